"""The last decisions, for `trimtab explain`: what each endpoint had to offer, and why the winner won; and the last
requests that were refused.

The one rule: a decision is kept as the scheduler gave it and turned into JSON only when somebody asks, so that keeping
one costs next to nothing. No prompt text, only numbers and names.

Bounds: `DECISIONS_MAX` decisions and as many refusals, the oldest of each going first, so that a storm of refusals
hides no decision; `ENDPOINTS_SHOWN_MAX` endpoints of each, best first.
"""

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import numpy as np

from trimtab_core.placement import Bools, Placement
from trimtab_extproc.request_classes import ShownPriority

DECISIONS_MAX = 256
ENDPOINTS_SHOWN_MAX = 64
REQUEST_ID_CHARS_MAX = 128
"""Of a request's id that is kept: clients choose them."""
AT_ITS_LIMIT = "at its limit"
NO_NUMBERS = dict.fromkeys(("hit_tokens", "queued_tokens", "p_tokens", "batch", "weighted_batch", "score"))
"""Of an endpoint that was no candidate."""


class Asked(msgspec.Struct, frozen=True, kw_only=True, eq=False, gc=False):
    """What was asked for, and by which rules the answer was found."""

    time_s: float
    """Of the answer, by the process's monotonic clock."""
    request_id: str
    kind: str
    model: str
    policy: str
    request_class: str
    """Empty: of none."""
    priority: ShownPriority | None
    """None: it has none, and asked for none."""
    waited_s: float
    """For a place, before the answer."""


class Decision(msgspec.Struct, frozen=True, kw_only=True, eq=False, gc=False):
    """One choice."""

    asked: Asked
    endpoint: str
    placement: Placement
    approximate: str | None
    """Why the prefix was not known exactly; None: it was."""
    approximate_detail: str
    """The same in the words of whoever found it."""
    candidates: Bools
    excluded: Mapping[int, str]
    """Members of the pool that could not be chosen at all, and why."""
    moved_from: tuple[str, ...] = ()
    """Endpoints chosen first, which other pickers had chosen at the same moment."""


class Refusal(msgspec.Struct, frozen=True, kw_only=True, eq=False, gc=False):
    """One request that got no endpoint."""

    asked: Asked
    status: int
    reason: str
    """As in `trimtab_rejected_total`."""
    message: str
    """What the client was told."""
    candidates: Bools
    """Those that could have taken it, and were at their limits."""
    excluded: Mapping[int, str]


class DecisionLog:
    """A ring of decisions, and one of refusals."""

    def __init__(self, *, name_of: Callable[[int], str | None]) -> None:
        self._ring: deque[Decision] = deque(maxlen=DECISIONS_MAX)
        self._refusals: deque[Refusal] = deque(maxlen=DECISIONS_MAX)
        self._name_of = name_of

    def add(self, decision: Decision) -> None:
        """Keep one more."""
        self._ring.append(decision)

    def add_refusal(self, refusal: Refusal) -> None:
        """Keep one more."""
        self._refusals.append(refusal)

    def to_json(self, *, now_s: float, count: int, request_id: str | None = None) -> list[dict[str, Any]]:
        """The newest first, at most `count`; only the one of `request_id` if that is given."""
        both: list[Decision | Refusal] = [*reversed(self._ring), *reversed(self._refusals)]
        both.sort(key=lambda entry: -entry.asked.time_s)
        chosen = [entry for entry in both if request_id is None or entry.asked.request_id == request_id]
        return [
            self._entry(entry, now_s) if isinstance(entry, Decision) else self._refused(entry, now_s)
            for entry in chosen[:count]
        ]

    def _refused(self, refusal: Refusal, now_s: float) -> dict[str, Any]:
        """The keys of a decision, as far as there is something to say, and `refused`."""
        full = dict.fromkeys(np.flatnonzero(refusal.candidates).tolist(), AT_ITS_LIMIT)
        return {
            **_asked(refusal.asked, now_s),
            "endpoint": None,
            "refused": {"status": refusal.status, "reason": refusal.reason, "message": refusal.message},
            "candidate_count": 0,
            "endpoints": self._excluded_rows({**full, **refusal.excluded}, ENDPOINTS_SHOWN_MAX),
        }

    def _entry(self, decision: Decision, now_s: float) -> dict[str, Any]:
        placement = decision.placement
        shown = np.flatnonzero(decision.candidates)
        shown = shown[shown < len(placement.score)]
        best_first = shown[np.argsort(placement.score[shown], kind="stable")]
        return {
            **_asked(decision.asked, now_s),
            "endpoint": decision.endpoint,
            "moved_from": list(decision.moved_from),
            "reason": placement.reason,
            "hotspot": None if placement.hotspot is None else f"{placement.hotspot:016x}",
            "approximate": decision.approximate,
            "approximate_detail": decision.approximate_detail or None,
            "prompt_tokens": placement.prompt_tokens,
            "p_own_tokens": placement.p_own_tokens,
            "alternatives": [name for slot in placement.alternatives if (name := self._name_of(slot)) is not None],
            "candidate_count": int(np.count_nonzero(placement.batch[shown])),
            "endpoints": [
                *(self._row(decision, int(slot)) for slot in best_first[:ENDPOINTS_SHOWN_MAX]),
                *self._excluded_rows(decision.excluded, ENDPOINTS_SHOWN_MAX - len(best_first)),
            ],
        }

    def _excluded_rows(self, excluded: Mapping[int, str], count: int) -> list[dict[str, Any]]:
        """The endpoints that were no candidates; numbers are not known for them."""
        return [
            {"endpoint": self._name(slot), **NO_NUMBERS, "verdict": f"no candidate: {why}"}
            for slot, why in list(excluded.items())[: max(0, count)]
        ]

    def _name(self, slot: int) -> str:
        return self._name_of(slot) or f"gone (slot {slot})"

    def _row(self, decision: Decision, slot: int) -> dict[str, Any]:
        placement = decision.placement
        if not placement.batch[slot]:  # the scheduler itself left it out, and has no terms of it
            return {"endpoint": self._name(slot), **NO_NUMBERS, "verdict": f"no candidate: {AT_ITS_LIMIT}"}
        score = float(placement.score[slot])
        is_winner = slot == placement.slot
        is_score = decision.asked.policy != "round_robin" and np.isfinite(score)
        return {
            "endpoint": self._name(slot),
            "hit_tokens": int(placement.hit_tokens[slot]),
            "queued_tokens": round(float(placement.queued_tokens[slot]), 1),
            "p_tokens": round(float(placement.p_tokens[slot]), 1),
            "batch": int(placement.batch[slot]),
            "weighted_batch": round(float(placement.weighted_batch[slot]), 3),
            "terms": _terms(placement, slot),
            "score": round(score, 1) if is_score else None,
            # Round robin scores turns: 0 where the endpoint still had its own in the round, else 1.
            "turn": ("had" if score else "open") if decision.asked.policy == "round_robin" else None,
            "verdict": "won: " + placement.reason if is_winner else _why_not(decision, slot),
        }


def _asked(asked: Asked, now_s: float) -> dict[str, Any]:
    return {
        "age_s": round(now_s - asked.time_s, 3),
        "request_id": asked.request_id,
        "kind": asked.kind,
        "model": asked.model,
        "policy": asked.policy,
        "class": asked.request_class or None,
        **_priority(asked.priority),
        "waited_s": round(asked.waited_s, 3) if asked.waited_s else None,
    }


def _priority(shown: ShownPriority | None) -> dict[str, Any]:
    if shown is None:
        return {"objective": None, "objective_known": None, "priority": 0}
    is_known = shown.is_known if shown.objective else None
    return {"objective": shown.objective or None, "objective_known": is_known, "priority": shown.priority}


def _terms(placement: Placement, slot: int) -> dict[str, float]:
    """The extra terms that acted on the slot; those that changed nothing are left out."""
    terms = {}
    factor, network = float(placement.expert_factor[slot]), float(placement.network_tokens[slot])
    linear = float(placement.p_linear_tokens[slot])
    if factor != 1.0:
        terms["expert_factor"] = round(factor, 4)
    if network:
        terms["network_tokens"] = round(network, 3)
    if linear != placement.p_tokens[slot]:
        terms["p_before_log_tokens"] = round(linear, 1)
    if placement.weighted_batch[slot] != placement.batch[slot]:
        terms["weighted_batch"] = round(float(placement.weighted_batch[slot]), 3)
    return terms


def _why_not(decision: Decision, slot: int) -> str:
    """Why a candidate lost, in words."""
    placement, won = decision.placement, decision.placement.slot
    if slot in placement.left_out:
        return "no candidate: holds the prefix of a hotspot"
    if decision.asked.policy == "round_robin":
        return "had its turn in this round" if placement.score[slot] else "its turn comes later in this round"
    if placement.score[slot] <= placement.score[won]:
        more = placement.batch[slot] > placement.batch[won]
        return "equal score, more requests" if more else "equal score, lost the draw"
    reasons = []
    if decision.asked.policy == "product" and placement.p_tokens[slot] > placement.p_tokens[won]:
        if placement.hit_tokens[slot] < placement.hit_tokens[won]:
            reasons.append("holds less of the prompt")
        if placement.queued_tokens[slot] > placement.queued_tokens[won]:
            reasons.append("more queued tokens")
        if placement.network_tokens[slot] > placement.network_tokens[won]:
            reasons.append("further away")
        if placement.expert_factor[slot] > placement.expert_factor[won]:
            reasons.append("slower experts")
    if placement.batch[slot] > placement.batch[won]:
        reasons.append("more requests")
    elif placement.weighted_batch[slot] > placement.weighted_batch[won]:
        reasons.append("heavier requests")
    return "lost: " + (", ".join(reasons) or "higher score")
