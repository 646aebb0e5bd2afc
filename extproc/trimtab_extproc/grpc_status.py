"""How a gRPC stream ends, without a gRPC library.

The one rule: the numbers are gRPC's own. Every front turns them into what it needs.
"""

from enum import IntEnum
from typing import NamedTuple


class Code(IntEnum):
    """The codes that we end streams with."""

    OK = 0
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    RESOURCE_EXHAUSTED = 8
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14


class Status(NamedTuple):
    """A code and what a person is told."""

    code: int
    text: str = ""


OK = Status(int(Code.OK))
