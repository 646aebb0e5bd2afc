"""Pods as endpoints: what of a pod counts, and what does not."""

from typing import Any

import pytest

from trimtab_operator.injection.marks import LEFT_ALONE_NOTE
from trimtab_operator.kube import Object
from trimtab_operator.membership.endpoints import ENDPOINTS_MAX, Members, members_of
from trimtab_operator.membership.pod_view import PodView


def pod(
    name: str,
    ip: str = "10.0.0.1",
    *args: str,
    ready: bool = True,
    deleting: bool = False,
    phase: str = "Running",
    labels: dict[str, str] | None = None,
    **container: Any,
) -> Object:
    body: Object = {
        "metadata": {"name": name, "namespace": "n", "uid": f"uid-{name}", "labels": labels or {}},
        "spec": {
            "nodeName": "node-1",
            "containers": [
                {
                    "name": "engine",
                    "image": "vllm/vllm-openai:v0.20.0",
                    "args": list(args),
                    "ports": [{"containerPort": 8000}],
                    **container,
                }
            ],
        },
        "status": {
            "phase": phase,
            "podIP": ip,
            "conditions": [{"type": "Ready", "status": "True" if ready else "False"}],
        },
    }
    if deleting:
        body["metadata"]["deletionTimestamp"] = "2030-01-01T00:00:00Z"
    return body


def members(*bodies: Object, ports: tuple[int, ...] = (8000,), ranks: int | None = None) -> Members:
    return members_of([PodView.of(body, ports) for body in bodies], ports, ranks)


def names(*bodies: Object, ports: tuple[int, ...] = (8000,), ranks: int | None = None) -> list[str]:
    return [endpoint.name for endpoint in members(*bodies, ports=ports, ranks=ranks).endpoints]


def test_each_target_port_of_each_ready_pod_is_an_endpoint_whatever_the_order_of_the_pods() -> None:
    one, two = pod("a", "10.0.0.2"), pod("b", "10.0.0.1")
    wanted = ["10.0.0.1:8000", "10.0.0.1:8001", "10.0.0.2:8000", "10.0.0.2:8001"]
    assert names(one, two, ports=(8000, 8001)) == wanted == names(two, one, ports=(8000, 8001))


def test_ports_that_are_declared_in_vain_are_kept_with_the_names_of_the_pods() -> None:
    one, two = pod("a", "10.0.0.1"), pod("b", "10.0.0.2", ports=[{"containerPort": 9001}, {"name": "x"}])
    found = members(one, two, pod("c", "10.0.0.3", ports=[]), pod("d", deleting=True), ports=(8000, 8001))
    assert (found.other_ports, found.pods) == ((9001,), {"a", "b", "c"})
    assert members(one, ports=(80,)).other_ports == (8000,)


def test_no_pool_has_more_endpoints_than_pickers_follow_and_those_that_live_come_first() -> None:
    bodies = [pod(f"d{number}", f"10.0.0.{number}", deleting=True) for number in range(5)]
    bodies += [pod(f"l{number}", f"10.0.1.{number}") for number in range(8)]
    found = members(*bodies, ports=(8000, 8001, 8002, 8003), ranks=256)
    assert len(found.endpoints) == len({endpoint.name for endpoint in found.endpoints}) == ENDPOINTS_MAX
    assert found.left_out == 13 * 4 * 256 - ENDPOINTS_MAX
    assert found.ready == 8 * 4 * 256
    some = members(*bodies[:6], ports=(8000,), ranks=None)
    assert (len(some.endpoints), some.left_out) == (6, 0)


def test_an_endless_number_of_endpoints_is_counted_and_not_made() -> None:
    bodies = [pod(f"p{number}", f"10.{number // 250}.0.{number % 250}") for number in range(1000)]
    found = members(*bodies, ports=tuple(range(8000, 8008)), ranks=256)
    assert len(found.endpoints) == ENDPOINTS_MAX
    assert found.left_out == 1000 * 8 * 256 - ENDPOINTS_MAX


def test_an_ipv6_address_stands_in_brackets_and_of_two_families_the_pods_own_choice_counts() -> None:
    body = pod("a", "fd00::1")
    body["status"]["podIPs"] = [{"ip": "fd00::1"}, {"ip": "10.0.0.9"}]
    assert names(body) == ["[fd00::1]:8000"]


@pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
def test_a_pod_that_is_over_is_no_member_even_while_it_is_deleted(phase: str) -> None:
    assert members(pod("a", phase=phase), pod("b", phase=phase, deleting=True)) == Members()


def test_a_pod_that_is_not_ready_or_has_no_address_is_counted_but_is_no_endpoint() -> None:
    found = members(pod("a", ready=False), pod("b", "", ready=True))
    assert (found.endpoints, found.pods_matching, found.pods_ready, found.total) == ((), 2, 1, 2)


def test_a_readiness_gate_holds_a_pod_back_through_its_ready_condition() -> None:
    body = pod("a", ready=False)
    body["spec"]["readinessGates"] = [{"conditionType": "example.com/up"}]
    body["status"]["conditions"].append({"type": "ContainersReady", "status": "True"})
    assert names(body) == []


@pytest.mark.parametrize("ready", [True, False])
def test_a_pod_being_deleted_drains_until_it_is_gone(ready: bool) -> None:
    found = members(pod("a", deleting=True, ready=ready))
    assert [(e.name, e.draining) for e in found.endpoints] == [("10.0.0.1:8000", True)]
    assert found.ready == 0


def test_an_address_taken_over_belongs_to_the_pod_that_lives() -> None:
    old, new = pod("z-old", deleting=True), pod("a-new")
    for order in ((old, new), (new, old)):
        assert [(e.pod, e.draining) for e in members(*order).endpoints] == [("a-new", False)]


@pytest.mark.parametrize(
    ("args", "ranks"),
    [
        (("--data-parallel-size", "2"), 2),
        (("--data_parallel_size=4",), 4),
        (("-dp", "3"), 3),
        (("-dp=3",), 3),
        (("--data-parallel-size", "$(DP)"), 5),
        (("--data-parallel-size", "2", "--data-parallel-external-lb"), 1),
        (("--data-parallel-size", "2", "--data-parallel-hybrid-lb"), 1),
        (("-dp", "2", "-dpn", "1"), 1),
        (("-dp", "2", "-dph"), 1),
        (("--data-parallel-size", "many"), 1),
        (("--data-parallel-size", "0"), 1),
    ],
)
def test_the_ranks_behind_a_port_are_as_vllm_was_told(args: tuple[str, ...], ranks: int) -> None:
    body = pod("a", "10.0.0.1", *args, env=[{"name": "DP", "value": "5"}])
    wanted = ["10.0.0.1:8000"] if ranks == 1 else [f"10.0.0.1:8000/{rank}" for rank in range(ranks)]
    assert names(body) == wanted


def test_ranks_are_found_in_a_shells_script_and_in_sglangs_words() -> None:
    script = "set -e\nexec vllm serve m \\\n  --data-parallel-size 2\n"
    assert len(names(pod("a", "10.0.0.1", script, command=["sh", "-c"]))) == 2
    sglang = pod("a", "10.0.0.1", "--dp-size", "2", command=["python3", "-m", "sglang.launch_server"], image="x")
    assert [(e.rank, e.engine) for e in members(sglang).endpoints] == [(0, "sglang"), (1, "sglang")]


def test_the_policys_ranks_come_before_the_engines_and_several_ports_have_none_of_their_own() -> None:
    body = pod("a", "10.0.0.1", "--data-parallel-size", "4")
    assert len(names(body, ranks=2)) == 2
    assert names(body, ports=(8000, 8001)) == ["10.0.0.1:8000", "10.0.0.1:8001"]


def test_a_label_says_which_engine_it_is_and_how_its_words_are_read() -> None:
    body = pod("a", "10.0.0.1", "--dp-size", "2", image="own", labels={"trimtab.dev/engine": "sglang"})
    assert [e.engine for e in members(body).endpoints] == ["sglang", "sglang"]


def test_a_label_that_names_no_engine_we_know_is_not_believed() -> None:
    assert [e.engine for e in members(pod("a", labels={"trimtab.dev/engine": "x"})).endpoints] == ["vllm"]


def test_accelerators_and_the_zone_are_shown() -> None:
    body = pod(
        "a", labels={"topology.kubernetes.io/zone": "z1"}, resources={"limits": {"cpu": "8", "nvidia.com/gpu": "8"}}
    )
    assert [(e.gpu, e.zone) for e in members(body).endpoints] == [("8x nvidia.com/gpu", "z1")]
    view = PodView.of(pod("b", "10.0.0.2"), (8000,))
    assert members_of([view], (8000,), None, zone_of={"node-1": "z2"}.__getitem__).endpoints[0].zone == "z2"


def test_a_pod_tells_why_the_webhook_left_it_alone_until_it_has_the_sidecar() -> None:
    bodies = [pod("a"), pod("b", "10.0.0.2"), pod("c", "10.0.0.3"), pod("d", "10.0.0.4")]
    for body in bodies[:3]:
        body["metadata"]["annotations"] = {LEFT_ALONE_NOTE: "no container is named x"}
    bodies[2]["spec"]["containers"].append({"name": "trimtab-sidecar", "image": "i"})
    found = members(*bodies)
    assert (found.pods_injected, found.pods_not_injected) == (1, 3)
    assert found.left_alone == {"no container is named x": 2}
