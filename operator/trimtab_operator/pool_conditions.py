"""The conditions of a pool: what holds, what does not, why, and what to do about it.

The one rule: every condition has a reason for programs, which never changes its name, and a text for people that says
what was found and, where it is not well, which field or command mends it. Pure.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from trimtab_operator.api.policy import PolicyError
from trimtab_operator.children.labels import INSTALL, Component, selector
from trimtab_operator.conditions import Truth, condition
from trimtab_operator.injection.marks import ENABLED, INJECT
from trimtab_operator.kube import Object
from trimtab_operator.policy_document import ANSWER_S, wait_s
from trimtab_operator.pool_facts import PoolFacts
from trimtab_operator.pool_status import CONTROLLER
from trimtab_operator.store_eviction import FIELD, SAFE

NAMES_SHOWN_MAX: Final = 3
Finding = tuple[Truth, str, str]
"""Status, reason, message."""


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
            f"{_sentence(error)} Until it is put right, the last good configuration keeps running.",
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
    yield "PrefixAware", _prefix_aware(facts)
    if facts.spec.sidecar.inject:
        yield "SidecarsInjected", _sidecars_injected(facts)
    yield "StoreReachable", _store_reachable(facts)
    if facts.store_evicts:
        yield "StoreKeepsKeys", _store_keeps_keys(facts)
    yield "Fallback", _fallback(facts)
    yield "GatewayAttached", _gateway_attached(facts)
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
        return "False", "ApplyFailed", f"Refused by the API server: {_some(facts.apply_errors)}"
    return "True", "Programmed", "Everything that the pool is to have was applied."


def _ready(facts: PoolFacts) -> Finding:
    ready, total = replicas(facts.picker)
    if facts.picker is None:
        return "False", "NoPickers", "The pickers' Deployment is not there yet: see Programmed."
    if ready == 0:
        text = f"None of {total} pickers is ready{_why(facts.picker)}. {_see_pods(facts, 'picker')}"
        if _is_starting(facts.picker):
            return "False", "PickersStarting", text
        return "False", "PickersNotReady", text
    if facts.is_standalone and facts.envoy is not None and replicas(facts.envoy)[0] == 0:
        text = f"The pickers are ready, but no Envoy in front is{_why(facts.envoy)}. {_see_pods(facts, 'envoy')}"
        if _is_starting(facts.envoy):
            return "False", "EnvoyStarting", text
        return "False", "EnvoyNotReady", text
    parts: tuple[tuple[Mapping[str, Any] | None, str, Component], ...]
    parts = ((facts.picker, "pickers", "picker"), (facts.envoy, "Envoys", "envoy"))
    for deployment, what, component in parts:
        if deployment is not None and (why := _why(deployment)):
            text = f"Those {what} that are ready serve, others do not come{why}. {_see_pods(facts, component)}"
            return "True", "UpdateStuck", text
    if ready < total:
        return "True", "PickersPartlyReady", f"{ready} of {total} pickers are ready{_why(facts.picker)}."
    return "True", "Ready", f"{_of(ready, 'picker')} ready."


def _endpoints_found(facts: PoolFacts) -> Finding:
    members = facts.members
    selector = ",".join(f"{key}={value}" for key, value in sorted(facts.pool.selector.items()))
    if problem := facts.pool.selector_problem:
        rest = "no pods are listed"
        if members is not None:
            rest = f"{_plural(members.ready, 'endpoint')} of the last good selector go on"
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
            f"Every pod that matches {selector} is being deleted; {_plural(draining, 'endpoint')} may finish what they"
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
        because = f": {_counts(facts.unready)}" if facts.unready else ""
        match = "1 pod matches" if members.pods_matching == 1 else f"{members.pods_matching} pods match"
        return "False", "NoPodReady", f"{match} {selector}, none is Ready{because}."
    of_pods = f"{members.pods_ready} of {_plural(members.pods_matching, 'pod')} Ready"
    rest = f" (not ready: {_counts(facts.unready)})" if facts.unready else ""
    if members.left_out:
        return (
            "True",
            "TooManyEndpoints",
            f"{_plural(ready, 'endpoint')}, which is all that a pool can have; {members.left_out} more are left out;"
            f" {of_pods}{rest}. Split the pool in two by spec.selector.",
        )
    return "True", "EndpointsFound", f"{_plural(ready, 'endpoint')}; {of_pods}{rest}."


def _prefix_aware(facts: PoolFacts) -> Finding:
    fleet = facts.fleet
    if fleet is None or fleet.store_error or facts.members is None:
        return "Unknown", "StoreUnread", "What the engines have cached is not known yet: see StoreReachable."
    members = fleet.beating + len(fleet.silent)
    if members == 0:
        return "Unknown", "NoEndpoints", "There are no endpoints: see EndpointsFound."
    if fleet.beating == 0:
        remedy = "Set spec.sidecar.inject, or add the sidecar to the pods yourself."
        if facts.spec.sidecar.inject:
            remedy = "See SidecarsInjected; where that is well, see the sidecars' logs."
        return (
            "False",
            "NoSidecars",
            f"No sidecar is heard from any of {_plural(members, 'endpoint')}: routed by load, and by a guess of what is"
            f" cached. {remedy}",
        )
    guessed = fleet.guessed + len(fleet.silent)
    away = _away(facts)
    if fleet.serving == 0 and not fleet.silent:
        return "Unknown", "NoneServing", f"No engine serves now: {away}."
    because = [f"{count} x {reason}" for reason, count in fleet.approximate.items()]
    if fleet.loading:
        because.append(f"{fleet.loading} x no model card yet")
    if fleet.silent:
        because.append(f"{len(fleet.silent)} x no sidecar heard ({_some(fleet.silent)})")
    tail = f" Not serving: {away}." if away else ""
    if fleet.exact == 0:
        if fleet.loading and not fleet.approximate and not fleet.silent:
            return "False", "NoModelCard", f"No model card yet: approximate mode.{tail}"
        return "False", "Approximate", f"Every endpoint is in approximate mode: {'; '.join(because)}.{tail}"
    if guessed:
        text = f"{guessed} of {guessed + fleet.exact} endpoints approximate: {'; '.join(because)}.{tail}"
        return "True", "PartlyApproximate", text
    return "True", "Exact", f"What is cached is known exactly on {_plural(fleet.exact, 'endpoint')}.{tail}"


def _sidecars_injected(facts: PoolFacts) -> Finding:
    namespace = facts.pool.key.namespace
    if not facts.namespace_opted_in:
        return (
            "False",
            "NamespaceNotLabelled",
            f"spec.sidecar.inject is set, but the namespace has not opted in: kubectl label namespace {namespace}"
            f" {INJECT}={ENABLED}",
        )
    members = facts.members
    if members is None:
        return "Unknown", "Listing", "The pods are being listed."
    pods = members.pods_injected + members.pods_not_injected
    if members.pods_not_injected:
        return (
            "False",
            "PodsNotInjected",
            f"{members.pods_not_injected} of {_plural(pods, 'pod')} started without the"
            f" sidecar. Recreate them (kubectl -n {namespace} rollout restart, of what runs them); running pods are"
            " never touched. Where new pods stay without it, the webhook is not reached: see the Deployment"
            " trimtab-webhook in the operator's namespace.",
        )
    if not pods:
        return "Unknown", "NoPods", "There are no pods yet: see EndpointsFound."
    return "True", "SidecarsInjected", f"{_plural(members.pods_injected, 'pod')} with the sidecar."


def _store_reachable(facts: PoolFacts) -> Finding:
    error = facts.fleet.store_error if facts.fleet is not None else ""
    if error:
        return (
            "False",
            "StoreUnavailable",
            f"{_sentence(error)} Routing goes on with what the pickers know; changes wait until the store is back.",
        )
    if facts.store_problem:
        return "False", "NoAccess", _sentence(facts.store_problem)
    if facts.fleet is None:
        return "Unknown", "NotReadYet", "The store has not been read yet."
    if not facts.is_own_store_user:
        return "True", "SharedLogin", " ".join(["The pool has a copy of the operator's own login.", *facts.store_notes])
    connected, total = facts.fleet.pickers, replicas(facts.picker)[1]
    answers = f"The store answers; {_of(connected, 'picker')} connected."
    if connected < total:
        answers = f"The store answers; of {total} pickers {connected} connected: see the logs of the others."
    return "True", "StoreReachable", " ".join([answers, *facts.store_notes])


def _store_keeps_keys(facts: PoolFacts) -> Finding:
    return (
        "False",
        "Evicts",
        f"The store's {FIELD} is {facts.store_evicts}: when its memory is full it throws away what operator, pickers"
        f" and sidecars have written, and the pool loses endpoints and what is known of caches. CONFIG SET {FIELD}"
        f" {SAFE}, and the same in the server's configuration (of a hosted store: in its parameters).",
    )


def _fallback(facts: PoolFacts) -> Finding:
    decision = facts.decision
    if decision is None:
        return "Unknown", "NotDecidedYet", "The alarms have not been read yet."
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
            f"Taken up by {_some(names)}, which asks the pickers {tls}. Where the gateway lets you: no request timeout"
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


def replicas(deployment: Mapping[str, Any] | None) -> tuple[int, int]:
    """(ready, wanted) of a Deployment."""
    if deployment is None:
        return 0, 0
    status, spec = deployment.get("status") or {}, deployment.get("spec") or {}
    wanted = spec.get("replicas")
    return int(status.get("readyReplicas") or 0), 1 if wanted is None else int(wanted)


def _why(deployment: Mapping[str, Any]) -> str:
    """What Kubernetes itself says is wrong with a Deployment."""
    for found in (deployment.get("status") or {}).get("conditions") or ():
        is_bad = (found.get("type"), found.get("status")) in (("ReplicaFailure", "True"), ("Progressing", "False"))
        if is_bad and found.get("message"):
            return f" ({str(found['message'])[:300]})"
    return ""


def _is_starting(deployment: Mapping[str, Any]) -> bool:
    """Whether Kubernetes still takes it for a start: no replica was ever there, and it has not given up on them."""
    conditions = (deployment.get("status") or {}).get("conditions") or ()
    found = {entry.get("type"): (entry.get("status"), entry.get("reason")) for entry in conditions}
    status, reason = found.get("Progressing", ("True", ""))
    has_failed = found.get("ReplicaFailure", ("False", ""))[0] == "True"
    return not has_failed and status == "True" and reason != "NewReplicaSetAvailable"


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
                f"{_some(made)} {_is(made)} of the Trimtab installation in namespace {other} and not touched. Where"
                f" that installation is gone: kubectl -n {namespace} annotate {_words(made)} {INSTALL}-"
            )
    foreign = [name for name in names if name not in facts.installations]
    if foreign:
        texts.append(
            f"{_some(foreign)} {_is(foreign)} somebody else's and not touched. Nothing can be renamed: make it anew"
            f" under another name where it is needed, then kubectl -n {namespace} delete {_words(foreign)}"
        )
    return "; ".join(texts)


def _words(names: Sequence[str]) -> str:
    """As kubectl takes them; of many, the first, and the text then names the next."""
    return " ".join(name.lower() for name in names[:NAMES_SHOWN_MAX])


def _sentence(text: object) -> str:
    """With a full stop, and not two where the text is another's that has one."""
    return str(text) if str(text).endswith((".", "!", "?", "…")) else f"{text}."


def _away(facts: PoolFacts) -> str:
    fleet = facts.fleet
    assert fleet is not None
    counts = {
        "draining": fleet.draining,
        "asleep": fleet.asleep,
        "engine not reached by its sidecar": fleet.unreachable,
    }
    return _counts({name: count for name, count in counts.items() if count})


def _counts(counts: Mapping[str, int]) -> str:
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    shown = [f"{count} {reason}" for reason, count in ordered[:NAMES_SHOWN_MAX]]
    rest = sum(count for _, count in ordered[NAMES_SHOWN_MAX:])
    return ", ".join(shown + ([f"{rest} for other reasons"] if rest else []))


def _some(names: Sequence[str]) -> str:
    more = len(names) - NAMES_SHOWN_MAX
    return ", ".join(names[:NAMES_SHOWN_MAX]) + (f" and {more} more" if more > 0 else "")


def _is(names: Sequence[str]) -> str:
    return "is" if len(names) == 1 else "are"


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _of(count: int, noun: str) -> str:
    return f"1 {noun} is" if count == 1 else f"{count} {noun}s are"
