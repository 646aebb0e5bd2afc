"""The KV follower against a literal model of writers and a store that loses things."""

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from pool_mirror import PoolMirror
from pool_processes import Changes, u32, u64

from trimtab_state.kv_codec import KvEntry, KvSnapshot, decode_entry, decode_snapshot, encode_snapshot
from trimtab_state.kv_follower import OTHER_WRITERS_MAX, KvFollower
from trimtab_state.kv_outbox import KvChange, KvOutbox, merged
from trimtab_state.load_codec import NO_U32, NO_U64
from trimtab_state.settings import StateSettings

SMALL = StateSettings(
    kv_chunks_per_entry_max=3, kv_queue_chunks_max=40, kv_buffer_entries_max=4, kv_buffer_chunks_max=8
)
ENDPOINTS = ("a", "b")
CHUNKS = st.integers(1, 12)


@dataclass
class Store:
    """What the server holds."""

    stream: list[tuple[int, bytes]] = field(default_factory=list)
    next_id: int = 1
    snapshots: dict[str, bytes] = field(default_factory=dict)
    older_snapshots: list[tuple[str, bytes]] = field(default_factory=list)
    heartbeats: dict[str, tuple[int, int]] = field(default_factory=dict)
    wanted: set[str] = field(default_factory=set)

    def append(self, data: bytes) -> None:
        self.stream.append((self.next_id, data))
        self.next_id += 1


class Writer:
    """A sidecar: what `KvPublisher` does, one transaction at a time."""

    def __init__(self, endpoint: str, incarnation: int, chunks: dict[int, int], epoch: str) -> None:
        self.endpoint = endpoint
        self.chunks = chunks
        self.epoch = epoch
        self.outbox = KvOutbox(endpoint, incarnation, SMALL, epoch=epoch)
        self.snapshot_due = True

    def publish(self, changes: Changes) -> None:
        if changes.cleared:
            self.chunks.clear()
        for chunk in changes.removed.tolist():
            self.chunks.pop(chunk, None)
        self.chunks.update(zip(changes.added.tolist(), changes.tokens.tolist(), strict=True))
        if not self.outbox.add(changes, self.epoch):
            self.snapshot_due = True

    def flush(self, store: Store, *, reply_lost: bool = False, heartbeat: bool = False, lost: bool = False) -> None:
        if heartbeat and (self.endpoint in store.wanted or self.endpoint not in store.snapshots):
            self.snapshot_due = True
        entries = self.outbox.entries(4)
        if lost:
            return
        for entry in entries:
            store.append(entry)
        if self.snapshot_due:
            snapshot = KvSnapshot(
                self.outbox.incarnation, self.outbox.sequence, self.epoch, u64(self.chunks), u32(self.chunks.values())
            )
            store.snapshots[self.endpoint] = encode_snapshot(snapshot)
            store.older_snapshots.append((self.endpoint, store.snapshots[self.endpoint]))
            store.wanted.discard(self.endpoint)
        if heartbeat:
            store.heartbeats[self.endpoint] = self.outbox.incarnation, self.outbox.sequence
        if not reply_lost:
            self.outbox.arrived(len(entries))
            self.snapshot_due = False


class Reader:
    """A follower and where it is in the stream."""

    def __init__(self, position: int) -> None:
        self.mirror = PoolMirror()
        self.follower = KvFollower(self.mirror, SMALL)
        self.position = position
        self.caught_up = False

    def read(self, store: Store, count: int) -> None:
        new = [(i, data) for i, data in store.stream if i > self.position][:count]
        for entry_id, data in new:
            self.position = entry_id
            self.follower.entry(decode_entry(data))
        if len(new) < count:
            self.caught_up = True

    def poll(self, store: Store) -> None:
        for endpoint, (incarnation, sequence) in store.heartbeats.items():
            self.follower.announced(endpoint, incarnation, sequence, caught_up=self.caught_up)
        self.caught_up = False

    def fetch(self, store: Store) -> None:
        for endpoint in sorted(self.follower.wanted):
            data = store.snapshots.get(endpoint)
            snapshot = None if data is None else decode_snapshot(data, chunks_max=1000)
            if not self.follower.snapshot(endpoint, snapshot):
                store.wanted.add(endpoint)


class KvLogMachine(RuleBasedStateMachine):
    """Random writes, trims, snapshots, restarts, lost replies, wipes and failovers."""

    @initialize()
    def begin(self) -> None:
        self.incarnations = 0
        self.epochs = 0
        self.store = Store()
        self.writers = {endpoint: self.new_writer(endpoint, {}, "e0") for endpoint in ENDPOINTS}
        self.reader = Reader(0)

    def new_writer(self, endpoint: str, chunks: dict[int, int], epoch: str) -> Writer:
        self.incarnations += 1
        writer = Writer(endpoint, (self.incarnations * 7919) % 1000, chunks, epoch)
        writer.flush(self.store, heartbeat=True)
        return writer

    @rule(
        endpoint=st.sampled_from(ENDPOINTS),
        cleared=st.sampled_from([False, False, False, True]),
        added=st.dictionaries(CHUNKS, st.integers(1, 99), max_size=5),
        removed=st.sets(CHUNKS, max_size=4),
    )
    def change(self, endpoint: str, cleared: bool, added: dict[int, int], removed: set[int]) -> None:
        changes = Changes(cleared, u64(added), u32(added.values()), u64(removed - set(added)))
        self.writers[endpoint].publish(changes)

    @rule(endpoint=st.sampled_from(ENDPOINTS), outcome=st.sampled_from(["well", "well", "reply_lost", "lost"]))
    def flush(self, endpoint: str, outcome: str) -> None:
        self.writers[endpoint].flush(self.store, reply_lost=outcome == "reply_lost", lost=outcome == "lost")

    @rule(endpoint=st.sampled_from(ENDPOINTS))
    def beat(self, endpoint: str) -> None:
        self.writers[endpoint].flush(self.store, heartbeat=True)

    @rule(endpoint=st.sampled_from(ENDPOINTS))
    def refresh_snapshot(self, endpoint: str) -> None:
        self.writers[endpoint].snapshot_due = True

    @rule(endpoint=st.sampled_from(ENDPOINTS))
    def overflow(self, endpoint: str) -> None:
        self.writers[endpoint].outbox.drop()
        self.writers[endpoint].snapshot_due = True

    @rule(endpoint=st.sampled_from(ENDPOINTS), keeps_chunks=st.booleans())
    def engine_or_sidecar_restarts(self, endpoint: str, keeps_chunks: bool) -> None:
        old = self.writers[endpoint]
        self.epochs += not keeps_chunks
        chunks = dict(old.chunks) if keeps_chunks else {}
        self.writers[endpoint] = self.new_writer(endpoint, chunks, old.epoch if keeps_chunks else f"e{self.epochs}")

    @rule(endpoint=st.sampled_from(ENDPOINTS))
    def engine_restarts_alone(self, endpoint: str) -> None:
        self.epochs += 1
        writer = self.writers[endpoint]
        writer.epoch = f"e{self.epochs}"
        writer.chunks.clear()
        writer.publish(Changes(False, u64([77]), u32([7]), u64(())))

    @rule(count=st.integers(1, 8))
    def trim(self, count: int) -> None:
        del self.store.stream[:count]

    @rule()
    def wipe(self) -> None:
        self.store = Store(next_id=1)
        self.reader.position = 0
        for writer in self.writers.values():
            writer.snapshot_due = True

    @rule(count=st.integers(1, 5), keeps_snapshots=st.booleans())
    def fail_over(self, count: int, keeps_snapshots: bool) -> None:
        """To a replica that had not received the last writes; a follower starts the stream again."""
        self.store.stream = self.store.stream[: max(0, len(self.store.stream) - count)]
        if not keeps_snapshots:
            self.store.snapshots.clear()
        self.reader.position = 0

    @rule(data=st.data())
    def an_older_snapshot_is_back(self, data: st.DataObject) -> None:
        """As after a failover, or when a command of a broken connection is carried out late."""
        if self.store.older_snapshots:
            endpoint, snapshot = data.draw(st.sampled_from(self.store.older_snapshots))
            self.store.snapshots[endpoint] = snapshot

    @rule(count=st.integers(1, 6))
    def read(self, count: int) -> None:
        self.reader.read(self.store, count)

    @rule()
    def fetch(self) -> None:
        self.reader.fetch(self.store)

    @rule()
    def poll(self) -> None:
        self.reader.poll(self.store)

    @rule(back=st.integers(0, 10))
    def reader_restarts(self, back: int) -> None:
        self.reader = Reader(max(0, self.store.next_id - 1 - back))

    @rule()
    def settle(self) -> None:
        """Whatever was missed: with time, the mirror is exactly what the writers hold."""
        for _ in range(8):
            for writer in self.writers.values():
                while writer.outbox.has_work:
                    writer.flush(self.store)
                writer.flush(self.store, heartbeat=True)
            self.reader.poll(self.store)
            self.reader.read(self.store, 10_000)
            self.reader.fetch(self.store)
        for endpoint, writer in self.writers.items():
            assert self.reader.follower.is_synced(endpoint)
            assert self.reader.mirror.chunks[endpoint] == writer.chunks
        assert not self.reader.mirror.unsynced
        assert not self.reader.follower.wanted

    @invariant()
    def follower_is_consistent(self) -> None:
        if hasattr(self, "reader"):
            self.reader.follower.check_invariants()

    def teardown(self) -> None:
        if hasattr(self, "reader"):
            self.settle()


TestKvLog = KvLogMachine.TestCase
TestKvLog.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)


def entry(sequence: int, *, incarnation: int = 1, added: tuple[int, ...] = (), cleared: bool = False) -> KvEntry:
    return KvEntry("a", incarnation, sequence, "e", cleared, u64(added), u32(added), NO_U64)


def snapshot(sequence: int, *chunks: int, incarnation: int = 1) -> KvSnapshot:
    return KvSnapshot(incarnation, sequence, "e", u64(chunks), u32(chunks))


def started(sequence: int, *chunks: int) -> tuple[PoolMirror, KvFollower]:
    mirror = PoolMirror()
    follower = KvFollower(mirror, SMALL)
    follower.announced("a", 1, sequence, caught_up=True)
    assert follower.wanted == {"a"}
    assert follower.snapshot("a", snapshot(sequence, *chunks))
    return mirror, follower


def test_entries_that_the_snapshot_covers_are_skipped() -> None:
    mirror, follower = started(5, 1, 2)
    follower.entry(entry(4, added=(99,)))
    follower.entry(entry(5, added=(98,)))
    follower.entry(entry(6, added=(3,)))
    assert set(mirror.chunks["a"]) == {1, 2, 3}


def test_a_gap_makes_an_endpoint_unsynced_until_a_snapshot_covers_it_and_later_entries_are_replayed() -> None:
    mirror, follower = started(5, 1)
    follower.entry(entry(8, added=(8,)))
    follower.entry(entry(9, added=(9,)))
    assert mirror.unsynced == {"a"}
    assert follower.wanted == {"a"}
    assert set(mirror.chunks["a"]) == {1}
    assert not follower.snapshot("a", None)
    assert not follower.snapshot("a", snapshot(6, 1, 6)), "does not reach the entries that are kept"
    assert follower.snapshot("a", snapshot(7, 1, 6, 7))
    assert set(mirror.chunks["a"]) == {1, 6, 7, 8, 9}
    assert not mirror.unsynced
    assert not follower.wanted


def test_a_clear_ends_a_gap_without_a_snapshot() -> None:
    mirror, follower = started(5, 1)
    follower.entry(entry(8, added=(8,)))
    follower.entry(entry(9, added=(9,), cleared=True))
    assert set(mirror.chunks["a"]) == {9}
    assert not mirror.unsynced
    assert not follower.wanted


def test_old_entries_of_an_earlier_writer_do_not_take_an_endpoint_back() -> None:
    mirror, follower = started(5, 1)
    follower.entry(entry(70, incarnation=2, added=(70,)))
    assert not mirror.unsynced, "the current writer is still in order"
    assert follower.snapshot("a", snapshot(5, 1)), "the store names the current writer as the newest"
    follower.entry(entry(71, incarnation=2, added=(71,)))
    assert set(mirror.chunks["a"]) == {1}
    assert not follower.wanted


def test_a_new_writer_is_followed_from_its_snapshot_on() -> None:
    mirror, follower = started(5, 1)
    follower.entry(entry(1, incarnation=2, added=(21,)))
    follower.entry(entry(2, incarnation=2, added=(22,)))
    assert follower.snapshot("a", snapshot(1, 1, 21, incarnation=2))
    assert set(mirror.chunks["a"]) == {1, 21, 22}


def test_a_lost_last_entry_is_found_by_the_heartbeat() -> None:
    mirror, follower = started(5, 1)
    follower.announced("a", 1, 7, caught_up=True)
    assert not mirror.unsynced, "the entries may be on their way"
    follower.announced("a", 1, 7, caught_up=False)
    assert not mirror.unsynced, "the log was not read to its end"
    follower.announced("a", 1, 7, caught_up=True)
    assert mirror.unsynced == {"a"}
    assert not follower.snapshot("a", snapshot(6, 1)), "the heartbeat said 7"
    assert follower.snapshot("a", snapshot(7, 1, 7))
    assert set(mirror.chunks["a"]) == {1, 7}


def test_a_new_epoch_starts_from_no_chunks() -> None:
    mirror, follower = started(5, 1)
    follower.entry(entry(6, added=(6,))._replace(epoch="other"))
    assert set(mirror.chunks["a"]) == {6}


def test_endpoints_and_writers_beyond_the_bounds_are_refused() -> None:
    follower = KvFollower(PoolMirror(), StateSettings(endpoints_max=2))
    for name in ("a", "b", "c", "c"):
        follower.entry(entry(1)._replace(endpoint=name))
    assert follower.refused == 2
    assert follower.wanted == {"a", "b"}
    for incarnation in range(2, 20):
        follower.entry(entry(1, incarnation=incarnation))
    follower.check_invariants()
    assert OTHER_WRITERS_MAX < 18


@pytest.mark.parametrize("seed", range(20))
def test_merged_changes_have_the_effect_of_all_in_a_row(seed: int) -> None:
    rng = np.random.default_rng(seed)

    def apply(chunks: dict[int, int], change: KvChange) -> None:
        if change.cleared:
            chunks.clear()
        for chunk in change.removed.tolist():
            chunks.pop(chunk, None)
        chunks.update(zip(change.added.tolist(), change.tokens.tolist(), strict=True))

    changes = [
        KvChange(
            bool(rng.integers(0, 4) == 0),
            added := rng.choice(20, size=rng.integers(0, 6), replace=False).astype(np.uint64),
            rng.integers(0, 99, size=len(added)).astype(np.uint32),
            rng.choice(20, size=rng.integers(0, 6), replace=False).astype(np.uint64),
        )
        for _ in range(6)
    ]
    one_by_one = {chunk: 1000 for chunk in range(0, 20, 2)}
    at_once = dict(one_by_one)
    for change in changes:
        apply(one_by_one, change)
    apply(at_once, merged(changes))
    assert at_once == one_by_one


def test_a_large_change_is_cut_into_bounded_entries() -> None:
    outbox = KvOutbox("a", 1, SMALL)
    outbox.add(Changes(True, u64(range(7)), u32(range(7)), NO_U64), "e")
    outbox.arrived(0)
    entries = [decode_entry(data) for data in outbox.entries(99)]
    assert [(e.sequence, e.cleared, len(e.added)) for e in entries] == [(1, True, 3), (2, False, 3), (3, False, 1)]
    assert NO_U32.size == 0
