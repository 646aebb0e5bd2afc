"""Where the other replicas have placed requests of late, in the load log's order; and what of that came before us.

The one rule: the log's order decides. Of two replicas that placed on one endpoint at the same moment, the one whose
entry is the first there has not seen the other's, and need not; the other one learns of it here, before it answers.

It never raises and never takes longer than it is given: a store that is away or slow is no answer, and the more answers
in a row come too late, the longer none is asked for.
"""

import asyncio
from collections import deque
from itertools import islice
from typing import NamedTuple, Protocol

PLACEMENTS_MAX = 4_096
"""Placements of peers that are remembered; of more in one round trip the oldest are not told."""
PAUSE_MIN_S = 0.05
PAUSE_MAX_S = 10.0
"""How long nothing is asked after an answer that did not come in time: from the first to the second, doubling."""


class PlacementTrail:
    """The peers' placements as this replica heard of them. No I/O."""

    def __init__(self) -> None:
        self.count = 0
        """All so far: a mark in time."""
        self._kept: deque[tuple[tuple[int, int], str]] = deque(maxlen=PLACEMENTS_MAX)

    def add(self, position: tuple[int, int], endpoint: str) -> None:
        """A peer has placed on that endpoint, as the entry at this position of the log says."""
        self.count += 1
        self._kept.append((position, endpoint))

    def since(self, mark: int, position: tuple[int, int]) -> frozenset[str]:
        """The endpoints of those that were heard of after `mark` was the count, and stand before `position`."""
        news = min(self.count - mark, len(self._kept))
        return frozenset(endpoint for at, endpoint in islice(reversed(self._kept), news) if at < position)


class Voice(Protocol):
    """Who writes our entries: LoadPublisher."""

    @property
    def connected(self) -> bool: ...

    @property
    def round_trip_s(self) -> float: ...

    def tell_now(self) -> "asyncio.Future[tuple[int, int] | None]": ...


class Ear(Protocol):
    """Who follows the peers: PoolFollower."""

    @property
    def connected(self) -> bool: ...

    @property
    def has_peers(self) -> bool: ...

    @property
    def placements(self) -> PlacementTrail: ...


class Question(NamedTuple):
    """What did the peers place before us? `mark`: what of it we knew."""

    mark: int
    position: "asyncio.Future[tuple[int, int] | None]"


class PeerPlacements:
    """Of one pool. All calls from one event loop."""

    def __init__(self, voice: Voice, ear: Ear) -> None:
        self._voice = voice
        self._ear = ear
        self._pause_s = PAUSE_MIN_S
        self._not_before_s = 0.0

    @property
    def is_askable(self) -> bool:
        """There are peers, and an answer can be expected soon."""
        if not self._ear.has_peers or not (self._ear.connected and self._voice.connected):
            return False
        return asyncio.get_running_loop().time() >= self._not_before_s

    @property
    def round_trip_s(self) -> float:
        """What an answer takes at least."""
        return self._voice.round_trip_s

    def ask(self) -> Question:
        """Call it in the step that placed and told the load log so."""
        return Question(self._ear.placements.count, self._voice.tell_now())

    async def answer(self, question: Question, until_s: float) -> frozenset[str] | None:
        """The endpoints on which peers placed before us without our knowing, and know it now. None: not known, or not
        by that time of the loop's clock."""
        try:
            async with asyncio.timeout_at(until_s):
                position = await question.position
        except TimeoutError:
            now_s = asyncio.get_running_loop().time()
            if now_s >= self._not_before_s:  # of those that are late together the first counts
                self._not_before_s = now_s + self._pause_s
                self._pause_s = min(2 * self._pause_s, PAUSE_MAX_S)
            return None
        self._pause_s = PAUSE_MIN_S
        return None if position is None else self._ear.placements.since(question.mark, position)
