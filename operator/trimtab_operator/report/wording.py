"""Numbers and names in the sentences of a status.

The one rule: of many names only the first few are said, and how many more there are: a message has an end. Pure.
"""

from collections.abc import Mapping, Sequence
from typing import Final

NAMES_SHOWN_MAX: Final = 3


def sentence(text: object) -> str:
    """With a full stop, and not two where the text is another's that has one."""
    return str(text) if str(text).endswith((".", "!", "?", "…")) else f"{text}."


def counted(counts: Mapping[str, int]) -> str:
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    shown = [f"{count} {reason}" for reason, count in ordered[:NAMES_SHOWN_MAX]]
    rest = sum(count for _, count in ordered[NAMES_SHOWN_MAX:])
    return ", ".join(shown + ([f"{rest} for other reasons"] if rest else []))


def some(names: Sequence[str]) -> str:
    more = len(names) - NAMES_SHOWN_MAX
    return ", ".join(names[:NAMES_SHOWN_MAX]) + (f" and {more} more" if more > 0 else "")


def is_or_are(names: Sequence[str]) -> str:
    return "is" if len(names) == 1 else "are"


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def so_many_are(count: int, noun: str) -> str:
    return f"1 {noun} is" if count == 1 else f"{count} {noun}s are"
