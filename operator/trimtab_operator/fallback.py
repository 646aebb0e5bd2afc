"""Whether a pool is placed by the product or by round robin: what its hotspot alarms lead to. Pure, time is given.

The one rule: the decision follows from the stage and its beginning, which are kept in the control document, and from
the alarms, which are kept in their stream; so an operator that starts again decides as the one before it did.

How alarms count: those of one prefix class that are less than ALARM_SPACING_S apart are one, whichever replicas raised
them. (Counted is the most alarms of the class that lie that far apart, so that neither the order in which they are read
nor where reading began matters.) The counts of all classes within the window are added up.

How the pool moves: to round robin when the count reaches `alarms`; back when no alarm came for `quiet_seconds`, but not
before `minimumStaySeconds`. Alarms from before the return do not count again. Quiet is what was heard as quiet: while
the alarms cannot be read, it does not pass.
"""

import bisect
import math
from dataclasses import dataclass
from typing import Final

from trimtab_operator.api.policy import Fallback, Mode
from trimtab_state.documents import FallbackStage, Policy, PolicyName

ALARM_SPACING_S: Final = 10.0
ALARMS_KEPT_MAX: Final = 4_096
"""Alarms remembered, as many as their stream holds; beyond it the oldest go."""
ALARM_AGE_MAX_S: Final = 3_600.0
"""The widest window that a policy may ask for; older alarms are forgotten, but for the time of the newest."""
CLOCK_SLACK_S: Final = 5.0
"""A clock that goes back by less than this stands still; by more, it was set back, and what is known keeps its age."""
_ASKED: Final[dict[Mode, PolicyName]] = {
    "Product": "product",
    "RoundRobin": "round_robin",
    "LeastRequest": "least_request",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """How the pool is placed now."""

    policy: PolicyName
    stage: FallbackStage
    reason: str
    """For people: why this policy; empty where it is the ordinary one."""
    since_s: float
    """Unix time at which this policy and stage began."""
    changed: bool
    """The policy is another than at the decision before (or than the control document's, at the first)."""

    def document(self, *, batch_limit: int | None) -> Policy:
        """As the control document keeps it."""
        return Policy(
            policy=self.policy,
            reason=self.reason if self.stage == "active" else "",
            batch_limit=batch_limit,
            fallback=self.stage,
            since_s=self.since_s,
        )


class FallbackState:
    """Of one pool. `stored`: the policy of the control document found at the start, None if there was none."""

    def __init__(self, stored: Policy | None = None) -> None:
        self._policy = None if stored is None else stored.policy
        self._stage: FallbackStage | None = None if stored is None else stored.fallback
        self._since_s = 0.0 if stored is None or not math.isfinite(stored.since_s) else stored.since_s
        self._reason = "" if stored is None else stored.reason
        self._alarms: list[tuple[float, str]] = []
        """(Unix time, class), sorted."""
        self._newest_s = -math.inf
        """Of any alarm ever heard."""
        self._deaf_until_s = -math.inf
        """Until then alarms may have been missed."""
        self._heard_s = -math.inf
        """Until then every alarm that could be heard was."""
        self._now_s = -math.inf

    def alarm(self, prefix_class: str, raised_s: float) -> None:
        """A detector has raised an alarm, at some Unix time not after now. In any order; twice is once."""
        entry = (raised_s, prefix_class)
        at = bisect.bisect_left(self._alarms, entry)
        if at == len(self._alarms) or self._alarms[at] != entry:
            self._alarms.insert(at, entry)
            if len(self._alarms) > ALARMS_KEPT_MAX:
                del self._alarms[0]
        self._newest_s = max(self._newest_s, raised_s)

    def heard(self, now_s: float, *, missed: bool = False) -> None:
        """Every alarm until now has been told. `missed`: but some before may never have been written."""
        now_s = self._move_to(now_s)
        self._heard_s = now_s
        if missed:
            self._deaf_until_s = now_s

    def decide(self, now_s: float, settings: Fallback, mode: Mode) -> Decision:
        """What holds from now on. May be called at any time and as often as one likes."""
        now_s = self._move_to(now_s)
        asked = _ASKED.get(mode)
        if asked is not None:
            return self._enter(asked, "off", f"spec.mode is {mode}")
        if not settings.enabled:
            return self._enter("product", "off", "spec.fallback.enabled is false")
        if self._stage == "active":
            if self._is_over(settings):
                return self._enter("product", "watching", f"no hotspot alarm for {settings.quiet_seconds} s")
            return self._enter("round_robin", "active", self._reason)
        if self._stage != "watching":
            return self._enter("product", "watching", "")
        count, classes = self._count(max(self._since_s, now_s - settings.window_seconds))
        if count >= settings.alarms:
            return self._enter("round_robin", "active", _why(count, classes, settings))
        return self._enter("product", "watching", self._reason)

    def _enter(self, policy: PolicyName, stage: FallbackStage, reason: str) -> Decision:
        changed = self._policy not in (None, policy)
        if (self._policy, self._stage) != (policy, stage):
            self._policy, self._stage, self._since_s = policy, stage, self._now_s
        self._reason = reason
        return Decision(policy=policy, stage=stage, reason=reason, since_s=self._since_s, changed=changed)

    def _is_over(self, settings: Fallback) -> bool:
        quiet_from_s = max(self._since_s, self._newest_s, self._deaf_until_s)
        return (
            self._heard_s - quiet_from_s >= settings.quiet_seconds
            and self._now_s - self._since_s >= settings.minimum_stay_seconds
        )

    def _count(self, after_s: float) -> tuple[int, int]:
        """(alarms, classes) that came later than that."""
        counted_s: dict[str, float] = {}
        count = 0
        for raised_s, prefix_class in self._alarms[bisect.bisect_right(self._alarms, (after_s, "\uffff")) :]:
            if raised_s - counted_s.get(prefix_class, -math.inf) >= ALARM_SPACING_S:
                counted_s[prefix_class] = raised_s
                count += 1
        return count, len(counted_s)

    def _move_to(self, now_s: float) -> float:
        if now_s >= self._now_s - CLOCK_SLACK_S:
            now_s = max(now_s, self._now_s)
        else:
            step_s = now_s - self._now_s
            self._since_s += step_s
            self._newest_s += step_s
            self._deaf_until_s += step_s
            self._heard_s += step_s
            self._alarms = [(raised_s + step_s, prefix_class) for raised_s, prefix_class in self._alarms]
        self._now_s = now_s
        # Nothing can have happened later than now; if a clock says so, it was now.
        self._since_s = min(self._since_s, now_s)
        if self._newest_s > now_s:
            self._newest_s = now_s
            self._alarms = sorted((min(raised_s, now_s), prefix_class) for raised_s, prefix_class in self._alarms)
        forgotten = bisect.bisect_left(self._alarms, (now_s - ALARM_AGE_MAX_S, ""))
        del self._alarms[:forgotten]
        return now_s


def _why(count: int, classes: int, settings: Fallback) -> str:
    of = "one prefix class" if classes == 1 else f"{classes} prefix classes"
    alarms = "1 hotspot alarm" if count == 1 else f"{count} hotspot alarms"
    return f"{alarms} of {of} within {settings.window_seconds} s"
