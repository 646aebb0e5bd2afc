"""Tells of hotspots: one line in the log when an alarm is raised, acted on and over, and the operator what lasts.

The one rule: it looks at what the detector knows and changes nothing there. An alarm goes to the shared state once it
has lasted `TOLD_AFTER_S`, or at once where the class had one less than `AGAIN_S` ago: what acting ends in a moment is
no news for the operator, but what comes again and again is. From then on as the contract of the stream has it
(`docs/alarms.md`). It lasts as long as requests of its class come: those of a burst that is over stay in the detector's
window, and would have the pool switched for what no longer happens. A store that is away loses alarms, which is no
harm: what lasts is written again.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Final, Protocol

from trimtab_core.hotspot import Hotspot, HotspotView
from trimtab_state import Alarm, StateUnavailable
from trimtab_state.alarms import ALARM_REPEAT_S
from trimtab_state.outage_log import OutageLog

log = logging.getLogger(__name__)

LOOK_S: Final = 0.1
TOLD_AFTER_S: Final = 5.0
"""Of an alarm's life; acting needs a few requests and the time of a prefill."""
AGAIN_S: Final = 60.0
OVER_MAX: Final = 256
"""Classes remembered after their alarms; the oldest go first."""


class Writer(Protocol):
    """See `trimtab_state.AlarmWriter`."""

    async def write(self, alarm: Alarm) -> None: ...


class _Told:
    """What was said of one alarm."""

    __slots__ = ("due_s", "hotspot", "is_acted_on", "is_written")

    def __init__(self, hotspot: Hotspot, due_s: float) -> None:
        self.hotspot = hotspot
        """As it was seen last."""
        self.due_s = due_s
        """It is told with the first request that comes then or later."""
        self.is_acted_on = False
        self.is_written = False


class HotspotWatch:
    """Of one picker. `view` gives what its detector knows, `window_s` the length of its window, `replica` its
    incarnation as the others know it."""

    def __init__(
        self,
        *,
        view: Callable[[], HotspotView],
        window_s: Callable[[], float],
        writer: Writer,
        replica: Callable[[], int],
        clock: Callable[[], float],
    ) -> None:
        self.written = 0
        """Alarms written to the shared state, repetitions and ends included."""
        self._view = view
        self._window_s = window_s
        self._writer = writer
        self._replica = replica
        self._clock = clock
        self._told: dict[int, _Told] = {}
        self._over_s: dict[int, float] = {}
        self._outage = OutageLog("hotspot alarms are lost; those that last are told again")

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            for alarm in self.look(self._clock()):
                await self._write(alarm)
            await asyncio.sleep(LOOK_S)

    def look(self, now_s: float) -> list[Alarm]:
        """What is to be written now."""
        hotspots = {hotspot.prefix_class: hotspot for hotspot in self._view().hotspots}
        alarms = [
            alarm
            for prefix_class, told in [*self._told.items()]
            if prefix_class not in hotspots or hotspots[prefix_class].since_s != told.hotspot.since_s
            if (alarm := self._end(told, now_s)) is not None
        ]
        for hotspot in hotspots.values():
            alarm = self._go_on(hotspot, now_s)
            if alarm is not None:
                alarms.append(alarm)
        return alarms

    def _go_on(self, hotspot: Hotspot, now_s: float) -> Alarm | None:
        told = self._told.get(hotspot.prefix_class)
        if told is None:
            is_again = now_s - self._over_s.pop(hotspot.prefix_class, -AGAIN_S) < AGAIN_S
            due_s = hotspot.since_s + (0.0 if is_again else TOLD_AFTER_S)
            told = self._told[hotspot.prefix_class] = _Told(hotspot, due_s)
            again = " again" if is_again else ""
            log.warning("hotspot %016x raised%s: %s", hotspot.prefix_class, again, _numbers(hotspot))
        if hotspot.is_acted_on and not told.is_acted_on:
            log.warning(
                "hotspot %016x acted on, its requests go to others than its holders until more hold it: %s",
                hotspot.prefix_class,
                _numbers(hotspot),
            )
            if told.is_written:
                told.due_s = hotspot.came_s
        told.hotspot, told.is_acted_on = hotspot, hotspot.is_acted_on
        if hotspot.came_s < told.due_s:
            return None
        told.is_written = True
        told.due_s = now_s + ALARM_REPEAT_S
        return self._alarm(hotspot, raised=True)

    def _end(self, told: _Told, now_s: float) -> Alarm | None:
        prefix_class = told.hotspot.prefix_class
        del self._told[prefix_class]
        self._over_s.pop(prefix_class, None)
        self._over_s[prefix_class] = now_s
        if len(self._over_s) > OVER_MAX:
            del self._over_s[next(iter(self._over_s))]
        log.warning("hotspot %016x over after %.1f s", prefix_class, now_s - told.hotspot.since_s)
        return self._alarm(told.hotspot, raised=False) if told.is_written else None

    def _alarm(self, hotspot: Hotspot, *, raised: bool) -> Alarm:
        return Alarm(
            prefix_class=f"{hotspot.prefix_class:016x}",
            raised=raised,
            acted=hotspot.is_acted_on,
            holders=hotspot.holders,
            others=hotspot.others,
            in_class=hotspot.in_class,
            arrivals=hotspot.arrivals,
            window_s=self._window_s(),
            replica=f"{self._replica():016x}",
        )

    async def _write(self, alarm: Alarm) -> None:
        try:
            await self._writer.write(alarm)
        except StateUnavailable as error:
            self._outage.failed(error)
        else:
            self.written += 1
            self._outage.over()


def _numbers(hotspot: Hotspot) -> str:
    return (
        f"{hotspot.in_class} of the last {hotspot.arrivals} requests begin with a prefix that {hotspot.holders} of "
        f"{hotspot.holders + hotspot.others} endpoints hold"
    )
