"""What of a SchedulingPolicy reaches the pickers, and the gateways in front of them."""

import re
from dataclasses import replace
from typing import Any

import pytest
from child_objects import install, policy, pool
from policy_cases import spec
from test_status import WELL

from trimtab_operator.api.policy import PolicySpec
from trimtab_operator.children.envoy import envoy_bootstrap
from trimtab_operator.fallback import FallbackState
from trimtab_operator.membership.pod_view import PodView
from trimtab_operator.policy_document import policy_document
from trimtab_operator.report.pool_conditions import pool_conditions
from trimtab_state.documents import ControlDocument, Policy, decode_control, encode
from trimtab_state.request_class import EndpointExperts, ExpertCost, ExpertShare, Overflow, RequestClass


def document(**parts: Any) -> Policy:
    wanted = PolicySpec.of(spec(**parts))
    return policy_document(FallbackState().decide(5.0, wanted.fallback, wanted.mode), wanted)


def test_a_policy_that_says_nothing_adds_nothing() -> None:
    assert document() == Policy(fallback="watching", since_s=5.0)


def test_requests_wait_only_where_the_policy_says_so() -> None:
    full = {"waitSeconds": 7, "requestsMax": 9, "tenantHeader": "X-Team"}
    assert document(whenFull=full).overflow == Overflow()
    waits = document(whenFull=full | {"action": "Wait"}, batchLimit=3)
    assert waits.overflow == Overflow(wait_s=7.0, waiting_max=9, tenant_header="x-team")
    assert waits.batch_limit == 3


def test_classes_and_experts_are_told_in_thousandths() -> None:
    experts = [{"first": 1, "last": 2, "share": 5}]
    gold = {
        "name": "gold",
        "weightPercent": 250,
        "priority": -3,
        "objectives": ["o"],
        "models": ["m"],
        "experts": experts,
    }
    costs = [{"endpoints": ["pod"], "costs": [{"first": 3, "last": 4, "percent": 150}]}]
    told = document(classes=[gold], classHeader="X-Class", expertCosts=costs, network="Measured", logAboveTokens=99)
    assert told.classes == (
        RequestClass(
            name="gold",
            weight_milli=2_500,
            priority=-3,
            objectives=("o",),
            models=("m",),
            experts=(ExpertShare(first=1, last=2, share=5),),
        ),
    )
    assert told.expert_costs == (
        EndpointExperts(endpoints=("pod",), costs=(ExpertCost(first=3, last=4, cost_milli=1_500),)),
    )
    assert (told.class_header, told.network, told.log_above_tokens) == ("x-class", "measured", 99)


def test_a_class_that_says_nothing_of_priority_leaves_it_to_the_objective() -> None:
    told = document(classes=[{"name": "a"}, {"name": "b", "priority": 0}, {"name": "c", "priority": None}])
    assert [each.priority for each in told.classes] == [None, 0, None]


def test_the_detectors_do_as_the_policy_says() -> None:
    assert (document().hotspots, document().hotspot_window_s) == ("act", 60.0)
    told = document(hotspots={"mode": "Alarm", "windowSeconds": 30})
    assert (told.hotspots, told.hotspot_window_s) == ("alarm", 30.0)
    assert document(hotspots={"mode": "Off"}).hotspots == "off"


@pytest.mark.parametrize("parts", [{"classes": [{"name": "a", "weightPercent": 100_000}]}, {"logAboveTokens": 10**8}])
def test_whatever_the_schema_takes_a_picker_can_read(parts: dict[str, Any]) -> None:
    whole = ControlDocument(namespace="n", name="p", policy=document(**parts))
    assert decode_control(encode(whole)) == whole


def annotated(text: str) -> float | None:
    metadata = {"name": "a", "uid": "u", "annotations": {"trimtab.dev/rtt-milliseconds": text}}
    return PodView.of({"metadata": metadata}, (8000,)).rtt_s


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("12", 0.012), ("0.5", 0.0005), ("0", 0.0), ("99999999", None), ("999999", 60.0), ("-1", None), ("1e3", None),
     ("", None), ("12ms", None), ("١", None)],
)  # fmt: skip
def test_a_pod_says_how_far_it_is(text: str, seconds: float | None) -> None:
    assert annotated(text) == seconds


def message_timeout(**parts: Any) -> float:
    config = envoy_bootstrap(pool(), policy(parts), install())
    (found,) = re.findall(r'"messageTimeout": "([0-9.]+)s"', config)
    return float(found)


def test_our_own_envoy_is_more_patient_than_a_request_waits() -> None:
    assert message_timeout() == 1.0
    assert message_timeout(whenFull={"waitSeconds": 30}) == 1.0
    assert message_timeout(whenFull={"waitSeconds": 30, "action": "Wait"}) == 31.0


def test_other_gateways_are_told_how_patient_they_have_to_be() -> None:
    parents = ({"parentRef": {"name": "web", "namespace": "infra"}, "controllerName": "x.y/z"},)
    facts = replace(WELL, parents=parents, spec=PolicySpec.of(spec(whenFull={"action": "Wait", "waitSeconds": 30})))
    said = {condition["type"]: condition["message"] for condition in pool_conditions(facts, 1)}["GatewayAttached"]
    assert "an ext_proc message timeout of at least 31 s (spec.whenFull lets requests wait)" in said


def told_of(**parts: Any) -> set[str]:
    config = envoy_bootstrap(pool(), policy(parts), install())
    return set(re.findall(r"request\.headers\['(.*?)'\]", config))


def test_our_own_envoy_tells_the_pickers_of_the_headers_that_they_decide_by() -> None:
    usual = told_of()
    assert told_of(classHeader="X-Class") == usual, "without classes nothing is decided by it"
    gold = {"classes": [{"name": "gold"}], "classHeader": "X-Class"}
    assert told_of(**gold) == usual | {"x-class", "x-gateway-inference-objective"}
    waits: dict[str, Any] = {"whenFull": {"action": "Wait"}}
    assert told_of(**waits) == usual | {"x-gateway-inference-fairness-id", "x-gateway-inference-objective"}
    waits["whenFull"]["tenantHeader"] = "X-Team"
    assert told_of(**waits, **gold) == usual | {"x-class", "x-gateway-inference-objective", "x-team"}
