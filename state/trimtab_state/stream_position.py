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


def after(position: tuple[int, int]) -> tuple[int, int]:
    """The least position that is beyond it."""
    return position[0], position[1] + 1


def before(position: tuple[int, int], seconds: float) -> tuple[int, int]:
    """The position some seconds before, by the store's clock."""
    return max(0, position[0] - int(seconds * 1000)), 0


class StreamCursors:
    """How far several streams have been read."""

    def __init__(self, streams: Sequence[str]) -> None:
        self._streams = tuple(streams)
        self._positions: dict[str, tuple[int, int]] = {}
        self._ends: dict[str, tuple[int, int]] = {}
        """The newest entries at the last look for the lag."""

    @staticmethod
    def have_gone_back(newest: Sequence[tuple[int, int]], known: Sequence[tuple[int, int]]) -> bool:
        """A stream's newest entry is older than what was read before it was asked for: it is not the stream that it
        was."""
        return any(end < position for end, position in zip(newest, known, strict=True))

    def positions(self) -> list[tuple[int, int]]:
        """How far each has been read."""
        return [self._positions.get(stream, START) for stream in self._streams]

    def lag_s(self, newest: Sequence[tuple[int, int]], *, looked_ago_s: float) -> float:
        """How much older the last entry read is than the newest there is, of the stream where that is most, seconds.

        A stream of which everything was read that was there at the last look is behind by no more than the time since:
        one that was quiet for long and has an entry just now is not late.
        """
        lag_ms = 0.0
        for stream, end in zip(self._streams, newest, strict=True):
            position, end_before = self._positions.get(stream, end), self._ends.get(stream)
            behind_ms = float(max(0, end[0] - position[0]))
            if end_before is not None and position >= end_before:
                behind_ms = min(behind_ms, looked_ago_s * 1000)
            lag_ms = max(lag_ms, behind_ms)
        self._ends = dict(zip(self._streams, newest, strict=True))
        return lag_ms / 1000

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

    def position(self, stream: str) -> tuple[int, int]:
        """The last entry that was read; before any was, the start."""
        return self._positions.get(stream, START)

    def ids(self) -> list[str]:
        """Where to read on, in the order of the streams."""
        return [format_id(self._positions[stream]) for stream in self._streams]
