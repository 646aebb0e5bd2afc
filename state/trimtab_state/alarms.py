"""Hotspot alarms: replicas write them to a bounded stream, the operator reads it.

The one rule: an alarm is news, not state: those that were not read in time are lost, which is no harm, since a hotspot
that lasts raises it again.
"""

import logging

from .documents import Alarm, decode_alarm, encode
from .errors import CodecError
from .keys import PoolKeys
from .settings import StateSettings
from .store import Store
from .stream_position import before, format_id, parse_id

log = logging.getLogger(__name__)

ALARMS_PER_READ_MAX = 1_000


class AlarmWriter:
    """One per replica."""

    def __init__(self, store: Store, keys: PoolKeys, *, settings: StateSettings | None = None) -> None:
        self._store = store
        self._keys = keys
        self._settings = settings or StateSettings()

    async def write(self, alarm: Alarm) -> None:
        """Raises StateUnavailable: drop it then."""
        settings, key = self._settings, self._keys.alarms
        await self._store.batch(
            [
                ("XADD", key, "MAXLEN", "~", settings.alarm_entries_max, "*", "b", encode(alarm)),
                ("PEXPIRE", key, int(settings.stream_ttl_s * 1000)),
            ]
        )


class AlarmReader:
    """One per pool and operator."""

    def __init__(self, store: Store, keys: PoolKeys, *, settings: StateSettings | None = None) -> None:
        self.malformed = 0
        """Entries that were skipped."""
        self._store = store
        self._keys = keys
        self._settings = settings or StateSettings()
        self._position: tuple[int, int] | None = None

    async def read(self) -> list[Alarm]:
        """The alarms since the last call, at most ALARMS_PER_READ_MAX, oldest first. Does not block.

        The first call gives those of the last `lookback_s`, as does one after the stream has gone back.
        Raises StateUnavailable.
        """
        newest = await self._store.execute("XREVRANGE", self._keys.alarms, "+", "-", "COUNT", 1)
        if not newest:
            return []
        end = parse_id(newest[0][0])
        if self._position is None or end < self._position:
            self._position = before(end, self._settings.lookback_s)
        start = f"({format_id(self._position)}"
        entries = await self._store.execute("XRANGE", self._keys.alarms, start, "+", "COUNT", ALARMS_PER_READ_MAX)
        alarms = []
        for entry_id, fields in entries:
            self._position = parse_id(entry_id)
            try:
                alarms.append(decode_alarm(fields.get(b"b", b"")))
            except CodecError as error:
                self.malformed += 1
                log.warning("alarm skipped: %s", error)
        return alarms
