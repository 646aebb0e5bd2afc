"""The operator's ear for hotspot alarms, on a real store."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import pytest
from valkey_server import ValkeyProcess, running

from trimtab_operator import alarm_watch
from trimtab_operator.alarm_watch import READS_PER_POLL_MAX, AlarmWatch
from trimtab_operator.api.policy import Fallback
from trimtab_operator.fallback import Decision, FallbackState
from trimtab_operator.steady_clock import SteadyClock
from trimtab_state import Alarm, AlarmReader, AlarmWriter, PoolKeys, StateSettings, Store, connect
from trimtab_state.alarms import ALARM_REPEAT_S, ALARMS_PER_READ_MAX

KEYS = PoolKeys("default", "pool")
SETTINGS = StateSettings(command_timeout_s=0.5, connect_timeout_s=0.5)
RULES = Fallback(alarms=2, window_seconds=60, quiet_seconds=60, minimum_stay_seconds=0)


class Clock:
    """Steady time that a test may move on."""

    def __init__(self) -> None:
        self._steady = SteadyClock()
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return self._steady() + self.ahead_s


class Ear:
    """Notes what the watch says, and lets a fallback hear it too."""

    def __init__(self, state: FallbackState | None = None) -> None:
        self.state = state or FallbackState()
        self.alarms: list[tuple[str, float]] = []
        self.heards: list[tuple[float, bool]] = []

    def alarm(self, prefix_class: str, raised_s: float) -> None:
        self.alarms.append((prefix_class, raised_s))
        self.state.alarm(prefix_class, raised_s)

    def heard(self, now_s: float, *, missed: bool = False) -> None:
        self.heards.append((now_s, missed))
        self.state.heard(now_s, missed=missed)


@pytest.fixture
def server() -> Iterator[ValkeyProcess]:
    with running() as process:
        yield process


@pytest.fixture
async def store(server: ValkeyProcess) -> AsyncIterator[Store]:
    made = connect(server.url, SETTINGS)
    yield made
    await made.close()


def named(number: int) -> str:
    return f"{number:016x}"


async def write_aged(store: Store, *, number: int, age_s: float, until_s: float = 86_400.0) -> None:
    """As if an alarm had been written some time ago: the server takes ids and times to live from the caller."""
    seconds, micros = (int(part) for part in await store.execute("TIME"))
    at_ms = int(seconds * 1_000 + micros / 1_000 - age_s * 1_000)
    await store.execute("XADD", KEYS.alarms, f"{at_ms}-*", "b", f'{{"prefix_class":"{named(number)}"}}'.encode())
    await store.execute("PEXPIRE", KEYS.alarms, int((until_s - age_s) * 1_000))


async def test_each_alarm_is_heard_once_with_its_time(store: Store) -> None:
    ear, clock = Ear(), Clock()
    watch = AlarmWatch(store, KEYS, ear, clock=clock, settings=SETTINGS)
    await watch.poll()
    assert (ear.alarms, [missed for _, missed in ear.heards]) == ([], [False])
    writer = AlarmWriter(store, KEYS, settings=SETTINGS)
    before_s = clock()
    await writer.write(Alarm(prefix_class=named(1), holders=2, others=6, in_class=90, arrivals=100, window_s=60.0))
    await writer.write(Alarm(prefix_class=named(2), raised=False))
    await watch.poll()
    await watch.poll()
    assert [name for name, _ in ear.alarms] == [named(1)], "an alarm that is over is none"
    # Within what the store's clock and the process's can differ by, reading both.
    assert before_s - 1.0 <= ear.alarms[0][1] <= clock()
    assert (watch.raised, watch.connected, watch.malformed) == (1, True, 0)


async def test_an_operator_that_starts_reads_back_with_the_true_ages(store: Store) -> None:
    for number, age_s in enumerate((5_000.0, 300.0, 40.0)):
        await write_aged(store, number=number, age_s=age_s)
    ear, clock = Ear(), Clock()
    await AlarmWatch(store, KEYS, ear, clock=clock, settings=SETTINGS).poll()
    ages_s = [clock() - raised_s for _, raised_s in ear.alarms]
    assert ages_s == pytest.approx([5_000.0, 300.0, 40.0], abs=5.0)


async def test_a_reader_looks_back_no_further_than_it_was_told(store: Store) -> None:
    for number, age_s in enumerate((500.0, 70.0, 40.0)):
        await write_aged(store, number=number, age_s=age_s)
    reader = AlarmReader(store, KEYS, lookback_s=100.0, settings=SETTINGS)
    assert [found.alarm.prefix_class for found in await reader.read()] == [named(1), named(2)]
    assert reader.is_at_end


async def test_a_fallback_survives_the_operator(store: Store) -> None:
    writer, clock = AlarmWriter(store, KEYS, settings=SETTINGS), Clock()
    ear = Ear()
    watch = AlarmWatch(store, KEYS, ear, clock=clock, settings=SETTINGS)
    ear.state.decide(clock() - 10.0, RULES, "Auto")
    for number in (1, 2):
        await writer.write(Alarm(prefix_class=named(number)))
    await watch.poll()
    decision = ear.state.decide(clock(), RULES, "Auto")
    assert (decision.policy, decision.changed) == ("round_robin", True)

    for later_s, policy in ((50.0, "round_robin"), (70.0, "product")):
        await store.execute("DEL", KEYS.alarms)
        for number in (1, 2):
            await write_aged(store, number=number, age_s=later_s)
        later = Clock()
        later.ahead_s = later_s
        heir = Ear(FallbackState(decision.document(batch_limit=None)))
        await AlarmWatch(store, KEYS, heir, clock=later, settings=SETTINGS).poll()
        again = heir.state.decide(later(), RULES, "Auto")
        assert (again.policy, again.changed) == (policy, policy == "product")
        assert policy == "product" or again.since_s == decision.since_s


async def test_it_outlives_the_store_and_says_that_it_may_have_missed_alarms(
    server: ValkeyProcess, store: Store
) -> None:
    ear, clock = Ear(), Clock()
    turns: list[float] = []
    watch = AlarmWatch(store, KEYS, ear, on_turn=turns.append, clock=clock, settings=SETTINGS)
    await watch.poll()
    server.kill()
    await watch.poll()
    assert not watch.connected
    assert (len(turns), len(ear.heards)) == (2, 1), "time to decide, but nothing was heard"
    server.start()
    await watch.poll()
    assert ear.heards[-1][1] is False, "too short for a detector to have fallen silent"
    server.kill()
    await watch.poll()
    clock.ahead_s += ALARM_REPEAT_S
    await watch.poll()
    server.start()
    await watch.poll()
    await watch.poll()
    assert [missed for _, missed in ear.heards[-2:]] == [True, False]
    await AlarmWriter(store, KEYS, settings=SETTINGS).write(Alarm(prefix_class=named(7)))
    await watch.poll()
    assert [name for name, _ in ear.alarms] == [named(7)], "it reads on in a store that came back empty"


async def test_a_backlog_is_read_in_bounded_steps_and_quiet_only_at_its_end(store: Store) -> None:
    entries = READS_PER_POLL_MAX * ALARMS_PER_READ_MAX + 10
    for start in range(0, entries, 1_000):
        batch = [
            ("XADD", KEYS.alarms, "*", "b", f'{{"prefix_class":"{named(i)}"}}')
            for i in range(start, min(start + 1_000, entries))
        ]
        await store.batch(batch)
    await store.execute("PEXPIRE", KEYS.alarms, 86_400_000)
    ear = Ear()
    watch = AlarmWatch(store, KEYS, ear, settings=SETTINGS)
    await watch.poll()
    assert (watch.raised, ear.heards) == (entries - 10, [])
    await watch.poll()
    assert (watch.raised, len(ear.heards)) == (entries, 1)


async def test_what_is_no_alarm_is_skipped_and_counted(store: Store) -> None:
    writer = AlarmWriter(store, KEYS, settings=SETTINGS)
    for wrong in (
        b"{",
        b"[]",
        b'{"prefix_class":1}',
        b'{"prefix_class":"A%s"}' % (b"0" * 15),
        b'{"prefix_class":"0\n"}',
    ):
        await store.execute("XADD", KEYS.alarms, "*", "b", wrong)
    await store.execute("XADD", KEYS.alarms, "*", "x", "y")
    await writer.write(Alarm(prefix_class=named(1)))
    ear = Ear()
    watch = AlarmWatch(store, KEYS, ear, settings=SETTINGS)
    await watch.poll()
    assert (len(ear.alarms), watch.malformed) == (1, 6)


async def test_a_key_of_another_type_and_one_without_a_time_to_live_do_no_harm(store: Store) -> None:
    await store.execute("SET", KEYS.alarms, "x")
    ear, clock = Ear(), Clock()
    watch = AlarmWatch(store, KEYS, ear, clock=clock, settings=SETTINGS)
    await watch.poll()
    assert watch.connected
    await store.execute("DEL", KEYS.alarms)
    await store.execute("XADD", KEYS.alarms, "*", "b", f'{{"prefix_class":"{named(1)}","unknown":1}}')
    await watch.poll()
    assert len(ear.alarms) == 1
    assert clock() - ear.alarms[0][1] < 60.0


async def test_a_stream_that_has_gone_back_is_read_again(store: Store) -> None:
    writer, ear = AlarmWriter(store, KEYS, settings=SETTINGS), Ear()
    watch = AlarmWatch(store, KEYS, ear, settings=replace(SETTINGS))
    await writer.write(Alarm(prefix_class=named(1)))
    await watch.poll()
    await store.execute("DEL", KEYS.alarms)
    await write_aged(store, number=2, age_s=30.0)
    await watch.poll()
    assert [name for name, _ in ear.alarms] == [named(1), named(2)]


async def test_it_runs_until_it_is_cancelled(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alarm_watch, "POLL_S", 0.01)
    ear, clock = Ear(), Clock()
    decided: asyncio.Queue[Decision] = asyncio.Queue()

    def on_turn(now_s: float) -> None:
        decision = ear.state.decide(now_s, RULES, "Auto")
        if decision.changed:
            decided.put_nowait(decision)

    watch = AlarmWatch(store, KEYS, ear, on_turn=on_turn, clock=clock, settings=SETTINGS)
    ear.state.decide(clock() - 10.0, RULES, "Auto")
    task = asyncio.create_task(watch.run())
    writer = AlarmWriter(store, KEYS, settings=SETTINGS)
    for number in (1, 2):
        await writer.write(Alarm(prefix_class=named(number)))
    assert (await decided.get()).policy == "round_robin"
    clock.ahead_s = 61.0
    assert (await decided.get()).policy == "product"
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert task.cancelled()
