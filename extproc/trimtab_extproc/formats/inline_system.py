"""Whether an engine takes system messages inside a conversation, or moves them to the front (Anthropic's API only).

The one rule: vLLM's own test is repeated here: it renders system, user, system, user with nothing but the messages, in
a plain sandbox; a template that raises there, for whatever reason, gets its system messages in front.
"""

from functools import lru_cache
from typing import Any

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from trimtab_core.model_card import ModelCard

TEMPLATES_MAX = 64
"""Answers kept."""
STEPS_MAX = 10_000
"""Look-ups, calls, rounds and pieces of output; a template that needs more is taken to have raised."""
PROBE = [{"role": role, "content": "t"} for role in ("system", "user", "system", "user")]


class _CountingSandbox(ImmutableSandboxedEnvironment):
    """Counts what a template does, and raises when it does too much."""

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        self.globals["range"] = self._range
        self._steps = 0

    def step(self, count: int = 1) -> None:
        self._steps += count
        if self._steps > STEPS_MAX:
            raise TemplateError("too many steps")

    def _range(self, *bounds: int) -> range:
        numbers = range(*bounds)
        self.step(len(numbers))
        return numbers

    def getattr(self, obj: Any, attribute: str) -> Any:
        self.step()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        self.step()
        return super().getitem(obj, argument)

    def call(self, context: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
        self.step()
        return super().call(context, obj, *args, **kwargs)


def wants_system_first(card: ModelCard) -> bool:
    """Whether the engine moves inline system messages to the front for this card's templates."""
    return any(_raises(template) for template in (card.template, card.tools_template))


@lru_cache(maxsize=TEMPLATES_MAX)
def _raises(template: str | None) -> bool:
    if not template:
        return True
    sandbox = _CountingSandbox()
    try:
        for _ in sandbox.from_string(template).generate(messages=PROBE, add_generation_prompt=False):
            sandbox.step()
    except Exception:
        return True
    return False
