"""A store that takes questions and answers none: it costs a caller its first question, and nobody a queue."""

import asyncio
import itertools
import re
from contextlib import suppress

import pytest
from pool_processes import until
from valkey_server import ValkeyProcess
from virtual_time import in_virtual_time

from trimtab_state import StateSettings, StateUnavailable, connect
from trimtab_state.backoff import Backoff
from trimtab_state.hang_watch import PROBE_S, HangWatch
from trimtab_state.store import CONNECTIONS_MAX

BRIEF = StateSettings(command_timeout_s=0.3, connect_timeout_s=0.3)
TIMEOUT_S = 2.0


class Server:
    """Answers from `well_at_s` of the loop's clock on."""

    def __init__(self, well_at_s: float) -> None:
        self.well_at_s = well_at_s
        self.asked_s: list[float] = []
        self.watch = HangWatch()

    async def probe(self) -> None:
        clock = asyncio.get_running_loop().time
        self.asked_s.append(clock())
        if clock() + TIMEOUT_S <= self.well_at_s:
            await asyncio.sleep(TIMEOUT_S)
            raise TimeoutError
        await asyncio.sleep(max(0.0, self.well_at_s - clock()))

    def hangs(self) -> None:
        self.watch.failed("a", TimeoutError(), self.probe)


async def seconds_to_fail(watch: HangWatch) -> float:
    clock = asyncio.get_running_loop().time
    began_s = clock()
    with pytest.raises(StateUnavailable):
        await watch.check("a")
    return clock() - began_s


def test_who_asks_before_it_is_sure_waits_once_and_all_others_fail_at_once() -> None:
    async def work() -> None:
        server = Server(1e9)
        server.hangs()
        assert await asyncio.gather(*(seconds_to_fail(server.watch) for _ in range(50))) == [TIMEOUT_S] * 50
        for _ in range(50):
            assert await seconds_to_fail(server.watch) == 0.0
            await asyncio.sleep(0.37)
        await server.watch.close()

    in_virtual_time(work())


def test_a_server_that_only_missed_one_question_fails_nobody_else() -> None:
    async def work() -> None:
        server = Server(0.01)
        server.hangs()
        await asyncio.gather(*(server.watch.check("a") for _ in range(50)))
        assert not server.watch.is_any

    in_virtual_time(work())


def test_one_question_is_asked_at_a_time_whatever_is_asked_of_us() -> None:
    async def work() -> None:
        server = Server(100.0)
        server.hangs()
        while server.watch.is_any:
            server.hangs()
            with suppress(StateUnavailable):
                await server.watch.check("a")
            await asyncio.sleep(0.05)
        asked = server.asked_s
        assert len(asked) > 40
        assert all(later - earlier > TIMEOUT_S - 1e-6 for earlier, later in itertools.pairwise(asked))

    in_virtual_time(work())


def test_who_waits_for_its_next_try_is_woken_when_the_server_is_back() -> None:
    async def work() -> None:
        server, backoff = Server(60.5), Backoff(0.05, 3.0)
        clock = asyncio.get_running_loop().time
        server.hangs()
        while True:
            try:
                await server.watch.check("a")
            except StateUnavailable:
                await server.watch.pause(backoff.next_s())
            else:
                break
        assert clock() - 60.5 <= PROBE_S

    in_virtual_time(work())


def test_another_server_is_not_held_responsible() -> None:
    async def work() -> None:
        server = Server(1e9)
        server.hangs()
        await server.watch.check("b")
        assert await seconds_to_fail(server.watch) == TIMEOUT_S
        # Until both are well somebody may wait for either.
        server.watch.failed("b", TimeoutError(), server.probe)
        server.watch.answered("b")
        await server.watch.close()

    in_virtual_time(work())


def test_a_refusal_is_no_hang() -> None:
    watch = HangWatch()
    assert not watch.failed("a", ConnectionRefusedError(), asyncio.Event().wait)
    assert not watch.is_any


@pytest.mark.parametrize("topology", ["tcp", "unix"])
async def test_a_hanging_server_is_sent_no_more_than_it_has_connections(server: ValkeyProcess, topology: str) -> None:
    store = connect(server.url if topology == "tcp" else server.unix_url, BRIEF)
    await store.execute("PING")
    server.pause()
    asked = [store.execute("GET", "{p}a") for _ in range(CONNECTIONS_MAX * 10)]
    asked += [store.batch([("GET", "{p}a"), ("PING",)]) for _ in range(CONNECTIONS_MAX * 10)]
    found = await asyncio.gather(*asked, return_exceptions=True)
    assert all(isinstance(each, StateUnavailable) for each in found)
    with pytest.raises(StateUnavailable, match="TimeoutError: no reply in time"):
        await store.on_each_server("INFO")
    with pytest.raises(StateUnavailable):
        await store.keys_with_prefix("{p}", 10)
    server.resume()
    assert await answers(store.execute, "PING")
    calls = re.search(rb"cmdstat_get:calls=(\d+)", server.command("INFO", "commandstats"))
    assert calls is None or int(calls[1]) <= CONNECTIONS_MAX
    await store.close()


async def test_a_reader_of_its_own_shares_what_is_known_and_may_be_closed(server: ValkeyProcess) -> None:
    store = connect(server.url, BRIEF)
    reader = store.dedicated(0.2)
    server.pause()
    with pytest.raises(StateUnavailable):
        await reader.execute("PING")
    await reader.close()
    with pytest.raises(StateUnavailable):
        await store.execute("PING")
    assert store._hangs.is_any
    server.resume()
    await until(lambda: not store._hangs.is_any, "the store is back though nobody asks it")
    assert await store.execute("PING")
    await store.close()


async def test_a_store_is_closed_while_it_hangs(server: ValkeyProcess) -> None:
    store = connect(server.url, BRIEF)
    server.pause()
    with pytest.raises(StateUnavailable):
        await store.execute("PING")
    await store.close()
    assert [task for task in asyncio.all_tasks() if "hangs" in task.get_name()] == []


async def answers(ask: "object", *words: str) -> object:
    while True:
        with suppress(StateUnavailable):
            return await ask(*words)  # type: ignore[operator]
        await asyncio.sleep(0.02)
