"""Confirmed placement: a large prompt is sent only when the other pickers' choices of the same moment are known.

Pickers hear of each other's choices a millisecond or more after they were made. In a burst several of them would send
to the same idle endpoint, where one picker would have used all. So a choice that puts much prefill on an endpoint is
written into the load log at once, and in the same round trip comes what the others wrote before it. If one of them has
chosen the same endpoint, we choose again, knowing that. The first in the log keeps its place.

The one rule: it makes a choice better or leaves it as it was. A store that is away or slow, and others that keep coming
first, cost no more than `CONFIRM_S_MAX`, and never the request.

Where it would not pay it does not ask: a single picker, a prompt that is small beside the round trip, one endpoint to
choose from, round robin.
"""

import asyncio
from collections.abc import Callable
from typing import Protocol

import numpy as np

from trimtab_extproc.choice import Choice, Chooser
from trimtab_extproc.events import Refused
from trimtab_state.peer_placements import Question

CONFIRM_TOKENS_MIN = 256
"""Tokens to prefill below which a choice is not confirmed."""
ROUND_TRIPS_MIN = 20
"""Nor where their prefill takes less than so many round trips to the store: few requests come in a burst, and all would
wait for it."""
CONFIRM_S_MAX = 0.02
"""The most that it may take in all."""
CHOICES_MAX = 4
"""Choices for one request; the last one stands, whoever came first."""


class Peers(Protocol):
    """Who knows what the other pickers placed: the shared state's PeerPlacements."""

    @property
    def is_askable(self) -> bool: ...

    @property
    def round_trip_s(self) -> float: ...

    def ask(self) -> Question: ...

    async def answer(self, question: Question, until_s: float) -> frozenset[str] | None: ...


class Observer(Protocol):
    """Who counts."""

    def confirmed(self, *, seconds: float, result: str) -> None: ...


class Unconfirmed:
    """A choice that waits for its confirmation. Whoever drops it withdraws `choice`, if there is one."""

    __slots__ = ("choice", "moved_from", "question", "since_s")

    def __init__(self, choice: Choice, question: Question, since_s: float) -> None:
        self.choice: Choice | None = choice
        self.question = question
        self.since_s = since_s
        self.moved_from: tuple[str, ...] = ()
        """Endpoints that were given up."""


class Confirmation:
    """All calls from one event loop. `peers` None: there are none."""

    def __init__(
        self,
        *,
        chooser: Chooser,
        observer: Observer,
        policy: Callable[[], str],
        prefill_rate: Callable[[int], float],
        peers: Peers | None = None,
    ) -> None:
        """`prefill_rate`: of a slot, tokens per second."""
        self._chooser = chooser
        self._observer = observer
        self._policy = policy
        self._prefill_rate = prefill_rate
        self._peers = peers

    def begin(self, choice: Choice) -> Unconfirmed | None:
        """Call it in the step that chose. None: the choice stands as it is."""
        peers, tokens = self._peers, choice.placement.p_own_tokens
        if tokens < CONFIRM_TOKENS_MIN or peers is None or not peers.is_askable:
            return None
        if self._policy() == "round_robin" or np.count_nonzero(choice.candidates) < 2:
            return None
        if tokens / self._prefill_rate(choice.endpoint.slot) < ROUND_TRIPS_MIN * peers.round_trip_s:
            return None
        return Unconfirmed(choice, peers.ask(), asyncio.get_running_loop().time())

    async def end(self, unconfirmed: Unconfirmed, clock: Callable[[], float]) -> Choice | Refused | None:
        """The choice that stands. None, Refused: the others have taken all room meanwhile; see `Chooser.choose`."""
        peers, loop = self._peers, asyncio.get_running_loop()
        assert peers is not None, "they were asked"
        until_s = unconfirmed.since_s + CONFIRM_S_MAX
        outcome: Choice | Refused | None = unconfirmed.choice
        result = "kept"
        while isinstance(outcome, Choice):
            taken = await peers.answer(unconfirmed.question, until_s)
            if self._chooser.is_possible(outcome):
                if taken is None:
                    result = "late" if loop.time() >= until_s else "unknown"
                    break
                if outcome.endpoint.name not in taken:
                    break
                if len(unconfirmed.moved_from) + 1 == CHOICES_MAX:
                    result = "unsettled"
                    break
            before = outcome
            outcome = self._again(unconfirmed, before, clock())
            if not isinstance(outcome, Choice):
                result = "refused"
                break
            if outcome.endpoint.name == before.endpoint.name:
                break  # it is the best all the same
            result = "moved"
            unconfirmed.moved_from += (before.endpoint.name,)
            if taken is None or len(unconfirmed.moved_from) == CHOICES_MAX:
                break  # nobody is asked any more
            unconfirmed.question = peers.ask()
        self._observer.confirmed(seconds=loop.time() - unconfirmed.since_s, result=result)
        return outcome

    def _again(self, unconfirmed: Unconfirmed, before: Choice, now_s: float) -> Choice | Refused | None:
        """Another choice in place of that one."""
        unconfirmed.choice = None
        self._chooser.withdraw(before)
        outcome = self._chooser.choose(before.request, before.prepared, now_s, waited_s=before.waited_s, is_again=True)
        if isinstance(outcome, Choice):
            unconfirmed.choice = outcome
        return outcome
