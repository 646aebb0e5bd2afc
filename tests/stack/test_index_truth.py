"""The index of each picker is what the engines have cached, chunk by chunk, whatever was killed or lost meanwhile.

Every case runs under traffic that overfills the engines' caches, so that blocks come and go all the time. Then the
traffic ends, and what each picker knows is compared with the engines' own caches by `cache_oracle`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import msgspec
import pytest
import pytest_asyncio
from cache_oracle import CacheOracle, Difference, difference, engine_cache, known_chunks
from kept_logs import logs_kept_on_failure
from stack_traffic import Traffic, TrafficCounts

from trimtab.commands import POOL_NAME, POOL_NAMESPACE, emulator_argv, sidecar_argv
from trimtab.probes import free_ports, get_json, http_ok, is_free
from trimtab.stack import MODEL_DIR, Stack, StackSettings, running
from trimtab_state import EndpointSpec

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.stack]

BLOCKS = 512
"""KV blocks of an engine: some dozen of the traffic's conversations."""
BLOCK_TOKENS = 16
ADAPTER = "harbour-pilot"
SMALL_BUFFER = 20
"""Event batches that the forgetful engine keeps for replay."""
ENGINE_FLAGS = (
    *("--num-gpu-blocks", str(BLOCKS), "--block-size", str(BLOCK_TOKENS), "--max-model-len", "4096"),
    *("--speed", "4", "--lora", ADAPTER),
)
KINDS: tuple[dict[str, str], ...] = (
    {},
    {},
    {"cache_salt": "tenant-1"},
    {"model": ADAPTER},
    {"model": ADAPTER, "cache_salt": "tenant-2"},
)
DEADLINE_S = 60.0
"""For what must become true. Far more than it takes: it only bounds how long a failing test waits."""

Names = dict[str, tuple[str, ...]]
"""Engine's URL to the endpoints that its ranks are."""


@dataclass(slots=True, kw_only=True)
class Pool:
    """A running stack whose pickers are questioned."""

    stack: Stack
    session: aiohttp.ClientSession
    oracle: CacheOracle
    engines: Names
    seed: int = 0
    seen: list[Difference] = field(default_factory=list)

    def traffic(
        self, *, workers: int = 8, url: str | None = None
    ) -> contextlib.AbstractAsyncContextManager[TrafficCounts]:
        """Conversations that are new each time."""
        self.seed += 1
        traffic = Traffic(
            self.session, self.stack.url if url is None else url, seed=self.seed, workers=workers, kinds=KINDS
        )
        return traffic.running()

    async def differences(self) -> list[Difference]:
        """Each picker against each engine."""
        found = []
        for url, names in self.engines.items():
            ranks = await engine_cache(self.session, url)
            assert len(ranks) == len(names)
            for name, rank in zip(names, ranks, strict=True):
                expected = self.oracle.chunks(rank)
                for picker in self.stack.pickers:
                    known = await known_chunks(self.session, picker.url, name)
                    found.append(difference(picker.url, name, known, expected))
        return found

    async def is_equal(self) -> list[Difference]:
        """Wait until every picker knows of every engine exactly what that has cached; what was compared."""
        self.seen = []

        async def equal() -> bool:
            self.seen = await self.differences()
            return all(found.is_equal for found in self.seen)

        await self.until(equal, lambda: "\n".join(str(d) for d in self.seen if not d.is_equal))
        return self.seen

    async def until(self, condition: Callable[[], Awaitable[bool]], what: Callable[[], str]) -> None:
        """Poll an async condition."""
        deadline_s = time.monotonic() + DEADLINE_S
        while not await condition():
            assert time.monotonic() < deadline_s, what()
            await asyncio.sleep(0.05)

    async def exactly_known(self) -> None:
        """Wait until every picker routes to every endpoint by what it holds."""
        wanted = {name for names in self.engines.values() for name in names}

        async def known() -> bool:
            for picker in self.stack.pickers:
                state = await get_json(f"{picker.url}/state")
                rows = {row["endpoint"]: row for row in (state or {"endpoints": []})["endpoints"]}
                if not all(
                    name in rows
                    and rows[name]["candidate"]
                    and not rows[name]["approximate"]
                    and not rows[name]["unsynced"]
                    for name in wanted
                ):
                    return False
            return True

        await self.until(known, lambda: f"not all of {wanted} are known exactly")

    async def engine(self, number: int, path: str) -> dict[str, object]:
        """POST to an engine's control page."""
        async with self.session.post(f"{self.stack.engines[number - 1].url}{path}") as response:
            assert response.status == 200, await response.text()
            answer: dict[str, object] = await response.json()
            return answer

    async def cached_blocks(self, number: int) -> int:
        """Blocks cached by an engine, all ranks together."""
        ranks = await engine_cache(self.session, self.stack.engines[number - 1].url)
        return sum(rank["live_blocks"] for rank in ranks)

    async def went_on(self, counts: TrafficCounts, *, requests: int = 80) -> None:
        """Wait until so many more requests have been answered."""
        target = counts.finished + requests

        async def enough() -> bool:
            return counts.finished >= target

        await self.until(enough, lambda: f"{counts.finished} of {target} requests, {dict(counts.failed)}")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pool]:
    log_dir: Path = tmp_path_factory.mktemp("index-truth") / "logs"
    settings = StackSettings(endpoints=3, pickers=2, engine_flags=ENGINE_FLAGS)
    timeout = aiohttp.ClientTimeout(total=DEADLINE_S)
    connector = aiohttp.TCPConnector(limit=0)
    async with (
        running(settings, log_dir=log_dir) as stack,
        aiohttp.ClientSession(timeout=timeout, connector=connector) as session,
    ):
        oracle = CacheOracle.of_pool(secret=stack.secret, namespace=POOL_NAMESPACE, name=POOL_NAME, model_dir=MODEL_DIR)
        engines: Names = {ports.url: (ports.address,) for ports in stack.engines}
        with logs_kept_on_failure(request, log_dir):
            yield Pool(stack=stack, session=session, oracle=oracle, engines=engines)


def chunks_compared(found: Iterable[Difference]) -> int:
    return sum(one.expected for one in found)


async def test_after_evictions_the_index_is_the_cache(pool: Pool) -> None:
    capacity = len(pool.stack.engines) * BLOCKS * BLOCK_TOKENS
    async with pool.traffic() as counts:

        async def overfilled() -> bool:
            return counts.computed_tokens > 2 * capacity

        await pool.until(overfilled, lambda: f"{counts}")
    assert not counts.failed
    assert counts.cached_tokens > 0
    assert min([await pool.cached_blocks(number) for number in (1, 2, 3)]) > 0.8 * BLOCKS
    assert chunks_compared(await pool.is_equal()) > 1000


async def test_adapters_and_salts_have_chains_of_their_own(pool: Pool) -> None:
    async with pool.traffic() as counts:
        await pool.went_on(counts)
    kinds = {
        (chain["lora_name"], chain["cache_salt"])
        for url in pool.engines
        for rank in await engine_cache(pool.session, url)
        for chain in rank["chains"]
    }
    assert len(kinds) == 4
    await pool.is_equal()


async def test_an_engine_that_is_killed_comes_back_empty_and_is_followed(pool: Pool) -> None:
    async with pool.traffic() as counts:
        await pool.went_on(counts)
        pool.stack.kill("engine-1")
        await pool.went_on(counts)
        await pool.stack.restart("engine-1")
        await pool.exactly_known()
        await pool.went_on(counts)
    await pool.is_equal()


async def test_a_sidecar_that_is_killed_and_comes_back_has_missed_nothing(pool: Pool) -> None:
    async with pool.traffic() as counts:
        await pool.went_on(counts)
        pool.stack.kill("sidecar-2")
        await pool.went_on(counts)
        await pool.stack.restart("sidecar-2")
        await pool.exactly_known()
        await pool.went_on(counts)
    await pool.is_equal()


async def test_an_engine_and_its_sidecar_can_be_killed_together(pool: Pool) -> None:
    async with pool.traffic() as counts:
        await pool.went_on(counts)
        pool.stack.kill("sidecar-1")
        pool.stack.kill("engine-1")
        await pool.went_on(counts)
        await asyncio.gather(pool.stack.restart("sidecar-1"), pool.stack.restart("engine-1"))
        await pool.exactly_known()
        await pool.went_on(counts)
    await pool.is_equal()


async def test_what_an_engine_stored_before_its_sidecar_was_back_is_known(pool: Pool) -> None:
    async with pool.traffic() as counts:
        pool.stack.kill("sidecar-1")
        pool.stack.kill("engine-1")
        await pool.stack.restart("engine-1")
        async with pool.traffic(workers=4, url=pool.stack.engines[0].url) as direct:
            await pool.went_on(direct, requests=20)
        await pool.stack.restart("sidecar-1")
        await pool.exactly_known()
        await pool.went_on(counts)
    await pool.is_equal()


async def test_a_store_that_comes_back_empty_is_filled_again(pool: Pool) -> None:
    async with pool.traffic() as counts:
        await pool.went_on(counts)
        pool.stack.kill("valkey")
        await pool.went_on(counts)
        await pool.stack.restart("valkey")
        await pool.went_on(counts)
    assert not counts.failed
    await pool.is_equal()
    await pool.exactly_known()


async def test_a_picker_that_starts_late_knows_what_the_others_know(pool: Pool) -> None:
    async with pool.traffic() as counts:
        pool.stack.kill("picker-2")
        await pool.went_on(counts)
        await pool.stack.restart("picker-2")
        await pool.went_on(counts)
    await pool.is_equal()


async def test_a_picker_that_slept_catches_up(pool: Pool) -> None:
    async with pool.traffic() as counts:
        pool.stack.kill("picker-2", signal.SIGSTOP)
        await pool.went_on(counts)
        pool.stack.kill("picker-2", signal.SIGCONT)
        await pool.went_on(counts)
    await pool.is_equal()


async def test_events_that_were_lost_on_their_way_are_fetched(pool: Pool) -> None:
    async with pool.traffic() as counts:
        for _ in range(3):
            for number in (1, 2, 3):
                await pool.engine(number, "/lab/lose_events?batches=3")
            await pool.went_on(counts, requests=80)
    await pool.is_equal()


async def test_the_loss_of_an_engines_last_events_is_noticed_although_nothing_follows(pool: Pool) -> None:
    for _ in range(2):
        await pool.engine(1, "/lab/lose_events?batches=1000")
        async with pool.traffic(workers=1, url=pool.stack.engines[0].url) as counts:
            await pool.went_on(counts, requests=2)
        await pool.is_equal()
        await pool.engine(1, "/lab/lose_events?batches=0")


async def test_a_cache_that_is_reset_is_empty_for_the_pickers_too(pool: Pool) -> None:
    async with pool.traffic() as counts:
        await pool.went_on(counts)
        answer = await pool.engine(2, "/reset_prefix_cache?reset_running_requests=true")
        assert answer["success"]
        await pool.went_on(counts)
    await pool.is_equal()


async def test_an_engine_that_sleeps_holds_nothing_and_gets_nothing(pool: Pool) -> None:
    async with pool.traffic() as counts:
        await pool.went_on(counts)
        await pool.engine(3, "/sleep")

        async def unwanted() -> bool:
            states = [await get_json(f"{picker.url}/state") for picker in pool.stack.pickers]
            name = pool.stack.engines[2].address
            rows = [row for s in states if s for row in s["endpoints"] if row["endpoint"] == name]
            return [(row["candidate"], row["index_chunks"]) for row in rows] == [(False, 0), (False, 0)]

        await pool.until(unwanted, lambda: "the sleeper is still wanted")
        before = counts.endpoints[pool.stack.engines[2].address]
        await pool.went_on(counts)
        # What was on its way when the sleeper was found out waits there; nothing else came after.
        assert counts.endpoints[pool.stack.engines[2].address] - before <= 8
        await pool.engine(3, "/wake_up")
        await pool.exactly_known()
        await pool.went_on(counts)
    assert await pool.cached_blocks(3) > 0
    await pool.is_equal()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ranked(pool: Pool) -> str:
    """The third engine replaced by one with two data-parallel ranks."""
    return await replaced(pool, 3, "ranked", ("--data-parallel-size", "2"), ranks=2)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def forgetful(pool: Pool) -> str:
    """The second engine replaced by one with a short replay buffer."""
    return await replaced(pool, 2, "forgetful", ("--kv-buffer-steps", str(SMALL_BUFFER)))


async def replaced(pool: Pool, number: int, name: str, flags: tuple[str, ...], *, ranks: int = 1) -> str:
    """Put another engine (`NAME-engine`, `NAME-sidecar`) in an engine's place; returns its URL."""
    stack, old = pool.stack, pool.stack.engines[number - 1]
    await stack.supervisor.stop(f"sidecar-{number}")
    await stack.supervisor.stop(f"engine-{number}")
    # A rank's event ports are rank 0's plus its number.
    events, replay = port_pairs(2)
    ports = dataclasses.replace(old, kv_events=events, kv_replay=replay)
    argv = emulator_argv(ports, model_dir=MODEL_DIR, engine_flags=(*ENGINE_FLAGS, *flags))
    healthy = http_ok(f"{ports.url}/health")
    await stack.supervisor.start(f"{name}-engine", argv, ready=healthy, ready_timeout_s=DEADLINE_S)
    checkpoints = stack.supervisor.log_dir / f"checkpoint-{name}"
    checkpoints.mkdir()
    sidecar = sidecar_argv(
        ports, store=stack.store_url, model_dir=MODEL_DIR, checkpoint_dir=checkpoints, engine_argv=argv
    )
    await stack.supervisor.start(f"{name}-sidecar", sidecar, env={"TRIMTAB_SECRET": stack.secret})
    if ranks > 1:
        pool.engines[ports.url] = tuple(f"{ports.address}/{rank}" for rank in range(ranks))
    assert stack.control is not None
    await stack.control.put(msgspec.structs.replace(stack.document(), endpoints=tuple(members(pool.engines))))
    await pool.exactly_known()
    return ports.url


def members(engines: Names) -> Iterable[EndpointSpec]:
    for names in engines.values():
        for name in names:
            address, _, rank = name.partition("/")
            yield EndpointSpec(name=name, address=address, rank=int(rank) if rank else None)


def port_pairs(count: int) -> list[int]:
    """Ports that are free, and the next one after each of them too."""
    firsts = [port for port in free_ports(50) if is_free(port + 1)]
    return [port for at, port in enumerate(firsts) if not {port - 1, port + 1} & set(firsts[:at])][:count]


async def test_two_ranks_behind_one_port_are_two_caches(pool: Pool, ranked: str) -> None:
    async with pool.traffic() as counts:
        await pool.went_on(counts, requests=120)
    assert min(rank["live_blocks"] for rank in await engine_cache(pool.session, ranked)) > 0
    await pool.is_equal()


async def test_the_ranks_come_back_after_being_killed(pool: Pool, ranked: str) -> None:
    async with pool.traffic() as counts:
        pool.stack.kill("ranked-engine")
        await pool.went_on(counts)
        await pool.stack.restart("ranked-engine")
        await pool.exactly_known()
        await pool.went_on(counts, requests=80)
    await pool.is_equal()


async def test_a_gap_beyond_the_replay_buffer_claims_nothing_false_and_heals(pool: Pool, forgetful: str) -> None:
    lost = 3 * SMALL_BUFFER
    async with pool.session.post(f"{forgetful}/lab/lose_events?batches={lost}") as response:
        assert response.status == 200
    [rank] = await engine_cache(pool.session, forgetful)
    async with pool.traffic(url=forgetful) as counts, pool.traffic():

        async def gone() -> bool:
            [now] = await engine_cache(pool.session, forgetful)
            return bool(now["next_sequence"] > rank["next_sequence"] + lost + 3)

        await pool.until(gone, lambda: f"{counts}")

    async def covered() -> bool:
        pool.seen = await pool.differences()
        return not any(found.is_claim_without_cover for found in pool.seen)

    await pool.until(covered, lambda: "\n".join(map(str, pool.seen)))
    # The other endpoints have missed nothing.
    others = [found for found in pool.seen if found.endpoint not in pool.engines[forgetful]]
    assert all(found.is_equal for found in others), others
    async with pool.session.post(f"{forgetful}/reset_prefix_cache?reset_running_requests=true") as response:
        assert (await response.json())["success"]
    async with pool.traffic() as counts:
        await pool.went_on(counts)
    await pool.is_equal()
