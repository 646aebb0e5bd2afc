"""What is said of hotspots, and when: virtual time, no store."""

import asyncio
import logging
from dataclasses import replace

import pytest

from trimtab_core.hotspot import Hotspot, HotspotView
from trimtab_extproc.hotspot_watch import AGAIN_S, LOOK_S, OVER_MAX, TOLD_AFTER_S, HotspotWatch
from trimtab_state import Alarm, StateUnavailable
from trimtab_state.alarms import ALARM_REPEAT_S

CLASS = 0xAB


class Written:
    """A stream as a list; while `is_away` it takes nothing."""

    def __init__(self) -> None:
        self.alarms: list[Alarm] = []
        self.is_away = False

    async def write(self, alarm: Alarm) -> None:
        if self.is_away:
            raise StateUnavailable("the store is away")
        self.alarms.append(alarm)


class Rig:
    """A watch over a detector that the test plays."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.hotspots: dict[int, Hotspot] = {}
        self.stream = Written()
        self.watch = HotspotWatch(
            view=self.view,
            window_s=lambda: 60.0,
            writer=self.stream,
            replica=lambda: 7,
            clock=lambda: self.now_s,
        )

    def view(self) -> HotspotView:
        hotspots = tuple(self.hotspots.values())
        return HotspotView(hotspots=hotspots, arrivals=200, prefixes=9, raised=0, acted=0)

    def raised(self, prefix_class: int = CLASS, *, is_acted_on: bool = False) -> None:
        before = self.hotspots.get(prefix_class)
        self.hotspots[prefix_class] = Hotspot(
            prefix_class=prefix_class,
            since_s=self.now_s if before is None else before.since_s,
            came_s=self.now_s,
            is_acted_on=is_acted_on,
            holders=2,
            others=6,
            in_class=90,
            arrivals=200,
        )

    def look(self) -> list[tuple[bool, bool]]:
        """(raised, acted) of what is to be written now."""
        return [(alarm.raised, alarm.acted) for alarm in self.watch.look(self.now_s)]

    def after(self, seconds: float, *, comes: bool = True) -> list[tuple[bool, bool]]:
        """A look later, at which a request of every class has just come."""
        self.now_s += seconds
        if comes:
            self.hotspots = {
                prefix_class: replace(hotspot, came_s=self.now_s) for prefix_class, hotspot in self.hotspots.items()
            }
        return self.look()


def test_an_alarm_that_lasts_is_told_repeated_and_ended() -> None:
    rig = Rig()
    rig.raised()
    assert rig.look() == []
    assert rig.after(TOLD_AFTER_S - 0.1) == []
    assert rig.after(0.1) == [(True, False)]
    assert rig.after(ALARM_REPEAT_S - 0.1) == []
    assert rig.after(0.1) == [(True, False)]
    rig.hotspots.clear()
    assert rig.after(1.0) == [(False, False)]
    assert rig.after(100.0) == []


def test_an_alarm_whose_requests_have_ceased_is_not_told_of_until_more_come() -> None:
    rig = Rig()
    rig.raised()
    rig.look()
    assert rig.after(TOLD_AFTER_S - 0.1) == []
    assert rig.after(30.0, comes=False) == []  # a burst that is over, and still in the window
    assert rig.after(10.0) == [(True, False)]
    assert rig.after(2 * ALARM_REPEAT_S, comes=False) == []
    assert rig.after(0.0) == [(True, False)]
    assert rig.after(0.1) == []


def test_what_acting_ends_in_a_moment_is_told_to_nobody() -> None:
    rig = Rig()
    rig.raised(is_acted_on=True)
    rig.look()
    rig.after(TOLD_AFTER_S - 0.5)
    rig.hotspots.clear()
    assert rig.after(0.1) == []


def test_what_comes_again_soon_is_told_at_once() -> None:
    rig = Rig()
    rig.raised()
    rig.look()
    rig.hotspots.clear()
    rig.after(1.0)
    rig.now_s += AGAIN_S - 1.0
    rig.raised()
    assert rig.look() == [(True, False)]
    rig.hotspots.clear()
    assert rig.after(1.0) == [(False, False)]
    rig.now_s += AGAIN_S
    rig.raised()
    assert rig.look() == []


def test_an_alarm_that_ended_and_began_between_two_looks_is_another_one() -> None:
    rig = Rig()
    rig.raised()
    rig.look()
    assert rig.after(TOLD_AFTER_S) == [(True, False)]
    rig.hotspots.clear()
    rig.now_s += 0.05
    rig.raised()
    assert rig.look() == [(False, False), (True, False)]


def test_acting_on_a_told_alarm_is_told_at_once() -> None:
    rig = Rig()
    rig.raised()
    rig.look()
    assert rig.after(TOLD_AFTER_S) == [(True, False)]
    rig.raised(is_acted_on=True)
    assert rig.after(1.0) == [(True, True)]
    assert rig.after(1.0) == []


def test_an_alarm_has_the_numbers_and_nothing_of_the_text() -> None:
    rig = Rig()
    rig.raised()
    rig.look()
    rig.now_s += TOLD_AFTER_S
    rig.raised()
    (alarm,) = rig.watch.look(rig.now_s)
    assert alarm == Alarm(
        prefix_class="00000000000000ab",
        holders=2,
        others=6,
        in_class=90,
        arrivals=200,
        window_s=60.0,
        replica="0000000000000007",
    )


def test_each_step_is_one_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig()
    with caplog.at_level(logging.INFO):
        rig.raised()
        rig.look()
        rig.look()
        rig.raised(is_acted_on=True)
        rig.after(1.0)
        rig.after(1.0)
        rig.hotspots.clear()
        rig.after(1.0)
    assert [record.getMessage() for record in caplog.records] == [
        "hotspot 00000000000000ab raised: 90 of the last 200 requests begin with a prefix that 2 of 8 endpoints hold",
        "hotspot 00000000000000ab acted on, its requests go to others than its holders until more hold it: "
        "90 of the last 200 requests begin with a prefix that 2 of 8 endpoints hold",
        "hotspot 00000000000000ab over after 3.0 s",
    ]


def test_classes_that_are_over_are_remembered_to_a_bound() -> None:
    rig = Rig()
    for prefix_class in range(OVER_MAX + 1):
        rig.raised(prefix_class)
        rig.look()
        rig.hotspots.clear()
        rig.look()
    rig.raised(0)
    rig.raised(OVER_MAX)
    assert [alarm.prefix_class for alarm in rig.watch.look(rig.now_s)] == [f"{OVER_MAX:016x}"]


@pytest.mark.asyncio
async def test_a_store_that_is_away_loses_alarms_and_what_lasts_is_told_again() -> None:
    rig = Rig()
    rig.raised()
    task = asyncio.create_task(rig.watch.run())

    async def turn(seconds: float) -> None:
        rig.now_s += seconds
        rig.raised()
        await asyncio.sleep(1.5 * LOOK_S)

    try:
        await turn(0.0)
        rig.stream.is_away = True
        await turn(TOLD_AFTER_S)
        rig.stream.is_away = False
        await turn(1.0)
        assert not rig.stream.alarms
        await turn(ALARM_REPEAT_S)
        assert [alarm.raised for alarm in rig.stream.alarms] == [True]
        assert rig.watch.written == 1
    finally:
        task.cancel()
        await asyncio.wait([task])
