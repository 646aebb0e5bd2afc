"""Who waits for a place, in what order, and for how long. No I/O, no clock.

The one rule: the highest priority first, and within it turns go round by tenant. Of the groups that the caller looks at
together (requests that the same endpoints can take) every tenant that waits at that priority has one turn a round, its
oldest request first, however many it has. And one that fills the queue makes room: when it is full, a request of the
lowest priority gives way to one of a higher, and among equals the newest request of the tenant with the most to one of
a tenant with clearly fewer.

Bounds: what the caller names; deadlines of those who have left are kept a little longer, at most as many again.
"""

import heapq
from collections import OrderedDict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import Generic, TypeVar

T = TypeVar("T")
STALE_MIN = 64
"""Deadlines of those who have left that are not worth clearing away."""
LINES_PAST_MAX = 256
"""Tenants of a group with nothing but too large requests just now that are looked past."""


@dataclass(slots=True, kw_only=True, eq=False)
class Waiter(Generic[T]):
    """One that waits. `group`: requests of one group fit the same endpoints."""

    item: T
    group: Hashable
    tenant: str
    since_s: float
    deadline_s: float
    priority: int = 0
    size: int = 1
    """How much room it needs."""
    number: int = field(default=0, init=False)
    """In order of coming; 0: it does not wait."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Line(Generic[T]):
    """A tenant's requests at one priority, of one group."""

    turn: int
    """Grows: when it had its last turn, or came."""
    waiters: dict[int, dict[int, Waiter[T]]] = field(default_factory=dict)
    """By the binary digits of their sizes, so that none hides smaller ones behind it."""

    def first(self, digits_max: int | None) -> Waiter[T] | None:
        firsts = [
            next(iter(waiters.values()))
            for digits, waiters in self.waiters.items()
            if digits_max is None or digits <= digits_max
        ]
        return min(firsts, key=lambda waiter: waiter.number, default=None)


class _Tenants(Generic[T]):
    """Who waits at one priority, and who of them has the most. Every step costs the same, however many there are:
    clients invent their names."""

    def __init__(self) -> None:
        self.most = 0
        self._of: dict[str, dict[int, Waiter[T]]] = {}
        self._with: dict[int, dict[str, None]] = {}
        """Tenants by how many of theirs wait."""

    def count(self, tenant: str) -> int:
        return len(self._of.get(tenant, ()))

    def add(self, waiter: Waiter[T]) -> None:
        waiters = self._of.setdefault(waiter.tenant, {})
        waiters[waiter.number] = waiter
        self._counted(waiter.tenant, len(waiters) - 1, len(waiters))
        self.most = max(self.most, len(waiters))

    def remove(self, waiter: Waiter[T]) -> bool:
        """Whether anybody is left."""
        waiters = self._of[waiter.tenant]
        del waiters[waiter.number]
        self._counted(waiter.tenant, len(waiters) + 1, len(waiters))
        if self.most not in self._with:
            self.most -= 1
        if not waiters:
            del self._of[waiter.tenant]
        return bool(self._of)

    def newest_of_greediest(self) -> Waiter[T]:
        return next(reversed(self._of[next(iter(self._with[self.most]))].values()))

    def _counted(self, tenant: str, before: int, after: int) -> None:
        if before:
            del self._with[before][tenant]
            if not self._with[before]:
                del self._with[before]
        if after:
            self._with.setdefault(after, {})[tenant] = None


class WaitQueue(Generic[T]):
    """Empty at the beginning."""

    def __init__(self) -> None:
        self._waiting: dict[int, Waiter[T]] = {}
        self._groups: OrderedDict[Hashable, dict[int, OrderedDict[str, _Line[T]]]] = OrderedDict()
        """By group, priority and tenant; tenants in the order of their turns, which is that of `_Line.turn`."""
        self._tenants: dict[int, _Tenants[T]] = {}
        """By priority."""
        self._deadlines: list[tuple[float, int]] = []
        self._next_number = 1
        self._next_turn = 1

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def waited_for(self) -> Iterable[Hashable]:
        """The groups of those who wait, in no order that means anything."""
        return self._groups.keys()

    def oldest_since_s(self) -> float | None:
        """Since when the longest wait lasts; None: nobody waits."""
        return next((waiter.since_s for waiter in self._waiting.values()), None)

    def add(self, waiter: Waiter[T], *, waiting_max: int) -> Waiter[T] | None:
        """Who has to go instead, and no longer waits: `waiter` itself where there is no room for it; None: nobody."""
        gone = None
        if len(self._waiting) >= waiting_max:
            gone = self._giving_way(waiter)
            if gone is None:
                return waiter
            self.remove(gone)
        waiter.number = self._next_number
        self._next_number += 1
        self._waiting[waiter.number] = waiter
        tenants = self._groups.setdefault(waiter.group, {}).setdefault(waiter.priority, OrderedDict())
        line = tenants.get(waiter.tenant)
        if line is None:
            line = tenants[waiter.tenant] = _Line(turn=self._turn())
        line.waiters.setdefault(waiter.size.bit_length(), {})[waiter.number] = waiter
        self._tenants.setdefault(waiter.priority, _Tenants()).add(waiter)
        heapq.heappush(self._deadlines, (waiter.deadline_s, waiter.number))
        return gone

    def remove(self, waiter: Waiter[T]) -> bool:
        """It waits no more. False: it did not."""
        if self._waiting.pop(waiter.number, None) is None:
            return False
        group = self._groups[waiter.group]
        tenants = group[waiter.priority]
        line = tenants[waiter.tenant]
        digits = waiter.size.bit_length()
        del line.waiters[digits][waiter.number]
        if not line.waiters[digits]:
            del line.waiters[digits]
        if not line.waiters:
            del tenants[waiter.tenant]
            if not tenants:
                del group[waiter.priority]
                if not group:
                    del self._groups[waiter.group]
        if not self._tenants[waiter.priority].remove(waiter):
            del self._tenants[waiter.priority]
        waiter.number = 0
        if len(self._deadlines) > 2 * len(self._waiting) + STALE_MIN:
            self._deadlines = [(w.deadline_s, number) for number, w in self._waiting.items()]
            heapq.heapify(self._deadlines)
        return True

    def groups(self, groups_max: int) -> list[Hashable]:
        """Those that were longest without being asked for here, so many at most."""
        groups = list(islice(self._groups, groups_max))
        for group in groups:
            self._groups.move_to_end(group)
        return groups

    def next_of(self, groups: Iterable[Hashable], *, digits_max: int | None = None) -> Waiter[T] | None:
        """Whose turn it is in these groups together, of those whose sizes have no more binary digits. It still waits,
        and it is its turn until `take`."""
        best: Waiter[T] | None = None
        best_turn = (0, 0)
        for group in groups:
            priorities = self._groups.get(group) or {}
            for priority in sorted(priorities, reverse=True):
                if best is not None and priority < best.priority:
                    break
                found = _first(priorities[priority].values(), digits_max)
                if found is not None:
                    line, waiter = found
                    turn = (line.turn, waiter.number)
                    if best is None or priority > best.priority or turn < best_turn:
                        best, best_turn = waiter, turn
                    break
        return best

    def turn_of(self, waiter: Waiter[T]) -> int:
        """The less, the longer its tenant was without a turn."""
        return self._groups[waiter.group][waiter.priority][waiter.tenant].turn

    def take(self, waiter: Waiter[T], *, together: Iterable[Hashable] = ()) -> None:
        """It had its tenant's turn, in all groups that are looked at together with its own, and waits no more."""
        turn = self._turn()
        for group in {waiter.group, *together}:
            tenants = self._groups.get(group, {}).get(waiter.priority)
            if tenants is not None and waiter.tenant in tenants:
                tenants[waiter.tenant].turn = turn
                tenants.move_to_end(waiter.tenant)
        self.remove(waiter)

    def expired(self, now_s: float) -> list[Waiter[T]]:
        """Those whose deadline has come; they wait no more."""
        over = []
        while self._deadlines and self._deadlines[0][0] <= now_s:
            waiter = self._waiting.get(heapq.heappop(self._deadlines)[1])
            if waiter is not None:
                self.remove(waiter)
                over.append(waiter)
        return over

    def _giving_way(self, waiter: Waiter[T]) -> Waiter[T] | None:
        """Of the lowest priority the newest of the tenant with the most, if that is below the waiter's; or if it is the
        same, and that tenant has at least two more than the waiter's."""
        lowest = min(self._tenants, default=waiter.priority)
        tenants = self._tenants.get(lowest)
        if tenants is None or lowest > waiter.priority:
            return None
        if lowest == waiter.priority and tenants.most < tenants.count(waiter.tenant) + 2:
            return None
        return tenants.newest_of_greediest()

    def _turn(self) -> int:
        self._next_turn += 1
        return self._next_turn


def _first(lines: Iterable[_Line[T]], digits_max: int | None) -> tuple[_Line[T], Waiter[T]] | None:
    """The first line's first that is no larger."""
    for line in islice(lines, LINES_PAST_MAX):
        waiter = line.first(digits_max)
        if waiter is not None:
            return line, waiter
    return None
