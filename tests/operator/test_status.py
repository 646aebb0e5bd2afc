"""What a policy's status says, and that it is written only when it has something new to say."""

import asyncio
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from valkey_server import ValkeyProcess, running

from trimtab_operator.api.policy import Fallback, PolicyError, PolicySpec, Sidecar, TargetRef
from trimtab_operator.api.pool import Pool, PoolKey
from trimtab_operator.api.request_terms import WhenFull
from trimtab_operator.fallback import FallbackState
from trimtab_operator.kube import POLICIES, Kube, KubeError, Object
from trimtab_operator.membership.endpoints import Members
from trimtab_operator.objectives import PoolObjectives
from trimtab_operator.report.fleet_report import OTHER_REASONS, OTHER_SECRET, FleetReport, aggregate, read_fleet
from trimtab_operator.report.pool_conditions import pool_conditions
from trimtab_operator.report.pool_facts import PoolFacts
from trimtab_operator.report.pool_status import CONTROLLER
from trimtab_operator.report.status import OUR_TYPES, announcements, is_changed, policy_status, write_status
from trimtab_state import EndpointSpec, Heartbeat, PoolKeys, ServedModel, StateSettings, connect
from trimtab_state.documents import encode
from trimtab_state.request_class import Objective

NOW_S = 1_800_000_000.0
NOW = "2027-01-15T08:00:00Z"
LATER = "2027-01-15T09:00:00Z"


def endpoints(count: int, *, draining: int = 0) -> tuple[EndpointSpec, ...]:
    names = [f"10.0.0.{i}:8000" for i in range(count)]
    return tuple(EndpointSpec(name=name, address=name, draining=i < draining) for i, name in enumerate(names))


def deployment(ready: int, wanted: int = 2, image: str = "registry:5000/trimtab:v1.2", **status: Any) -> Object:
    return {
        "spec": {"replicas": wanted, "template": {"spec": {"containers": [{"image": image}]}}},
        "status": {"readyReplicas": ready, **status},
    }


def progress(status: str, reason: str) -> Object:
    """As a Deployment's controller says it."""
    return {"type": "Progressing", "status": status, "reason": reason, "message": reason}


def pool(picker: str | None = "trimtab-chat") -> Pool:
    return Pool(
        key=PoolKey("default", "chat"),
        uid="u",
        generation=3,
        is_deleting=False,
        selector={"app": "vllm"},
        target_ports=(8000,),
        app_protocol="http",
        picker_name=picker,
        picker_port=9002,
        fails_open=False,
    )


CALM = FallbackState().decide(NOW_S, Fallback(), "Auto")
ONLY_WHERE_BAD = {"CrdsCurrent", "ObjectivesRead", "StoreKeepsKeys", "WaitInForce"}
WELL = PoolFacts(
    pool=pool(),
    spec=PolicySpec(target_ref=TargetRef(name="chat"), sidecar=Sidecar(inject=True)),
    is_standalone=True,
    service_name="trimtab-chat",
    members=Members(endpoints=endpoints(8), pods_matching=8, pods_ready=8, pods_injected=8, total=8),
    picker=deployment(2),
    envoy=deployment(2),
    fleet=FleetReport(exact=8, pickers=2),
    decision=CALM,
    told=CALM.document(batch_limit=None),
)


def policy(**more: Any) -> Object:
    return {
        "metadata": {"name": "fast", "namespace": "default", "uid": "p", "generation": 5},
        "spec": {"targetRef": {"name": "chat"}},
        **more,
    }


def conditions(facts: PoolFacts | None, **about: Any) -> dict[str, tuple[str, str, str]]:
    status = policy_status(policy(), facts=facts, now_s=NOW_S, **about)
    return {c["type"]: (c["status"], c["reason"], c["message"]) for c in status["conditions"]}


def test_a_pool_that_runs_well_says_so_in_every_condition() -> None:
    status = policy_status(policy(), facts=WELL, now_s=NOW_S)
    said = {c["type"]: c["status"] for c in status["conditions"]}
    assert said.pop("Fallback") == "False"
    assert set(said.values()) == {"True"}
    assert set(said) | {"Fallback", *ONLY_WHERE_BAD} == OUR_TYPES
    assert all(c["lastTransitionTime"] == NOW and c["observedGeneration"] == 5 for c in status["conditions"])
    del status["conditions"]
    assert status == {
        "observedGeneration": 5,
        "pool": "chat",
        "activePolicy": "Product",
        "activeSince": NOW,
        "endpoints": {"ready": 8, "total": 8},
        "injected": {"pods": 8, "notInjected": 0},
        "pickers": {"ready": 2, "total": 2, "shown": "2/2", "version": "v1.2"},
        "modelCards": {"exact": 8, "approximate": 0, "reason": ""},
    }


def test_pickers_that_are_replaced_never_are_more_than_are_wanted() -> None:
    status = policy_status(policy(), facts=replace(WELL, picker=deployment(3)), now_s=NOW_S)
    assert status["pickers"] | {"version": ""} == {"ready": 2, "total": 2, "shown": "2/2", "version": ""}


def test_a_policy_that_is_wrong_names_the_field_and_the_pool_runs_on() -> None:
    fault = "spec.fallback.alarms: expected at least 1, got 0; set 1 to 1000"
    said = conditions(WELL, error=PolicyError([fault]))
    status, reason, message = said["Accepted"]
    assert (status, reason) == ("False", "InvalidField")
    assert fault in message
    assert "last good configuration" in message
    assert said["Ready"][0] == "True"


def test_a_policy_without_a_pool_and_one_that_comes_second_say_which() -> None:
    assert conditions(None) == {
        "Accepted": (
            "False",
            "TargetNotFound",
            "There is no InferencePool chat in this namespace. Create it, or change spec.targetRef.name.",
        )
    }
    said = conditions(WELL, winner="older")
    assert list(said) == ["Accepted"]
    assert said["Accepted"][:2] == ("False", "Conflicted")
    assert "SchedulingPolicy older" in said["Accepted"][2]


PLAIN = PolicySpec(target_ref=TargetRef(name="chat"))
WAITING = PolicySpec(
    target_ref=TargetRef(name="chat"), batch_limit=4, when_full=WhenFull(action="Wait"), sidecar=Sidecar(inject=True)
)
CASES: dict[str, tuple[PoolFacts, str, tuple[str, str], str]] = {
    "no pod": (
        replace(WELL, members=Members()),
        "EndpointsFound",
        ("False", "NoPodMatches"),
        "No pod matches app=vllm.",
    ),
    "none ready": (
        replace(WELL, members=Members(pods_matching=3, total=3), unready={"Pending": 2, "CrashLoopBackOff": 1}),
        "EndpointsFound",
        ("False", "NoPodReady"),
        "3 pods match app=vllm, none is Ready: 2 Pending, 1 CrashLoopBackOff.",
    ),
    "all draining": (
        replace(WELL, members=Members(endpoints=endpoints(2, draining=2))),
        "EndpointsFound",
        ("False", "AllDraining"),
        "Every pod that matches app=vllm is being deleted; 2 endpoints may finish",
    ),
    "no label": (
        replace(WELL, members=None, pool=replace(pool(), selector={"app in (a,b),z": "c"})),
        "EndpointsFound",
        ("False", "InvalidSelector"),
        "In spec.selector.matchLabels of the pool, 'app in (a,b),z' is no label's key: up to 63 letters",
    ),
    "no label, but it was one": (
        replace(WELL, pool=replace(pool(), selector={"app": "a b"})),
        "EndpointsFound",
        ("False", "InvalidSelector"),
        "Put it right there; until then 8 endpoints of the last good selector go on.",
    ),
    "too many": (
        replace(WELL, members=Members(endpoints=endpoints(2), pods_matching=3, pods_ready=3, left_out=4)),
        "EndpointsFound",
        ("True", "TooManyEndpoints"),
        "2 endpoints, which is all that a pool can have; 4 more are left out; 3 of 3 pods Ready. Split the pool in two",
    ),
    "not listed": (replace(WELL, members=None), "EndpointsFound", ("Unknown", "Listing"), "being listed"),
    "no card": (
        replace(WELL, fleet=FleetReport(loading=8)),
        "PrefixAware",
        ("False", "NoModelCard"),
        "No model card yet: approximate mode.",
    ),
    "some approximate": (
        replace(WELL, fleet=FleetReport(exact=6, approximate={"no KV events": 2}, asleep=1)),
        "PrefixAware",
        ("True", "PartlyApproximate"),
        "2 of 8 endpoints approximate: 2 x no KV events. Not serving: 1 asleep.",
    ),
    "all approximate": (
        replace(WELL, fleet=FleetReport(approximate={"no model card": 7}, silent=("10.0.0.1:8000",))),
        "PrefixAware",
        ("False", "Approximate"),
        "7 x no model card; 1 x no sidecar heard (10.0.0.1:8000)",
    ),
    "no sidecars": (
        replace(WELL, fleet=FleetReport(silent=("a", "b"), pickers=2)),
        "PrefixAware",
        ("False", "NoSidecars"),
        "No sidecar is heard from any of 2 endpoints at port 8000: routed by load, and by a guess of what is cached."
        " See SidecarsInjected",
    ),
    "sidecars at another port": (
        replace(WELL, fleet=FleetReport(silent=("10.0.0.1:8000", "10.0.0.2:8000"), elsewhere={9000: 2})),
        "PrefixAware",
        ("False", "OtherPorts"),
        "Engines are looked for at port 8000, but sidecars of the same pods are heard: 2 at port 9000. Requests to a"
        " port that nobody listens at fail. Set the pool's spec.targetPorts to what the engines listen at",
    ),
    "engines at another port": (
        replace(
            WELL,
            members=Members(endpoints=endpoints(2), pods_matching=2, other_ports=(9000, 9001)),
            fleet=FleetReport(unreachable=2),
        ),
        "PrefixAware",
        ("False", "OtherPorts"),
        "but the pods' containers declare ports 9000, 9001. Requests",
    ),
    "no sidecar, and other ports": (
        replace(WELL, members=Members(other_ports=(9000,)), fleet=FleetReport(silent=("a", "b"), pickers=2)),
        "PrefixAware",
        ("False", "NoSidecars"),
        "see the sidecars' logs. Engines are looked for at port 8000, but the pods' containers declare port 9000.",
    ),
    "some at another port": (
        replace(WELL, fleet=FleetReport(exact=6, silent=("10.0.0.1:8000",), elsewhere={9000: 1})),
        "PrefixAware",
        ("True", "PartlyApproximate"),
        "Engines are looked for at port 8000, but sidecars of the same pods are heard: 1 at port 9000.",
    ),
    "another secret": (
        replace(WELL, fleet=FleetReport(exact=6, approximate={OTHER_SECRET: 2})),
        "PrefixAware",
        ("False", "OtherSecret"),
        "2 of 8 endpoints approximate: 2 x another secret's hashes. Sidecars with another secret than the pool's tell"
        " nothing that pickers find: restart their pods (kubectl -n default rollout restart",
    ),
    "asleep": (
        replace(WELL, fleet=FleetReport(asleep=8)),
        "PrefixAware",
        ("Unknown", "NoneServing"),
        "No engine serves now: 8 asleep.",
    ),
    "namespace": (
        replace(WELL, namespace_opted_in=False),
        "SidecarsInjected",
        ("False", "NamespaceNotLabelled"),
        "kubectl label namespace default trimtab.dev/inject=enabled",
    ),
    "several pools": (
        replace(WELL, rivals={"code": 2}, older_rivals=["code"]),
        "SidecarsInjected",
        ("False", "SeveralPools"),
        "and both ask for injection: 2 pods with pool code. A pod reports to one pool: new ones get the sidecar of the"
        " oldest (code). Change",
    ),
    "several pools, and this is the oldest": (
        replace(WELL, rivals={"code": 2}),
        "SidecarsInjected",
        ("True", "SeveralPools"),
        "2 pods with pool code. A pod reports to one pool: new ones get the sidecar of this one, which is the oldest.",
    ),
    "not injected": (
        replace(WELL, members=Members(endpoints=endpoints(1), pods_matching=3, pods_injected=1, pods_not_injected=2)),
        "SidecarsInjected",
        ("False", "PodsNotInjected"),
        "2 of 3 pods started without the sidecar. Recreate them",
    ),
    "left alone": (
        replace(
            WELL,
            members=Members(
                endpoints=endpoints(1), pods_matching=3, pods_not_injected=3, left_alone={"no container is named x": 2}
            ),
        ),
        "SidecarsInjected",
        ("False", "PodsNotInjected"),
        "The webhook left them alone: no container is named x (2 pods). Put that right, then recreate them (kubectl",
    ),
    "foreign service": (
        replace(WELL, foreign=("Service/trimtab-chat",)),
        "ResolvedRefs",
        ("False", "ServiceNotOurs"),
        "Service/trimtab-chat is somebody else's and not touched. Nothing can be renamed: make it anew under another"
        " name where it is needed, then kubectl -n default delete service/trimtab-chat",
    ),
    "foreign child": (
        replace(WELL, foreign=("Service/trimtab-chat",)),
        "Programmed",
        ("False", "NotOurs"),
        "Service/trimtab-chat is somebody else's",
    ),
    "another installation's child": (
        replace(
            WELL,
            foreign=("Secret/trimtab-chat-store", "Service/x"),
            installations={"Secret/trimtab-chat-store": "trimtab-blue"},
        ),
        "Programmed",
        ("False", "NotOurs"),
        "Secret/trimtab-chat-store is of the Trimtab installation in namespace trimtab-blue and not touched. Where"
        " that installation is gone: kubectl -n default annotate secret/trimtab-chat-store trimtab.dev/install-;"
        " Service/x is somebody else's",
    ),
    "other picker": (
        replace(WELL, pool=pool("their-epp")),
        "ResolvedRefs",
        ("False", "InvalidExtensionRef"),
        "spec.endpointPickerRef.name is their-epp",
    ),
    "no picker named": (
        replace(WELL, pool=pool(None), is_standalone=False),
        "ResolvedRefs",
        ("False", "InvalidExtensionRef"),
        "Set spec.endpointPickerRef.name: trimtab-chat.",
    ),
    "refused": (
        replace(WELL, apply_errors=("Deployment/trimtab-chat: 403 Forbidden: no",)),
        "Programmed",
        ("False", "ApplyFailed"),
        "403 Forbidden: no",
    ),
    "no pickers": (replace(WELL, picker=None), "Ready", ("False", "NoPickers"), "not there yet"),
    "pickers down": (
        replace(
            WELL,
            picker=deployment(
                0, conditions=[{"type": "ReplicaFailure", "status": "True", "message": "quota exceeded"}]
            ),
        ),
        "Ready",
        ("False", "PickersNotReady"),
        "None of 2 pickers is ready (quota exceeded). See: kubectl -n default describe pods -l"
        " app.kubernetes.io/name=trimtab-picker,app.kubernetes.io/instance=chat,app.kubernetes.io/component=picker",
    ),
    "pickers that never came": (
        replace(WELL, picker=deployment(0, conditions=[progress("False", "ProgressDeadlineExceeded")])),
        "Ready",
        ("False", "PickersNotReady"),
        "None of 2 pickers is ready (ProgressDeadlineExceeded).",
    ),
    "pickers that were there": (
        replace(WELL, picker=deployment(0, conditions=[progress("True", "NewReplicaSetAvailable")])),
        "Ready",
        ("False", "PickersNotReady"),
        "None of 2 pickers is ready.",
    ),
    "pickers that come": (
        replace(WELL, picker=deployment(0, conditions=[progress("True", "ReplicaSetUpdated")])),
        "Ready",
        ("False", "PickersStarting"),
        "None of 2 pickers is ready.",
    ),
    "an update that is stuck": (
        replace(WELL, picker=deployment(2, conditions=[progress("False", "ProgressDeadlineExceeded")])),
        "Ready",
        ("True", "UpdateStuck"),
        "Those pickers that are ready serve, others do not come (ProgressDeadlineExceeded). See: kubectl -n default",
    ),
    "an update of the Envoys that is stuck": (
        replace(WELL, envoy=deployment(1, conditions=[progress("False", "ProgressDeadlineExceeded")])),
        "Ready",
        ("True", "UpdateStuck"),
        "Those Envoys that are ready serve",
    ),
    "one picker down": (
        replace(WELL, picker=deployment(1)),
        "Ready",
        ("True", "PickersPartlyReady"),
        "1 of 2 pickers are ready.",
    ),
    "envoy down": (
        replace(WELL, envoy=deployment(0, conditions=[progress("True", "NewReplicaSetAvailable")])),
        "Ready",
        ("False", "EnvoyNotReady"),
        "no Envoy in front is. See: kubectl -n default describe pods -l app.kubernetes.io/name=trimtab-envoy",
    ),
    "envoy that comes": (replace(WELL, envoy=deployment(0)), "Ready", ("False", "EnvoyStarting"), "no Envoy in front"),
    "store away": (
        replace(
            WELL,
            fleet=FleetReport(store_error="ConnectionError: refused"),
            store_address="standalone at store.trimtab-system:6379",
        ),
        "StoreReachable",
        ("False", "StoreUnavailable"),
        "The store (standalone at store.trimtab-system:6379) does not answer as it should: ConnectionError: refused.",
    ),
    "wrong password": (
        replace(WELL, fleet=FleetReport(store_error="AuthenticationError: invalid username-password pair.")),
        "StoreReachable",
        ("False", "StoreUnavailable"),
        "invalid username-password pair. Routing",
    ),
    "evicting store": (
        replace(WELL, store_evicts="allkeys-lru"),
        "StoreKeepsKeys",
        ("False", "Evicts"),
        "CONFIG SET maxmemory-policy noeviction",
    ),
    "no access": (
        replace(WELL, store_problem="no user could be made"),
        "StoreReachable",
        ("False", "NoAccess"),
        "no user could be made",
    ),
    "shared login": (
        replace(WELL, is_own_store_user=False, store_notes=("It refuses (no ACL).",)),
        "StoreReachable",
        ("True", "SharedLogin"),
        "The pool has a copy of the operator's own login. It refuses (no ACL).",
    ),
    "a picker that does not find the store": (
        replace(WELL, picker=deployment(2), fleet=FleetReport(exact=8, pickers=1)),
        "StoreReachable",
        ("True", "StoreReachable"),
        "The store answers; of 2 pickers 1 connected: see the logs of the others.",
    ),
    "no picker that finds the store": (
        replace(WELL, fleet=FleetReport(exact=8)),
        "StoreReachable",
        ("False", "NoPickerConnected"),
        "The store answers, but none of 2 pickers is connected: see Ready, and the pickers' logs.",
    ),
    "no picker that finds the store, with a login that all share": (
        replace(WELL, picker=deployment(1, 1), fleet=FleetReport(exact=8), is_own_store_user=False),
        "StoreReachable",
        ("False", "NoPickerConnected"),
        "The store answers, but the only picker is not connected",
    ),
    "pickers that start and do not find the store yet": (
        replace(WELL, picker=deployment(0), fleet=FleetReport(exact=8)),
        "StoreReachable",
        ("Unknown", "NoPickerConnected"),
        "none of 2 pickers is connected",
    ),
    "no sidecar and no picker that finds the store": (
        replace(WELL, fleet=FleetReport(silent=("a", "b"))),
        "PrefixAware",
        ("Unknown", "NoPickerConnected"),
        "No sidecar is heard, and that may be for the store: see StoreReachable.",
    ),
    "no sidecar and no login": (
        replace(WELL, store_problem="The store refuses.", fleet=FleetReport(silent=("a", "b"), pickers=2)),
        "PrefixAware",
        ("Unknown", "NoAccess"),
        "see StoreReachable",
    ),
    "no sidecar while pickers start": (
        replace(WELL, picker=deployment(0), fleet=FleetReport(silent=("a", "b"))),
        "PrefixAware",
        ("False", "NoSidecars"),
        "No sidecar is heard from any of 2 endpoints",
    ),
    "files to mount": (
        replace(WELL, store_notes=("Mount the files.",)),
        "StoreReachable",
        ("True", "StoreReachable"),
        "2 pickers are connected. Mount the files.",
    ),
    "gateway": (
        replace(WELL, parents=({"parentRef": {"name": "web", "namespace": "infra"}, "controllerName": "x.y/z"},)),
        "GatewayAttached",
        ("True", "Gateway"),
        "Taken up by Gateway infra/web, which asks the pickers over TLS",
    ),
    "own entry is no gateway": (
        replace(WELL, is_standalone=False, parents=({"parentRef": {"name": "a"}, "controllerName": CONTROLLER},)),
        "GatewayAttached",
        ("False", "NoGateway"),
        "set spec.standalone.enabled",
    ),
    "a wait that Envoys do not bear yet": (
        replace(WELL, spec=WAITING, told_wait_s=2.0, envoy=deployment(2, updatedReplicas=1)),
        "WaitInForce",
        ("False", "EnvoysBeingReplaced"),
        "wait for 2 s, and not yet for the 5 s of spec.whenFull.waitSeconds: the pool's Envoys give up before. Replaced"
        " are 1 of 2",
    ),
    "a wait that one old Envoy does not bear": (
        replace(WELL, spec=WAITING, told_wait_s=2.0, envoy=deployment(2, 1, updatedReplicas=1, replicas=2)),
        "WaitInForce",
        ("False", "EnvoysBeingReplaced"),
        "Replaced are 1 of 1, but 1 old Envoy is still ending. Where it stays so",
    ),
    "objectives": (
        replace(WELL, spec=WAITING, told_wait_s=5.0, objectives=PoolObjectives(used=(Objective(name="gold"),))),
        "ObjectivesRead",
        ("True", "ObjectivesRead"),
        "1 InferenceObjective of the pool in use.",
    ),
    "objectives where nothing waits": (
        replace(WELL, objectives=PoolObjectives(used=(Objective(name="gold"),))),
        "ObjectivesRead",
        ("True", "NothingWaits"),
        "set spec.batchLimit and spec.whenFull.action: Wait",
    ),
    "too many objectives": (
        replace(WELL, spec=WAITING, objectives=PoolObjectives(used=(Objective(name="gold"),), left_out=2)),
        "ObjectivesRead",
        ("False", "TooManyObjectives"),
        "2 younger ones count as priority 0",
    ),
    "objectives that may not be read": (
        replace(WELL, objectives_refusal="403 Forbidden: no"),
        "ObjectivesRead",
        ("False", "NotReadable"),
        "403 Forbidden: no. InferenceObjectives keep the priorities",
    ),
    "old CRD": (replace(WELL, crd_problem="apply crds/"), "CrdsCurrent", ("False", "OutOfDate"), "apply crds/"),
}


@pytest.mark.parametrize(("facts", "type_", "said", "text"), CASES.values(), ids=CASES)
def test_what_is_not_well_says_what_and_what_to_do(
    facts: PoolFacts, type_: str, said: tuple[str, str], text: str
) -> None:
    found = conditions(facts)
    assert found[type_][:2] == said
    assert text in found[type_][2]
    assert ".." not in found[type_][2]
    assert found["Accepted"][0] == "True"


def test_without_injection_there_is_no_condition_about_it() -> None:
    assert "SidecarsInjected" not in conditions(replace(WELL, spec=PLAIN))


def test_the_fallback_says_since_when_why_and_how_to_end_it() -> None:
    rules = Fallback(alarms=1)
    state = FallbackState()
    state.decide(NOW_S - 60.0, rules, "Auto")
    state.alarm("0" * 16, NOW_S - 1.0)
    decision = state.decide(NOW_S, rules, "Auto")
    facts = replace(WELL, decision=decision, told=decision.document(batch_limit=None))
    status, reason, message = conditions(facts)["Fallback"]
    assert (status, reason) == ("True", "HotspotAlarms")
    assert "1 hotspot alarm of one prefix class within 120 s" in message
    assert "spec.mode: Product ends it at once" in message
    body = policy_status(policy(), facts=facts, now_s=NOW_S)
    assert (body["activePolicy"], body["activeSince"]) == ("RoundRobin", NOW)


def test_what_the_pickers_were_not_told_is_not_said_to_be_in_force() -> None:
    asked = FallbackState(CALM.document(batch_limit=None)).decide(NOW_S + 60.0, Fallback(), "RoundRobin")
    facts = replace(WELL, decision=asked)
    status, reason, message = conditions(facts)["Fallback"]
    assert (status, reason) == ("Unknown", "NotTold")
    assert "To be placed: round robin (spec.mode is RoundRobin)." in message
    assert "what they were told last: by the product." in message
    body = policy_status(policy(), facts=facts, now_s=NOW_S + 60.0)
    assert (body["activePolicy"], body["activeSince"]) == ("Product", NOW)
    first = replace(facts, told=None)
    assert "told last: nothing yet" in conditions(first)["Fallback"][2]
    assert "activePolicy" not in policy_status(policy(), facts=first, now_s=NOW_S)


def test_the_version_is_what_runs_and_both_where_another_one_is_wanted() -> None:
    def shown(*running: str) -> str:
        facts = replace(WELL, picker=deployment(2, image="trimtab:v2"), picker_versions=running)
        version: str = policy_status(policy(), facts=facts, now_s=NOW_S)["pickers"]["version"]
        return version

    assert shown("v2") == "v2"
    assert shown("v1") == "v1 -> v2"
    assert shown("v1", "v2") == "v1, v2 -> v2"
    assert shown() == "v2"


@pytest.mark.parametrize(
    ("spec", "reason", "active"),
    [
        (PolicySpec(target_ref=TargetRef(name="chat"), mode="LeastRequest"), "Overridden", "LeastRequest"),
        (PolicySpec(target_ref=TargetRef(name="chat"), fallback=Fallback(enabled=False)), "Disabled", "Product"),
    ],
)
def test_an_override_is_no_fallback(spec: PolicySpec, reason: str, active: str) -> None:
    decision = FallbackState().decide(NOW_S, spec.fallback, spec.mode)
    facts = replace(WELL, spec=spec, decision=decision, told=decision.document(batch_limit=None))
    assert conditions(facts)["Fallback"][:2] == ("False", reason)
    assert policy_status(policy(), facts=facts, now_s=NOW_S)["activePolicy"] == active


def test_a_condition_keeps_its_time_until_its_status_turns() -> None:
    before = policy_status(policy(), facts=WELL, now_s=NOW_S)
    stored = policy(status=before)
    more = replace(WELL, fleet=FleetReport(exact=7, asleep=1, pickers=1), picker=deployment(0))
    after = policy_status(stored, facts=more, now_s=NOW_S + 3_600.0)
    times = {c["type"]: c["lastTransitionTime"] for c in after["conditions"]}
    assert times.pop("Ready") == LATER
    assert set(times.values()) == {NOW}
    assert is_changed(stored, after)
    assert not is_changed(stored, policy_status(stored, facts=WELL, now_s=NOW_S + 3_600.0))


def test_events_are_made_of_turns_and_not_of_what_is_well_from_the_start() -> None:
    well = pool_conditions(WELL, 1)
    assert announcements(well, None) == []
    bad = pool_conditions(replace(WELL, members=Members()), 1)
    (news,) = announcements(bad, None)
    assert (news.topic, news.reason, news.type_) == ("EndpointsFound", "NoPodMatches", "Warning")
    assert announcements(bad, bad) == []
    (again,) = announcements(well, bad)
    assert (again.reason, again.type_) == ("EndpointsFound", "Normal")
    active = [{**c, "status": "True", "reason": "HotspotAlarms"} if c["type"] == "Fallback" else c for c in well]
    assert [(n.reason, n.type_) for n in announcements(active, well)] == [("FallbackStarted", "Warning")]
    assert [(n.reason, n.type_) for n in announcements(well, active)] == [("FallbackEnded", "Normal")]
    unknown = pool_conditions(replace(WELL, members=None, fleet=None, decision=None), 1)
    assert announcements(unknown, well) == []
    assert announcements(well, unknown) == []


def test_other_ports_are_news_though_what_is_known_of_caches_is_none() -> None:
    ports = pool_conditions(replace(WELL, fleet=FleetReport(silent=("10.0.0.1:8000",), elsewhere={9000: 1})), 1)
    silent = pool_conditions(replace(WELL, fleet=FleetReport(silent=("10.0.0.1:8000",), pickers=2)), 1)
    for before in (None, pool_conditions(WELL, 1), silent):
        (news,) = [n for n in announcements(ports, before) if n.topic == "PrefixAware"]
        assert (news.reason, news.type_) == ("OtherPorts", "Warning")
        assert "Requests to a port that nobody listens at fail." in news.note
    assert [n for n in announcements(silent, ports) if n.topic == "PrefixAware"] == []


def test_every_reason_is_explained_to_people() -> None:
    page = (Path(__file__).parents[2] / "docs" / "status.md").read_text()
    folder = Path(pool_conditions.__code__.co_filename).parent
    source = "".join(path.read_text() for path in sorted(folder.glob("*_conditions.py")))
    reasons = set(re.findall(r'"(?:True|False|Unknown)",\s*"([A-Z][A-Za-z]+)"', source))
    assert len(reasons) > 25
    assert [reason for reason in sorted(reasons | OUR_TYPES) if f"`{reason}`" not in page] == []


def test_pickers_that_start_are_no_news_and_those_that_never_come_or_go_are() -> None:
    none, starting, failed, gone, up = (
        pool_conditions(replace(WELL, picker=picker), 1)
        for picker in (
            None,
            deployment(0),
            deployment(0, conditions=[progress("False", "ProgressDeadlineExceeded")]),
            deployment(0, conditions=[progress("True", "NewReplicaSetAvailable")]),
            deployment(2),
        )
    )
    assert announcements(none, None) == announcements(starting, None) == announcements(starting, none) == []
    assert [(n.reason, n.type_) for n in announcements(failed, starting)] == [("PickersNotReady", "Warning")]
    assert [(n.reason, n.type_) for n in announcements(up, starting)] == [("Ready", "Normal")]
    assert [(n.reason, n.type_) for n in announcements(gone, up)] == [("PickersNotReady", "Warning")]
    stuck = [{**up[0], "reason": "UpdateStuck"}]
    assert [(n.reason, n.type_) for n in announcements(stuck, up)] == [("UpdateStuck", "Warning")]
    assert announcements(up, stuck) == []
    assert [(n.reason, n.type_) for n in announcements(starting, up)] == [("PickersStarting", "Warning")]


async def make_policy(kube: Kube, namespace: str) -> Object:
    return await kube.create(
        POLICIES,
        {
            "apiVersion": POLICIES.api_version,
            "kind": POLICIES.kind,
            "metadata": {"name": "fast", "namespace": namespace},
            "spec": {"targetRef": {"name": "chat"}},
        },
    )


async def read_policy(kube: Kube, namespace: str) -> Object:
    body = await kube.get(POLICIES, namespace, "fast")
    assert body is not None
    return body


async def test_the_api_server_takes_it_and_it_is_written_once(kube: Kube, namespace: str) -> None:
    made = await make_policy(kube, namespace)
    assert await write_status(kube, made, policy_status(made, facts=WELL, now_s=NOW_S))
    stored = await read_policy(kube, namespace)
    assert stored["metadata"]["generation"] == 1
    again = policy_status(stored, facts=WELL, now_s=NOW_S + 3_600.0)
    assert stored["status"] == again
    assert not await write_status(kube, stored, again)
    # Fewer fields and conditions: what is not said any more goes.
    lost = policy_status(stored, facts=None, now_s=NOW_S + 3_600.0)
    assert await write_status(kube, stored, lost)
    assert (await read_policy(kube, namespace))["status"] == lost


@pytest.mark.parametrize("facts", [facts for facts, *_ in CASES.values()], ids=CASES)
async def test_the_api_server_takes_every_case(kube: Kube, namespace: str, facts: PoolFacts) -> None:
    made = await make_policy(kube, namespace)
    wanted = policy_status(made, facts=facts, now_s=NOW_S)
    await write_status(kube, made, wanted)
    stored = await read_policy(kube, namespace)
    assert stored["status"] == wanted
    assert not is_changed(stored, wanted)


async def test_a_condition_of_somebody_elses_stays_and_makes_no_writes(kube: Kube, namespace: str) -> None:
    made = await make_policy(kube, namespace)
    await write_status(kube, made, policy_status(made, facts=WELL, now_s=NOW_S))
    other = {
        "type": "example.com/Audited",
        "status": "True",
        "reason": "Yes",
        "message": "",
        "lastTransitionTime": NOW,
    }
    body = {key: made[key] for key in ("apiVersion", "kind")}
    body |= {"metadata": {"name": "fast", "namespace": namespace}, "status": {"conditions": [other]}}
    await kube.apply(body, manager="somebody", subresource="status")
    stored = await read_policy(kube, namespace)
    assert len(stored["status"]["conditions"]) == len(OUR_TYPES - ONLY_WHERE_BAD) + 1
    assert not await write_status(kube, stored, policy_status(stored, facts=WELL, now_s=NOW_S))
    await write_status(kube, stored, policy_status(stored, facts=None, now_s=NOW_S))
    left = (await read_policy(kube, namespace))["status"]["conditions"]
    assert {c["type"] for c in left} == {"Accepted", "example.com/Audited"}


async def test_a_policy_that_was_deleted_is_not_made_again(kube: Kube, namespace: str) -> None:
    made = await make_policy(kube, namespace)
    status = policy_status(made, facts=WELL, now_s=NOW_S)
    await kube.delete(POLICIES, namespace, "fast")
    with pytest.raises(KubeError) as gone:
        await write_status(kube, made, status)
    assert gone.value.status == 404
    assert await kube.get(POLICIES, namespace, "fast") is None, "nor made again"


def beat(endpoint: str, state: Any = "serving", *, card: str | None = "c", approximate: str | None = None) -> Heartbeat:
    models = {"m": ServedModel(card=card), "adapter": ServedModel(card=card, lora=True)}
    return Heartbeat(endpoint=endpoint, epoch="e", state=state, models=models, approximate=approximate)


def test_each_member_is_counted_once_and_strangers_are_not() -> None:
    beats = [
        beat("a"),
        beat("b", approximate="no KV events"),
        beat("c", card=None),
        beat("d", card="missing"),
        beat("e", "asleep"),
        beat("f", "draining"),
        beat("g", "unreachable", approximate="whatever"),
        beat("stranger"),
    ]
    report = aggregate([*"abcdefgh", "a"], beats, missing_cards=["missing"], pickers=2)
    assert report == FleetReport(
        exact=1,
        approximate={"no KV events": 1},
        loading=2,
        draining=1,
        asleep=1,
        unreachable=1,
        silent=("h",),
        pickers=2,
    )
    assert (report.beating, report.serving, report.guessed) == (7, 4, 3)


def test_sidecars_of_another_secret_or_at_another_port_are_found_out() -> None:
    digests = {"a": "1", "b": "2", "c": ""}
    beats = [msgspec.structs.replace(beat(name), seed_digest=digest) for name, digest in digests.items()]
    report = aggregate([*"abc"], beats, seed_digest="1")
    assert (report.exact, report.approximate) == (2, {OTHER_SECRET: 1})
    assert aggregate([*"abc"], beats).exact == 3
    members = ["10.0.0.1:9000", "10.0.0.2:9000", "[fd00::1]:9000", "10.0.0.4:9000"]
    heard = [beat("10.0.0.4:9000")]
    strangers = ["10.0.0.1:8000/0", "10.0.0.1:8000/1", "[fd00::1]:8001", "10.0.0.4:8000", "10.0.0.9:8000", "socket"]
    report = aggregate(members, heard, strangers=strangers)
    assert report.elsewhere == {8000: 2, 8001: 1}


def test_reasons_are_bounded() -> None:
    beats = [beat(str(i), approximate=f"{i % 50:02}" * 500) for i in range(100)]
    report = aggregate([str(i) for i in range(100)], beats)
    assert sum(report.approximate.values()) == 100
    assert len(report.approximate) == 9
    assert report.approximate[OTHER_REASONS] == 84
    assert max(len(reason) for reason in report.approximate) == 200


@pytest.fixture
def server() -> Iterator[ValkeyProcess]:
    with running() as process:
        yield process


async def test_the_fleet_is_read_from_the_store_and_a_store_that_is_away_is_an_answer(server: ValkeyProcess) -> None:
    keys = PoolKeys("default", "chat")
    store = connect(server.url, StateSettings(command_timeout_s=0.5, connect_timeout_s=0.5))
    names = [f"10.0.{i // 250}.{i % 250}:8000" for i in range(600)]
    for i, name in enumerate(names[:-1]):
        await store.execute("SET", keys.heartbeat(name), encode(beat(name, card="there" if i else "gone")))
    await store.execute("SET", keys.heartbeat(names[5]), b"{")
    await store.execute("SET", keys.card("there"), b"card")
    await store.execute("SADD", keys.replicas, f"{1:016x}", f"{2:016x}", "nonsense")
    await store.execute("SET", keys.replica(1), b"lease")
    report = await read_fleet(store, keys, names)
    assert report == FleetReport(exact=597, loading=1, silent=(names[5], names[-1]), pickers=1)
    elsewhere = [names[5].replace(":8000", ":9000"), names[6].replace(":8000", ":9000"), "10.9.9.9:9000"]
    gone = names[-1].replace(":8000", ":9000")
    await store.execute("SADD", keys.endpoints, *names, *elsewhere, gone)
    for name in elsewhere:
        await store.execute("SET", keys.heartbeat(name), encode(beat(name)))
    assert (await read_fleet(store, keys, names)).elsewhere == {9000: 1}
    assert await read_fleet(store, PoolKeys("default", "empty"), []) == FleetReport()
    await store.execute("DEL", keys.replicas)
    await store.execute("SET", keys.replicas, "another type")
    assert (await read_fleet(store, keys, names)).pickers == 0
    await asyncio.to_thread(server.kill)
    report = await read_fleet(store, keys, names)
    assert report.store_error
    assert report.exact == 0
    await store.close()
