"""The conditions of a pool: what holds, what does not, why, and what to do about it.

The one rule: every condition has a reason for programs, which never changes its name, and a text for people that says
what was found and, where it is not well, which field or command mends it. Pure.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from trimtab_operator.api.policy import PolicyError
from trimtab_operator.children.labels import INSTALL, Component, selector
from trimtab_operator.kube import Object
from trimtab_operator.policy_document import ANSWER_S, wait_s
from trimtab_operator.report.conditions import Finding, condition
from trimtab_operator.report.pool_facts import PoolFacts
from trimtab_operator.report.pool_status import CONTROLLER
from trimtab_operator.report.rollout import is_starting, replicas, why
from trimtab_operator.report.sidecar_conditions import prefix_aware, sidecars_injected
from trimtab_operator.report.store_conditions import store_keeps_keys, store_reachable
from trimtab_operator.report.waiting_conditions import objectives_read, wait_in_force
from trimtab_operator.report.wording import NAMES_SHOWN_MAX, counted, is_or_are, plural, sentence, so_many_are, some
from trimtab_state.documents import PolicyName

_IN_WORDS: Final[dict[PolicyName, str]] = {
    "product": "by the product",
    "round_robin": "round robin",
    "least_request": "by least requests",
}


def pool_conditions(facts: PoolFacts, generation: int) -> list[Object]:
    """All but Accepted, which is of a policy. Without times. `generation`: of the object that will carry them."""
    return [
        condition(type_, status, reason, message, generation) for type_, (status, reason, message) in _findings(facts)
    ]


def accepted(facts: PoolFacts | None, error: PolicyError | None, *, pool: str, winner: str | None) -> Finding:
    """Whether a policy is in force. `winner`: the policy that is, where it is another one."""
    if winner is not None:
        return (
            "False",
            "Conflicted",
            f"The older SchedulingPolicy {winner} is in force for pool {pool}."
            " Delete one of the two, or change spec.targetRef.name here.",
        )
    if error is not None:
        return (
            "False",
            "InvalidField",
            f"{sentence(error)} Until it is put right, the last good configuration keeps running.",
        )
    if facts is None:
        return (
            "False",
            "TargetNotFound",
            f"There is no InferencePool {pool} in this namespace. Create it, or change spec.targetRef.name.",
        )
    return "True", "Accepted", f"In force for pool {pool}."


def picker_ref_problem(facts: PoolFacts) -> str:
    """Why the pool's `endpointPickerRef` does not lead to our pickers; empty: it does, or need not."""
    pool, ours = facts.pool, facts.service_name
    if (service := f"Service/{ours}") in facts.foreign:
        return f"The pickers' Service cannot be made. {_in_the_way(facts, [service])}"
    if pool.picker_name is None:
        if facts.is_standalone:
            return ""
        return f"The pool names no picker, so no gateway asks ours. Set spec.endpointPickerRef.name: {ours}."
    if pool.picker_name != ours:
        return (
            f"spec.endpointPickerRef.name is {pool.picker_name}, which is not ours: gateways ask that one."
            f" Set it to {ours}."
        )
    return ""


def _findings(facts: PoolFacts) -> Iterator[tuple[str, Finding]]:
    yield "ResolvedRefs", _resolved_refs(facts)
    yield "Programmed", _programmed(facts)
    yield "Ready", _ready(facts)
    yield "EndpointsFound", _endpoints_found(facts)
    yield "PrefixAware", prefix_aware(facts)
    if facts.spec.sidecar.inject:
        yield "SidecarsInjected", sidecars_injected(facts)
    yield "StoreReachable", store_reachable(facts)
    if facts.store_evicts:
        yield "StoreKeepsKeys", store_keeps_keys(facts)
    yield "Fallback", _fallback(facts)
    yield "GatewayAttached", _gateway_attached(facts)
    if (held_back := wait_in_force(facts)) is not None:
        yield "WaitInForce", held_back
    if (objectives := objectives_read(facts)) is not None:
        yield "ObjectivesRead", objectives
    if facts.crd_problem:
        yield "CrdsCurrent", ("False", "OutOfDate", facts.crd_problem)


def _resolved_refs(facts: PoolFacts) -> Finding:
    problem = picker_ref_problem(facts)
    if not problem:
        return "True", "ResolvedRefs", f"The pickers are behind the Service {facts.service_name}."
    reason = "ServiceNotOurs" if f"Service/{facts.service_name}" in facts.foreign else "InvalidExtensionRef"
    return "False", reason, problem


def _programmed(facts: PoolFacts) -> Finding:
    if facts.foreign:
        return "False", "NotOurs", f"The pool's own objects cannot all be made. {_in_the_way(facts, facts.foreign)}"
    if facts.apply_errors:
        return "False", "ApplyFailed", f"Refused by the API server: {some(facts.apply_errors)}"
    return "True", "Programmed", "Everything that the pool is to have was applied."


def _ready(facts: PoolFacts) -> Finding:
    ready, total = replicas(facts.picker)
    if facts.picker is None:
        return "False", "NoPickers", "The pickers' Deployment is not there yet: see Programmed."
    if ready == 0:
        text = f"None of {total} pickers is ready{why(facts.picker)}. {_see_pods(facts, 'picker')}"
        if is_starting(facts.picker):
            return "False", "PickersStarting", text
        return "False", "PickersNotReady", text
    if facts.is_standalone and facts.envoy is not None and replicas(facts.envoy)[0] == 0:
        text = f"The pickers are ready, but no Envoy in front is{why(facts.envoy)}. {_see_pods(facts, 'envoy')}"
        if is_starting(facts.envoy):
            return "False", "EnvoyStarting", text
        return "False", "EnvoyNotReady", text
    parts: tuple[tuple[Mapping[str, Any] | None, str, Component], ...]
    parts = ((facts.picker, "pickers", "picker"), (facts.envoy, "Envoys", "envoy"))
    for deployment, what, component in parts:
        if deployment is not None and (reason := why(deployment)):
            text = f"Those {what} that are ready serve, others do not come{reason}. {_see_pods(facts, component)}"
            return "True", "UpdateStuck", text
    if ready < total:
        return "True", "PickersPartlyReady", f"{ready} of {total} pickers are ready{why(facts.picker)}."
    return "True", "Ready", f"{so_many_are(ready, 'picker')} ready."


def _endpoints_found(facts: PoolFacts) -> Finding:
    members = facts.members
    selector = ",".join(f"{key}={value}" for key, value in sorted(facts.pool.selector.items()))
    if problem := facts.pool.selector_problem:
        rest = "no pods are listed"
        if members is not None:
            rest = f"{plural(members.ready, 'endpoint')} of the last good selector go on"
        return (
            "False",
            "InvalidSelector",
            f"In spec.selector.matchLabels of the pool, {problem}. Put it right there; until then {rest}.",
        )
    if members is None:
        return "Unknown", "Listing", "The pods are being listed."
    draining = len(members.endpoints) - members.ready
    if members.pods_matching == 0 and draining:
        return (
            "False",
            "AllDraining",
            f"Every pod that matches {selector} is being deleted; {plural(draining, 'endpoint')} may finish what they"
            " have.",
        )
    if members.pods_matching == 0:
        return (
            "False",
            "NoPodMatches",
            f"No pod matches {selector}. Start the engines, or change the pool's spec.selector.",
        )
    ready = members.ready
    if ready == 0:
        because = f": {counted(facts.unready)}" if facts.unready else ""
        match = "1 pod matches" if members.pods_matching == 1 else f"{members.pods_matching} pods match"
        return "False", "NoPodReady", f"{match} {selector}, none is Ready{because}."
    of_pods = f"{members.pods_ready} of {plural(members.pods_matching, 'pod')} Ready"
    rest = f" (not ready: {counted(facts.unready)})" if facts.unready else ""
    if members.left_out:
        return (
            "True",
            "TooManyEndpoints",
            f"{plural(ready, 'endpoint')}, which is all that a pool can have; {members.left_out} more are left out;"
            f" {of_pods}{rest}. Split the pool in two by spec.selector.",
        )
    return "True", "EndpointsFound", f"{plural(ready, 'endpoint')}; {of_pods}{rest}."


def _fallback(facts: PoolFacts) -> Finding:
    decision = facts.decision
    if decision is None:
        return "Unknown", "NotDecidedYet", "The alarms have not been read yet."
    if facts.told is None or facts.told.policy != decision.policy:
        told = "nothing yet" if facts.told is None else _IN_WORDS[facts.told.policy]
        because = f" ({decision.reason})" if decision.reason else ""
        return (
            "Unknown",
            "NotTold",
            f"To be placed: {_IN_WORDS[decision.policy]}{because}. The pickers have not been told yet, and go on with"
            f" what they were told last: {told}. See StoreReachable.",
        )
    if decision.stage == "active":
        stay = facts.spec.fallback
        return (
            "True",
            "HotspotAlarms",
            f"Round robin: {decision.reason}. Back after {stay.quiet_seconds} s without an alarm, at the earliest"
            f" {stay.minimum_stay_seconds} s after it began. spec.mode: Product ends it at once.",
        )
    if decision.stage == "off":
        reason = "Overridden" if facts.spec.mode != "Auto" else "Disabled"
        return "False", reason, f"{decision.reason}, whatever the detectors say."
    return "False", "Watching", "Placed by the product; the detectors' alarms are watched."


def _gateway_attached(facts: PoolFacts) -> Finding:
    names = gateways(facts.parents)
    if names:
        tls = (
            "over TLS with a self-signed certificate that it must not verify (spec.picker.tls)"
            if facts.spec.picker.tls
            else "in plaintext (spec.picker.tls is false)"
        )
        return (
            "True",
            "Gateway",
            f"Taken up by {some(names)}, which asks the pickers {tls}. Where the gateway lets you: no request timeout"
            " on the route (streams are long), an ext_proc message timeout of at least"
            f" {ANSWER_S + wait_s(facts.spec):.0f} s{_waits(facts)}, and more requests in its circuit breaker for the"
            " pickers than streams at once (Envoy's default is 1,024).",
        )
    if facts.is_standalone:
        return "True", "Standalone", "The pool has an Envoy of its own; no gateway is needed."
    return (
        "False",
        "NoGateway",
        "No gateway has taken the pool up: name it as a backend of an HTTPRoute, or set spec.standalone.enabled.",
    )


def _waits(facts: PoolFacts) -> str:
    """Why a gateway must have so much patience with the pickers."""
    return " (spec.whenFull lets requests wait)" if wait_s(facts.spec) else ""


def gateways(parents: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names of the others in `status.parents`, `Gateway ns/name`."""
    found = []
    for entry in parents:
        reference = entry.get("parentRef") or {}
        if entry.get("controllerName") == CONTROLLER or reference.get("name") in (None, "default"):
            continue  # `default` is what controllers write for "no parent yet".
        namespace = f"{reference['namespace']}/" if reference.get("namespace") else ""
        found.append(f"{reference.get('kind') or 'Gateway'} {namespace}{reference['name']}")
    return found


def _see_pods(facts: PoolFacts, component: Component) -> str:
    key = facts.pool.key
    labels = ",".join(f"{name}={value}" for name, value in selector(key, component).items())
    return f"See: kubectl -n {key.namespace} describe pods -l {labels}, and the same with logs"


def _in_the_way(facts: PoolFacts, names: Sequence[str]) -> str:
    """Whose these objects are and how each of them is got out of the way."""
    namespace, texts = facts.pool.key.namespace, []
    for other in sorted(set(facts.installations.values())):
        made = [name for name in names if facts.installations.get(name) == other]
        if made:
            texts.append(
                f"{some(made)} {is_or_are(made)} of the Trimtab installation in namespace {other} and not touched."
                f" Where that installation is gone: kubectl -n {namespace} annotate {_words(made)} {INSTALL}-"
            )
    foreign = [name for name in names if name not in facts.installations]
    if foreign:
        texts.append(
            f"{some(foreign)} {is_or_are(foreign)} somebody else's and not touched. Nothing can be renamed: make it"
            f" anew under another name where it is needed, then kubectl -n {namespace} delete {_words(foreign)}"
        )
    return "; ".join(texts)


def _words(names: Sequence[str]) -> str:
    """As kubectl takes them; of many, the first, and the text then names the next."""
    return " ".join(name.lower() for name in names[:NAMES_SHOWN_MAX])
