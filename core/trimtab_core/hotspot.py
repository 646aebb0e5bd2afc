"""The hotspot detector: prefix classes that bring more load than the endpoints which hold their prefix can carry.

The one rule: it speaks up about what it has counted, never about what it expects; and what it leaves out for a class
never leaves that class without an endpoint.

    class    the requests that begin with one prefix: the deepest that clearly more arrivals begin with than are one
             endpoint's equal share, named by how far nearly all of them go on together
    M, M'    the candidates whose engines hold that prefix, and the others
    x, x'    the share of the window's arrivals that are in the class, and the rest

1. Arrivals: raised when x/x' > |M|/|M'|, clearly: beyond what chance does with so few arrivals. Not where M or M' is
   empty, nor where nearly all arrivals are in the class (a system prompt common to all).
2. Routing: acted on after 2|M| requests of the class in a row for which an endpoint of M had the least score. Then M,
   as it grows, is left out for the class until the alarm is over.

An alarm is over when x/x' > |M|/|M'| does not hold any more, clearly or not: what lies between the two keeps it from
being raised again and again.

In the shadow, while another policy than the product places, what M is says nothing of the product: round robin spreads
every prefix. So the holders of a class that is raised stay those that the product had left it with.
"""

import math
from dataclasses import dataclass

from trimtab_core.chunk_owners import Slots, slots_in
from trimtab_core.errors import ensure
from trimtab_core.hit import Hit
from trimtab_core.hotspot_arrivals import Arrivals, Prefix
from trimtab_core.placement import F64

ALARMS_MAX = 64
"""Classes with an alarm at once. Beyond, none is raised; no more than one class an endpoint can bring so many
arrivals, but for prefixes of one another."""
IN_CLASS_MIN = 20
"""Arrivals of a class below which nothing is said of it."""
IN_CLASS_LEFT_MIN = 10
"""Arrivals of a class below which its alarm is over."""
DEVIATIONS = 4.0
"""Standard deviations of the number of arrivals, were it by chance, that it must lie above an equal share. Each arrival
is a test of its own, so few false alarms an hour take a chance of one in 30,000."""
PARTING_SHARE = 8
"""Where at least one in so many of a prefix's arrivals leaves the others, their class ends."""
COMMON_SHARE = 50
"""With at most one arrival in so many outside of it, a class is common to all: strays do not make it a hotspot."""
OTHERS_MIN = 5
"""The same where arrivals are few: the first of a class are not counted as such, since nobody shared their prefix."""
SEEN_COUNT = 32
"""Requests of a class; where none of so many could go (an engine that sleeps, say) is neither in M nor in M'."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HotspotSettings:
    """How the detector works."""

    window_s: float = 60.0
    """Arrivals are counted for so long."""
    acts: bool = True
    """Whether holders are left out; False: alarms are raised, and nothing else is done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hotspot:
    """A class with an alarm. `prefix_class`: the hash of its prefix's last chunk. `came_s`: when a request of it came
    last. `holders`, `others`: |M|, |M'| then. `in_class`, `arrivals`: in the window."""

    prefix_class: int
    since_s: float
    came_s: float
    is_acted_on: bool
    holders: int
    others: int
    in_class: int
    arrivals: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HotspotView:
    """What the detector knows. `raised`, `acted`: alarms so far, and those that were acted on."""

    hotspots: tuple[Hotspot, ...]
    arrivals: int
    prefixes: int
    raised: int
    acted: int


@dataclass(slots=True, kw_only=True)
class Alarm:
    """Of one class. `holders`: M, or what the product had left of it; `candidates`: M and M'. `seen`: where its last
    `seen_count` requests could have gone."""

    prefix_class: int
    depth_chunks: int
    since_s: float
    came_s: float
    holders: Slots
    candidates: Slots
    seen: Slots = 0
    seen_count: int = 0
    in_a_row: int = 0
    is_acted_on: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """Holders that a request was kept from, though one of them had the least score, and their class."""

    prefix_class: int
    slots: Slots


class HotspotDetector:
    """Off until it is set."""

    def __init__(self) -> None:
        self._settings: HotspotSettings | None = None
        self._acts = False
        self._arrivals = Arrivals()
        self._alarms: dict[int, Alarm] = {}
        self._raised = 0
        self._acted = 0

    def set(self, settings: HotspotSettings | None) -> None:
        """From now on; None: off, and all is forgotten."""
        self._settings = settings
        self._acts = settings is not None and settings.acts
        if settings is None:
            self._arrivals.clear()
            self._alarms.clear()
        elif not self._acts:
            for alarm in self._alarms.values():
                alarm.is_acted_on = False

    def slot_reset(self, slot: int) -> None:
        """`slot` begins (again): it holds nothing."""
        for alarm in self._alarms.values():
            alarm.holders &= ~(1 << slot)
            alarm.candidates &= ~(1 << slot)
            alarm.seen &= ~(1 << slot)

    def advance(self, now_s: float) -> None:
        """Time has passed: arrivals leave the window, and alarms may be over."""
        if self._settings is None:
            return
        self._arrivals.forget_before(now_s - self._settings.window_s)
        for alarm in [*self._alarms.values()]:
            if not self._is_above(alarm):
                del self._alarms[alarm.prefix_class]

    def arrived(
        self,
        chain: list[int],
        hits: list[Hit],
        candidates: Slots,
        *,
        is_product: bool,
        now_s: float,
        is_again: bool = False,
    ) -> Alarm | None:
        """A request is about to be placed; the alarm of its class, if there is one. `hits`: who holds how much of it,
        what is on its way there included: those will be holders before another could be. `is_again`: it was counted."""
        if self._settings is None:
            return None
        self._arrivals.forget_before(now_s - self._settings.window_s)
        if is_again:
            return self._refreshed(chain, hits, candidates, is_product=is_product)
        path = self._arrivals.add(chain, now_s)
        of_path = self._refreshed(chain, hits, candidates, is_product=is_product)
        prefix = self._class_of(path, candidates.bit_count())
        if prefix is None or (of_path is not None and of_path.depth_chunks >= prefix.depth_chunks):
            if of_path is not None:
                of_path.came_s = now_s
            return of_path
        return self._raised_for(prefix, _holders(hits, prefix.depth_chunks), candidates, now_s)

    def routed(
        self, alarm: Alarm, candidates: Slots, score: F64, *, is_product: bool, is_again: bool = False
    ) -> LeftOut | None:
        """The second stage: whether this request is kept from the holders. `score`: the product's, of every slot; in
        the shadow, as if nobody but `alarm.holders` held the prefix."""
        holders, others = candidates & alarm.holders, candidates & ~alarm.holders
        if not holders or not others:
            return None
        best, best_other = _best(score, holders), _best(score, others)
        is_drawn = score[best] <= score[best_other]
        if not is_again:
            alarm.in_a_row = alarm.in_a_row + 1 if is_drawn else 0
        if not is_product:
            if not is_drawn:
                alarm.holders |= 1 << best_other  # where the product would have brought the prefix
            return None
        if self._acts and not alarm.is_acted_on and alarm.in_a_row >= 2 * alarm.holders.bit_count():
            alarm.is_acted_on = True
            self._acted += 1
        if alarm.is_acted_on and is_drawn:
            return LeftOut(prefix_class=alarm.prefix_class, slots=holders)
        return None

    def view(self) -> HotspotView:
        """What there is to tell."""
        hotspots = tuple(
            Hotspot(
                prefix_class=alarm.prefix_class,
                since_s=alarm.since_s,
                came_s=alarm.came_s,
                is_acted_on=alarm.is_acted_on,
                holders=alarm.holders.bit_count(),
                others=(alarm.candidates & ~alarm.holders).bit_count(),
                in_class=self._count(alarm.prefix_class),
                arrivals=len(self._arrivals),
            )
            for alarm in self._alarms.values()
        )
        return HotspotView(
            hotspots=hotspots,
            arrivals=len(self._arrivals),
            prefixes=len(self._arrivals.prefixes),
            raised=self._raised,
            acted=self._acted,
        )

    def _refreshed(self, chain: list[int], hits: list[Hit], candidates: Slots, *, is_product: bool) -> Alarm | None:
        """The alarms of all prefixes of a request, seen anew; the deepest that goes on. What a request cannot see,
        since it may not go everywhere, stays as it was known."""
        deepest: Alarm | None = None
        for alarm in [*self._alarms.values()]:
            depth = alarm.depth_chunks
            if len(chain) < depth or chain[depth - 1] != alarm.prefix_class:
                continue
            alarm.candidates |= candidates
            if is_product:
                alarm.holders = alarm.holders & ~candidates | _holders(hits, depth)
            alarm.seen |= candidates
            alarm.seen_count += 1
            if alarm.seen_count == SEEN_COUNT:
                alarm.candidates, alarm.seen, alarm.seen_count = alarm.seen, 0, 0
                alarm.holders &= alarm.candidates
            if not self._is_above(alarm):
                del self._alarms[alarm.prefix_class]
            elif deepest is None or deepest.depth_chunks < depth:
                deepest = alarm
        return deepest

    def _class_of(self, path: list[Prefix], slots: int) -> Prefix | None:
        """The deepest prefix with clearly more than one endpoint's share of the arrivals, or where those part."""
        total, enough = len(self._arrivals), 0
        for prefix in reversed(path):
            if _is_clearly_above(prefix.count, total, 1, slots):
                enough = prefix.count
                break
        if not enough:
            return None
        return next(prefix for prefix in reversed(path) if (enough - prefix.count) * PARTING_SHARE < enough)

    def _raised_for(self, prefix: Prefix, holders: Slots, candidates: Slots, now_s: float) -> Alarm | None:
        """The first stage, for a class without an alarm."""
        count, total = prefix.count, len(self._arrivals)
        is_hot = _is_clearly_above(count, total, holders.bit_count(), candidates.bit_count())
        if not is_hot or not _is_told_apart(count, total) or len(self._alarms) >= ALARMS_MAX:
            return None
        alarm = Alarm(
            prefix_class=prefix.chunk,
            depth_chunks=prefix.depth_chunks,
            since_s=now_s,
            came_s=now_s,
            holders=holders,
            candidates=candidates,
        )
        self._alarms[prefix.chunk] = alarm
        self._raised += 1
        return alarm

    def _is_above(self, alarm: Alarm) -> bool:
        """Whether x/x' > |M|/|M'| holds still."""
        held, others = alarm.holders.bit_count(), (alarm.candidates & ~alarm.holders).bit_count()
        count, total = self._count(alarm.prefix_class), len(self._arrivals)
        if not held or not others or count < IN_CLASS_LEFT_MIN:
            return False
        return _is_told_apart(count, total) and count * others > (total - count) * held

    def _count(self, chunk: int) -> int:
        prefix = self._arrivals.prefixes.get(chunk)
        return 0 if prefix is None else prefix.count

    def check_invariants(self) -> None:
        """Raise `InvariantError` if the state contradicts itself."""
        self._arrivals.check_invariants()
        ensure(len(self._alarms) <= ALARMS_MAX, "more alarms than there may be")
        for alarm in self._alarms.values():
            ensure(not alarm.holders & ~alarm.candidates, "a holder that was never a candidate")
        ensure(self._settings is not None or not (self._alarms or len(self._arrivals)), "off, and not empty")


def _is_clearly_above(count: int, total: int, held: int, slots: int) -> bool:
    """Whether `count` of `total` arrivals are more than the share of `held` of the `slots`, beyond chance."""
    if count < IN_CLASS_MIN or not 0 < held < slots:
        return False
    expected = total * held / slots
    return count > expected + DEVIATIONS * math.sqrt(expected * (slots - held) / slots)


def _is_told_apart(count: int, total: int) -> bool:
    """Whether there are other arrivals than those of the class."""
    others = total - count
    return others >= OTHERS_MIN and others * COMMON_SHARE > total


def _holders(hits: list[Hit], depth_chunks: int) -> Slots:
    """Who holds so much."""
    holders = 0
    for hit in hits:
        if hit.depth >= depth_chunks:
            holders |= hit.slots
    return holders


def _best(score: F64, slots: Slots) -> int:
    """The slot with the least score; of equals the lowest. `slots` is not empty."""
    return min(slots_in(slots), key=lambda slot: score[slot])
