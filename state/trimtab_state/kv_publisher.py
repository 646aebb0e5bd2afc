"""A sidecar's voice: chunk changes, heartbeats and model cards of one endpoint.

The one rule: what the store is told is always followed by what makes it whole again. A store that is away makes the
publisher keep what fits and tell the rest by a snapshot; a store that lost its contents is told everything.
"""

import asyncio
import logging
import os
from collections.abc import Callable

import msgspec

from trimtab_core.chunks import U32, U64

from .backoff import Backoff
from .documents import Heartbeat, encode
from .errors import CodecError, StateUnavailable
from .generation import Generation
from .keys import PoolKeys
from .kv_codec import KvSnapshot, encode_snapshot
from .kv_outbox import Changes, KvOutbox
from .notices import Notice, notify
from .outage_log import OutageLog
from .settings import StateSettings
from .store import Command, Store

log = logging.getLogger(__name__)

ENTRIES_PER_FLUSH_MAX = 64
"""Entries of the KV log in one transaction."""
CARDS_MAX = 64
"""Model cards of one endpoint; beyond it the oldest is no longer renewed."""


class KvPublisher:
    """`publish`, `heartbeat` and `card` only enqueue; `run` sends until it is cancelled, `close` says goodbye.

    `snapshot` returns all published chunks (hashes, tokens). It must first hand what is still undrained to `publish`,
    so that no later change refers to a state between two snapshots:
    `publisher.publish(chains.drain(), epoch); return chains.chunks()`.
    """

    def __init__(
        self,
        store: Store,
        keys: PoolKeys,
        endpoint: str,
        *,
        snapshot: Callable[[], tuple[U64, U32]],
        epoch: str = "",
        settings: StateSettings | None = None,
        incarnation: int | None = None,
    ) -> None:
        self.connected = False
        """The store took the last batch."""
        self.snapshots_written = 0
        self._store = store
        self._keys = keys
        self._endpoint = endpoint
        self._snapshot = snapshot
        self._settings = settings or StateSettings()
        own = int.from_bytes(os.urandom(8), "little") if incarnation is None else incarnation
        self._outbox = KvOutbox(endpoint, own, self._settings, epoch=epoch)
        self._generation = Generation(keys, self._settings)
        self._cards: dict[str, bytes] = {}
        self._cards_unsent: set[str] = set()
        self._heartbeat: Heartbeat | None = None
        self._heartbeat_due = False
        self._visible: tuple[object, ...] = ()
        self._beat = 0
        self._snapshot_due = True
        self._is_dirty = False
        self._snapshot_s = 0.0
        self._wake = asyncio.Event()
        self._urgent = asyncio.Event()
        self._flushing = asyncio.Lock()

    @property
    def incarnation(self) -> int:
        """Names this writer in the KV log and in heartbeats."""
        return self._outbox.incarnation

    @property
    def sequence(self) -> int:
        """The last sequence number given out."""
        return self._outbox.sequence

    @property
    def dropped(self) -> int:
        """How often changes were dropped in favour of a snapshot, because the store was away for long."""
        return self._outbox.dropped

    def publish(self, changes: Changes, epoch: str) -> None:
        """Enqueues net changes; those of a new epoch start from no chunks."""
        if not self._outbox.add(changes, epoch):
            self._snapshot_due = True
        self._wake.set()

    def heartbeat(self, heartbeat: Heartbeat) -> None:
        """Enqueues it in place of one that was not sent yet. Call every second or so: it is not repeated by itself.

        A changed state, epoch or set of models goes out at once and followers are notified.
        """
        self._heartbeat, self._heartbeat_due = heartbeat, True
        if _visible(heartbeat) != self._visible:
            self._urgent.set()
        self._wake.set()

    def card(self, digest: str, data: bytes) -> None:
        """Enqueues a model card; it is kept in the store for as long as this publisher sends heartbeats."""
        if digest in self._cards:
            return
        if len(self._cards) >= CARDS_MAX:
            oldest = next(iter(self._cards))
            del self._cards[oldest]
            self._cards_unsent.discard(oldest)
        self._cards[digest] = data
        self._cards_unsent.add(digest)
        self._urgent.set()
        self._wake.set()

    async def run(self) -> None:
        """Sends until cancelled; never raises for a store that is away."""
        backoff = Backoff(self._settings.backoff_min_s, self._settings.backoff_max_s)
        outage = OutageLog(f"changes of {self._endpoint} wait")
        while True:
            await self._gather()
            try:
                await self._flush()
            except StateUnavailable as error:
                self.connected = False
                outage.failed(error)
                await self._store.pause(backoff.next_s())
            else:
                backoff.reset()
                outage.over()

    async def flushed(self) -> None:
        """Sends now what there is to send. Raises StateUnavailable."""
        if self._has_work():
            await self._flush()

    async def close(self) -> None:
        """Sends what is left and takes the endpoint out of the shared state. Call it when `run` has ended.

        Raises StateUnavailable: the heartbeat then goes by its time to live.
        """
        if self._has_work():
            await self._flush()
        keys = self._keys
        await self._store.batch(
            [
                ("DEL", keys.heartbeat(self._endpoint), keys.kv_snapshot(self._endpoint)),
                ("SREM", keys.endpoints, self._endpoint),
                ("SREM", keys.snapshot_wanted, self._endpoint),
                notify(keys, self._settings, Notice.GONE, self._endpoint),
            ],
            atomic=True,
        )

    def _has_work(self) -> bool:
        return self._outbox.has_work or self._heartbeat_due or self._snapshot_due or bool(self._cards_unsent)

    async def _gather(self) -> None:
        """Waits for something to send, and then for the batch window unless it is urgent."""
        if not self._has_work():
            self._wake.clear()
            await self._wake.wait()
        if not self._urgent.is_set():
            try:
                async with asyncio.timeout(self._settings.kv_window_s):
                    await self._urgent.wait()
            except TimeoutError:
                pass
        self._urgent.clear()

    async def _flush(self) -> None:
        async with self._flushing:
            while self._has_work():
                await self._send(asyncio.get_running_loop().time())

    async def _send(self, now_s: float) -> None:
        """One transaction: entries, then what stands on them."""
        keys, settings = self._keys, self._settings
        heartbeat = self._heartbeat if self._heartbeat_due else None
        if heartbeat is not None and self._is_dirty and now_s - self._snapshot_s >= settings.kv_snapshot_refresh_s:
            self._snapshot_due = True
        # Before the entries are numbered, since it may publish: the snapshot's position is the one after them.
        chunks = self._snapshot() if self._snapshot_due else None
        entries = self._outbox.entries(ENTRIES_PER_FLUSH_MAX)
        cards = sorted(self._cards_unsent)
        commands: list[Command] = [
            ("XADD", keys.kv_log, "MAXLEN", "~", settings.kv_log_entries_max, "*", "b", entry) for entry in entries
        ]
        if chunks is not None:
            commands += self._snapshot_commands(*chunks)
        for digest in cards:
            commands.append(("SET", keys.card(digest), self._cards[digest], "PX", _ms(settings.card_ttl_s)))
            commands.append(notify(keys, settings, Notice.CARD, digest))
        checks: list[Command] = []
        if heartbeat is not None:
            checks = self._heartbeat_commands(heartbeat)
        replies = await self._store.batch([*commands, *checks], atomic=True)
        self.connected = True
        self._outbox.arrived(len(entries))
        self._is_dirty = self._is_dirty or bool(entries)
        self._cards_unsent.difference_update(cards)
        if chunks is not None:
            self._snapshot_due, self._is_dirty, self._snapshot_s = False, False, now_s
            self.snapshots_written += 1
        if heartbeat is not None:
            if self._heartbeat is heartbeat:
                self._heartbeat_due = False
            self._visible = _visible(heartbeat)
            self._check(replies[len(commands) :])

    def _snapshot_commands(self, hashes: U64, tokens: U32) -> list[Command]:
        keys, settings, outbox = self._keys, self._settings, self._outbox
        if len(hashes) > settings.kv_snapshot_chunks_max:
            raise CodecError(f"{len(hashes)} chunks, at most {settings.kv_snapshot_chunks_max}")
        data = encode_snapshot(KvSnapshot(outbox.incarnation, outbox.sequence, outbox.epoch, hashes, tokens))
        return [
            ("SET", keys.kv_snapshot(self._endpoint), data, "PX", _ms(settings.kv_snapshot_ttl_s)),
            ("SREM", keys.snapshot_wanted, self._endpoint),
            notify(keys, settings, Notice.SNAPSHOT, self._endpoint),
        ]

    def _heartbeat_commands(self, heartbeat: Heartbeat) -> list[Command]:
        """The heartbeat, and the questions whose replies `_check` reads, which come first."""
        keys, settings = self._keys, self._settings
        self._beat += 1
        data = encode(_placed(heartbeat, incarnation=self.incarnation, sequence=self._outbox.sequence, beat=self._beat))
        commands: list[Command] = [
            *self._generation.commands(),
            ("SISMEMBER", keys.snapshot_wanted, self._endpoint),
            ("PEXPIRE", keys.kv_snapshot(self._endpoint), _ms(settings.kv_snapshot_ttl_s)),
            *(("PEXPIRE", keys.card(digest), _ms(settings.card_ttl_s)) for digest in self._cards),
            ("SET", keys.heartbeat(self._endpoint), data, "PX", _ms(settings.heartbeat_ttl_s)),
            ("SADD", keys.endpoints, self._endpoint),
            ("PEXPIRE", keys.endpoints, _ms(settings.membership_ttl_s)),
            ("PEXPIRE", keys.kv_log, _ms(settings.stream_ttl_s)),
            ("PEXPIRE", keys.notify, _ms(settings.stream_ttl_s)),
        ]
        if _visible(heartbeat) != self._visible:
            commands.append(notify(keys, settings, Notice.HEARTBEAT, self._endpoint))
        return commands

    def _check(self, replies: list[object]) -> None:
        """Whether the store still has what this publisher told it before."""
        generation = replies[1]
        wanted, has_snapshot, *has_cards = replies[Generation.REPLIES :][: 2 + len(self._cards)]
        if self._generation.is_changed(generation if isinstance(generation, bytes) else None):
            log.warning("the store lost its contents: publishing %s again", self._endpoint)
            self._snapshot_due = self._heartbeat_due = True
            self._cards_unsent.update(self._cards)
        if wanted or not has_snapshot:
            self._snapshot_due = True
        self._cards_unsent.update(
            digest for digest, is_there in zip(self._cards, has_cards, strict=True) if not is_there
        )


def _ms(seconds: float) -> int:
    return int(seconds * 1000)


def _visible(heartbeat: Heartbeat) -> tuple[object, ...]:
    """What followers must see at once."""
    return heartbeat.state, heartbeat.epoch, heartbeat.approximate, heartbeat.models


def _placed(heartbeat: Heartbeat, *, incarnation: int, sequence: int, beat: int) -> Heartbeat:
    return msgspec.structs.replace(heartbeat, incarnation=incarnation, sequence=sequence, beat=beat)
