"""Classes of requests, round trips and experts: from the policy to the scores."""

from typing import Any

import numpy as np
import pytest
from picker_rig import PickerRig, chat

from trimtab_extproc.request_classes import ORDINARY, RequestClasses
from trimtab_state import ControlDocument, EndpointSpec, Heartbeat, Policy
from trimtab_state.request_class import EndpointExperts, ExpertCost, ExpertShare, Objective, RequestClass

A, B, C = "10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000/1"
GOLD = RequestClass(name="gold", weight_milli=4_000, objectives=("chat-gold",), models=("big",))
BULK = RequestClass(name="bulk", weight_milli=250, models=("big", "small"))
MATHS = RequestClass(
    name="maths", experts=(ExpertShare(first=0, last=3, share=1), ExpertShare(first=9, last=9, share=3))
)
OBJECTIVE = "x-gateway-inference-objective"


def classes(**fields: Any) -> RequestClasses:
    return RequestClasses(Policy(**({"class_header": "X-Class", "classes": (GOLD, BULK)} | fields)))


@pytest.mark.parametrize(
    ("headers", "model", "expected"),
    [
        ({}, None, ORDINARY),
        ({"x-class": "gold"}, None, GOLD),
        ({"x-class": "bulk", OBJECTIVE: "chat-gold"}, "big", BULK),
        ({"x-class": "invented", OBJECTIVE: "chat-gold"}, "small", GOLD),
        ({OBJECTIVE: "invented"}, "small", BULK),
        ({}, "big", GOLD),
        ({}, "another", ORDINARY),
        ({"x-class": ""}, None, ORDINARY),
    ],
)
def test_the_most_particular_word_makes_the_class(
    headers: dict[str, str], model: str | None, expected: RequestClass
) -> None:
    assert classes().of(headers, model) is expected


def test_without_a_header_in_the_policy_a_client_cannot_choose_its_class() -> None:
    assert classes(class_header="").of({"": "gold", "x-class": "gold"}, None) is ORDINARY


def test_a_pool_without_extra_terms_gets_none() -> None:
    rig = PickerRig()
    rig.announce(A, B)
    assert rig.fleet.class_terms.of(ORDINARY) is None


async def test_a_heavy_request_makes_its_endpoint_look_fuller_and_peers_are_told() -> None:
    rig = PickerRig()
    rig.announce(A, B, policy=Policy(class_header="x-class", classes=(GOLD,)))
    gold = await rig.place(chat(headers={"x-class": "gold"}))
    assert rig.log.weights == [4_000]
    assert [record.weight_milli for record in rig.reservations.for_lease()] == [4_000]
    for _ in range(3):
        assert (await rig.place(chat())).endpoint != gold.endpoint
    assert rig.last()["class"] is None
    rows = {row["endpoint"]: row for row in rig.last()["endpoints"]}
    assert rows[gold.endpoint]["weighted_batch"] == 5
    assert rows[gold.endpoint]["terms"]["weighted_batch"] == 5
    assert rows[gold.endpoint]["batch"] == 2


async def test_the_weight_of_a_peers_request_counts_here() -> None:
    rig = PickerRig()
    rig.announce(A, B)
    none = np.zeros(0, dtype=np.uint64), np.zeros(0, dtype=np.uint32)
    rig.fleet.on_peer_reserve(9, 1, A, 0, 1, *none, 4_000)
    rig.fleet.on_peer_reserve(9, 2, B, 0, 2, *none, 1_000)
    assert (await rig.place()).endpoint == B


async def test_a_decision_shows_the_class() -> None:
    rig = PickerRig()
    rig.announce(A, policy=Policy(classes=(GOLD,)))
    await rig.place(chat(headers={OBJECTIVE: "chat-gold"}))
    assert rig.last()["class"] == "gold"


def announce(rig: PickerRig, policy: Policy, *specs: EndpointSpec) -> None:
    rig.announce(*(spec.name for spec in specs))
    rig.fleet.on_control(ControlDocument(namespace="tests", name="pool", endpoints=specs, policy=policy))


def spec(name: str, rtt_s: float | None = None, pod: str = "") -> EndpointSpec:
    return EndpointSpec(name=name, address=name.partition("/")[0], rtt_s=rtt_s, pod=pod)


def trips(rig: PickerRig) -> dict[str, float]:
    """What each endpoint's round trip is taken for."""
    terms = rig.fleet.class_terms.of(ORDINARY)
    if terms is None or terms.rtt_s is None:
        return {}
    return {e.name: float(terms.rtt_s[e.slot]) for e in rig.table.all()}


def test_an_endpoint_whose_way_is_not_known_is_as_far_as_the_middle_one() -> None:
    rig = PickerRig()
    announce(rig, Policy(network="annotation"), spec(A, 0.01), spec(B), spec(C, 0.05), spec("10.0.0.4:1", 0.02))
    assert trips(rig)[B] == 0.02


def test_measured_trips_count_where_a_pod_says_nothing() -> None:
    rig = PickerRig()
    announce(rig, Policy(network="measured"), spec(A, 0.01), spec(B), spec(C))
    assert rig.fleet.class_terms.addresses == {"10.0.0.2:8000", "10.0.0.3:8000"}
    rig.fleet.class_terms.on_round_trips({"10.0.0.3:8000": 0.04, "10.0.0.1:8000": 9.0})
    assert trips(rig) == {A: 0.01, B: 0.025, C: 0.04}
    rig.fleet.class_terms.on_round_trips({})
    assert trips(rig) == {A: 0.01, B: 0.01, C: 0.01}


def test_where_no_way_is_known_none_counts() -> None:
    rig = PickerRig()
    announce(rig, Policy(network="annotation"), spec(A), spec(B))
    rig.fleet.class_terms.on_round_trips({A: 1.0})
    assert trips(rig) == {}


async def test_a_policy_that_changes_is_followed_with_the_next_decision() -> None:
    rig = PickerRig()
    far_and_near = spec(A, 0.5), spec(B, 0.001)
    announce(rig, Policy(), *far_and_near)
    await rig.place(chat())
    assert not any(row.get("terms") for row in rig.last()["endpoints"])
    announce(rig, Policy(network="annotation"), *far_and_near)
    assert (await rig.place(chat())).endpoint == B
    far = next(row for row in rig.last()["endpoints"] if row["endpoint"] == A)
    assert far["terms"] == {"network_tokens": 0.5 * 8000}
    assert far["verdict"] == "lost: further away"
    announce(rig, Policy(log_above_tokens=10), *far_and_near)
    await rig.place(chat("word " * 400))
    assert set(rig.last()["endpoints"][0]["terms"]) == {"p_before_log_tokens"}


def factors(rig: PickerRig, of: RequestClass) -> dict[str, float]:
    terms = rig.fleet.class_terms.of(of)
    assert terms is not None
    if terms.expert_factor is None:
        return {}
    return {e.name: round(float(terms.expert_factor[e.slot]), 6) for e in rig.table.all()}


def test_experts_cost_what_the_sidecar_says_as_often_as_the_class_uses_them() -> None:
    rig = PickerRig()
    announce(rig, Policy(classes=(MATHS, BULK)), spec(A), spec(B), spec(C))
    rig.beat(A, expert_costs={9: 2_000})
    rig.beat(B, expert_costs={0: 3_000, 3: 3_000, 700: 9_000})
    # Expert 9 has 3/4 of the class's picks, experts 0 to 3 have 1/16 each.
    assert factors(rig, MATHS) == {A: 1.75, B: 1.25, C: 1.0}
    assert factors(rig, BULK) == {}
    rig.fleet.on_heartbeat_gone(A)
    assert factors(rig, MATHS)[A] == 1.0


def test_the_policys_word_about_an_endpoint_stands_in_place_of_its_sidecars() -> None:
    rig = PickerRig()
    cheap = EndpointExperts(endpoints=("pod-a",), costs=(ExpertCost(first=9, last=9, cost_milli=500),))
    nothing = EndpointExperts(endpoints=(C,))
    policy = Policy(classes=(MATHS,), expert_costs=(cheap, nothing))
    announce(rig, policy, spec(A, pod="pod-a"), spec(B, pod="pod-b"), spec(C, pod="pod-c"))
    for name in (A, B, C):
        rig.beat(name, expert_costs={9: 2_000})
    assert factors(rig, MATHS) == {A: 0.625, B: 1.75, C: 1.0}


def test_a_pod_that_takes_anothers_address_takes_none_of_its_costs() -> None:
    rig = PickerRig()
    cheap = EndpointExperts(endpoints=("pod-a",), costs=(ExpertCost(first=9, last=9, cost_milli=500),))
    policy = Policy(classes=(MATHS,), expert_costs=(cheap,))
    announce(rig, policy, spec(A, pod="pod-a"), spec(B, pod="pod-b"))
    assert factors(rig, MATHS) == {A: 0.625, B: 1.0}
    announce(rig, policy, spec(A, pod="pod-c"), spec(B, pod="pod-a"))
    assert factors(rig, MATHS) == {A: 1.0, B: 0.625}
    announce(rig, Policy(classes=(MATHS,)), spec(A, pod="pod-c"), spec(B, pod="pod-a"))
    assert factors(rig, MATHS) == {A: 1.0, B: 1.0}


async def test_a_class_goes_where_its_experts_are_fast() -> None:
    rig = PickerRig()
    announce(rig, Policy(class_header="x-class", classes=(MATHS,)), spec(A), spec(B))
    rig.beat(A, expert_costs={9: 3_000})
    for _ in range(2):
        assert (await rig.place(chat("2 + 2 = " * 99, headers={"x-class": "maths"}))).endpoint == B
    slow = next(row for row in rig.last()["endpoints"] if row["endpoint"] == A)
    assert slow["terms"] == {"expert_factor": 2.5}


def test_a_heartbeat_that_says_the_same_makes_nothing_anew() -> None:
    rig = PickerRig()
    announce(rig, Policy(classes=(MATHS,)), spec(A))
    beat = Heartbeat(endpoint=A, epoch="1", expert_costs={9: 2_000})
    rig.fleet.class_terms.on_heartbeat(beat)
    before = rig.fleet.class_terms.of(MATHS)
    rig.fleet.class_terms.on_heartbeat(beat)
    assert rig.fleet.class_terms.of(MATHS) is before


def test_slots_that_are_given_out_again_are_others() -> None:
    rig = PickerRig()
    announce(rig, Policy(network="annotation"), spec(A, 0.3), spec(B, 0.1))
    assert trips(rig) == {A: 0.3, B: 0.1}
    announce(rig, Policy(network="annotation"), spec(B, 0.1))
    rig.fleet.on_heartbeat_gone(A)
    for seconds in (0.0, 60.0):
        rig.fleet.sweep(rig.now_s + seconds)
    announce(rig, Policy(network="annotation"), spec(B, 0.1), spec(C, 0.2))
    assert trips(rig) == {B: 0.1, C: 0.2}


URGENT = RequestClass(name="urgent", priority=7, models=("big",))


@pytest.mark.parametrize(
    ("headers", "model", "expected"),
    [
        ({}, None, 0),
        ({OBJECTIVE: "invented"}, None, 0),
        ({OBJECTIVE: "chat-gold"}, None, 10),
        ({OBJECTIVE: "crawl"}, None, -3),
        # The policy's word about an objective goes before the object's own, where it says one.
        ({OBJECTIVE: "batch"}, None, 1),
        ({OBJECTIVE: "plain"}, None, 0),
        ({"x-class": "gold"}, None, 0),
        ({"x-class": "gold", OBJECTIVE: "crawl"}, None, -3),
        ({"x-class": "urgent", OBJECTIVE: "crawl"}, None, 7),
        # What a request is for says more than its model.
        ({OBJECTIVE: "crawl"}, "big", -3),
        ({OBJECTIVE: "invented"}, "big", 7),
        ({}, "big", 7),
    ],
)
def test_the_most_particular_word_makes_the_priority(headers: dict[str, str], model: str | None, expected: int) -> None:
    gold = RequestClass(name="gold", weight_milli=4_000, objectives=("chat-gold",))
    over = RequestClass(name="over", priority=1, objectives=("batch",))
    zero = RequestClass(name="zero", priority=0, objectives=("plain",))
    told = {"chat-gold": 10, "crawl": -3, "batch": -9, "plain": 5}
    objectives = tuple(Objective(name=name, priority=priority) for name, priority in told.items())
    found = classes(classes=(gold, over, zero, URGENT), objectives=objectives)
    assert found.priority(headers, model) == expected
    if OBJECTIVE in headers:
        shown = found.shown_priority(headers, model)
        assert shown is not None
        assert (shown.objective, shown.priority) == (headers[OBJECTIVE], expected)
        assert shown.is_known == (headers[OBJECTIVE] != "invented")


async def test_a_decision_shows_the_objective_and_the_priority_that_it_has() -> None:
    rig = PickerRig()
    rig.announce(A, B, policy=Policy(objectives=(Objective(name="chat-gold", priority=10),)))
    shown = ("objective", "objective_known", "priority")
    for headers, expected in (
        ({OBJECTIVE: "chat-gold"}, ("chat-gold", True, 10)),
        ({OBJECTIVE: "x" * 999}, ("x" * 128, False, 0)),
        ({}, (None, None, 0)),
    ):
        await rig.place(chat(headers=headers))
        assert tuple(rig.last()[name] for name in shown) == expected
