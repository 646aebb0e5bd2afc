"""A replica's ear: follows everything of a pool and tells a sink. The shell around the followers without I/O.

The one rule: one task reads, one thing at a time, on one connection of its own: a blocking read of the three streams,
between two of them what notices, gaps and the slow poll ask for. What is read is passed on at once; nothing is decided
here about positions (`kv_follower`, `load_follower`) or about life and death (`heartbeat_table`, leases).
"""

import asyncio
import logging
from collections.abc import Container, Iterable
from dataclasses import dataclass
from typing import TypeVar

from .backoff import Backoff
from .connected_clock import ConnectedClock
from .documents import decode_control, decode_heartbeat
from .errors import CodecError, StateUnavailable
from .generation import Generation
from .heartbeat_table import HeartbeatTable
from .keys import PoolKeys
from .kv_codec import KvSnapshot, decode_entry, decode_snapshot
from .kv_follower import KvFollower
from .load_codec import LEASE_HEAD_BYTES, Lease, LeaseHead, decode_lease, decode_lease_head, decode_load_entry
from .load_follower import LoadFollower
from .notices import Notice, parse_notice
from .retry_times import RetryTimes
from .settings import StateSettings
from .sink import PoolSink
from .store import Command, Store
from .stream_position import START, before, format_id, parse_id

log = logging.getLogger(__name__)
T = TypeVar("T")

SLICE_S = 0.002
"""After this long of applying entries the event loop gets a turn."""
VALUES_PER_READ_MAX = 256
"""Heartbeats, cards or lease heads in one read."""
CATCH_UP_READS_MAX = 1_000
"""Reads of the logs before a session counts as connected even though they were not read to their end."""
SNAPSHOT_RETRY_S = 1.0
LEASE_RETRY_S = 0.5


@dataclass(slots=True)
class FollowerCounters:
    """Since the start of the process."""

    sessions: int = 0
    """Connections to the store."""
    resyncs: int = 0
    """How often the store had lost its contents or a stream had gone back."""
    kv_entries: int = 0
    load_entries: int = 0
    snapshots: int = 0
    leases: int = 0
    malformed: int = 0
    """Values and entries that were skipped."""


class PoolFollower:
    """`run` until cancelled; it never raises for a store that is away. `own_incarnations`: `LoadPublisher`'s."""

    def __init__(
        self,
        store: Store,
        keys: PoolKeys,
        sink: PoolSink,
        *,
        own_incarnations: Container[int] = (),
        settings: StateSettings | None = None,
    ) -> None:
        self.connected = False
        """The store is reachable and what it holds was read."""
        self.counters = FollowerCounters()
        self._store = store
        self._keys = keys
        self._sink = sink
        self._settings = settings or StateSettings()
        self._generation = Generation(keys, self._settings)
        self._clock = ConnectedClock(self._settings.clock_step_max_s)
        self._streams = (keys.kv_log, keys.load_log, keys.notify)
        self._positions: dict[str, tuple[int, int]] = {}
        self.kv = KvFollower(sink, self._settings)
        self.load = LoadFollower(sink, self._settings, own_incarnations)
        self.heartbeats = HeartbeatTable(sink, self._settings)
        self._snapshot_times: RetryTimes[str] = RetryTimes(SNAPSHOT_RETRY_S)
        self._lease_times: RetryTimes[int] = RetryTimes(LEASE_RETRY_S)
        self._control: bytes | None = None
        self._control_told = False
        self._cards: set[str] = set()
        self._noticed: set[tuple[Notice, str]] = set()
        self._caught_up = False

    async def run(self) -> None:
        """Follows the pool until cancelled."""
        backoff = Backoff(self._settings.backoff_min_s, self._settings.backoff_max_s)
        while True:
            reader = self._store.dedicated(self._settings.poll_s + self._settings.command_timeout_s)
            try:
                await self._session(reader, backoff)
            except StateUnavailable as error:
                log.log(logging.WARNING if self.connected else logging.DEBUG, "store away: %s", error)
            finally:
                await reader.close()
            self._clock.away()
            if self.connected:
                self.connected = False
                self._sink.on_connected(False)
            await asyncio.sleep(backoff.next_s())

    async def _session(self, reader: Store, backoff: Backoff) -> None:
        """From one connect to the loss of the store."""
        loop = asyncio.get_running_loop()
        self._clock.contact(loop.time())
        self._grace()
        self._caught_up = False
        await self._poll(reader)
        await self._fetch_leases(reader)
        while self._snapshot_times.due(self.kv.wanted, loop.time()):
            await self._fetch_snapshots(reader)
        for _ in range(CATCH_UP_READS_MAX):
            if self._caught_up:
                break
            await self._read_streams(reader, 0.0)
        self.connected = True
        self.counters.sessions += 1
        backoff.reset()
        self._sink.on_connected(True)
        poll_at_s = loop.time() + self._settings.poll_s
        while True:
            if loop.time() >= poll_at_s:
                await self._poll(reader)
                poll_at_s = loop.time() + self._settings.poll_s
            if self._noticed:
                await self._follow_notices(reader)
            await self._fetch_leases(reader)
            await self._fetch_snapshots(reader)
            until_s = min(
                poll_at_s,
                self._snapshot_times.next_s(self.kv.wanted, poll_at_s),
                self._lease_times.next_s(self.load.wanted, poll_at_s),
            )
            await self._read_streams(reader, until_s - loop.time())

    async def _ask(self, reader: Store, commands: list[Command]) -> "list[object]":
        replies = await reader.batch(commands)
        self._clock.contact(asyncio.get_running_loop().time())
        return replies

    def _grace(self) -> None:
        self.load.grace(self._clock.now_s)
        self.heartbeats.grace(self._clock.now_s)

    async def _poll(self, reader: Store) -> None:
        """Compares the store with what is known: contents, streams, control document, heartbeats, leases."""
        keys, caught_up = self._keys, self._caught_up
        generation_commands = self._generation.commands()
        replies = await self._ask(
            reader,
            [
                *generation_commands,
                ("SMEMBERS", keys.endpoints),
                ("SMEMBERS", keys.replicas),
                ("GET", keys.control),
                *(("XREVRANGE", stream, "+", "-", "COUNT", 1) for stream in self._streams),
            ],
        )
        generation, (members, replicas, control, *ends) = replies[1], replies[len(generation_commands) :]
        assert isinstance(generation, bytes | None)
        assert isinstance(control, bytes | None)
        assert isinstance(members, set)
        assert isinstance(replicas, set)
        self._place(ends, is_new_store=self._generation.is_changed(generation))
        self._take_control(control)
        known = self.heartbeats.endpoints
        names = {*known, *(name for member in members if (name := _text(member)) is not None)}
        await self._read_heartbeats(reader, sorted(names), caught_up=caught_up)
        await self._read_lease_heads(reader, replicas, caught_up=caught_up)
        self._caught_up = False

    def _place(self, ends: "list[object]", *, is_new_store: bool) -> None:
        """Where to read on: from before the end at first, and again when the store is not what it was."""
        for stream, newest in zip(self._streams, ends, strict=True):
            end = parse_id(newest[0][0]) if isinstance(newest, list) and newest else START
            at = self._positions.get(stream)
            if at is not None and end < at:
                is_new_store = True
            if at is None:
                self._positions[stream] = before(end, self._settings.lookback_s)
        if is_new_store:
            log.warning("the store went back or lost its contents: reading everything of %s again", self._keys.prefix)
            self.counters.resyncs += 1
            self._positions = dict.fromkeys(self._streams, START)
            self._caught_up = False
            self._grace()

    def _take_control(self, data: bytes | None) -> None:
        """A missing document is no document: what was known stays."""
        if data is None:
            if self._control is None and not self._control_told:
                self._control_told = True
                self._sink.on_control(None)
            return
        if data == self._control:
            return
        try:
            document = decode_control(data)
        except CodecError as error:
            self._skip("control document", error)
            return
        self._control, self._control_told = data, True
        self._sink.on_control(document)

    async def _read_heartbeats(
        self, reader: Store, names: list[str], *, caught_up: bool = False, goodbyes: Container[str] = ()
    ) -> None:
        for some in _portions(names):
            values = (await self._ask(reader, [("MGET", *(self._keys.heartbeat(name) for name in some))]))[0]
            assert isinstance(values, list)
            found = []
            for name, value in zip(some, values, strict=True):
                try:
                    heartbeat = None if value is None else decode_heartbeat(value)
                    if heartbeat is not None and heartbeat.endpoint != name:
                        raise CodecError(f"heartbeat of {heartbeat.endpoint!r} under the name {name!r}")
                except CodecError as error:
                    self._skip("heartbeat", error)
                    continue
                if heartbeat is not None:
                    found.append(heartbeat)
                elif (
                    self.heartbeats.goodbye(name)
                    if name in goodbyes
                    else self.heartbeats.missing(name, self._clock.now_s)
                ):
                    self.kv.forget(name)
            named = {model.card for heartbeat in found for model in heartbeat.models.values()}
            await self._read_cards(reader, sorted(card for card in named if card and card not in self._cards))
            for heartbeat in found:
                self.heartbeats.seen(heartbeat, self._clock.now_s)
                self.kv.announced(heartbeat.endpoint, heartbeat.incarnation, heartbeat.sequence, caught_up=caught_up)
        if self._cards:
            self._cards &= self.heartbeats.cards()

    async def _read_cards(self, reader: Store, digests: list[str]) -> None:
        for some in _portions(digests):
            values = await self._ask(reader, [("GET", self._keys.card(digest)) for digest in some])
            for digest, value in zip(some, values, strict=True):
                if isinstance(value, bytes):
                    self._cards.add(digest)
                    self._sink.on_card(digest, value)

    async def _read_lease_heads(self, reader: Store, members: "set[bytes]", *, caught_up: bool) -> None:
        incarnations = {*self.load.peers, *(i for member in members if (i := _incarnation(member)) is not None)}
        for some in _portions(sorted(incarnations)):
            values = await self._ask(
                reader, [("GETRANGE", self._keys.replica(i), 0, LEASE_HEAD_BYTES - 1) for i in some]
            )
            heads: dict[int, LeaseHead | None] = {}
            for incarnation, value in zip(some, values, strict=True):
                try:
                    heads[incarnation] = decode_lease_head(value) if isinstance(value, bytes) and value else None
                except CodecError as error:
                    self._skip("lease", error)
            dead = self.load.heads(heads, self._clock.now_s, caught_up=caught_up)
            if dead:
                await self._ask(reader, [("SREM", self._keys.replicas, *(f"{i:016x}" for i in dead))])

    async def _follow_notices(self, reader: Store) -> None:
        noticed, self._noticed = self._noticed, set()
        if any(notice is Notice.CONTROL for notice, _ in noticed):
            control = (await self._ask(reader, [("GET", self._keys.control)]))[0]
            assert isinstance(control, bytes | None)
            self._take_control(control)
        goodbyes = {name for notice, name in noticed if notice is Notice.GONE}
        changed = {name for notice, name in noticed if notice is Notice.HEARTBEAT}
        await self._read_heartbeats(reader, sorted(goodbyes | changed), goodbyes=goodbyes)
        named = {name for notice, name in noticed if notice is Notice.CARD} & (self.heartbeats.cards() - self._cards)
        await self._read_cards(reader, sorted(named))
        for notice, name in noticed:
            if notice is Notice.SNAPSHOT:
                self._snapshot_times.now(name)

    async def _fetch_leases(self, reader: Store) -> None:
        loop = asyncio.get_running_loop()
        for incarnation in self._lease_times.due(self.load.wanted, loop.time()):
            value = (await self._ask(reader, [("GET", self._keys.replica(incarnation))]))[0]
            lease: Lease | None = None
            try:
                lease = decode_lease(value) if isinstance(value, bytes) else None
            except CodecError as error:
                self._skip("lease", error)
            self.counters.leases += 1
            self.load.lease(incarnation, lease, self._clock.now_s)
            self._lease_times.tried(incarnation, loop.time())

    async def _fetch_snapshots(self, reader: Store) -> None:
        """A few of the wanted ones; asks the writers for those that are not enough."""
        loop = asyncio.get_running_loop()
        missing = []
        due = self._snapshot_times.due(self.kv.wanted, loop.time())
        for endpoint in due[: self._settings.snapshots_per_turn_max]:
            value = (await self._ask(reader, [("GET", self._keys.kv_snapshot(endpoint))]))[0]
            snapshot: KvSnapshot | None = None
            try:
                if isinstance(value, bytes):
                    snapshot = decode_snapshot(value, chunks_max=self._settings.kv_snapshot_chunks_max)
            except CodecError as error:
                self._skip("snapshot", error)
            self.counters.snapshots += 1
            if not self.kv.snapshot(endpoint, snapshot):
                missing.append(endpoint)
            self._snapshot_times.tried(endpoint, loop.time())
        if missing:
            key = self._keys.snapshot_wanted
            ttl_ms = int(self._settings.heartbeat_ttl_s * 1000)
            await self._ask(reader, [("SADD", key, *missing), ("PEXPIRE", key, ttl_ms)])

    async def _read_streams(self, reader: Store, block_s: float) -> None:
        """One read of the logs. Returns after `block_s` without entries."""
        loop, count = asyncio.get_running_loop(), self._settings.read_entries_max
        block: tuple[str | int, ...] = ("BLOCK", max(1, int(block_s * 1000))) if block_s > 0 else ()
        ids = (format_id(self._positions[stream]) for stream in self._streams)
        reply = await reader.execute("XREAD", "COUNT", count, *block, "STREAMS", *self._streams, *ids)
        slice_s = loop.time()
        self._clock.contact(slice_s)
        if all(len(entries) < count for _, entries in reply or ()):
            self._caught_up = True
        for name, entries in reply or ():
            stream = name.decode()
            for entry_id, fields in entries:
                self._positions[stream] = parse_id(entry_id)
                self._take(stream, fields or {})
                if loop.time() - slice_s > SLICE_S:
                    await asyncio.sleep(0)
                    slice_s = loop.time()

    def _take(self, stream: str, fields: "dict[bytes, bytes]") -> None:
        try:
            if stream == self._keys.kv_log:
                self.counters.kv_entries += 1
                self.kv.entry(decode_entry(fields.get(b"b", b"")))
            elif stream == self._keys.load_log:
                self.counters.load_entries += 1
                self.load.entry(decode_load_entry(fields.get(b"b", b"")), self._clock.now_s)
            elif (notice := parse_notice(fields)) is not None:
                self._noticed.add(notice)
        except CodecError as error:
            self._skip("entry", error)

    def _skip(self, what: str, error: CodecError) -> None:
        self.counters.malformed += 1
        log.log(logging.WARNING if self.counters.malformed == 1 else logging.DEBUG, "%s skipped: %s", what, error)


def _portions(items: "list[T]") -> "Iterable[list[T]]":
    return (items[i : i + VALUES_PER_READ_MAX] for i in range(0, len(items), VALUES_PER_READ_MAX))


def _text(member: bytes) -> str | None:
    try:
        return member.decode("utf-8")
    except UnicodeDecodeError:
        return None


def _incarnation(member: bytes) -> int | None:
    try:
        return int(member, 16) if len(member) == 16 else None
    except ValueError:
        return None
