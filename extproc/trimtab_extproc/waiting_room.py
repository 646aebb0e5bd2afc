"""Requests that wait for a place: the queue's shell, in which each has a coroutine that waits for its turn.

The one rule: a place is chosen and reserved in the turn itself, by `place`, and handed to the one who waits; if that
one leaves before it can take it, the place is given back at once, and one who has left already gets none. So nobody who
was told to wait is overtaken by one who came later, and no reservation is without an owner.

A large request (of many engine requests) for which no endpoint has room neither stops the smaller ones behind it nor is
starved by them: for the first of these one endpoint is kept free of all who wait behind it, until it fits there.

Turns are taken when a place has become free here, and with the time (`advance`), which is how places are noticed that
others have left. Bounds: `GROUPS_MAX` groups are looked at in one go; where there are more, they take turns. After
`TURNS_MAX` turns everything else is served before the next ones: a pool that grows, or a limit that is lifted, lets
thousands in at once.
"""

import asyncio
import heapq
from collections.abc import Callable, Hashable, Iterable, Mapping, Set
from itertools import chain
from typing import Generic, Literal, NamedTuple, Protocol, TypeVar

from trimtab_extproc.events import Placed, Refused
from trimtab_extproc.wait_queue import Waiter, WaitQueue
from trimtab_state.request_class import Overflow

GROUPS_MAX = 64
TURNS_MAX = 64
"""Requests placed in one go, which takes some milliseconds."""
NONE_KEPT: Set[int] = frozenset()

T = TypeVar("T")
InVain = Literal["wait_over", "wait_queue_full"]
"""Its deadline came, or there was no room to wait (any more)."""
Outcome = Placed | Refused | InVain


class Observer(Protocol):
    """Who counts what becomes of those who wait."""

    def waited(self, *, seconds: float, outcome: str) -> None: ...


class _Seat(NamedTuple, Generic[T]):
    ticket: T
    outcome: "asyncio.Future[Outcome]"


class WaitingRoom(Generic[T]):
    """`place` chooses for a ticket at a time, given how long it has waited and the endpoints that are kept free of it;
    None: still no place. `give_back` undoes it. `keep` says which endpoint to keep free for a ticket that found none.
    `endpoints_of` is equal for groups that the same endpoints can take, as things are. All calls from one event loop.
    """

    def __init__(
        self,
        *,
        place: Callable[[T, float, float, Set[int]], Placed | Refused | None],
        keep: Callable[[T], int | None],
        give_back: Callable[[Placed], None],
        endpoints_of: Callable[[Hashable], Hashable],
        observer: Observer,
        clock: Callable[[], float],
    ) -> None:
        self._place = place
        self._keep = keep
        self._give_back = give_back
        self._endpoints_of = endpoints_of
        self._observer = observer
        self._clock = clock
        self._queue: WaitQueue[_Seat[T]] = WaitQueue()
        self._is_turn_due = False
        self._kept: tuple[Waiter[_Seat[T]], int] | None = None
        """The large one for which an endpoint is kept free, and that."""

    def __len__(self) -> int:
        return len(self._queue)

    def oldest_s(self, now_s: float) -> float:
        """How long the longest wait has lasted; 0: nobody waits."""
        since_s = self._queue.oldest_since_s()
        return 0.0 if since_s is None else now_s - since_s

    @property
    def waited_for(self) -> Iterable[Hashable]:
        """The groups of those who wait."""
        return self._queue.waited_for

    async def wait(
        self,
        ticket: T,
        *,
        group: Hashable,
        tenant: str,
        since_s: float,
        overflow: Overflow,
        priority: int = 0,
        size: int = 1,
    ) -> Outcome:
        """Until it has a place, or has waited in vain. Who cancels this leaves the queue."""
        seat = _Seat(ticket, asyncio.get_running_loop().create_future())
        deadline_s = since_s + overflow.wait_s
        waiter = Waiter(
            item=seat,
            group=group,
            tenant=tenant,
            since_s=since_s,
            deadline_s=deadline_s,
            priority=priority,
            size=size,
        )
        gone = self._queue.add(waiter, waiting_max=overflow.waiting_max)
        if gone is not None:
            self._tell(gone, "wait_queue_full")
        try:
            self.freed()  # its tenant's turn may be now
            return await seat.outcome
        except BaseException:
            self._left(waiter)
            raise

    def freed(self) -> None:
        """There may be a place: whose turn it is has it soon."""
        if len(self._queue) and not self._is_turn_due:
            self._is_turn_due = True
            asyncio.get_running_loop().call_soon(self._turn)

    def advance(self, now_s: float) -> None:
        """Time has passed: deadlines come, and others may have left places."""
        for waiter in self._queue.expired(now_s):
            self._tell(waiter, "wait_over")
        if len(self._queue):
            self._take_turns(now_s)

    def _turn(self) -> None:
        self._is_turn_due = False
        self.advance(self._clock())

    def _take_turns(self, now_s: float) -> None:
        """The highest priority first; among equals whoever was longest without a turn."""
        queue = self._queue
        together: dict[Hashable, list[Hashable]] = {}
        for group in queue.groups(GROUPS_MAX):
            together.setdefault(self._endpoints_of(group), []).append(group)
        self._try_kept(together, now_s)
        turns: list[tuple[int, int, int, int | None, list[Hashable]]] = []

        def line_up(number: int, digits_max: int | None, groups: list[Hashable]) -> None:
            waiter = queue.next_of(groups, digits_max=digits_max)
            if waiter is not None:
                heapq.heappush(turns, (-waiter.priority, queue.turn_of(waiter), number, digits_max, groups))

        for number, groups in enumerate(together.values()):
            line_up(number, None, groups)
        left = TURNS_MAX
        while turns and left:
            _, _, number, digits_max, groups = heapq.heappop(turns)
            waiter = queue.next_of(groups, digits_max=digits_max)
            if waiter is None:
                continue
            if self._has_place(waiter, groups, now_s):
                left -= 1
            else:
                if waiter.size <= 1:
                    continue
                if self._kept is None or self._kept[0] is waiter:
                    self._keep_for(waiter)
                digits_max = waiter.size.bit_length() - 1
            line_up(number, digits_max, groups)
        if turns:  # so many were placed; were others counted too, those without a place would be asked for ever
            self.freed()

    def _try_kept(self, together: Mapping[Hashable, list[Hashable]], now_s: float) -> None:
        """Nobody of its priority is let to the endpoint that is kept, so it waits for no turn of theirs."""
        if self._kept is None:
            return
        waiter, _ = self._kept
        if not waiter.number:
            self._kept = None
            return
        first = self._queue.next_of(chain.from_iterable(together.values()))
        if first is not None and first.priority > waiter.priority:
            return
        groups = next((groups for groups in together.values() if waiter.group in groups), [])
        if not self._has_place(waiter, groups, now_s):
            self._keep_for(waiter)

    def _keep_for(self, waiter: Waiter[_Seat[T]]) -> None:
        slot = self._keep(waiter.item.ticket)
        self._kept = None if slot is None else (waiter, slot)

    def _has_place(self, waiter: Waiter[_Seat[T]], groups: list[Hashable], now_s: float) -> bool:
        """Whether its turn is over. False: there is no place for it."""
        kept = NONE_KEPT
        if self._kept is not None:
            large, slot = self._kept
            if large.number and large is not waiter and large.priority >= waiter.priority:
                kept = {slot}
        if waiter.item.outcome.done():
            # Its coroutine was cancelled, and did not run since.
            self._queue.remove(waiter)
            self._count_as_left(waiter)
            return True
        try:
            outcome = self._place(waiter.item.ticket, now_s, now_s - waiter.since_s, kept)
        except Exception as error:
            # Its own fault, and none of those behind it.
            self._queue.take(waiter, together=groups)
            waiter.item.outcome.set_exception(error)
            return True
        if outcome is None:
            return False
        self._queue.take(waiter, together=groups)
        self._tell(waiter, outcome)
        return True

    def _tell(self, waiter: Waiter[_Seat[T]], outcome: Outcome) -> None:
        """The waiter is out of the queue."""
        if waiter.item.outcome.done():
            self._count_as_left(waiter)
            return
        waiter.item.outcome.set_result(outcome)
        word = "placed" if isinstance(outcome, Placed) else "refused" if isinstance(outcome, Refused) else outcome
        self._observer.waited(seconds=self._clock() - waiter.since_s, outcome=word)

    def _count_as_left(self, waiter: Waiter[_Seat[T]]) -> None:
        self._observer.waited(seconds=self._clock() - waiter.since_s, outcome="left")

    def _left(self, waiter: Waiter[_Seat[T]]) -> None:
        if self._queue.remove(waiter):
            self._count_as_left(waiter)
        outcome = waiter.item.outcome
        if outcome.done() and not outcome.cancelled() and outcome.exception() is None:
            told = outcome.result()
            if isinstance(told, Placed):
                self._give_back(told)
