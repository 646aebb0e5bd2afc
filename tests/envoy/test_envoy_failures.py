"""What a client sees when pickers are down, hung, going away or many streams are open: an answer."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import pytest_asyncio
from envoy_rig import Rig

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.stack]

STREAMS = 1500


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Poll; the test's own timeout is the bound."""
    while not await condition():  # noqa: ASYNC110 (nothing here sends an event)
        await asyncio.sleep(0.05)


async def both_choose(rig: Rig) -> None:
    """Wait until every worker of Envoy uses both pickers: its workers hear of health a moment after its statistics."""

    async def as_wanted() -> bool:
        answers = [await rig.ask(x_test_destination=rig.engines["c"]) for _ in range(16)]
        asked = Counter(body["headers"].get("x-test-picker") for _, body, _ in answers)
        return min(asked["picker-1"], asked["picker-2"]) >= 6

    await until(as_wanted)


async def healthy_pickers(rig: Rig, count: int) -> None:
    async def as_wanted() -> bool:
        return await rig.stat("cluster.pickers.membership_healthy") == count

    await until(as_wanted)


@pytest_asyncio.fixture(loop_scope="module")
async def all_well(rig: Rig) -> AsyncIterator[Rig]:
    """The rig with both pickers in use, before the test and again after it."""
    await both_choose(rig)
    yield rig
    for name in rig.picker_ports:
        if rig.supervisor.is_running(name):
            rig.supervisor.kill(name, signal.SIGCONT)
        else:
            await rig.supervisor.restart(name)
    await both_choose(rig)


async def test_one_picker_killed_costs_no_choice_since_the_other_is_asked_at_once(all_well: Rig) -> None:
    rig = all_well
    rig.supervisor.kill("picker-1")
    for _ in range(30):
        status, body, _ = await rig.ask(x_test_destination=rig.engines["c"])
        assert (status, body["engine"], body["headers"]["x-test-picker"]) == (200, "c", "picker-2")


async def test_with_every_picker_down_requests_are_spread_over_the_engines(all_well: Rig) -> None:
    rig = all_well
    for name in rig.picker_ports:
        await rig.supervisor.stop(name)
    served = Counter()
    for _ in range(12):
        status, body, _ = await rig.ask(x_test_destination=rig.engines["c"])
        assert status == 200
        served[body["engine"]] += 1
    assert set(served) == {"a", "b", "c"}


async def test_a_client_cannot_choose_while_the_pickers_are_down(all_well: Rig) -> None:
    rig = all_well
    for name in rig.picker_ports:
        await rig.supervisor.stop(name)
    served = {(await rig.ask(x_gateway_destination_endpoint=rig.engines["a"]))[1]["engine"] for _ in range(9)}
    assert served == {"a", "b", "c"}


async def test_a_picker_that_comes_back_is_used_again(all_well: Rig) -> None:
    rig = all_well
    await rig.supervisor.stop("picker-1")
    await healthy_pickers(rig, 1)
    await rig.supervisor.restart("picker-1")
    await both_choose(rig)


async def test_hung_pickers_delay_a_request_but_do_not_lose_it(all_well: Rig) -> None:
    rig = all_well
    for name in rig.picker_ports:
        rig.supervisor.kill(name, signal.SIGSTOP)
    answers = await asyncio.gather(*(rig.ask(x_test_destination=rig.engines["c"]) for _ in range(20)))
    assert [status for status, _, _ in answers] == [200] * 20
    await healthy_pickers(rig, 0)

    async def nobody_waits() -> bool:
        before = await rig.stat("http.front.ext_proc.message_timeouts")
        for _ in range(8):
            assert (await rig.ask())[0] == 200
        return await rig.stat("http.front.ext_proc.message_timeouts") == before

    await until(nobody_waits)


async def test_a_picker_that_hangs_while_an_answer_streams_does_not_stop_the_stream(all_well: Rig) -> None:
    rig = all_well
    headers = {"x-test-stream": "one", "x-test-destination": rig.engines["a"]}
    async with rig.session.post(f"{rig.url}/v1/completions", data=b"{}", headers=headers) as response:
        assert response.status == 200
        for name in rig.picker_ports:
            rig.supervisor.kill(name, signal.SIGSTOP)
        await healthy_pickers(rig, 0)
        await rig.session.post(f"http://{rig.engines['a']}/release?one")
        text = await response.text()
    assert text.endswith("data: [DONE]\n\n")


async def test_failing_closed_refuses_instead(all_well: Rig) -> None:
    rig = all_well
    closed = await rig.start_envoy("closed", fail_open=False)
    await both_choose(closed)
    status, body, _ = await closed.ask(x_test_destination=rig.engines["c"])
    assert (status, body["engine"]) == (200, "c")
    for name in rig.picker_ports:
        await rig.supervisor.stop(name)
    status, _, _ = await closed.ask(x_test_destination=rig.engines["c"])
    assert status >= 500


async def test_fifteen_hundred_streams_at_once_are_all_chosen_and_all_end(all_well: Rig) -> None:
    rig = await all_well.start_envoy("streams", message_timeout_s=30.0)
    await both_choose(rig)
    opened = asyncio.Semaphore(0)

    async def stream(number: int) -> tuple[str, str]:
        name = "abc"[number % 3]
        headers = {"x-test-stream": "many", "x-test-destination": rig.engines[name]}
        async with rig.session.post(f"{rig.url}/v1/completions", data=b"{}", headers=headers) as response:
            opened.release()
            assert response.status == 200
            return response.headers["x-engine"], (await response.text())[-14:]

    tasks = [asyncio.ensure_future(stream(number)) for number in range(STREAMS)]
    for _ in tasks:
        await opened.acquire()
    assert await rig.stat("cluster.pickers.upstream_rq_active") == STREAMS
    for address in rig.engines.values():
        await rig.session.post(f"http://{address}/release?many")
    answers = await asyncio.gather(*tasks)
    assert answers == [("abc"[number % 3], "data: [DONE]\n\n") for number in range(STREAMS)]
    assert await rig.stat("http.front.ext_proc.failure_mode_allowed") == 0
    assert await rig.stat("cluster.pool.upstream_rq_pending_overflow") == 0
