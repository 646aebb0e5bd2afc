"""Hotspot alarms: replicas write them to a bounded stream, the operator reads it.

The one rule: an alarm is news, not state: those that were not read in time are lost, which is no harm, since a hotspot
that lasts raises it again. An alarm's time is the stream's, by the store's clock, so that no replica's clock matters.
"""

import logging
from dataclasses import dataclass

from .documents import Alarm, decode_alarm, encode
from .errors import CodecError
from .keys import PoolKeys
from .settings import StateSettings
from .store import Store
from .stream_position import before, format_id, parse_id

log = logging.getLogger(__name__)

ALARMS_PER_READ_MAX = 1_000
ALARM_REPEAT_S = 15.0
"""A detector writes an alarm when it is raised, then this often for as long as it lasts, and once when it is over."""


@dataclass(frozen=True, slots=True)
class AgedAlarm:
    """An alarm and how long ago it was written."""

    alarm: Alarm
    age_s: float


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
                ("PEXPIRE", key, _ms(settings.stream_ttl_s)),
            ],
            atomic=True,
        )


class AlarmReader:
    """One per pool and operator. `lookback_s`: how far before now the first read starts; None: the settings' own."""

    def __init__(
        self, store: Store, keys: PoolKeys, *, lookback_s: float | None = None, settings: StateSettings | None = None
    ) -> None:
        self.malformed = 0
        """Entries that were skipped."""
        self.is_at_end = False
        """The last read has left nothing."""
        self._store = store
        self._keys = keys
        self._settings = settings or StateSettings()
        self._lookback_s = self._settings.lookback_s if lookback_s is None else lookback_s
        self._position: tuple[int, int] | None = None

    async def read(self) -> list[AgedAlarm]:
        """The alarms since the last call, at most ALARMS_PER_READ_MAX, oldest first. Does not block.

        The first call gives those of the last `lookback_s`, as does one after the stream has gone back.
        Raises StateUnavailable.
        """
        key = self._keys.alarms
        newest, ttl_ms = await self._store.batch(
            [("XREVRANGE", key, "+", "-", "COUNT", 1), ("PTTL", key)], skips_other_types=True
        )
        if not newest:
            self.is_at_end = True
            return []
        end = parse_id(newest[0][0])
        # Each write renews the stream's time to live, so what is left of it tells the newest entry's age by the clock
        # of the very server that holds it. (TIME would ask another one in a cluster.)
        end_age_s = max(0.0, self._settings.stream_ttl_s - int(ttl_ms) / 1000) if int(ttl_ms) > 0 else 0.0
        if self._position is None or end < self._position:
            self._position = before(end, max(0.0, self._lookback_s - end_age_s))
        if end == self._position:
            self.is_at_end = True
            return []
        start = f"({format_id(self._position)}"
        entries = await self._store.execute("XRANGE", key, start, "+", "COUNT", ALARMS_PER_READ_MAX)
        self.is_at_end = len(entries) < ALARMS_PER_READ_MAX
        alarms = []
        for entry_id, fields in entries:
            self._position = position = parse_id(entry_id)
            try:
                alarm = decode_alarm(fields.get(b"b", b""))
            except CodecError as error:
                self.malformed += 1
                log.warning("alarm skipped: %s", error)
                continue
            alarms.append(AgedAlarm(alarm, max(0.0, end_age_s + (end[0] - position[0]) / 1000)))
        return alarms


def _ms(seconds: float) -> int:
    return int(seconds * 1000)
