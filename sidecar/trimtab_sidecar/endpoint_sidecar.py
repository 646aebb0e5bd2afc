"""The sidecar of one endpoint, one rank of one engine: its cached prefixes, from events to the shared state.

The one rule: what is published belongs to one epoch, one lifetime of the engine process. A new process means a new
epoch and an empty set before anything else is published. A checkpoint's chunks are published only once the engine's
own log has confirmed that it is still the same process. When to look at the engine, and what its heartbeats say, is
`EngineSidecar`'s business.
"""

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import zmq
import zmq.asyncio

from trimtab_core.block_chains import ChunkChanges
from trimtab_core.chunks import U32, U64
from trimtab_core.errors import DataError
from trimtab_core.selection import BlockChains
from trimtab_core.token_table import TokenTable
from trimtab_sidecar.cached_prefixes import CachedPrefixes
from trimtab_sidecar.checkpoint import Checkpoint, CheckpointError, CheckpointFile
from trimtab_sidecar.engine_events import EventBatch, EventFormatError
from trimtab_sidecar.engine_log import EngineLog, LogPosition
from trimtab_sidecar.kv_feed import FeedTimes, KvFeed
from trimtab_sidecar.kv_sources import KvSource
from trimtab_state.documents import Heartbeat

logger = logging.getLogger(__name__)


class Publisher(Protocol):
    """Where chunks, heartbeats and cards go: `trimtab_state`'s `KvPublisher`. The first three only enqueue."""

    connected: bool
    """The store took the last batch."""

    def publish(self, changes: ChunkChanges, epoch: str) -> None: ...
    def heartbeat(self, heartbeat: Heartbeat) -> None: ...
    def card(self, digest: str, data: bytes) -> None: ...
    async def run(self) -> None: ...
    async def flushed(self) -> None: ...
    async def close(self) -> None: ...


MakePublisher = Callable[[str, Callable[[], tuple[U64, U32]], str], Publisher]
"""From endpoint, snapshot provider and epoch."""
CONFIRM_S = 3.0
"""How long the publisher waits for the engine's log, so that a restart is not seen as an empty cache."""
Decode = Callable[[bytes], EventBatch]
"""An engine adapter: the events of one payload. Raises EventFormatError."""


@dataclass(slots=True, kw_only=True)
class FeedCounts:
    """What went through, for the metrics. They only grow."""

    batches: int = 0
    payload_errors: int = 0
    chunks_published: int = 0
    chunks_withdrawn: int = 0
    epochs: int = 0
    gaps_lost: int = 0
    checkpoints: int = 0
    checkpoint_errors: int = 0


class EndpointSidecar:
    """One endpoint. `table` None: the text of tokens is not known, so no chunk is published."""

    def __init__(
        self,
        *,
        endpoint: str,
        rank: int,
        source: KvSource | None,
        decode: Decode,
        table: TokenTable | None,
        seed: int,
        make_publisher: MakePublisher,
        checkpoint_file: CheckpointFile | None,
        context: zmq.asyncio.Context,
        times: FeedTimes | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.rank = rank
        self.source = source
        self.epoch = secrets.token_hex(8)
        self.engine = ""
        """Identity of the engine process as its metrics tell it; empty until they do."""
        self.prefixes: CachedPrefixes | None = None
        self.log = EngineLog(can_replay=False)
        self.counts = FeedCounts()
        self.event_lag_s = 0.0
        """From the engine's step to its chunks being handed to the publisher, of the last batch."""
        self.feed: KvFeed | None = None
        self.feed_error = ""
        """Why no events can be received, empty if they can."""
        self.has_confirmed = False
        """The engine's log has been read to its end once, so that what is held is this process's."""
        self._has_feed = asyncio.Event()
        self._confirmed = asyncio.Event()
        self._is_publishing = False
        self._seed = seed
        self._decode = decode
        self._file = checkpoint_file
        self._batch_time_s = 0.0
        self._context = context
        self._times = times
        if table is not None:
            self._make_feed(table)
        self._told_epoch = self.epoch
        """The epoch that the publisher takes its next changes to be of."""
        self.publisher = make_publisher(endpoint, self.snapshot, self.epoch)

    # What the feed calls.

    def apply(self, sequence: int, payload: bytes) -> None:
        assert self.prefixes is not None
        try:
            batch = self._decode(payload)
        except EventFormatError as error:
            # Whatever the frame said is not known, so neither is what it removed.
            self.counts.payload_errors += 1
            if self.counts.payload_errors & (self.counts.payload_errors - 1) == 0:
                logger.warning("KV event frame cannot be read", extra={"endpoint": self.endpoint, "error": str(error)})
            self.prefixes.unpublish()
            return
        self.counts.batches += 1
        self._batch_time_s = batch.time_s
        self.prefixes.apply(batch)

    def restarted(self) -> None:
        """Another engine process: a new epoch, and nothing cached."""
        assert self.prefixes is not None
        self.counts.epochs += 1
        self.epoch = secrets.token_hex(8)
        self.engine = ""
        self.prefixes.forget_engine()
        self.flush()
        logger.info("engine restarted, new epoch", extra={"endpoint": self.endpoint, "epoch": self.epoch})

    def lost(self) -> None:
        assert self.prefixes is not None
        self.counts.gaps_lost += 1
        self.prefixes.unpublish()
        logger.warning("KV events lost for good, chunks unpublished", extra={"endpoint": self.endpoint})

    def flush(self) -> None:
        """Hand the net changes to the publisher, which never blocks."""
        if self.prefixes is None or not self.has_confirmed or not self._is_publishing:
            return
        changes = self.prefixes.drain()
        # A new epoch is told before any chunk of it, also where there is nothing else to tell: the publisher would take
        # the first change that comes later for the epoch's beginning, and with it all before as void.
        if changes.is_empty() and self.epoch == self._told_epoch:
            return
        self.counts.chunks_published += len(changes.added)
        self.counts.chunks_withdrawn += len(changes.removed)
        self._publish(changes)
        if self._batch_time_s:
            self.event_lag_s = max(0.0, time.time() - self._batch_time_s)

    def confirmed(self) -> None:
        if self.has_confirmed:
            return
        self.has_confirmed = True
        self._confirmed.set()
        if self._is_publishing:
            self._publish_all()

    # What the process calls.

    def snapshot(self) -> tuple[U64, U32]:
        """All published chunks, after what was not handed on yet."""
        if self.prefixes is None or not self.has_confirmed:
            return np.empty(0, dtype=np.uint64), np.empty(0, dtype=np.uint32)
        self.flush()
        return self.prefixes.chunks()

    def heartbeat(self, heartbeat: Heartbeat) -> None:
        self.publisher.heartbeat(heartbeat)

    def cache_discarded(self) -> None:
        """The engine's KV cache is gone without an event (it sleeps)."""
        if self.prefixes is not None and not self.prefixes.is_empty:
            self.prefixes.clear()
            self.flush()

    def engine_is(self, identity: str) -> None:
        """What the engine's metrics say of its process. A change means a restart, however contiguous its log looks."""
        if identity == self.engine:
            return
        known, self.engine = self.engine, identity
        if not known:
            return
        if self.feed is not None:
            self.feed.forget_engine()
        else:
            self.counts.epochs += 1
            self.epoch = secrets.token_hex(8)

    def write_checkpoint(self) -> float:
        """Write the checkpoint if anything changed; returns the seconds it took."""
        if self._file is None or self.prefixes is None or not self.has_confirmed or not self.prefixes.is_dirty:
            return 0.0
        start_s = time.monotonic()
        position = self.log.position
        self.prefixes.is_dirty = False
        try:
            self._file.write(
                Checkpoint(
                    endpoint=self.endpoint,
                    epoch=self.epoch,
                    engine=self.engine,
                    sequence=position.sequence,
                    digest=position.digest,
                    group=self.prefixes.group,
                    other_groups=self.prefixes.other_groups,
                    chains=self.prefixes.chains.dump(),
                )
            )
            self.counts.checkpoints += 1
        except (CheckpointError, OSError) as error:
            self.counts.checkpoint_errors += 1
            logger.warning("checkpoint not written", extra={"endpoint": self.endpoint, "error": str(error)})
        return time.monotonic() - start_s

    def use_table(self, table: TokenTable) -> None:
        """The vocabulary is known now, or is another one: then everything known is void."""
        if self.feed is None or self.prefixes is None:
            if not self.feed_error:
                self._make_feed(table)
            return
        self.prefixes = CachedPrefixes(table, self._seed)
        self.prefixes.clear()
        self.flush()
        self.feed.forget_engine()

    async def run(self) -> None:
        """Read events and publish until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._run_feed())
            if self.feed is not None:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._confirmed.wait(), CONFIRM_S)
            # The publisher starts with a snapshot: what was drained until now is in it.
            if self.prefixes is not None:
                self.prefixes.drain()
            self._is_publishing = True
            tasks.create_task(self.publisher.run())

    def _make_feed(self, table: TokenTable) -> None:
        if self.source is None:
            return
        self.prefixes, position = self._restore(table, self._seed)
        self.log = EngineLog(can_replay=self.source.replay is not None, position=position)
        self.feed = KvFeed(self._context, self.source, self.log, self, self._times)
        self._has_feed.set()

    async def _run_feed(self) -> None:
        await self._has_feed.wait()
        assert self.feed is not None
        try:
            await self.feed.run()
        except zmq.ZMQError as error:
            self.feed_error = f"KV events cannot be received at {self.feed.source.events}: {error}"
            self.prefixes = self.feed = None
            logger.error("KV events cannot be received", extra={"endpoint": self.endpoint, "error": str(error)})

    def _publish_all(self) -> None:
        """Tell everything that is held: a checkpoint's chunks are in no drain."""
        assert self.prefixes is not None
        self.prefixes.drain()
        hashes, tokens = self.prefixes.chunks()
        empty = np.empty(0, dtype=np.uint64)
        self.counts.chunks_published += len(hashes)
        self._publish(ChunkChanges(cleared=True, added=hashes, tokens=tokens, removed=empty))

    def _publish(self, changes: ChunkChanges) -> None:
        self.publisher.publish(changes, self.epoch)
        self._told_epoch = self.epoch

    def _restore(self, table: TokenTable, seed: int) -> tuple[CachedPrefixes, LogPosition]:
        """From the checkpoint, or afresh."""
        try:
            found = None if self._file is None else self._file.read()
            if found is not None:
                chains = BlockChains.load(table, seed, found.chains)
                prefixes = CachedPrefixes(table, seed, chains=chains, group=found.group)
                prefixes.other_groups.update(found.other_groups)
                self.epoch, self.engine = found.epoch, found.engine
                logger.info(
                    "checkpoint loaded",
                    extra={"endpoint": self.endpoint, "blocks": chains.block_count, "sequence": found.sequence},
                )
                return prefixes, LogPosition(sequence=found.sequence, digest=found.digest)
        except (CheckpointError, DataError) as error:
            self.counts.checkpoint_errors += 1
            logger.warning(
                "checkpoint refused, starting afresh", extra={"endpoint": self.endpoint, "error": str(error)}
            )
        return CachedPrefixes(table, seed), LogPosition()
