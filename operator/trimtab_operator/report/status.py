"""The status of a SchedulingPolicy: made from what is known of its pool, and written where it has changed.

The one rule: the status says what is, not what was wanted, and is written by server-side apply to `/status` under our
field manager and only if something in it is new. What it says is decided in `pool_conditions`.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from trimtab_operator.api.policy import PolicyError
from trimtab_operator.api.policy_status import (
    ActivePolicy,
    Condition,
    EndpointCounts,
    InjectionCounts,
    ModelCards,
    PickerCounts,
    PolicyStatus,
)
from trimtab_operator.events import EventType
from trimtab_operator.kube import POLICIES, Kube, Object
from trimtab_operator.report.conditions import condition, rfc3339, turned, with_times
from trimtab_operator.report.fleet_report import FleetReport
from trimtab_operator.report.picker_versions import shown_version
from trimtab_operator.report.pool_conditions import accepted, pool_conditions
from trimtab_operator.report.pool_facts import PoolFacts
from trimtab_operator.report.rollout import replicas
from trimtab_state.documents import PolicyName

OUR_TYPES: Final = frozenset(
    {
        "Accepted",
        "ResolvedRefs",
        "Programmed",
        "Ready",
        "EndpointsFound",
        "PrefixAware",
        "SidecarsInjected",
        "StoreReachable",
        "StoreKeepsKeys",
        "Fallback",
        "GatewayAttached",
        "WaitInForce",
        "ObjectivesRead",
        "CrdsCurrent",
    }
)
"""Conditions that the operator writes; one of them that is no longer said goes."""
_QUIET_TYPES: Final = frozenset({"PrefixAware", "GatewayAttached", "WaitInForce"})
"""Of which no Events are made: they move with every engine that starts, or are others' news."""
_LOUD: Final = frozenset({"OtherPorts"})
"""Reasons of a quiet condition that are news all the same: requests fail."""
_STARTING: Final = frozenset({"NoPickers", "PickersStarting", "EnvoyStarting"})
"""No news of a pool that starts; of one that was ready, they are."""
_BAD_WHEN_TRUE: Final = frozenset({"Fallback"})
_BAD_THOUGH_TRUE: Final = frozenset({"SeveralPools", "UpdateStuck"})
"""Reasons of a condition that holds, and somebody should know all the same."""
_ACTIVE: Final[dict[PolicyName, ActivePolicy]] = {
    "product": "Product",
    "round_robin": "RoundRobin",
    "least_request": "LeastRequest",
}
REASON_CHARS_MAX: Final = 1_024


@dataclass(frozen=True, slots=True, kw_only=True)
class Announcement:
    """An Event to be posted: arguments of `EventPoster.post`."""

    topic: str
    reason: str
    note: str
    type_: EventType


def policy_status(
    policy: Mapping[str, Any],
    *,
    facts: PoolFacts | None,
    error: PolicyError | None = None,
    winner: str | None = None,
    now_s: float,
) -> Object:
    """The status of this policy as it is to be. Pure.

    `facts`: of its pool, None if there is none. `error`: why its spec cannot be used; `facts.spec` is what runs
    instead. `winner`: the policy in force for the pool, where that is another one.
    """
    generation = int(policy["metadata"].get("generation", 1))
    spec = policy.get("spec")
    reference = spec.get("targetRef") if isinstance(spec, Mapping) else None
    pool = str(reference.get("name", "")) if isinstance(reference, Mapping) else ""
    is_in_force = facts is not None and winner is None
    status, reason, message = accepted(facts, error, pool=pool, winner=winner)
    conditions = [condition("Accepted", status, reason, message, generation)]
    if facts is not None and is_in_force:
        conditions += pool_conditions(facts, generation)
    found = (policy.get("status") or {}).get("conditions") or []
    timed = with_times(conditions, found, now=rfc3339(now_s))
    body = PolicyStatus(
        observed_generation=generation,
        conditions=[msgspec.convert(entry, Condition) for entry in timed],
    )
    if facts is not None and is_in_force:
        body = _counted(body, facts)
    return body.body()


def is_changed(policy: Mapping[str, Any], status: Mapping[str, Any]) -> bool:
    """Whether that status says anything that the policy's own, as read, does not."""
    found = dict(policy.get("status") or {})
    theirs, ours = found.pop("conditions", None) or [], status.get("conditions") or []
    if found != {key: value for key, value in status.items() if key != "conditions"}:
        return True
    # Conditions of somebody else's do not concern us; one of ours that is not said any more has to go.
    said = {entry["type"] for entry in ours}
    kept = [entry for entry in theirs if entry["type"] in OUR_TYPES or entry["type"] in said]
    return _by_type(kept) != _by_type(ours)


async def write_status(kube: Kube, policy: Mapping[str, Any], status: Mapping[str, Any]) -> bool:
    """True if it was new and was written. Raises KubeError: NotFound if the policy is gone meanwhile.

    One that was made again meanwhile under its name gets the status of the one before it, until its own comes; the
    API server ignores a uid here.
    """
    if not is_changed(policy, status):
        return False
    metadata = policy["metadata"]
    body: Object = {
        "apiVersion": POLICIES.api_version,
        "kind": POLICIES.kind,
        "metadata": {"name": metadata["name"], "namespace": metadata["namespace"]},
        "status": dict(status),
    }
    await kube.apply(body, subresource="status")
    return True


def announcements(wanted: Iterable[Mapping[str, Any]], found: Sequence[Mapping[str, Any]] | None) -> list[Announcement]:
    """What deserves an Event when conditions become `wanted`. `found`: those before, None or empty: the first time,
    when only what is not well is news."""
    news = []
    for before, now in turned(wanted, found or ()):
        type_, status = str(now["type"]), str(now["status"])
        if (type_ in _QUIET_TYPES and now["reason"] not in _LOUD) or status == "Unknown":
            continue
        is_well = (status == "False") if type_ in _BAD_WHEN_TRUE else (status == "True")
        is_well &= now["reason"] not in _BAD_THOUGH_TRUE
        if is_well and (before is None or before.get("status") in ("Unknown", status)):
            continue
        if now["reason"] in _STARTING and (before is None or before.get("status") != "True"):
            continue
        if type_ == "Fallback" and is_well:
            reason = "FallbackEnded"
        elif type_ == "Fallback":
            reason = "FallbackStarted"
        else:
            reason = str(now["reason"])
        news.append(
            Announcement(topic=type_, reason=reason, note=str(now["message"]), type_="Normal" if is_well else "Warning")
        )
    return news


def _counted(body: PolicyStatus, facts: PoolFacts) -> PolicyStatus:
    ready, total = replicas(facts.picker)
    version = shown_version(facts.picker, facts.picker_versions)
    counted: dict[str, Any] = {
        "pool": facts.pool.key.name,
        "pickers": PickerCounts(ready=ready, total=total, shown=f"{ready}/{total}", version=version),
    }
    if facts.installation and not facts.crd_problem:
        # An older CRD has no such field, and the API server would refuse the whole status.
        counted["installation"] = facts.installation
    members, fleet, told = facts.members, facts.fleet, facts.told
    if members is not None:
        counted["endpoints"] = EndpointCounts(ready=members.ready, total=max(members.ready, members.total))
        counted["injected"] = InjectionCounts(
            pods=members.pods_injected,
            not_injected=members.pods_not_injected if facts.spec.sidecar.inject else 0,
        )
    if fleet is not None and not fleet.store_error and members is not None:
        counted["model_cards"] = ModelCards(
            exact=fleet.exact, approximate=fleet.guessed + len(fleet.silent), reason=_guess_reason(fleet)
        )
    if told is not None:
        counted["active_policy"] = _ACTIVE[told.policy]
        if math.isfinite(told.since_s) and told.since_s > 0:
            counted["active_since"] = rfc3339(told.since_s)
    return msgspec.structs.replace(body, **counted)


def _guess_reason(fleet: FleetReport) -> str:
    reasons = list(fleet.approximate)
    if fleet.loading:
        reasons.append("no model card yet")
    if fleet.silent:
        reasons.append("no sidecar heard")
    return "; ".join(reasons)[:REASON_CHARS_MAX]


def _by_type(conditions: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    return {entry["type"]: dict(entry) for entry in conditions}
