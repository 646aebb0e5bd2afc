"""The policy of the control document: what a SchedulingPolicy asks for, with what was decided about it.

The one rule: a change of units and names, and nothing else. What the pickers do with it is theirs.
"""

from collections.abc import Sequence
from typing import Final

import msgspec

from trimtab_operator.api.policy import PolicySpec
from trimtab_operator.api.request_terms import Network
from trimtab_operator.fallback import Decision
from trimtab_state import request_class as state
from trimtab_state.documents import HotspotMode, NetworkTerm, Policy
from trimtab_state.request_class import FAIRNESS_HEADER, OBJECTIVE_HEADER

MILLI_OF_PERCENT: Final = 10
ANSWER_S: Final = 1.0
"""How long an answer of a picker may take, besides what a request may wait for a place."""
_HOTSPOTS: Final[dict[str, HotspotMode]] = {"Off": "off", "Alarm": "alarm", "Act": "act"}
_NETWORK: Final[dict[Network, NetworkTerm]] = {"Off": "off", "Annotation": "annotation", "Measured": "measured"}


def policy_document(
    decision: Decision,
    spec: PolicySpec,
    *,
    objectives: Sequence[state.Objective] = (),
    told_wait_s: float | None = None,
) -> Policy:
    """As the control document keeps it. `told_wait_s`: how long requests may wait yet, None: as long as is asked."""
    return msgspec.structs.replace(
        decision.document(batch_limit=spec.batch_limit),
        hotspots=_HOTSPOTS[spec.hotspots.mode],
        hotspot_window_s=float(spec.hotspots.window_seconds),
        overflow=_overflow(spec, wait_s(spec) if told_wait_s is None else told_wait_s),
        log_above_tokens=spec.log_above_tokens or 0,
        network=_NETWORK[spec.network],
        class_header=spec.class_header.lower(),
        classes=tuple(
            state.RequestClass(
                name=each.name,
                weight_milli=each.weight_percent * MILLI_OF_PERCENT,
                priority=each.priority,
                objectives=tuple(each.objectives),
                models=tuple(each.models),
                experts=tuple(
                    state.ExpertShare(first=run.first, last=run.last, share=run.share) for run in each.experts
                ),
            )
            for each in spec.classes
        ),
        objectives=tuple(objectives),
        expert_costs=tuple(
            state.EndpointExperts(
                endpoints=tuple(each.endpoints),
                costs=tuple(
                    state.ExpertCost(first=run.first, last=run.last, cost_milli=run.percent * MILLI_OF_PERCENT)
                    for run in each.costs
                ),
            )
            for each in spec.expert_costs
        ),
    )


def shown_headers(spec: PolicySpec) -> tuple[str, ...]:
    """Request headers by which the pickers decide under this policy, in lower case."""
    names = []
    if spec.classes:
        names += [spec.class_header.lower(), OBJECTIVE_HEADER]
    if spec.when_full.action == "Wait":
        # Whether there are objectives or not: they come and go, and no Envoy is to be replaced for that.
        names += [OBJECTIVE_HEADER, spec.when_full.tenant_header.lower() or FAIRNESS_HEADER]
    return tuple(dict.fromkeys(name for name in names if name))


def wait_s(spec: PolicySpec) -> float:
    """How long a request may wait in a picker."""
    return float(spec.when_full.wait_seconds) if spec.when_full.action == "Wait" else 0.0


def _overflow(spec: PolicySpec, told_wait_s: float) -> state.Overflow:
    if spec.when_full.action != "Wait":
        return state.Overflow()
    return state.Overflow(
        wait_s=told_wait_s,
        waiting_max=spec.when_full.requests_max,
        tenant_header=spec.when_full.tenant_header.lower(),
    )
