"""Where a reader is in a stream of the store.

The one rule: stream ids serve only to read on. They are no positions of a writer: after a failover they can go back,
and then the streams are read again from before their end.
"""

from .errors import CodecError

START = (0, 0)


def parse_id(data: bytes) -> tuple[int, int]:
    """`b"1700000000000-3"` as (milliseconds, number). Raises CodecError."""
    milliseconds, _, number = data.partition(b"-")
    try:
        return int(milliseconds), int(number)
    except ValueError as error:
        raise CodecError(f"stream id {data[:40]!r}") from error


def format_id(position: tuple[int, int]) -> str:
    return f"{position[0]}-{position[1]}"


def before(position: tuple[int, int], seconds: float) -> tuple[int, int]:
    """The position some seconds before, by the store's clock."""
    return max(0, position[0] - int(seconds * 1000)), 0
