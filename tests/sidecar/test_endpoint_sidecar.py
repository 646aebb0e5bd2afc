"""An endpoint publishes what its engine process holds: across gaps, restarts of either side, and unreadable frames."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq.asyncio
from hypothesis import given
from hypothesis import strategies as st
from sidecar_captures import SEED, tiny_table
from test_kv_feed import QUICK
from test_vllm_events import EVENTS
from zmq_engine import ZmqEngine, until, zmq_context

from trimtab_core.block_chains import ChunkChanges
from trimtab_core.chunks import U32, U64
from trimtab_core.token_table import TokenTable
from trimtab_sidecar import vllm_events
from trimtab_sidecar.cached_prefixes import CachedPrefixes
from trimtab_sidecar.checkpoint import CheckpointFile
from trimtab_sidecar.endpoint_sidecar import EndpointSidecar
from trimtab_sidecar.kv_sources import KvSource
from trimtab_state.documents import Heartbeat

TABLE = tiny_table()
ENDPOINT = "10.0.0.1:8000"


class ToldState:
    """A publisher that keeps what followers would hold. Its first snapshot is of the epoch that it was made with."""

    def __init__(self, snapshot: Callable[[], tuple[U64, U32]], epoch: str) -> None:
        self.chunks: dict[int, int] = {}
        self.epochs = [epoch]
        self.is_running = False
        self.publications = 0
        self._snapshot = snapshot

    def publish(self, changes: ChunkChanges, epoch: str) -> None:
        assert self.is_running, "nothing is published before the first snapshot"
        self.publications += 1
        if changes.cleared or self.epochs[-1] != epoch:
            self.chunks = {}
        for chunk in changes.removed.tolist():
            self.chunks.pop(chunk, None)
        self.chunks |= dict(zip(changes.added.tolist(), changes.tokens.tolist(), strict=True))
        if self.epochs[-1] != epoch:
            self.epochs.append(epoch)

    def heartbeat(self, heartbeat: Heartbeat) -> None: ...
    def card(self, digest: str, data: bytes) -> None: ...
    async def flushed(self) -> None: ...
    async def close(self) -> None: ...

    async def run(self) -> None:
        self.is_running = True
        hashes, tokens = self._snapshot()
        self.chunks = dict(zip(hashes.tolist(), tokens.tolist(), strict=True))
        await asyncio.Event().wait()


class Rig:
    """One engine, and one sidecar after another beside it."""

    def __init__(self, context: zmq.asyncio.Context, directory: Path) -> None:
        self.context = context
        self.directory = directory
        self.engine = ZmqEngine(context)
        self._stack = contextlib.AsyncExitStack()

    async def start(
        self,
        *,
        replay: bool = True,
        seed: int = SEED,
        table: TokenTable | None = TABLE,
        source: KvSource | None = None,
    ) -> EndpointSidecar:
        self.told: ToldState

        def make_publisher(endpoint: str, snapshot: Callable[[], tuple[U64, U32]], epoch: str) -> ToldState:
            self.told = ToldState(snapshot, epoch)
            return self.told

        sidecar = EndpointSidecar(
            endpoint=ENDPOINT,
            rank=0,
            source=source or self.engine.source(replay=replay),
            decode=vllm_events.decode,
            table=table,
            seed=seed,
            make_publisher=make_publisher,
            checkpoint_file=CheckpointFile(self.directory, ENDPOINT),
            context=self.context,
            times=QUICK,
        )
        task = asyncio.create_task(sidecar.run())

        async def stop() -> None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

        self._stack.push_async_callback(stop)
        return sidecar

    async def stop(self) -> None:
        await self._stack.aclose()

    async def holds(self, blocks: int) -> None:
        """The told chunks are those of so many blocks of one row: a block of 32 tokens here has two chunks or so."""
        expected = chunks_of(blocks)
        with contextlib.suppress(TimeoutError):
            await until(lambda: self.told.is_running and self.told.chunks == expected, 10.0)
        assert self.told.chunks == expected


def chunks_of(blocks: int) -> dict[int, int]:
    prefixes = CachedPrefixes(TABLE, SEED)
    for index in range(blocks):
        prefixes.apply(vllm_events.decode(msgspec.msgpack.encode([1.0, [stored(index)], 0])))
    hashes, tokens = prefixes.chunks()
    return dict(zip(hashes.tolist(), tokens.tolist(), strict=True))


def stored(index: int) -> dict[str, Any]:
    """Block `index` of one long row of tokens."""
    return {
        "type": "BlockStored",
        "block_hashes": [index + 1],
        "parent_block_hash": index or None,
        "token_ids": [300 + (index * 37 + at * 11) % 3_000 for at in range(32)],
        "block_size": 32,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    }


def removed(index: int) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": [index + 1], "medium": "GPU"}


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with zmq_context() as context:
        rig = Rig(context, tmp_path)
        yield rig
        await rig.stop()
        await rig.engine.stop()


async def test_what_the_engine_held_before_and_stores_since_is_published(rig: Rig) -> None:
    rig.engine.lose(stored(0), stored(1))
    await rig.start()
    await rig.holds(2)
    await rig.engine.publish(stored(2))
    await rig.holds(3)
    await rig.engine.publish(removed(2))
    await rig.holds(2)


async def test_an_engine_that_restarts_gets_a_new_epoch_and_an_empty_set(rig: Rig) -> None:
    rig.engine.lose(stored(0), stored(1))
    sidecar = await rig.start()
    await rig.holds(2)
    epoch = sidecar.epoch
    await rig.engine.restart()
    rig.engine.lose(stored(0))
    await rig.holds(1)
    assert sidecar.epoch != epoch
    assert sidecar.counts.epochs == 1


async def test_a_sidecar_that_restarts_goes_on_from_its_checkpoint(rig: Rig) -> None:
    rig.engine.lose(stored(0), stored(1))
    first = await rig.start()
    await rig.holds(2)
    first.write_checkpoint()
    await rig.stop()
    rig.engine.requests.clear()
    rig.engine.lose(stored(2), removed(1), stored(1))
    second = await rig.start()
    await rig.holds(3)
    assert second.epoch == first.epoch
    assert 0 in rig.engine.requests  # our position was the frame with sequence 0: only what follows is read again
    assert second.counts.epochs == 0
    assert second.prefixes is not None
    assert second.prefixes.counts.stored_blocks == 2


async def test_an_engine_that_restarts_while_its_sidecar_is_away_voids_the_checkpoint(rig: Rig) -> None:
    rig.engine.lose(stored(0), stored(1))
    first = await rig.start()
    await rig.holds(2)
    first.write_checkpoint()
    await rig.stop()
    await rig.engine.restart()
    rig.engine.lose(stored(0))
    second = await rig.start()
    await rig.holds(1)
    assert second.epoch != first.epoch
    # The next event adds to what is held; it does not begin the new epoch.
    rig.engine.lose(stored(1))
    assert second.feed is not None
    second.feed.check_tail()
    await rig.holds(2)


async def test_a_gap_beyond_the_buffer_unpublishes_until_the_blocks_are_seen_again(rig: Rig) -> None:
    await rig.engine.stop()
    rig.engine = ZmqEngine(rig.context, buffer_steps=1)
    rig.engine.lose(stored(0), stored(1), stored(2))
    sidecar = await rig.start()
    await rig.holds(3)
    for _ in range(3):
        rig.engine.lose({"type": "BlockPainted"})
    await rig.engine.publish({"type": "BlockPainted"})
    await rig.holds(0)
    assert sidecar.counts.gaps_lost == 1
    # A child is stored only if its ancestors are held, so they are confirmed; the end states were kept.
    await rig.engine.publish(stored(3))
    await rig.holds(4)


async def test_a_checkpoint_older_than_the_buffer_publishes_nothing_until_it_is_confirmed(rig: Rig) -> None:
    await rig.engine.stop()
    rig.engine = ZmqEngine(rig.context, buffer_steps=1)
    rig.engine.lose(stored(0), stored(1))
    first = await rig.start()
    await rig.holds(2)
    first.write_checkpoint()
    await rig.stop()
    for _ in range(3):
        rig.engine.lose({"type": "BlockPainted"})
    second = await rig.start()
    await until(lambda: second.has_confirmed)
    await rig.holds(0)
    rig.engine.lose(stored(2))
    assert second.feed is not None
    second.feed.check_tail()
    await rig.holds(3)


@pytest.mark.parametrize("damage", ["bytes", "seed", "table"])
async def test_a_checkpoint_that_does_not_fit_is_refused_and_the_log_read_afresh(rig: Rig, damage: str) -> None:
    rig.engine.lose(stored(0), stored(1))
    first = await rig.start()
    await rig.holds(2)
    first.write_checkpoint()
    await rig.stop()
    if damage == "bytes":
        path = next(rig.directory.glob("*.checkpoint"))
        path.write_bytes(path.read_bytes()[:-3])
    other = TokenTable.from_pieces([b"xyz"] * 4_000) if damage == "table" else TABLE
    second = await rig.start(seed=SEED + (damage == "seed"), table=other)
    await until(lambda: rig.told.is_running and rig.told.chunks)
    assert second.counts.checkpoint_errors == 1
    assert (rig.told.chunks == chunks_of(2)) == (damage == "bytes")


async def test_a_frame_that_cannot_be_read_withdraws_everything(rig: Rig) -> None:
    rig.engine.lose(stored(0), stored(1))
    sidecar = await rig.start()
    await rig.holds(2)
    rig.engine.buffer.append((rig.engine.sequence, b"\xc1"))
    rig.engine.sequence += 1
    assert sidecar.feed is not None
    sidecar.feed.check_tail()
    await rig.holds(0)
    assert sidecar.counts.payload_errors == 1


async def test_metrics_that_show_another_process_end_the_epoch_without_any_event(rig: Rig) -> None:
    rig.engine.lose(stored(0))
    sidecar = await rig.start()
    await rig.holds(1)
    sidecar.engine_is("100.00")
    sidecar.engine_is("100.00")
    assert sidecar.counts.epochs == 0
    rig.engine.buffer.clear()
    rig.engine.sequence = 0
    sidecar.engine_is("200.00")
    await rig.holds(0)
    await until(lambda: sidecar.counts.epochs == 1)
    sidecar.engine_is("200.00")
    rig.engine.lose(stored(0))
    assert sidecar.feed is not None
    sidecar.feed.check_tail()
    await rig.holds(1)
    assert sidecar.counts.epochs == 1


async def test_a_cache_that_sleep_discarded_is_empty(rig: Rig) -> None:
    rig.engine.lose(stored(0))
    sidecar = await rig.start()
    await rig.holds(1)
    sidecar.cache_discarded()
    assert rig.told.chunks == {}
    published = rig.told.publications
    sidecar.cache_discarded()
    assert rig.told.publications == published


async def test_without_a_replay_socket_live_events_alone_are_published(rig: Rig) -> None:
    rig.engine.lose(stored(0))
    sidecar = await rig.start(replay=False)
    assert sidecar.feed is not None
    while not sidecar.feed.frames:
        await rig.engine.publish(stored(0))
        await asyncio.sleep(0.01)
    await rig.holds(1)


async def test_another_vocabulary_voids_everything(rig: Rig) -> None:
    rig.engine.lose(stored(0))
    sidecar = await rig.start()
    await rig.holds(1)
    sidecar.use_table(TokenTable.from_pieces([b"xyz"] * 4_000))
    await until(lambda: rig.told.chunks and rig.told.chunks != chunks_of(1))
    sidecar.use_table(TABLE)
    await rig.holds(1)


async def test_an_endpoint_whose_vocabulary_comes_later_starts_then(rig: Rig) -> None:
    rig.engine.lose(stored(0), stored(1))
    sidecar = await rig.start(table=None)
    await until(lambda: rig.told.is_running)
    assert rig.told.chunks == {}
    sidecar.use_table(TABLE)
    await rig.holds(2)


async def test_an_address_that_cannot_be_used_is_told_and_ends_nothing(rig: Rig) -> None:
    sidecar = await rig.start(source=KvSource(rank=0, events="tcp://no port", replay=None))
    await until(lambda: sidecar.feed_error)
    await until(lambda: rig.told.is_running)
    assert sidecar.prefixes is None


@given(payloads=st.lists(st.lists(EVENTS, max_size=3).map(lambda events: msgspec.msgpack.encode([1.0, events, 0]))
                         | st.binary(max_size=40), max_size=8))  # fmt: skip
async def test_no_frame_brings_an_endpoint_down_and_each_unreadable_one_is_counted(payloads: list[bytes]) -> None:
    async with zmq_context() as context:
        sidecar = EndpointSidecar(
            endpoint=ENDPOINT,
            rank=0,
            source=KvSource(rank=0, events="inproc://events", replay=None),
            decode=vllm_events.decode,
            table=TABLE,
            seed=SEED,
            make_publisher=lambda endpoint, snapshot, epoch: ToldState(snapshot, epoch),
            checkpoint_file=None,
            context=context,
        )
        assert sidecar.prefixes is not None
        for sequence, payload in enumerate(payloads):
            sidecar.apply(sequence, payload)
            sidecar.prefixes.chains.check_invariants()
        assert sidecar.counts.batches + sidecar.counts.payload_errors == len(payloads)
