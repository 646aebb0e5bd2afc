"""What the status says of a pool's sidecars: whether they are in its pods, and whether they tell what is cached.

The one rule: as of all conditions: a reason for programs, what was found, and what mends it. Pure.
"""

from collections.abc import Sequence

from trimtab_operator.injection.marks import ENABLED, INJECT
from trimtab_operator.report.conditions import Finding
from trimtab_operator.report.fleet_report import OTHER_SECRET
from trimtab_operator.report.pool_facts import PoolFacts
from trimtab_operator.report.store_conditions import store_reachable
from trimtab_operator.report.wording import counted, plural, sentence, some


def prefix_aware(facts: PoolFacts) -> Finding:
    fleet = facts.fleet
    if fleet is None or fleet.store_error or facts.members is None:
        return "Unknown", "StoreUnread", "What the engines have cached is not known yet: see StoreReachable."
    members = fleet.beating + len(fleet.silent)
    if members == 0:
        return "Unknown", "NoEndpoints", "There are no endpoints: see EndpointsFound."
    found = _other_ports(facts)
    if found and fleet.beating == fleet.unreachable and (fleet.elsewhere or fleet.unreachable):
        return "False", "OtherPorts", found
    store, reason, _ = store_reachable(facts)
    if fleet.beating == 0 and store == "False":
        text = "No sidecar is heard, and that may be for the store: see StoreReachable."
        return "Unknown", reason, f"{text}{found and f' {found}'}"
    if fleet.beating == 0:
        remedy = "Set spec.sidecar.inject, or add the sidecar to the pods yourself."
        if facts.spec.sidecar.inject:
            remedy = "See SidecarsInjected; where that is well, see the sidecars' logs."
        return (
            "False",
            "NoSidecars",
            f"No sidecar is heard from any of {plural(members, 'endpoint')} at {_target_ports(facts)}: routed by load,"
            f" and by a guess of what is cached. {remedy}{found and f' {found}'}",
        )
    guessed = fleet.guessed + len(fleet.silent)
    away = _away(facts)
    if fleet.serving == 0 and not fleet.silent:
        return "Unknown", "NoneServing", f"No engine serves now: {away}."
    because = [f"{count} x {reason}" for reason, count in fleet.approximate.items()]
    if fleet.loading:
        because.append(f"{fleet.loading} x no model card yet")
    if fleet.silent:
        because.append(f"{len(fleet.silent)} x no sidecar heard ({some(fleet.silent)})")
    tail = f" Not serving: {away}." if away else ""
    if fleet.silent and found:
        tail += f" {found}"
    if OTHER_SECRET in fleet.approximate:
        tail += (
            " Sidecars with another secret than the pool's tell nothing that pickers find: restart their pods (kubectl"
            f" -n {facts.pool.key.namespace} rollout restart, of what runs them)."
        )
    if OTHER_SECRET in fleet.approximate:
        text = f"{guessed} of {plural(guessed + fleet.exact, 'endpoint')} approximate: {'; '.join(because)}.{tail}"
        return "False", "OtherSecret", text
    if fleet.exact == 0:
        if fleet.loading and not fleet.approximate and not fleet.silent:
            return "False", "NoModelCard", f"No model card yet: approximate mode.{tail}"
        return "False", "Approximate", f"Every endpoint is in approximate mode: {'; '.join(because)}.{tail}"
    if guessed:
        text = f"{guessed} of {guessed + fleet.exact} endpoints approximate: {'; '.join(because)}.{tail}"
        return "True", "PartlyApproximate", text
    return "True", "Exact", f"What is cached is known exactly on {plural(fleet.exact, 'endpoint')}.{tail}"


def sidecars_injected(facts: PoolFacts) -> Finding:
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
    if facts.rivals:
        shared = "; ".join(f"{plural(count, 'pod')} with pool {name}" for name, count in facts.rivals.items())
        taker = f"the oldest ({some(facts.older_rivals)})" if facts.older_rivals else "this one, which is the oldest"
        text = (
            f"The pool selects pods that another one selects too, and both ask for injection: {shared}. A pod reports"
            f" to one pool: new ones get the sidecar of {taker}. Change spec.selector of one of the two, or"
            " unset spec.sidecar.inject in its policy; then restart the pods."
        )
        if facts.older_rivals or members.pods_not_injected:
            return "False", "SeveralPools", text
        return "True", "SeveralPools", text
    pods = members.pods_injected + members.pods_not_injected
    if members.pods_not_injected:
        found = f"{members.pods_not_injected} of {plural(pods, 'pod')} started without the sidecar."
        how = f"(kubectl -n {namespace} rollout restart, of what runs them); running pods are never touched."
        if members.left_alone:
            why = "; ".join(f"{text} ({plural(count, 'pod')})" for text, count in members.left_alone.items())
            text = f"{found} The webhook left them alone: {sentence(why)} Put that right, then recreate them {how}"
            return "False", "PodsNotInjected", text
        return (
            "False",
            "PodsNotInjected",
            f"{found} Recreate them {how} Where new pods stay without it, the webhook is not reached: see the"
            " Deployment trimtab-webhook in the operator's namespace.",
        )
    if not pods:
        return "Unknown", "NoPods", "There are no pods yet: see EndpointsFound."
    return "True", "SidecarsInjected", f"{plural(members.pods_injected, 'pod')} with the sidecar."


def _other_ports(facts: PoolFacts) -> str:
    """What speaks for target ports that are wrong, and the remedy; empty: nothing does."""
    fleet, members = facts.fleet, facts.members
    assert fleet is not None
    assert members is not None
    signs = []
    if fleet.elsewhere:
        heard = ", ".join(f"{count} at port {port}" for port, count in fleet.elsewhere.items())
        signs.append(f"sidecars of the same pods are heard: {heard}")
    if members.other_ports:
        signs.append(f"the pods' containers declare {_ports(members.other_ports)}")
    if not signs:
        return ""
    return (
        f"Engines are looked for at {_target_ports(facts)}, but {', and '.join(signs)}. Requests to a port"
        " that nobody listens at fail. Set the pool's spec.targetPorts to what the engines listen at; pods whose"
        " sidecar was injected by the old ports then need a restart."
    )


def _target_ports(facts: PoolFacts) -> str:
    return _ports(facts.pool.target_ports)


def _ports(ports: Sequence[int]) -> str:
    return f"{'port' if len(ports) == 1 else 'ports'} {', '.join(map(str, ports))}"


def _away(facts: PoolFacts) -> str:
    fleet = facts.fleet
    assert fleet is not None
    counts = {
        "draining": fleet.draining,
        "asleep": fleet.asleep,
        "engine not reached by its sidecar": fleet.unreachable,
    }
    return counted({name: count for name, count in counts.items() if count})
