"""Values of flags, from the words of a command line.

Its one rule: what a flag cannot take is refused in plain words that say what it can take; argparse puts the flag's name
before them.
"""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Callable
from typing import Final

RATE_MAX: Final = 1000.0
"""Requests per second: far beyond what one client on one machine can send on time."""


def whole_number(least: int, most: int | None = None) -> Callable[[str], int]:
    """A type of flag: a whole number in these bounds, both included."""

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise ArgumentTypeError(f"{text!r} is not a whole number") from None
        if most is not None and not least <= number <= most:
            raise ArgumentTypeError(f"{number} is not between {least} and {most}")
        if number < least:
            raise ArgumentTypeError(f"{number} is less than {least}")
        return number

    return parse


def rate(text: str) -> float:
    """A type of flag: requests per second."""
    try:
        number = float(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is not a number") from None
    if not 0 < number < float("inf"):
        raise ArgumentTypeError(f"{text} is not above zero")
    if number > RATE_MAX:
        raise ArgumentTypeError(f"{text} is above {RATE_MAX:g}, more than one machine can send")
    return number
