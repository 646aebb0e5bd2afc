"""The engine's command line as its container's manifest gives it, and the flags in it that injection must know.

The one rule: a flag is read as the engine's own parser reads it: `--a b` and `--a=b`, dashes or underscores, the last
one wins. What the engine does with the value is the sidecar's business.
"""

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from trimtab_operator.injection.environment import Environment
from trimtab_operator.injection.references import (
    STRING_CHARS_MAX,
    escaped,
    expand,
    is_script,
    names_in,
    script_expanded,
)

EngineKind = Literal["vllm", "sglang"]
WORDS_MAX: Final = 4096
"""Words of a command line; the rest is not looked at."""
COMMAND_CHARS_MAX: Final = 131_072
"""A longer command line counts as none."""
VARIABLE_CHARS: Final = 64
"""Room for a variable's name."""
SCRIPT_CHARS_MAX: Final = 32_768
"""A longer script is not taken apart, which takes a microsecond for each character."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineWords:
    """Command and args; a reference that is left in them, `$(NAME)`, is to a value that only the kubelet knows."""

    words: tuple[str, ...]
    flat: tuple[str, ...]
    """The same, a shell's script in it taken apart."""
    references: frozenset[str]
    """Names in the references that are left."""

    def encoded(self) -> str:
        """A JSON list, as a variable's value that the kubelet leaves alone: the sidecar puts the references in."""
        text = json.dumps(list(self.words), ensure_ascii=False)
        # As a variable it is one string, and one that is too long would keep the sidecar from starting.
        return escaped(text) if len(text.encode()) < STRING_CHARS_MAX - VARIABLE_CHARS else "[]"

    def flag(self, *names: str) -> str | None:
        """The value of the last of `--NAME value` and `--NAME=value`; None: there is none."""
        found = None
        for index, word in enumerate(self.flat):
            name, equals, value = _flag(word)
            if name in names:
                if equals:
                    found = value
                elif index + 1 < len(self.flat) and not self.flat[index + 1].startswith("--"):
                    found = self.flat[index + 1]
        return found

    def has(self, *names: str) -> bool:
        """Whether one of the flags is there, with or without a value."""
        return any(_flag(word)[0] in names for word in self.flat)

    @property
    def model(self) -> str | None:
        """A path or a hub id: the argument of `vllm serve`, or the flag."""
        for index, word in enumerate(self.flat[:-1]):
            if word == "serve" and not self.flat[index + 1].startswith("-"):
                return self.flat[index + 1]
        return self.flag("model", "model-path")


def read_words(container: Mapping[str, Any], environment: Environment, engine: EngineKind) -> EngineWords:
    """What `container` runs. Empty where its image alone decides."""
    command, args = list(container.get("command") or ()), list(container.get("args") or ())
    if engine == "vllm" and not command and args and not args[0].startswith("-") and args[0] not in ("serve", "vllm"):
        command = ["vllm", "serve"]  # the entry point of vLLM's own images, whose first argument is the model
    words, room = [], COMMAND_CHARS_MAX
    for word in [*command, *args][:WORDS_MAX]:
        expanded = expand(str(word), environment.value, chars_max=min(room, STRING_CHARS_MAX))
        if expanded is None:
            return EngineWords(words=(), flat=(), references=frozenset())
        words.append(expanded)
        room -= len(expanded)
    if is_script(words):

        def of_shell(name: str) -> str | None:
            known = environment.value(name)
            return f"$({name})" if known is None and environment.may_have(name) else known

        script = script_expanded(words[2], of_shell)
        words[2] = words[2] if script is None else script
    references = {name for word in words for name in names_in(word) if environment.may_have(name)}
    return EngineWords(words=tuple(words), flat=_flat(words), references=frozenset(references))


def _flat(words: list[str]) -> tuple[str, ...]:
    if is_script(words):
        if len(words[2]) > SCRIPT_CHARS_MAX:
            return ()
        try:
            return tuple(shlex.split(words[2], comments=True)[:WORDS_MAX])
        except ValueError:
            return ()
    return tuple(words)


def _flag(word: str) -> tuple[str, str, str]:
    """(name, `=` or nothing, value); the name is empty where the word is no flag."""
    if not word.startswith("--"):
        return "", "", ""
    name, equals, value = word[2:].partition("=")
    return name.replace("_", "-"), equals, value
