"""Picks an endpoint for one complete request.

The one rule: what is decided in one step stays one step (`choice`). What comes before it (parsing, rendering, hashing)
is awaited where the prompt is large, and holds nothing; what may come after it, where others want the same
(`waiting_room`, `confirmation`), never loses a reservation.
"""

from collections.abc import Callable, Hashable, Set
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np

from trimtab_core.placement import Bools
from trimtab_core.scheduler import Scheduler
from trimtab_extproc.choice import Choice, Chooser
from trimtab_extproc.confirmation import Confirmation, Peers, Unconfirmed
from trimtab_extproc.decisions import DecisionLog
from trimtab_extproc.eligibility import Eligibility, Group, overlap
from trimtab_extproc.endpoint_table import EndpointTable
from trimtab_extproc.errors import NotReady
from trimtab_extproc.events import Placed, Refused
from trimtab_extproc.fleet_view import FleetView
from trimtab_extproc.offload import Offload
from trimtab_extproc.preparation import Preparation, Prepared
from trimtab_extproc.replies import Decide
from trimtab_extproc.reservations import Reservations
from trimtab_extproc.response_directory import ResponseDirectory
from trimtab_extproc.telemetry import Telemetry
from trimtab_extproc.waiting_room import WaitingRoom

OVERTAKEN_GROUPS_MAX = 64
"""Groups of waiting requests that a new one is compared with; where there are more, it waits for its turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PickerSettings:
    """What all decisions of a process share."""

    seed: int
    """The pool's hash seed."""
    is_conformance_test: bool = False
    """Obey the request header that names the endpoints to choose from. Never where clients are not trusted."""


class Undecided:
    """A request whose outcome has to be awaited: give it to `decide`, and to `drop` if nobody wants the outcome."""

    __slots__ = ("prepared", "request", "started_s", "unconfirmed")

    def __init__(
        self,
        request: Decide,
        started_s: float,
        prepared: Prepared | None = None,
        unconfirmed: Unconfirmed | None = None,
    ) -> None:
        self.request = request
        self.started_s = started_s
        self.prepared = prepared
        """None: that takes longer."""
        self.unconfirmed = unconfirmed
        """Its choice, where there is one already."""


class Ticket(NamedTuple):
    """Of a request that waits for a place."""

    request: Decide
    prepared: Prepared
    is_again: bool
    """It had one, and others were there before."""


class Picker:
    """Picks endpoints. All calls from one event loop."""

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        table: EndpointTable,
        fleet: FleetView,
        reservations: Reservations,
        responses: ResponseDirectory,
        offload: Offload,
        telemetry: Telemetry,
        decisions: DecisionLog,
        settings: PickerSettings,
        clock: Callable[[], float],
        peers: Peers | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._fleet = fleet
        self._eligible = Eligibility(fleet=fleet, table=table)
        self._reservations = reservations
        self._telemetry = telemetry
        self._clock = clock
        self._preparation = Preparation(fleet=fleet, responses=responses, offload=offload, seed=settings.seed)
        self._chooser = Chooser(
            scheduler=scheduler,
            table=table,
            fleet=fleet,
            eligible=self._eligible,
            reservations=reservations,
            telemetry=telemetry,
            decisions=decisions,
            is_conformance_test=settings.is_conformance_test,
            clock=clock,
        )
        self._confirmation = Confirmation(
            chooser=self._chooser,
            observer=telemetry,
            policy=lambda: fleet.policy.policy,
            prefill_rate=lambda slot: float(scheduler.load().prefill_rate[slot]),
            peers=peers,
        )
        self.waiting: WaitingRoom[Ticket] = WaitingRoom(
            place=self._place_waiting,
            keep=self._kept_for,
            give_back=self._give_back,
            endpoints_of=self._endpoints_of,
            observer=telemetry,
            clock=clock,
        )
        """Requests for which every endpoint is at its limit, where the policy lets them wait."""
        reservations.on_freed = self.waiting.freed

    @property
    def is_ready(self) -> bool:
        """Whether a choice can be made at all."""
        return self._fleet.is_ready

    def pick_now(self, request: Decide) -> Placed | Refused | Undecided:
        """An endpoint, reserved, or the refusal to tell the client, where that can be had at once. Raises NotReady."""
        if not self._fleet.is_ready:
            raise NotReady("the pool's members are not known yet")
        undecided = Undecided(request, self._clock())
        undecided.prepared = self._preparation.now(request)
        return undecided if undecided.prepared is None else self._tried(undecided)

    async def decide(self, undecided: Undecided) -> Placed | Refused:
        """What `pick_now` could not say at once."""
        try:
            if undecided.prepared is None:
                undecided.prepared = await self._preparation.later(undecided.request)
                outcome = self._tried(undecided)
                if isinstance(outcome, Placed | Refused):
                    return outcome
            is_again = undecided.unconfirmed is not None
            if undecided.unconfirmed is not None:
                confirmed = await self._confirmed(undecided.unconfirmed)
                undecided.unconfirmed = None
                if confirmed is not None:
                    return confirmed
            return await self._wait(Ticket(undecided.request, undecided.prepared, is_again), undecided.started_s)
        finally:
            self.drop(undecided)

    async def pick(self, request: Decide) -> Placed | Refused:
        """Both. Raises NotReady."""
        outcome = self.pick_now(request)
        return outcome if isinstance(outcome, Placed | Refused) else await self.decide(outcome)

    def drop(self, undecided: Undecided) -> None:
        """Nobody wants the outcome (any more). Idempotent."""
        unconfirmed = undecided.unconfirmed
        if unconfirmed is not None and unconfirmed.choice is not None:
            self._chooser.withdraw(unconfirmed.choice)

    def _tried(self, undecided: Undecided) -> Placed | Refused | Undecided:
        """The choice, unless it has to be confirmed or waited for."""
        request, prepared = undecided.request, undecided.prepared
        assert prepared is not None, "the caller has prepared it"
        if self._is_behind_others(request, prepared):
            return undecided
        hashed_s = self._clock()
        outcome = self._chooser.choose(request, prepared, hashed_s)
        if outcome is None:  # nothing is decided yet, and it will be tried again
            return undecided
        ended_s = self._clock()
        self._telemetry.decided(seconds=ended_s - undecided.started_s, scheduler_seconds=ended_s - hashed_s)
        if isinstance(outcome, Choice):
            undecided.unconfirmed = self._confirmation.begin(outcome)
            if undecided.unconfirmed is not None:
                return undecided
        return self._announced(outcome)

    async def _confirmed(self, unconfirmed: Unconfirmed) -> Placed | Refused | None:
        outcome = await self._confirmation.end(unconfirmed, self._clock)
        return None if outcome is None else self._announced(outcome, unconfirmed.moved_from)

    def _announced(self, outcome: Choice | Refused, moved_from: tuple[str, ...] = ()) -> Placed | Refused:
        if isinstance(outcome, Refused):
            return outcome
        try:
            return self._chooser.announce(outcome, moved_from=moved_from)
        except BaseException:
            # Nobody would ever end it: the exchange has not heard of it.
            self._chooser.withdraw(outcome)
            raise

    # Where every endpoint is at its limit.

    def _is_behind_others(self, request: Decide, prepared: Prepared) -> bool:
        """Whether it might overtake requests that wait for an endpoint that could take it."""
        if not len(self.waiting) or not self._fleet.policy.overflow.wait_s:
            return False
        groups = list(islice(self.waiting.waited_for, OVERTAKEN_GROUPS_MAX))
        group = self._chooser.group(request, prepared)
        if group in groups or len(groups) == OVERTAKEN_GROUPS_MAX:
            return True
        own = self._eligible.of(group)
        if self._priority(request, prepared) < 0:
            # It would be refused: where it has more to choose from than they, others may well be free.
            return any(np.array_equal(own, self._waited_for(other)) for other in groups)
        return any(overlap(own, self._waited_for(other)) for other in groups)

    def _priority(self, request: Decide, prepared: Prepared) -> int:
        return self._fleet.class_terms.classes.priority(request.headers, prepared.parsed.model)

    def _waited_for(self, group: Hashable) -> Bools:
        assert isinstance(group, Group), "the waiting room has no others"
        return self._eligible.of(group)

    def _endpoints_of(self, group: Hashable) -> bytes:
        return self._waited_for(group).tobytes()

    def _kept_for(self, ticket: Ticket) -> int | None:
        """Of the endpoints that could take it the one with the fewest requests: the next to have room for it."""
        candidates = np.flatnonzero(self._eligible.of(self._chooser.group(ticket.request, ticket.prepared)))
        if not len(candidates):
            return None
        load = self._scheduler.load()
        return int(candidates[np.argmin((load.requests + load.external)[candidates])])

    async def _wait(self, ticket: Ticket, started_s: float) -> Placed | Refused:
        request, prepared = ticket.request, ticket.prepared
        priority = self._priority(request, prepared)
        if priority < 0:
            return self._chooser.refused(request, prepared, "sheddable")
        outcome = await self.waiting.wait(
            ticket,
            group=self._chooser.group(request, prepared),
            tenant=self._fleet.class_terms.classes.tenant(request.headers),
            priority=priority,
            size=prepared.parsed.sequences,
            since_s=started_s,
            overflow=self._fleet.policy.overflow,
        )
        if not isinstance(outcome, str):
            return outcome
        return self._chooser.refused(request, prepared, outcome, waited_s=self._clock() - started_s)

    def _place_waiting(self, ticket: Ticket, now_s: float, waited_s: float, kept: Set[int]) -> Placed | Refused | None:
        started_s = self._clock()
        request, prepared, is_again = ticket
        outcome = self._chooser.choose(request, prepared, now_s, waited_s=waited_s, kept=kept, is_again=is_again)
        if outcome is None:
            return None
        if not is_again:
            took_s = self._clock() - started_s
            self._telemetry.decided(seconds=took_s, scheduler_seconds=took_s)
        return self._announced(outcome)

    def _give_back(self, placed: Placed) -> None:
        """Nobody is there any more to use it."""
        self._reservations.finished(placed.reservation_id, now_s=self._clock())
