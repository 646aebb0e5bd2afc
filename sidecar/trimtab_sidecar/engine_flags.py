"""The engine's flags that decide how prompts are rendered, read from its container's command and arguments.

The one rule: a flag is read as the engine's own parser reads it: `--a b` and `--a=b`, dashes or underscores, the last
one wins, `--a.b=c` sets one key of a JSON object. Flags that do not matter here are skipped; nothing is validated,
since the engine has done that. What cannot be read (a shell's variables, a configuration file) shows up in the probes.
"""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

ARGUMENTS_MAX = 4096
"""Words of a command line; the rest is not read."""

_SHELLS = frozenset({"sh", "bash", "ash", "dash", "zsh"})
_FLAGS = {
    "model": "model",
    "model-path": "model",
    "tokenizer": "tokenizer",
    "tokenizer-path": "tokenizer",
    "tokenizer-mode": "tokenizer_mode",
    "chat-template": "chat_template",
    "chat-template-content-format": "content_format",
    "revision": "revision",
    "tokenizer-revision": "tokenizer_revision",
    "download-dir": "download_dir",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFlags:
    """None, empty and false: the flag is not there, and the engine's default holds."""

    model: str | None = None
    """A folder, or a hub id."""
    served_model_names: tuple[str, ...] = ()
    tokenizer: str | None = None
    """Where the tokenizer comes from, if not from the model."""
    tokenizer_mode: str = "auto"
    chat_template: str | None = None
    """A file's path, a template's text or a template's name, as given."""
    content_format: str = "auto"
    default_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    exclude_tools_when_tool_choice_none: bool = False
    revision: str | None = None
    tokenizer_revision: str | None = None
    download_dir: str | None = None
    """The engine's own cache folder for hub models."""


def parse_engine_flags(words: Sequence[str]) -> EngineFlags:
    """The flags in a container's command followed by its args."""
    words = _unwrap_shell(list(words[:ARGUMENTS_MAX]))
    found: dict[str, Any] = {}
    kwargs: dict[str, Any] = {}
    at = 0
    while at < len(words):
        word, at = words[at], at + 1
        if word == "serve" and at < len(words) and not words[at].startswith("-"):
            found["model"], at = words[at], at + 1
            continue
        if not word.startswith("--"):
            continue
        name, equals, value = word[2:].partition("=")
        name, dot, path = name.partition(".")
        name = name.replace("_", "-")
        values = [value] if equals else _values_at(words, at)
        if name == "served-model-name":
            found["served_model_names"] = tuple(values)
        elif name == "default-chat-template-kwargs" and values:
            kwargs = _with_json(kwargs, path if dot else "", values[0])
        elif name.removeprefix("no-") == "exclude-tools-when-tool-choice-none":
            found["exclude_tools_when_tool_choice_none"] = not name.startswith("no-")
        elif name in _FLAGS and values:
            found[_FLAGS[name]] = values[0]
    if "tokenizer_mode" in found:
        found["tokenizer_mode"] = found["tokenizer_mode"].lower()
    return EngineFlags(default_template_kwargs=kwargs, **found)


def _values_at(words: list[str], at: int) -> list[str]:
    """The words from `at` up to the next flag. A template's text may start with a dash, but never with two."""
    values = []
    while at < len(words) and not words[at].startswith("--"):
        values.append(words[at])
        at += 1
    return values


def _unwrap_shell(words: list[str]) -> list[str]:
    """`sh -c "vllm serve ..."` as the words of its script."""
    if len(words) >= 3 and words[0].rpartition("/")[2] in _SHELLS and words[1].startswith("-") and "c" in words[1]:
        try:
            return shlex.split(words[2], comments=True)[:ARGUMENTS_MAX]
        except ValueError:
            return words
    return words


def _with_json(kwargs: dict[str, Any], path: str, value: str) -> dict[str, Any]:
    """`kwargs` with a whole object, or with the value at one dotted path, put in."""
    try:
        parsed = json.loads(value)
    except ValueError:
        parsed = value
    if not path:
        return dict(parsed) if isinstance(parsed, dict) else kwargs
    key, _, rest = path.partition(".")
    if rest:
        inner = kwargs.get(key)
        parsed = _with_json(dict(inner) if isinstance(inner, dict) else {}, rest, value)
    return {**kwargs, key: parsed}
