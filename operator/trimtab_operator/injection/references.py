"""References to variables in a container's command: Kubernetes' `$(NAME)`, and a shell script's `$NAME` and `${NAME}`.

The one rule: Kubernetes' references are read as the kubelet reads them: `$$` is a dollar, a name that is not known
stays as it is. Of shells only plain variables are read, since the rest cannot be known without running them.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Final

ValueOf = Callable[[str], str | None]
"""A variable's value, None where it is not known."""
STRING_CHARS_MAX: Final = 131_072
"""Linux starts no program with a longer argument or variable."""
SHELLS: Final = frozenset({"sh", "bash", "ash", "dash", "zsh"})
_REFERENCE: Final = re.compile(r"\$(?:\$|\(([^()]*)\))")
_SHELL_VARIABLE: Final = re.compile(r"\$(?:([A-Za-z_][A-Za-z0-9_]*)|\{([A-Za-z_][A-Za-z0-9_]*)\})")


def names_in(text: str) -> Iterator[str]:
    """Names in `$(NAME)`."""
    for found in _REFERENCE.finditer(text):
        if found[1] is not None:
            yield found[1]


def expand(text: str, value_of: ValueOf, *, chars_max: int = STRING_CHARS_MAX) -> str | None:
    """As the kubelet does; None: the result would be longer than `chars_max`, whatever values refer to each other."""
    parts: list[str] = []
    room, at = chars_max, 0
    for found in _REFERENCE.finditer(text):
        value = "$" if found[1] is None else value_of(found[1])
        parts += [text[at : found.start()], found[0] if value is None else value]
        at = found.end()
        room -= len(parts[-1]) + len(parts[-2])
        if room < 0:
            return None
    parts.append(text[at:])
    return "".join(parts) if len(parts[-1]) <= room else None


def escaped(text: str) -> str:
    """`text` as the kubelet will leave it."""
    return text.replace("$", "$$")


def escaped_but(text: str, names: frozenset[str]) -> str:
    """`text` as the kubelet will leave it but for references to `names`, which it will replace."""
    parts, at = [], 0
    for found in re.finditer(r"\$\(([^()]*)\)", text):
        if found[1] in names:
            parts += [escaped(text[at : found.start()]), found[0]]
            at = found.end()
    return "".join([*parts, escaped(text[at:])])


def is_script(words: Sequence[str]) -> bool:
    """`sh -c SCRIPT`: the third word is a script."""
    return (
        len(words) >= 3
        and words[0].rpartition("/")[2] in SHELLS
        and words[1].startswith("-")
        and not words[1].startswith("--")
        and "c" in words[1]
    )


def script_expanded(script: str, value_of: ValueOf) -> str | None:
    """The script with its variables put in, and its continued lines joined; what stands in single quotes is text.

    None: it would be longer than STRING_CHARS_MAX.
    """
    parts: list[str] = []
    room, at, in_single, in_double = STRING_CHARS_MAX, 0, False, False
    while at < len(script):
        part = letter = script[at]
        end = at + 1
        if in_single:
            in_single = letter != "'"
        elif letter == "\\":
            part = script[at : at + 2]
            end = at + len(part)
            part = " " if part == "\\\n" else part
        elif letter == "'" and not in_double:
            in_single = True
        elif letter == '"':
            in_double = not in_double
        elif letter == "$" and (found := _SHELL_VARIABLE.match(script, at)) is not None:
            known = value_of(found[1] or found[2])
            part, end = found[0] if known is None else known, found.end()
        parts.append(part)
        room, at = room - len(part), end
        if room < 0:
            return None
    return "".join(parts)
