"""Where a reader is in a stream of the store.

The one rule: stream ids serve only to read on. They are no positions of a writer: after a failover they can go back,
and then the streams are read again from before their end.
"""

from collections.abc import Sequence

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


class StreamCursors:
    """How far several streams have been read."""

    def __init__(self, streams: Sequence[str]) -> None:
        self._streams = tuple(streams)
        self._positions: dict[str, tuple[int, int]] = {}

    def have_gone_back(self, newest: Sequence[tuple[int, int]]) -> bool:
        """A stream's newest entry is older than what was read: it is not the stream that it was."""
        ends = zip(self._streams, newest, strict=True)
        return any(end < self._positions.get(stream, START) for stream, end in ends)

    def lag_s(self, newest: Sequence[tuple[int, int]]) -> float:
        """How much older the last entry read is than the newest there is, of the stream where that is most, seconds."""
        ends = zip(self._streams, newest, strict=True)
        return max((max(0, end[0] - self._positions.get(stream, end)[0]) for stream, end in ends), default=0) / 1000

    def restart(self) -> None:
        """Read all streams from their first entry; what a follower knows already, it skips."""
        self._positions = dict.fromkeys(self._streams, START)

    def start(self, newest: Sequence[tuple[int, int]], lookback_s: float) -> None:
        """Streams that were never read: from some time before their newest entry."""
        for stream, end in zip(self._streams, newest, strict=True):
            self._positions.setdefault(stream, before(end, lookback_s))

    def advance(self, stream: str, position: tuple[int, int]) -> None:
        """The entry at this position was read."""
        self._positions[stream] = position

    def ids(self) -> list[str]:
        """Where to read on, in the order of the streams."""
        return [format_id(self._positions[stream]) for stream in self._streams]
