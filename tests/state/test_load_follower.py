"""The load follower against a literal model of replicas, leases and a store that loses things."""

from dataclasses import dataclass, field

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from pool_mirror import PoolMirror, Reservation

from trimtab_state.load_codec import (
    Lease,
    LeaseHead,
    LoadEntry,
    LoadKind,
    LoadOperation,
    decode_lease,
    decode_lease_head,
    decode_load_entry,
    encode_lease,
    encode_load_entry,
)
from trimtab_state.load_follower import GONE_MAX, LoadFollower
from trimtab_state.load_outbox import LoadOutbox
from trimtab_state.settings import StateSettings

SMALL = StateSettings(load_ops_per_entry_max=2, load_queue_ops_max=12, lease_s=10.0)
IDS = st.integers(1, 6)


@dataclass
class Store:
    """What the server holds."""

    stream: list[tuple[int, bytes]] = field(default_factory=list)
    next_id: int = 1
    leases: dict[int, tuple[bytes, float]] = field(default_factory=dict)
    replicas: set[int] = field(default_factory=set)

    def append(self, data: bytes) -> None:
        self.stream.append((self.next_id, data))
        self.next_id += 1

    def lease(self, incarnation: int, now_s: float) -> bytes | None:
        data, until_s = self.leases.get(incarnation, (None, 0.0))
        return data if now_s < until_s else None


class Writer:
    """A replica: what `LoadPublisher` does, one transaction at a time."""

    def __init__(self, machine: "LoadLogMachine", open_: dict[int, Reservation] | None = None) -> None:
        machine.incarnations += 1
        self.outbox = LoadOutbox((machine.incarnations * 7919) % 1000, SMALL)
        self.open: dict[int, Reservation] = {} if open_ is None else open_
        self.is_held = False
        self.is_wiped = False
        self.renewed_at_s = machine.now_s
        self.renewal = 0
        self.goodbyes: list[bytes] = []

    def add(self, operation: LoadOperation) -> None:
        self.outbox.add(operation)

    def flush(self, store: Store, *, reply_lost: bool = False, lost: bool = False) -> None:
        if self.outbox.sequence == 0:
            self.outbox.greet()
        entries = self.outbox.entries(4)
        if lost:
            return
        for entry in self.goodbyes + entries:
            store.append(entry)
        if not reply_lost:
            self.goodbyes.clear()
            self.outbox.arrived(len(entries))

    def renew(self, store: Store, machine: "LoadLogMachine") -> None:
        while self.outbox.has_work or self.outbox.sequence == 0:
            self.flush(store)
        incarnation = self.outbox.incarnation
        is_recent = machine.now_s - self.renewed_at_s < SMALL.lease_s
        if self.is_held and store.lease(incarnation, machine.now_s) is None and not (self.is_wiped and is_recent):
            goodbye = LoadEntry(incarnation, self.outbox.sequence + 1, [LoadOperation(LoadKind.GOODBYE, 0)])
            self.__init__(machine, self.open)  # type: ignore[misc]
            self.goodbyes.append(encode_load_entry(goodbye))
            self.flush(store)
        self.renewal += 1
        reservations = [
            LoadOperation(LoadKind.RESERVE, i, r.endpoint, r.p_tokens, r.batch) for i, r in self.open.items()
        ]
        head = LeaseHead(self.outbox.incarnation, self.outbox.sequence, self.renewal)
        store.leases[head.incarnation] = encode_lease(Lease(head, reservations)), machine.now_s + SMALL.lease_s
        store.replicas.add(head.incarnation)
        self.is_held = True
        self.is_wiped = False
        self.renewed_at_s = machine.now_s

    def close(self, store: Store) -> None:
        while self.outbox.has_work:
            self.flush(store)
        goodbye = LoadEntry(self.outbox.incarnation, self.outbox.sequence + 1, [LoadOperation(LoadKind.GOODBYE, 0)])
        store.append(encode_load_entry(goodbye))
        store.leases.pop(self.outbox.incarnation, None)
        store.replicas.discard(self.outbox.incarnation)


class Reader:
    """A follower and where it is in the stream."""

    def __init__(self, position: int, own: set[int]) -> None:
        self.mirror = PoolMirror()
        self.follower = LoadFollower(self.mirror, SMALL, own)
        self.position = position
        self.caught_up = False

    def read(self, store: Store, count: int, now_s: float) -> None:
        new = [(i, data) for i, data in store.stream if i > self.position][:count]
        for entry_id, data in new:
            self.position = entry_id
            self.follower.entry(decode_load_entry(data), now_s)
        if len(new) < count:
            self.caught_up = True

    def poll(self, store: Store, now_s: float) -> None:
        heads = {}
        for incarnation in {*store.replicas, *self.follower.peers}:
            data = store.lease(incarnation, now_s)
            heads[incarnation] = None if data is None else decode_lease_head(data[:25])
        store.replicas.difference_update(self.follower.heads(heads, now_s, caught_up=self.caught_up))
        self.caught_up = False

    def fetch(self, store: Store, now_s: float) -> None:
        for incarnation in sorted(self.follower.wanted):
            data = store.lease(incarnation, now_s)
            self.follower.lease(incarnation, None if data is None else decode_lease(data), now_s)


class LoadLogMachine(RuleBasedStateMachine):
    """Random operations, trims, kills, restarts, lost replies, wipes, failovers and time."""

    @initialize()
    def begin(self) -> None:
        self.incarnations = 0
        self.now_s = 0.0
        self.store = Store()
        self.writers = [Writer(self), Writer(self)]
        for writer in self.writers:
            writer.renew(self.store, self)
        self.own = Writer(self)
        self.own.renew(self.store, self)
        self.reader = Reader(0, {self.own.outbox.incarnation})

    @rule(index=st.integers(0, 1), reservation_id=IDS, p_tokens=st.integers(1, 99))
    def reserve(self, index: int, reservation_id: int, p_tokens: int) -> None:
        writer = self.writers[index]
        if reservation_id not in writer.open:
            writer.open[reservation_id] = Reservation("a", p_tokens, 1, ())
            writer.add(LoadOperation(LoadKind.RESERVE, reservation_id, "a", p_tokens, 1))

    @rule(index=st.integers(0, 1), reservation_id=IDS)
    def first_token(self, index: int, reservation_id: int) -> None:
        writer = self.writers[index]
        if reservation_id in writer.open:
            writer.open[reservation_id].p_tokens = 0
        writer.add(LoadOperation(LoadKind.FIRST_TOKEN, reservation_id))

    @rule(index=st.integers(0, 1), reservation_id=IDS, endpoint=st.sampled_from("ab"))
    def move(self, index: int, reservation_id: int, endpoint: str) -> None:
        writer = self.writers[index]
        if reservation_id in writer.open:
            writer.open[reservation_id].endpoint = endpoint
        writer.add(LoadOperation(LoadKind.MOVED, reservation_id, endpoint))

    @rule(index=st.integers(0, 1), reservation_id=IDS)
    def finish(self, index: int, reservation_id: int) -> None:
        self.writers[index].open.pop(reservation_id, None)
        self.writers[index].add(LoadOperation(LoadKind.FINISHED, reservation_id))

    @rule()
    def own_operation(self) -> None:
        self.own.add(LoadOperation(LoadKind.RESERVE, 1, "a", 50, 1))
        self.own.flush(self.store)

    @rule(index=st.integers(0, 1), outcome=st.sampled_from(["well", "well", "reply_lost", "lost"]))
    def flush(self, index: int, outcome: str) -> None:
        self.writers[index].flush(self.store, reply_lost=outcome == "reply_lost", lost=outcome == "lost")

    @rule(index=st.integers(0, 1))
    def renew(self, index: int) -> None:
        self.writers[index].renew(self.store, self)

    @rule(index=st.integers(0, 1))
    def overflow(self, index: int) -> None:
        self.writers[index].outbox.drop()

    @rule(index=st.integers(0, 1), is_clean=st.booleans())
    def replica_restarts(self, index: int, is_clean: bool) -> None:
        if is_clean:
            self.writers[index].close(self.store)
        self.writers[index] = Writer(self)
        self.writers[index].renew(self.store, self)

    @rule(seconds=st.sampled_from([1.0, 4.0, 12.0]))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(count=st.integers(1, 8))
    def trim(self, count: int) -> None:
        del self.store.stream[:count]

    @rule()
    def wipe(self) -> None:
        self.store = Store()
        self.reader.position = 0
        self.reader.follower.grace(self.now_s)
        for writer in self.writers:
            writer.is_wiped = True

    @rule(count=st.integers(1, 5), keeps_leases=st.booleans())
    def fail_over(self, count: int, keeps_leases: bool) -> None:
        self.store.stream = self.store.stream[: max(0, len(self.store.stream) - count)]
        if not keeps_leases:
            self.store.leases.clear()
        self.reader.position = 0
        self.reader.follower.grace(self.now_s)

    @rule(count=st.integers(1, 6))
    def read(self, count: int) -> None:
        self.reader.read(self.store, count, self.now_s)

    @rule()
    def fetch(self) -> None:
        self.reader.fetch(self.store, self.now_s)

    @rule()
    def poll(self) -> None:
        self.reader.poll(self.store, self.now_s)

    @rule(back=st.integers(0, 10))
    def reader_restarts(self, back: int) -> None:
        self.reader = Reader(max(0, self.store.next_id - 1 - back), {self.own.outbox.incarnation})

    @rule()
    def settle(self) -> None:
        """Whatever was missed: with time, the mirror holds what the live replicas hold and nothing of the dead."""
        for _ in range(12):
            self.now_s += 2.0
            for writer in self.writers:
                writer.renew(self.store, self)
            self.reader.poll(self.store, self.now_s)
            self.reader.read(self.store, 10_000, self.now_s)
            self.reader.fetch(self.store, self.now_s)
        mirror = self.reader.mirror
        held = {incarnation: own for incarnation, own in mirror.peers.items() if own}
        assert held == {writer.outbox.incarnation: writer.open for writer in self.writers if writer.open}
        assert set(self.reader.follower.peers) == {writer.outbox.incarnation for writer in self.writers}
        assert not self.reader.follower.wanted
        assert self.own.outbox.incarnation not in mirror.peers

    @invariant()
    def follower_is_consistent(self) -> None:
        if hasattr(self, "reader"):
            self.reader.follower.check_invariants()

    def teardown(self) -> None:
        if hasattr(self, "reader"):
            self.settle()


TestLoadLog = LoadLogMachine.TestCase
TestLoadLog.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)


def reserve(reservation_id: int, p_tokens: int = 10) -> LoadOperation:
    return LoadOperation(LoadKind.RESERVE, reservation_id, "a", p_tokens, 1)


def lease(sequence: int, *operations: LoadOperation, renewal: int = 1) -> Lease:
    return Lease(LeaseHead(1, sequence, renewal), operations)


def started(*operations: LoadOperation) -> tuple[PoolMirror, LoadFollower]:
    mirror = PoolMirror()
    follower = LoadFollower(mirror, SMALL, ())
    follower.entry(LoadEntry(1, 5, []), 0.0)
    follower.lease(1, lease(5, *operations), 0.0)
    return mirror, follower


def test_the_weight_of_a_reservation_comes_by_the_log_and_by_the_lease() -> None:
    mirror, follower = started(reserve(1)._replace(weight_milli=250))
    follower.entry(LoadEntry(1, 6, [reserve(2)._replace(weight_milli=4_000), reserve(3)]), 0.0)
    assert {i: r.weight_milli for i, r in mirror.peers[1].items()} == {1: 250, 2: 4_000, 3: 1_000}


def test_nothing_is_passed_on_before_the_lease_of_a_replica_is_seen() -> None:
    mirror = PoolMirror()
    follower = LoadFollower(mirror, SMALL, ())
    follower.entry(LoadEntry(1, 1, [reserve(1)]), 0.0)
    follower.entry(LoadEntry(1, 2, [reserve(2)]), 0.0)
    assert mirror.peers == {}
    assert follower.wanted == {1}
    follower.lease(1, lease(1, reserve(1)), 0.0)
    assert set(mirror.peers[1]) == {1, 2}
    assert not follower.wanted


def test_after_a_gap_the_lease_tells_what_was_missed() -> None:
    mirror, follower = started(reserve(1), reserve(2), reserve(3))
    follower.entry(LoadEntry(1, 7, [reserve(7)]), 0.0)
    assert set(mirror.peers[1]) == {1, 2, 3}
    assert follower.wanted == {1}
    follower.lease(1, lease(5, reserve(1), reserve(2), reserve(3)), 0.0)
    assert follower.wanted == {1}, "too old"
    follower.lease(1, lease(6, reserve(2, p_tokens=0), LoadOperation(LoadKind.RESERVE, 3, "b", 10, 1)), 0.0)
    assert {i: (r.endpoint, r.p_tokens) for i, r in mirror.peers[1].items()} == {
        2: ("a", 0),
        3: ("b", 10),
        7: ("a", 10),
    }


def test_a_peer_without_a_lease_is_gone_once_after_the_lease_time() -> None:
    mirror, follower = started(reserve(1))
    assert follower.heads({1: None}, 9.9, caught_up=True) == []
    assert not mirror.gone_peers
    assert follower.heads({1: None}, 10.0, caught_up=True) == [1]
    assert mirror.gone_peers == [1]
    follower.entry(LoadEntry(1, 6, [reserve(2)]), 11.0)
    assert follower.heads({1: None}, 30.0, caught_up=True) == [1], "is taken out of the set again"
    assert mirror.gone_peers == [1]
    assert mirror.peers == {}
    assert not follower.wanted


def test_a_grace_gives_a_full_lease_time() -> None:
    mirror, follower = started(reserve(1))
    follower.grace(9.0)
    follower.heads({1: None}, 18.9, caught_up=True)
    assert not mirror.gone_peers
    follower.heads({1: None}, 19.0, caught_up=True)
    assert mirror.gone_peers == [1]


def test_a_renewed_lease_keeps_an_idle_peer_alive() -> None:
    mirror, follower = started(reserve(1))
    for second in range(5, 100, 5):
        follower.heads({1: LeaseHead(1, 5, second)}, float(second), caught_up=True)
    follower.heads({1: None}, 100.0, caught_up=True)
    assert not mirror.gone_peers
    assert 1 in mirror.peers[1]


def test_goodbye_ends_a_peer_at_once_even_after_a_gap() -> None:
    mirror, follower = started(reserve(1))
    follower.entry(LoadEntry(1, 9, [LoadOperation(LoadKind.GOODBYE, 0)]), 0.0)
    assert mirror.gone_peers == [1]
    assert follower.peers == ()


def test_a_lost_last_entry_is_found_by_the_lease() -> None:
    mirror, follower = started(reserve(1))
    for renewal, caught_up in ((2, True), (3, False)):
        follower.heads({1: LeaseHead(1, 6, renewal)}, 1.0, caught_up=caught_up)
        assert not follower.wanted
    follower.heads({1: LeaseHead(1, 6, 4)}, 1.0, caught_up=True)
    assert follower.wanted == {1}
    follower.lease(1, lease(6), 1.0)
    assert mirror.peers[1] == {}


def test_operations_are_idempotent_by_reservation_id() -> None:
    mirror, follower = started(reserve(1))
    twice = [reserve(1, 99), LoadOperation(LoadKind.FINISHED, 1), LoadOperation(LoadKind.FINISHED, 1)]
    follower.entry(LoadEntry(1, 6, [*twice, LoadOperation(LoadKind.FIRST_TOKEN, 8)]), 0.0)
    assert mirror.peers[1] == {}


def test_what_is_remembered_of_replicas_is_bounded() -> None:
    follower = LoadFollower(PoolMirror(), StateSettings(replicas_max=3), ())
    for incarnation in range(1, 6):
        follower.entry(LoadEntry(incarnation, 1, []), 0.0)
    assert follower.refused == 2
    assert len(follower.peers) == 3
    goodbye = [LoadOperation(LoadKind.GOODBYE, 0)]
    follower.entry(LoadEntry(1, 2, goodbye), 0.0)
    for incarnation in range(10, 10 + 2 * GONE_MAX):
        follower.entry(LoadEntry(incarnation, 1, goodbye), 0.0)
    assert follower.peers == (2, 3)
    assert len(follower._gone) == GONE_MAX


def test_nothing_of_a_peer_outlives_its_goodbye_wherever_that_stands() -> None:
    for goodbye in ([LoadOperation(LoadKind.GOODBYE, 0), reserve(3)], [reserve(3), LoadOperation(LoadKind.GOODBYE, 0)]):
        for sequence in (6, 9):
            mirror, follower = started(reserve(1))
            follower.entry(LoadEntry(1, sequence, goodbye), 0.0)
            follower.entry(LoadEntry(1, sequence + 1, goodbye), 0.0)
            follower.entry(LoadEntry(1, sequence + 2, [reserve(4)]), 0.0)
            follower.lease(1, lease(sequence + 2, reserve(4)), 0.0)
            follower.check_invariants()
            assert (mirror.gone_peers, mirror.peers, follower.peers) == ([1], {}, ())


def test_an_entry_from_a_future_that_never_comes_costs_some_renewals_and_not_the_peer() -> None:
    mirror, follower = started(reserve(1))
    follower.entry(LoadEntry(1, 1 << 60, [reserve(9)]), 1.0)
    follower.entry(LoadEntry(1, 6, [reserve(2)]), 1.0)
    for renewal in (2, 3, 4):
        assert follower.wanted == {1}
        follower.lease(1, lease(5 + renewal, reserve(2), renewal=renewal), 2.0 * renewal)
    assert not follower.wanted
    follower.entry(LoadEntry(1, 10, [reserve(3)]), 9.0)
    assert set(mirror.peers[1]) == {2, 3}
    follower.check_invariants()


def test_nor_does_a_lease_from_there() -> None:
    mirror, follower = started(reserve(1))
    follower.entry(LoadEntry(1, 7, [reserve(9)]), 1.0)
    follower.lease(1, lease(1 << 60, reserve(8), renewal=2), 1.0)
    follower.entry(LoadEntry(1, 8, [reserve(2)]), 1.0)
    for renewal in (3, 4, 5):
        follower.heads({1: LeaseHead(1, 7 + renewal, renewal)}, 2.0 * renewal, caught_up=True)
    assert follower.wanted == {1}
    follower.lease(1, lease(12, reserve(2), renewal=5), 11.0)
    follower.entry(LoadEntry(1, 13, [reserve(3)]), 11.0)
    assert set(mirror.peers[1]) == {2, 3}
    follower.check_invariants()


def test_a_lease_that_was_written_before_what_was_read_meanwhile_is_no_fault() -> None:
    mirror, follower = started(reserve(1))
    for sequence in range(6, 10):
        follower.entry(LoadEntry(1, sequence, [reserve(sequence)]), 1.0)
    follower.heads({1: LeaseHead(1, 7, 2)}, 2.0, caught_up=True)
    follower.heads({1: LeaseHead(1, 8, 3)}, 3.0, caught_up=True)
    follower.heads({1: LeaseHead(1, 9, 4)}, 3.0, caught_up=True)
    assert not follower.wanted
    assert len(mirror.peers[1]) == 5
