"""The order in which those who wait for a place have their turns."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from trimtab_extproc.wait_queue import Waiter, WaitQueue


def waiter(
    name: str, tenant: str = "", group: str = "g", *, deadline_s: float = 10.0, priority: int = 0
) -> Waiter[str]:
    return Waiter(item=name, group=group, tenant=tenant, since_s=0.0, deadline_s=deadline_s, priority=priority)


def queue_of(*tenants: str) -> WaitQueue[str]:
    """Requests a1, b1, a2 ... of tenants a, b, a ..."""
    queue: WaitQueue[str] = WaitQueue()
    count: Counter[str] = Counter()
    for tenant in tenants:
        count[tenant] += 1
        assert queue.add(waiter(f"{tenant}{count[tenant]}", tenant), waiting_max=100) is None
    return queue


def turns(queue: WaitQueue[str], count: int = 100, group: str = "g") -> list[str]:
    had: list[str] = []
    while len(had) < count and (found := queue.next_of([group])) is not None:
        queue.take(found)
        had.append(found.item)
    return had


def test_tenants_have_their_turns_in_rounds_however_many_requests_each_has() -> None:
    assert turns(queue_of(*"aaaaa", *"bb", "c")) == ["a1", "b1", "c1", "a2", "b2", "a3", "a4", "a5"]


def test_a_tenant_that_comes_back_has_its_turn_after_those_who_waited() -> None:
    queue = queue_of(*"abb")
    assert turns(queue, 2) == ["a1", "b1"]
    queue.add(waiter("a2", "a"), waiting_max=100)
    assert turns(queue) == ["b2", "a2"]


def test_one_who_leaves_is_passed_over() -> None:
    queue = queue_of(*"ab")
    first = queue.next_of(["g"])
    assert first is not None
    assert queue.remove(first)
    assert not queue.remove(first)
    assert turns(queue) == ["b1"]
    assert "g" not in queue.waited_for


def test_deadlines_end_a_wait_once() -> None:
    queue: WaitQueue[str] = WaitQueue()
    for name, deadline_s in (("late", 9.0), ("soon", 2.0), ("now", 1.0)):
        queue.add(waiter(name, deadline_s=deadline_s), waiting_max=9)
    assert [over.item for over in queue.expired(2.0)] == ["now", "soon"]
    assert queue.expired(2.0) == []
    assert turns(queue) == ["late"]
    assert queue.expired(100.0) == []


def test_a_full_queue_takes_a_quiet_tenant_in_place_of_the_greediest_ones_newest() -> None:
    queue = queue_of(*"aaaa")
    gone = queue.add(waiter("b1", "b"), waiting_max=4)
    assert gone is not None
    assert gone.item == "a4"
    second = queue.add(waiter("b2", "b"), waiting_max=4)
    assert second is not None
    assert second.item == "a3"
    third = waiter("b3", "b")
    assert queue.add(third, waiting_max=4) is third, "two each is fair"
    assert turns(queue) == ["a1", "b1", "a2", "b2"]


def test_a_full_queue_has_no_room_for_the_one_who_filled_it() -> None:
    queue = queue_of(*"aaa")
    newest = waiter("a4", "a")
    assert queue.add(newest, waiting_max=3) is newest
    assert len(queue) == 3


def test_the_highest_priority_goes_first_and_tenants_have_their_turns_within_it() -> None:
    queue: WaitQueue[str] = WaitQueue()
    for name, tenant, priority in (("a", "x", 0), ("b", "x", 5), ("c", "x", 5), ("d", "y", 5), ("e", "z", 9)):
        queue.add(waiter(name, tenant, priority=priority), waiting_max=9)
    assert turns(queue) == ["e", "b", "d", "c", "a"]


def test_a_full_queue_makes_room_for_a_higher_priority_and_none_for_a_lower() -> None:
    queue: WaitQueue[str] = WaitQueue()
    for name in ("a", "b"):
        queue.add(waiter(name, "x"), waiting_max=2)
    lower = waiter("c", "y", priority=-1)
    assert queue.add(lower, waiting_max=2) is lower
    gone = queue.add(waiter("d", "x", priority=1), waiting_max=2)
    assert gone is not None
    assert gone.item == "b"
    assert turns(queue) == ["d", "a"]


def test_groups_are_looked_at_in_turn() -> None:
    queue: WaitQueue[str] = WaitQueue()
    for group in "xyz":
        queue.add(waiter(group, group=group), waiting_max=9)
    assert queue.groups(1) == ["x"]
    assert queue.groups(1) == ["y"]
    assert queue.groups(9) == ["z", "x", "y"]


def test_groups_that_are_looked_at_together_have_one_round_of_turns() -> None:
    queue: WaitQueue[str] = WaitQueue()
    for name, tenant, group in (
        ("a1", "a", "x"),
        ("a2", "a", "y"),
        ("a3", "a", "x"),
        ("b1", "b", "y"),
        ("b2", "b", "x"),
    ):
        queue.add(waiter(name, tenant, group), waiting_max=9)
    had: list[str] = []
    while (found := queue.next_of("xy")) is not None:
        queue.take(found, together="xy")
        had.append(found.item)
    assert had == ["a1", "b1", "a2", "b2", "a3"]


def test_the_highest_priority_goes_first_whichever_group_it_is_in() -> None:
    queue: WaitQueue[str] = WaitQueue()
    for name, group, priority in (("a", "x", 0), ("b", "y", 5), ("c", "x", 7)):
        queue.add(waiter(name, group=group, priority=priority), waiting_max=9)
    had: list[str] = []
    while (found := queue.next_of("xy")) is not None:
        queue.take(found, together="xy")
        had.append(found.item)
    assert had == ["c", "b", "a"]


def test_what_is_too_large_is_looked_past_and_keeps_its_turn() -> None:
    queue: WaitQueue[str] = WaitQueue()
    for name, tenant, size in (("large", "a", 8), ("small", "a", 1), ("middle", "b", 4)):
        new = waiter(name, tenant)
        new.size = size
        queue.add(new, waiting_max=9)
    small, middle, first = queue.next_of("g", digits_max=1), queue.next_of("g", digits_max=3), queue.next_of("g")
    assert small is not None
    assert middle is not None
    assert first is not None
    assert (small.item, middle.item, first.item) == ("small", "small", "large")
    assert queue.next_of("g", digits_max=0) is None


@pytest.mark.parametrize("tenant", ["a", "b"])
def test_large_requests_hide_no_small_ones(tenant: str) -> None:
    queue: WaitQueue[str] = WaitQueue()
    for number in range(100):
        new = waiter(f"large{number}", "a")
        new.size = 8
        queue.add(new, waiting_max=999)
    queue.add(waiter("small", tenant), waiting_max=999)
    found = queue.next_of("g", digits_max=1)
    assert found is not None
    assert found.item == "small"


class QueueMachine(RuleBasedStateMachine):
    """Against lists: by group, priority and tenant what waits, in order, and whose turn it is."""

    def __init__(self) -> None:
        super().__init__()
        self.real: WaitQueue[int] = WaitQueue()
        self.waiting: list[Waiter[int]] = []
        self.rounds: dict[tuple[str, int], list[str]] = {}
        self.now_s = 0.0
        self.count = 0

    @rule(
        group=st.sampled_from("xy"),
        tenant=st.sampled_from("abc"),
        priority=st.sampled_from([0, 0, 0, 3]),
        wait_s=st.integers(0, 9),
        most=st.integers(1, 12),
    )
    def add(self, group: str, tenant: str, priority: int, wait_s: int, most: int) -> None:
        self.count += 1
        new = Waiter(
            item=self.count,
            group=group,
            tenant=tenant,
            since_s=self.now_s,
            deadline_s=self.now_s + wait_s,
            priority=priority,
        )
        gone = self.real.add(new, waiting_max=most)
        lowest = min((other.priority for other in self.waiting), default=priority)
        counts = Counter(other.tenant for other in self.waiting if other.priority == lowest)
        if len(self.waiting) < most:
            assert gone is None
        elif lowest > priority or (lowest == priority and max(counts.values()) < counts[tenant] + 2):
            assert gone is new
            return
        else:
            assert gone is not None
            assert gone.priority == lowest
            assert counts[gone.tenant] == max(counts.values())
            lowest_ones = [other for other in self.waiting if other.priority == lowest]
            assert gone is [other for other in lowest_ones if other.tenant == gone.tenant][-1]
            self.gone(gone)
        self.waiting.append(new)
        line = self.rounds.setdefault((group, priority), [])
        if tenant not in line:
            line.append(tenant)

    def gone(self, waiter: Waiter[int]) -> None:
        self.waiting.remove(waiter)
        key = (waiter.group, waiter.priority, waiter.tenant)
        if not [other for other in self.waiting if (other.group, other.priority, other.tenant) == key]:
            self.rounds[str(waiter.group), waiter.priority].remove(waiter.tenant)

    @rule(group=st.sampled_from("xy"))
    def turn(self, group: str) -> None:
        found = self.real.next_of([group])
        priorities = [other.priority for other in self.waiting if other.group == group]
        if not priorities:
            assert found is None
            return
        assert found is not None
        line = self.rounds[group, max(priorities)]
        tenant = line.pop(0)
        line.append(tenant)
        key = (group, max(priorities), tenant)
        assert found is next(w for w in self.waiting if (w.group, w.priority, w.tenant) == key)
        self.real.take(found)
        self.gone(found)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        waiter = data.draw(st.sampled_from(self.waiting))
        assert self.real.remove(waiter)
        self.gone(waiter)

    @rule(passed_s=st.integers(0, 4))
    def time(self, passed_s: int) -> None:
        self.now_s += passed_s
        over = self.real.expired(self.now_s)
        assert {w.item for w in over} == {w.item for w in self.waiting if w.deadline_s <= self.now_s}
        for waiter in over:
            self.gone(waiter)

    @invariant()
    def counts(self) -> None:
        assert len(self.real) == len(self.waiting)
        assert set(self.real.waited_for) == {waiter.group for waiter in self.waiting}
        assert self.real.oldest_since_s() == (self.waiting[0].since_s if self.waiting else None)


QueueMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
TestQueueEqualsItsModel = QueueMachine.TestCase
