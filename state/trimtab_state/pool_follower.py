"""A replica's ear: follows everything of a pool and tells a sink. The shell around the followers without I/O.

The one rule: one task reads, one thing at a time, on one connection of its own: a blocking read of the three streams,
between two of them what notices, gaps and the slow poll ask for. What is read is passed on at once; nothing is decided
here about positions (`kv_follower`, `load_follower`) or about life and death (`heartbeat_table`, leases).
"""

import asyncio
import logging
from collections.abc import Container, Iterable
from typing import TypeVar

from .backoff import Backoff
from .connected_clock import ConnectedClock
from .documents import decode_control, decode_heartbeat
from .errors import CodecError, StateUnavailable
from .follower_counters import FollowerCounters
from .generation import Generation
from .heartbeat_table import HeartbeatTable
from .keys import PoolKeys
from .kv_codec import KvSnapshot, decode_entry, decode_snapshot
from .kv_follower import KvFollower
from .load_codec import (
    LEASE_HEAD_BYTES,
    Lease,
    LeaseHead,
    LoadKind,
    decode_lease,
    decode_lease_head,
    decode_load_entry,
    work_of_load_entry,
    writer_of_load_entry,
)
from .load_follower import LoadFollower
from .notices import Notice, parse_notice
from .outage_log import OutageLog
from .pace import Pace
from .peer_placements import PlacementTrail
from .retry_times import RetryTimes
from .settings import StateSettings
from .sink import PoolSink
from .store import Command, Store
from .stream_position import START, StreamCursors, after, format_id, parse_id

log = logging.getLogger(__name__)
T = TypeVar("T")

SLICE_S = 0.002
"""After this long of applying entries the event loop gets a turn."""
BEHIND_WORK_MAX = 1_024
"""Operations (as `work_of_load_entry` counts) that are applied in one step of what the publisher has read for us, some
10 ms; more are left to our own reads: a peer that was cut off for a while tells all at once."""
READS_AT_ONCE = 4
"""Entries that come alone, or a few of them, are read at once."""
VALUES_PER_READ_MAX = 256
"""Heartbeats, cards or lease heads in one read."""
CATCH_UP_READS_MAX = 1_000
"""Reads of the logs before a session counts as connected even though they were not read to their end."""
SNAPSHOT_RETRY_S = 1.0
LEASE_RETRY_S = 0.5


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
        self._lag_s, self._lag_at_s = 0.0, 0.0
        self._store = store
        self._keys = keys
        self._sink = sink
        self._settings = settings or StateSettings()
        self._pace = Pace(self._settings.read_pause_s, READS_AT_ONCE)
        self._generation = Generation(keys, self._settings)
        self._clock = ConnectedClock(self._settings.clock_step_max_s)
        self._streams = (keys.kv_log, keys.load_log, keys.notify)
        self._cursors = StreamCursors(self._streams)
        self.kv = KvFollower(sink, self._settings)
        self._own_incarnations = own_incarnations
        self.load = LoadFollower(sink, self._settings, own_incarnations)
        self.placements = PlacementTrail()
        self._resyncs_behind = 0
        self.heartbeats = HeartbeatTable(sink, self._settings)
        self._snapshot_times: RetryTimes[str] = RetryTimes(SNAPSHOT_RETRY_S)
        self._lease_times: RetryTimes[int] = RetryTimes(LEASE_RETRY_S)
        self._control: bytes | None = None
        self._control_told = False
        self._cards: set[str] = set()
        self._noticed: set[tuple[Notice, str]] = set()
        self._silent_since_s: dict[str, float] = {}
        self._caught_up = False
        self._outage = OutageLog(f"the pool {keys.namespace}/{keys.name} is not followed")

    @property
    def has_peers(self) -> bool:
        """Whether other replicas are followed."""
        return bool(self.load.peers)

    def log_lag_s(self, now_s: float) -> float:
        """How far behind the logs this is at a time of the loop's clock, in seconds.

        The distance between the last entry read and the newest at the last slow poll; it grows from then on where that
        poll is overdue, since nobody knows what was written meanwhile.
        """
        overdue_s = now_s - self._lag_at_s - 2 * self._settings.poll_s
        return self._lag_s + max(0.0, overdue_s) if self._lag_at_s else 0.0

    async def run(self) -> None:
        """Follows the pool until cancelled."""
        backoff = Backoff(self._settings.backoff_min_s, self._settings.backoff_max_s)
        while True:
            reader = self._store.dedicated(self._settings.poll_s + self._settings.command_timeout_s)
            try:
                await self._session(reader, backoff)
            except StateUnavailable as error:
                self._outage.failed(error)
            finally:
                await reader.close()
            self._clock.away()
            if self.connected:
                self.connected = False
                self._sink.on_connected(False)
            await self._store.pause(backoff.next_s())

    async def _session(self, reader: Store, backoff: Backoff) -> None:
        """From one connect to the loss of the store."""
        loop = asyncio.get_running_loop()
        self._grace()
        self._caught_up = False
        await self._poll(reader)
        await self._fetch_leases(reader)
        for _ in range(0, len(self.kv.wanted), self._settings.snapshots_per_turn_max):
            await self._fetch_snapshots(reader)
        for _ in range(CATCH_UP_READS_MAX):
            if self._caught_up:
                break
            await self._read_streams(reader, 0.0)
        self.connected = True
        self.counters.sessions += 1
        backoff.reset()
        self._outage.over()
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
            if await self._read_streams(reader, until_s - loop.time()):
                await asyncio.sleep(self._pace.wait_s(loop.time()))

    async def _ask(self, reader: Store, commands: list[Command]) -> "list[object]":
        # A single damaged key must not keep everything else from being read.
        replies = await reader.batch(commands, skips_other_types=True)
        self._clock.contact(asyncio.get_running_loop().time())
        return replies

    def _grace(self) -> None:
        self.load.grace(self._clock.now_s)
        self.heartbeats.grace(self._clock.now_s)

    async def _poll(self, reader: Store) -> None:
        """Compares the store with what is known: contents, streams, control document, heartbeats, leases."""
        keys, caught_up = self._keys, self._caught_up
        known = self._cursors.positions()
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
        for stream, end in zip(self._streams, ends, strict=True):
            if end is None:
                raise StateUnavailable(f"the key {stream} holds something other than a stream: delete it")
        self._place(ends, known, is_new_store=self._generation.is_changed(generation))
        self._take_control(control)
        names = _bounded(self.heartbeats.endpoints, map(_text, _members(members)), self._settings.endpoints_max)
        await self._read_heartbeats(reader, names, caught_up=caught_up)
        self._forget_silent()
        incarnations = _bounded(self.load.peers, map(_incarnation, _members(replicas)), self._settings.replicas_max)
        await self._read_lease_heads(reader, incarnations, caught_up=caught_up)
        self._caught_up = False

    def _place(self, ends: "list[object]", known: list[tuple[int, int]], *, is_new_store: bool) -> None:
        """Where to read on. `known`: how far was read when the ends were asked for; more may have been since."""
        newest = [parse_id(end[0][0]) if isinstance(end, list) and end else START for end in ends]
        if self._cursors.have_gone_back(newest, known) or is_new_store:
            log.warning("the store went back or lost its contents: reading everything of %s again", self._keys.prefix)
            self.counters.resyncs += 1
            self._cursors.restart()
            self._caught_up = False
            self._grace()
        self._cursors.start(newest, self._settings.lookback_s)
        now_s = asyncio.get_running_loop().time()
        self._lag_s = self._cursors.lag_s(newest, looked_ago_s=now_s - self._lag_at_s)
        self._lag_at_s = now_s

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

    def _forget_silent(self) -> None:
        """Endpoints that only the log names: nothing is kept of one that has had no heartbeat for the time to live."""
        now_s = self._clock.now_s
        silent = set(self.kv.endpoints).difference(self.heartbeats.endpoints)
        self._silent_since_s = {name: self._silent_since_s.get(name, now_s) for name in silent}
        for name, since_s in list(self._silent_since_s.items()):
            if now_s - since_s >= self._settings.heartbeat_ttl_s:
                del self._silent_since_s[name]
                self.kv.forget(name)

    async def _read_lease_heads(self, reader: Store, incarnations: list[int], *, caught_up: bool) -> None:
        for some in _portions(incarnations):
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

    async def _read_streams(self, reader: Store, block_s: float) -> bool:
        """One read of the logs. Whether it brought their last entries; False after `block_s` without any."""
        loop, count = asyncio.get_running_loop(), self._settings.read_entries_max
        block: tuple[str | int, ...] = ("BLOCK", max(1, int(block_s * 1000))) if block_s > 0 else ()
        command = ("XREAD", "COUNT", count, *block, "STREAMS", *self._streams, *self._cursors.ids())
        reply = await reader.execute(*command)
        slice_s = loop.time()
        self._clock.contact(slice_s)
        is_end = all(len(entries) < count for _, entries in reply or ())
        self._caught_up |= is_end
        for name, entries in reply or ():
            stream = name.decode()
            for entry_id, fields in entries:
                self._read(stream, parse_id(entry_id), fields)
                if loop.time() - slice_s > SLICE_S:
                    await asyncio.sleep(0)
                    slice_s = loop.time()
        return bool(reply) and is_end

    # What the publisher reads for us in the transaction that writes. It runs beside our own reads of the same entries.

    def read_behind(self) -> Command:
        """The entries of the load log after the last one that was passed on, the newest first."""
        self._resyncs_behind = self.counters.resyncs
        following = format_id(after(self._cursors.position(self._keys.load_log)))
        return ("XREVRANGE", self._keys.load_log, "+", following, "COUNT", self._settings.read_entries_max)

    def take_behind(self, reply: "list[tuple[bytes, dict[bytes, bytes] | None]] | None") -> bool:
        """Passes them on, unless they are of a log that is not followed (any more), some are missing, or they are too
        many. Whether all were passed on."""
        entries = reply or []
        if not self.connected or self.counters.resyncs != self._resyncs_behind:
            return False
        if len(entries) >= self._settings.read_entries_max:
            return False
        news = (fields.get(b"b", b"") for _, fields in entries if fields)
        if sum(work_of_load_entry(data) for data in news if not self._is_own(data)) > BEHIND_WORK_MAX:
            return False
        for entry_id, fields in reversed(entries):
            self._read(self._keys.load_log, parse_id(entry_id), fields)
        return True

    def _read(self, stream: str, position: tuple[int, int], fields: "dict[bytes, bytes] | None") -> None:
        """One entry, which somebody else may have read meanwhile."""
        if position > self._cursors.position(stream):
            self._cursors.advance(stream, position)
            self._take(stream, position, fields or {})

    def _take(self, stream: str, position: tuple[int, int], fields: "dict[bytes, bytes]") -> None:
        try:
            if stream == self._keys.kv_log:
                self.counters.kv_entries += 1
                self.kv.entry(decode_entry(fields.get(b"b", b"")))
            elif stream == self._keys.load_log:
                self.counters.load_entries += 1
                data = fields.get(b"b", b"")
                # With one replica all entries are our own: reading their operations only to skip them is half the work.
                if not self._is_own(data):
                    entry = decode_load_entry(data)
                    for operation in entry.operations:
                        if operation.kind in (LoadKind.RESERVE, LoadKind.MOVED):
                            self.placements.add(position, operation.endpoint)
                    self.load.entry(entry, self._clock.now_s)
            elif (notice := parse_notice(fields)) is not None:
                self._noticed.add(notice)
        except CodecError as error:
            self._skip("entry", error)

    def _is_own(self, entry: bytes) -> bool:
        return writer_of_load_entry(entry) in self._own_incarnations

    def _skip(self, what: str, error: CodecError) -> None:
        self.counters.malformed += 1
        log.log(logging.WARNING if self.counters.malformed == 1 else logging.DEBUG, "%s skipped: %s", what, error)


def _portions(items: "list[T]") -> "Iterable[list[T]]":
    return (items[i : i + VALUES_PER_READ_MAX] for i in range(0, len(items), VALUES_PER_READ_MAX))


def _members(reply: object) -> "set[bytes]":
    return reply if isinstance(reply, set) else set()


def _bounded(known: "Iterable[T]", found: "Iterable[T | None]", most: int) -> "list[T]":
    """What is known and what was found, the known first, at most so many."""
    names = dict.fromkeys(known)
    for name in found:
        if len(names) >= most:
            break
        if name is not None:
            names[name] = None
    return list(names)


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
