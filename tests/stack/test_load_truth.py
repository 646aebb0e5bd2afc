"""The load that each picker believes is what the engines report, whoever is killed, stopped or leaves; and none leaks.

An engine's truth is its own count of requests, running and waiting. A picker's belief is the requests that it knows of,
its own and the other's, plus those that it takes for foreign.
"""

from __future__ import annotations

import asyncio
import dataclasses
import re
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from kept_logs import logs_kept_on_failure
from stack_traffic import Traffic

from trimtab.commands import picker_argv
from trimtab.probes import get_json, json_says
from trimtab.stack import Stack, StackSettings, running

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.stack]

ENGINE_FLAGS = ("--step-base-ms", "100")
"""Ten tokens a second: streams live long and cost this machine little."""
ENDLESS_TOKENS = 5_000
DEADLINE_S = 60.0
"""For what must become true. Far more than it takes: it only bounds how long a failing test waits."""
WINDOW_S = 1.0
"""How far apart in time belief and truth may be on a busy machine while everything changes."""
BETWEEN_STEPS_MAX = 2
"""Requests that an engine has taken and not counted yet: it counts when a step is over."""

Counts = tuple[int, ...]
"""Requests on each engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Belief and truth at about one moment."""

    time_s: float
    truth: Counts
    beliefs: tuple[Counts, ...]
    """One for each picker."""


class Stream:
    """One streaming request of a client that may leave."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self._text = b""

    @property
    def is_open(self) -> bool:
        return not self._response.content.at_eof()

    async def first_byte(self) -> None:
        self._text += await self._response.content.readany()

    async def ended_well(self) -> bool:
        """Read to the end: whether the answer is complete."""
        self._text += await self._response.read()
        return self._text.rstrip().endswith(b"data: [DONE]")

    def leave(self) -> None:
        """The client closes its connection."""
        self._response.close()


@dataclass(slots=True, kw_only=True)
class Load:
    """A running stack whose load is watched."""

    stack: Stack
    session: aiohttp.ClientSession
    streams: list[Stream] = field(default_factory=list)
    number: int = 0
    seen: object = None

    async def open(self, count: int, *, tokens: int = ENDLESS_TOKENS) -> list[Stream]:
        """So many streams more, each past its first byte."""
        streams = await asyncio.gather(*(self._opened(tokens) for _ in range(count)))
        self.streams += streams
        return streams

    def leave(self, count: int) -> None:
        """So many clients go, those first that have been there longest."""
        for stream in self.streams[:count]:
            stream.leave()
        del self.streams[:count]

    def begin(self, *, tokens: int = ENDLESS_TOKENS) -> asyncio.Task[aiohttp.ClientResponse]:
        """Send a request without waiting for its answer."""
        self.number += 1
        body = {
            "model": "tiny",
            "messages": [{"role": "user", "content": f"{self.number} bottles on the quay. " * 10}],
            "max_tokens": tokens,
            "ignore_eos": True,
            "stream": True,
        }
        return asyncio.ensure_future(self._post(body))

    async def _post(self, body: dict[str, Any]) -> aiohttp.ClientResponse:
        return await self.session.post(f"{self.stack.url}/v1/chat/completions", json=body)

    async def _opened(self, tokens: int) -> Stream:
        response = await self.begin(tokens=tokens)
        assert response.status == 200, await response.text()
        stream = Stream(response)
        await stream.first_byte()
        return stream

    async def truth(self) -> Counts:
        """What each engine counts."""
        return tuple([await self._engine_requests(ports.url) for ports in self.stack.engines])

    async def _engine_requests(self, url: str) -> int:
        async with self.session.get(f"{url}/metrics") as response:
            text = await response.text()
        found = re.findall(r"^vllm:num_requests_(?:running|waiting)\{[^}]*\} (\S+)$", text, re.MULTILINE)
        assert len(found) == 2
        return round(sum(map(float, found)))

    async def states(self) -> list[dict[str, Any]]:
        """What each picker that answers says, in the pickers' order."""
        answers = await asyncio.gather(*(get_json(f"{picker.url}/state") for picker in self.stack.pickers))
        return [answer for answer in answers if answer is not None]

    def rows(self, state: dict[str, Any]) -> list[dict[str, Any]]:
        """One for each engine, in the engines' order."""
        by_name = {row["endpoint"]: row for row in state["endpoints"]}
        return [by_name[ports.address] for ports in self.stack.engines]

    def belief(self, state: dict[str, Any]) -> Counts:
        """Requests on each engine as a picker counts them in its decisions."""
        return tuple(row["requests"] + row["external"] for row in self.rows(state))

    async def agreed(self, total: int, *, pickers: int = 2, foreign: bool = False) -> None:
        """Wait until all believe what the engines report, which is `total` requests; none of them foreign."""

        async def equal() -> bool:
            states, truth = await self.states(), await self.truth()
            beliefs = [self.belief(state) for state in states]
            external = sum(row["external"] for state in states for row in self.rows(state))
            self.seen = {"truth": truth, "beliefs": beliefs, "external": external}
            return (
                len(states) == pickers
                and sum(truth) == total
                and set(beliefs) == {truth}
                and (foreign or external == 0)
                and (foreign or sum(state["open_reservations"] for state in states) == total)
            )

        await self.until(equal, lambda: f"{total} requests: {self.seen}")

    async def until(self, condition: Callable[[], Awaitable[bool]], what: Callable[[], str]) -> None:
        """Poll."""
        deadline_s = time.monotonic() + DEADLINE_S
        while not await condition():
            assert time.monotonic() < deadline_s, what()
            await asyncio.sleep(0.05)

    async def leases_but(self, state_of: int) -> None:
        """Wait until a picker counts only its own reservations: the other's lease has expired."""

        async def alone() -> bool:
            state = await get_json(f"{self.stack.pickers[state_of].url}/state")
            self.seen = state
            if state is None:
                return False
            return sum(row["requests"] for row in self.rows(state)) == int(state["open_reservations"])

        await self.until(alone, lambda: f"only its own: {self.seen}")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def load(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Load]:
    log_dir: Path = tmp_path_factory.mktemp("load-truth") / "logs"
    settings = StackSettings(endpoints=2, pickers=2, engine_flags=ENGINE_FLAGS)
    timeout = aiohttp.ClientTimeout(total=None, sock_read=DEADLINE_S)
    async with (
        running(settings, log_dir=log_dir) as stack,
        aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session,
    ):
        with logs_kept_on_failure(request, log_dir):
            yield Load(stack=stack, session=session)


async def test_while_streams_come_and_go_all_believe_what_the_engines_report(load: Load) -> None:
    open_count = 0
    for come, go in ((12, 0), (9, 5), (0, 7), (20, 3), (0, 20), (4, 10)):
        await load.open(come)
        load.leave(go)
        open_count += come - go
        await load.agreed(open_count)
    assert open_count == 0


async def test_in_a_busy_run_belief_follows_truth_and_ends_at_zero(load: Load) -> None:
    samples: list[Sample] = []
    traffic = Traffic(load.session, load.stack.url, seed=7, workers=24, kinds=({},), tokens_max=30, pause_max_s=1.0)
    async with traffic.running() as counts:
        while counts.finished < 100:
            truth_before = await load.truth()
            beliefs = tuple(load.belief(state) for state in await load.states())
            if len(beliefs) == 2:
                samples.append(Sample(time_s=time.monotonic(), truth=truth_before, beliefs=beliefs))
            await asyncio.sleep(0.02)
    assert not counts.failed
    await load.agreed(0)
    assert len(samples) > 20
    assert outside(samples, window_s=WINDOW_S) == []
    # Counting somebody twice, or never again after the end, would show in the means whatever the delays.
    for engine in range(2):
        truth = mean([sample.truth[engine] for sample in samples])
        assert truth > 2
        for picker in range(2):
            assert mean([sample.beliefs[picker][engine] for sample in samples]) == pytest.approx(truth, rel=0.25, abs=1)


async def test_hundreds_of_clients_that_leave_leave_nothing_behind(load: Load) -> None:
    for _ in range(2):
        await load.open(100)
        load.leave(100)
    # And some leave before anything has come back, wherever their request is by then.
    tasks = [load.begin() for _ in range(100)]

    async def some_arrived() -> bool:
        return sum(await load.truth()) > 30

    await load.until(some_arrived, lambda: "nothing arrives")
    for task in tasks:
        if not task.cancel():
            task.result().close()
    await asyncio.gather(*tasks, return_exceptions=True)
    await load.agreed(0)


async def test_a_killed_pickers_reservations_end_with_its_lease(load: Load) -> None:
    await load.open(16)
    await load.agreed(16)
    traffic = Traffic(load.session, load.stack.url, seed=8, workers=8, kinds=({},), tokens_max=12)
    async with traffic.running() as counts:
        await enough(load, lambda: counts.finished > 20)
        first, second = await load.states()
        in_its_hands = int(first["open_reservations"])
        assert in_its_hands > 0
        assert second["open_reservations"] > 0
        load.stack.kill("picker-1")
        await enough(load, lambda: counts.finished > 60)
    assert sum(counts.failed.values()) <= in_its_hands
    await load.leases_but(1)
    own = int((await load.states())[0]["open_reservations"])
    assert own < 16
    # What the dead picker had placed still runs, and counts as foreign now.
    await load.agreed(16, pickers=1, foreign=True)
    assert all([stream.is_open for stream in load.streams])
    load.leave(16)
    await load.agreed(0, pickers=1)
    await load.stack.restart("picker-1")
    await load.stack.settled()
    await load.agreed(0)


async def test_a_picker_that_slept_through_its_lease_is_right_again(load: Load) -> None:
    await load.open(12)
    await load.agreed(12)
    _, second = await load.states()
    assert second["open_reservations"] > 0
    load.stack.kill("picker-2", signal.SIGSTOP)
    await load.leases_but(0)
    load.leave(4)
    await load.open(3)
    load.stack.kill("picker-2", signal.SIGCONT)
    # Requests that came while Envoy had not noticed yet were placed by nobody, and are foreign to all.
    await load.agreed(11, foreign=True)
    await load.open(3)
    load.leave(14)
    await load.agreed(0)


async def test_a_picker_that_is_told_to_stop_sees_its_streams_to_their_end(load: Load) -> None:
    stack = load.stack
    await stack.supervisor.stop("picker-1")
    argv = [*picker_argv(stack.pickers[0], store=stack.store_url), "--drain-delay", "1", "--drain-timeout", "60"]
    ready = json_says(f"{stack.pickers[0].url}/healthz", "ready")
    await stack.supervisor.start("leaver", argv, env={"TRIMTAB_SECRET": stack.secret}, ready=ready)
    await stack.settled()

    async def both_used() -> bool:
        await load.open(4)
        return all(state["open_reservations"] > 3 for state in await load.states())

    await load.until(both_used, lambda: "one picker gets everything")
    lasting = await load.open(12, tokens=80)
    stack.kill("leaver", signal.SIGTERM)
    load.streams = [stream for stream in load.streams if stream not in lasting]
    answers = await asyncio.gather(*(load.begin(tokens=2) for _ in range(20)))
    assert [answer.status for answer in answers] == [200] * 20
    assert all([await Stream(answer).ended_well() for answer in answers])
    assert any(stream.is_open for stream in lasting)
    assert stack.supervisor.is_running("leaver")
    assert all(await asyncio.gather(*(stream.ended_well() for stream in lasting)))
    # Streams of its own are open still, so it is still there.
    assert stack.supervisor.is_running("leaver")
    load.leave(len(load.streams))

    async def is_gone() -> bool:
        return not stack.supervisor.is_running("leaver")

    await load.until(is_gone, lambda: "it does not end")
    await load.agreed(0, pickers=1)


async def enough(load: Load, condition: Callable[[], bool]) -> None:
    async def asked() -> bool:
        return condition()

    await load.until(asked, lambda: "the traffic stands still")


def mean(values: Sequence[int]) -> float:
    return sum(values) / len(values)


def outside(samples: Sequence[Sample], *, window_s: float) -> list[Sample]:
    """Samples in which somebody believes what was true at no time within the window."""
    found = []
    for sample in samples[1:-1]:
        near = [other.truth for other in samples if abs(other.time_s - sample.time_s) <= window_s]
        for belief in sample.beliefs:
            if not all(
                min(c) <= b <= max(c) + BETWEEN_STEPS_MAX for b, c in zip(belief, zip(*near, strict=True), strict=True)
            ):
                found.append(dataclasses.replace(sample, beliefs=(belief,)))
    return found
