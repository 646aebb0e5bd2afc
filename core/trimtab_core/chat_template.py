"""A chat template, compiled in the sandbox that Hugging Face's libraries use, and rendered within limits.

The one rule: a template sees only the variables that it is given, and what it renders depends on them and on the clock
that the caller passes. It must never come from a request. The environment (immutable sandbox, trimmed blocks, loop
controls, `generation` blocks, `tojson` without HTML escapes, `raise_exception`, `strftime_now`) follows what chat
templates in model repositories are written for.

The limits are checked at each piece of output and at each attribute, item and call the template makes. One single
operation of Python's own (a string times a huge number) is not interrupted: the engine would run the same one.
"""

import json
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import Template, TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro, new_context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from trimtab_core.chat_skeleton import Skeletons
from trimtab_core.not_renderable import NotRenderable

TEMPLATES_MAX = 32
"""Compiled templates kept; the one that was not used for longest is compiled again when it is next needed."""
TEMPLATE_CHARS_MAX = 1 << 20
"""A longer template is refused, not compiled."""
STEPS_PER_CLOCK_READ = 64
"""Attributes, items, calls and pieces of output between two looks at the clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderLimits:
    """What one rendering may cost. Past either limit it is `NotRenderable`."""

    time_s: float = 2.0
    """Time of one rendering, seconds."""
    output_bytes: int = 32 << 20
    """Size of the rendered text in UTF-8."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderClock:
    """The caller's clocks: the core has none of its own."""

    monotonic: Callable[[], float]
    """Seconds that only go forward (`time.monotonic`), for `RenderLimits.time_s`."""
    local_time: Callable[[], datetime]
    """The wall clock (`datetime.now`), for templates that print the date with `strftime_now`."""


class RenderBudget:
    """What is left of the limits of one rendering."""

    __slots__ = ("_bytes_left", "_clock", "_deadline_s", "_steps")

    def __init__(self, limits: RenderLimits, clock: RenderClock) -> None:
        self._clock = clock
        self._deadline_s = clock.monotonic() + limits.time_s
        self._bytes_left = limits.output_bytes
        self._steps = 0

    def step(self) -> None:
        self._steps += 1
        if self._steps % STEPS_PER_CLOCK_READ == 0 and self._clock.monotonic() > self._deadline_s:
            raise NotRenderable("rendering took too long")

    def take(self, piece: str) -> None:
        self._bytes_left -= len(piece) if piece.isascii() else len(piece.encode("utf-8", "surrogatepass"))
        if self._bytes_left < 0:
            raise NotRenderable("the rendered prompt is too long")
        self.step()

    def local_time(self) -> datetime:
        return self._clock.local_time()


_budget: ContextVar[RenderBudget] = ContextVar("trimtab_render_budget")
"""The budget of the rendering that runs in this context: compiled templates are shared, also between threads."""


_DICT_ATTRIBUTES = frozenset(dir(dict))


class _Sandbox(ImmutableSandboxedEnvironment):
    """The immutable sandbox; each way out of plain template text is a step of the budget."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        _budget.get().step()
        if type(obj) is dict and attribute not in _DICT_ATTRIBUTES and attribute in obj:
            return obj[attribute]  # what the line below comes to in the end, several times faster
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        _budget.get().step()
        return super().getitem(obj, argument)

    def call(self, context: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
        _budget.get().step()
        return super().call(context, obj, *args, **kwargs)


class _GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}`: marks what the assistant wrote, for training. Here it is its body."""

    tags = {"generation"}  # noqa: RUF012 - the declaration that jinja2 asks for

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Macro) -> str:
        return str(caller())


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return _budget.get().local_time().strftime(form)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTemplate:
    """One compiled template and what its source says about it."""

    compiled: Template
    variables: frozenset[str]
    """The names that it reads and does not set itself."""
    names_developer: bool
    """Whether it knows the role `developer`."""
    source: str
    names: dict[str, Any]
    """What every template may name: the library's functions and ours. As one dict, since the library's chain of them
    takes as long to read as a short chat to render."""
    skeletons: Skeletons
    """The text around plain messages, where the template only wraps them."""

    def render(self, variables: Mapping[str, Any], *, limits: RenderLimits, clock: RenderClock) -> str:
        """The text for these variables. Whatever goes wrong inside is `NotRenderable`: the engine refuses it too."""
        budget = RenderBudget(limits, clock)
        token = _budget.set(budget)
        pieces: list[str] = []
        try:
            # What `Template.generate` comes to.
            context = new_context(
                self.compiled.environment,
                self.compiled.name,
                self.compiled.blocks,
                vars={**self.names, **variables},
                shared=True,
                globals=self.names,
            )
            for piece in self.compiled.root_render_func(context):
                budget.take(piece)
                pieces.append(piece)
        except NotRenderable:
            raise
        except Exception as error:
            raise NotRenderable(f"the template refused the request ({type(error).__name__})") from error
        finally:
            _budget.reset(token)
        return "".join(pieces)


def parse_template(source: str) -> nodes.Template:
    """The syntax tree of a template. `NotRenderable` where it does not parse."""
    if len(source) > TEMPLATE_CHARS_MAX:
        raise NotRenderable("the chat template is too long")
    try:
        return _environment().parse(source)
    except (TemplateError, RecursionError) as error:
        raise NotRenderable(f"the chat template does not parse ({type(error).__name__})") from error


@lru_cache(maxsize=TEMPLATES_MAX)
def compile_template(source: str) -> ChatTemplate:
    """`source`, ready to render. `NotRenderable` where it does not compile."""
    tree = parse_template(source)
    try:
        compiled = _environment().from_string(source)
        return ChatTemplate(
            compiled=compiled,
            variables=frozenset(meta.find_undeclared_variables(tree)),
            names_developer='"developer"' in source or "'developer'" in source,
            source=source,
            names=dict(compiled.globals),
            skeletons=Skeletons(tree),
        )
    except (TemplateError, RecursionError, SyntaxError) as error:
        raise NotRenderable(f"the chat template does not compile ({type(error).__name__})") from error
