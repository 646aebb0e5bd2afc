"""Reads the hotspot alarms of one pool from the shared state and tells them to its fallback.

The one rule: it hears and passes on; what alarms lead to is decided in `fallback`. It outlives every outage of the
store, and says after one that was longer than a detector's pause that alarms may have been missed: nobody could write
them either.
"""

import asyncio
from collections.abc import Callable
from typing import Final, Protocol

from trimtab_operator.steady_clock import SteadyClock
from trimtab_state import AlarmReader, PoolKeys, StateSettings, StateUnavailable, Store
from trimtab_state.alarms import ALARM_REPEAT_S
from trimtab_state.outage_log import OutageLog

POLL_S: Final = 2.0
LOOKBACK_S: Final = 86_400.0
"""The first poll goes back this far: the longest window and quiet that a policy may ask for. The stream is bounded."""
READS_PER_POLL_MAX: Final = 8


class AlarmSink(Protocol):
    """See `fallback.FallbackState`."""

    def alarm(self, prefix_class: str, raised_s: float) -> None: ...
    def heard(self, now_s: float, *, missed: bool = False) -> None: ...


class AlarmWatch:
    """Of one pool. `on_turn(now_s)` is called after each poll, also while the store is away: time to decide."""

    def __init__(
        self,
        store: Store,
        keys: PoolKeys,
        sink: AlarmSink,
        *,
        on_turn: Callable[[float], None] | None = None,
        clock: Callable[[], float] | None = None,
        settings: StateSettings | None = None,
    ) -> None:
        self.connected = False
        """The last poll has reached the store."""
        self.raised = 0
        """Alarms told so far, each replica's by itself."""
        self._sink = sink
        self._on_turn = on_turn
        self._clock = clock or SteadyClock()
        self._reader = AlarmReader(store, keys, lookback_s=LOOKBACK_S, settings=settings)
        self._outage = OutageLog(f"the hotspot alarms of {keys.namespace}/{keys.name} are not heard")
        self._away_since_s: float | None = None

    @property
    def malformed(self) -> int:
        """Entries of the stream that were skipped."""
        return self._reader.malformed

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self.poll()
            await asyncio.sleep(POLL_S)

    async def poll(self) -> None:
        """Once. Never raises for a store that is away."""
        try:
            await self._read()
        except StateUnavailable as error:
            self._outage.failed(error)
            self.connected = False
            if self._away_since_s is None:
                self._away_since_s = self._clock()
        else:
            self._outage.over()
            self.connected = True
        if self._on_turn is not None:
            self._on_turn(self._clock())

    async def _read(self) -> None:
        for _ in range(READS_PER_POLL_MAX):
            found = await self._reader.read()
            now_s = self._clock()
            for aged in found:
                if aged.alarm.raised:
                    self.raised += 1
                    self._sink.alarm(aged.alarm.prefix_class, now_s - aged.age_s)
            if self._reader.is_at_end:
                away_s = 0.0 if self._away_since_s is None else now_s - self._away_since_s
                self._sink.heard(now_s, missed=away_s >= ALARM_REPEAT_S)
                self._away_since_s = None
                return
