"""The demo's pool behind a real Gateway API controller, by the manifest as it is."""

import os

import pytest
from demo_pool import ENGINES, ENVOY, MANIFESTS, NAMESPACE, PICKERS, decisions, manifest, running, settled, status
from kubectl import get, is_there, items, kubectl, log, rolled_out, until
from traffic import Load

CLASS = "gatewayclass.gateway.networking.k8s.io/eg"
STREAMS = 4


def address() -> str:
    found = get("-n", NAMESPACE, "gateway.gateway.networking.k8s.io/gateway").get("status", {}).get("addresses", [])
    return str(found[0]["value"]) if found else ""


@pytest.fixture(scope="module")
def front() -> str:
    kinds = kubectl("api-resources", "--api-group=gateway.networking.k8s.io", "-o", "name")
    if "gatewayclasses" not in kinds or not is_there(CLASS):
        assert "E2E_GATEWAY" not in os.environ, "E2E_GATEWAY is set, and there is no GatewayClass eg"
        pytest.skip("the cluster has no GatewayClass eg (Envoy Gateway)")
    kubectl("apply", "-f", "-", text=manifest("envoy-gateway.yaml"))
    until("the pool's own Envoy is gone", lambda: not is_there("-n", NAMESPACE, f"deployment/{ENVOY}"))
    rolled_out(NAMESPACE, PICKERS)
    settled(endpoints=3)
    until("the gateway is programmed", address)
    url = f"http://{address()}/v1"

    def is_accepted() -> bool:
        route = get("-n", NAMESPACE, "httproute/demo")["status"]["parents"][0]["conditions"]
        policies = [
            one["conditions"]
            for kind in ("backendtrafficpolicy", "envoyextensionpolicy")
            for one in get("-n", NAMESPACE, f"{kind}/demo")["status"]["ancestors"]
        ]
        told = [one for conditions in (route, *policies) for one in conditions]
        wrong = [one for one in told if one["status"] != "True"]
        assert not wrong, wrong
        return bool(told)

    until("route and policies are accepted", is_accepted)
    deployments = items("-n", "envoy-gateway-system", "deployments", "-l", "gateway.envoyproxy.io/owning-gateway-name")
    for deployment in deployments:
        rolled_out("envoy-gateway-system", deployment["metadata"]["name"])
    return url


def test_requests_go_where_the_picker_says(front: str) -> None:
    with Load(front, talkers=4) as load:
        load.more(60)
    load.assert_nothing_failed()
    chosen = [one for one in decisions() if one["kind"] == "chat"]
    assert len(chosen) > 60
    assert sum(max(endpoint["hit_tokens"] for endpoint in one["endpoints"]) > 0 for one in chosen) > len(chosen) / 2
    moved = {"moved": 0.0, "decided": 0.0}
    for pod in running("picker"):
        page = kubectl(
            *("-n", NAMESPACE, "exec", pod["metadata"]["name"], "--", "python", "-c"),
            "import urllib.request as r; print(r.urlopen('http://localhost:9090/metrics').read().decode())",
        )
        for line in page.splitlines():
            name, _, value = line.rpartition(" ")
            if name.startswith("trimtab_moved_requests_total"):
                moved["moved"] += float(value)
            if name.startswith("trimtab_decisions_total"):
                moved["decided"] += float(value)
    assert moved["decided"] > 60
    # What a gateway does not heed it serves elsewhere, and the picker is told.
    assert moved["moved"] < 0.02 * moved["decided"], moved


def test_the_policy_says_that_no_envoy_is_its_own(front: str) -> None:
    conditions = {one["type"]: one for one in status()["conditions"]}
    log.info("GatewayAttached: %s", conditions["GatewayAttached"]["message"])
    assert conditions["Ready"]["status"] == "True"


def test_the_api_server_takes_a_route_to_a_pool(front: str) -> None:
    """Envoy Gateway does not follow it; gateways that know the kind do, and are not here."""
    kubectl("-n", NAMESPACE, "apply", "--dry-run=server", "-f", str(MANIFESTS / "httproute.yaml"))


def test_engines_are_replaced_behind_the_gateway(front: str) -> None:
    with Load(front) as load:
        kubectl("-n", NAMESPACE, "rollout", "restart", f"deployment/{ENGINES}")
        rolled_out(NAMESPACE, ENGINES)
        settled(endpoints=3)
        load.more(30)
    load.assert_nothing_failed()


def test_pickers_are_replaced_behind_the_gateway_with_streams_open(front: str) -> None:
    before = {pod["metadata"]["name"] for pod in running("picker")}
    with Load(front, talkers=4, streams=STREAMS, stream_tokens=5000) as load:
        until("all streams are open", lambda: load.tally["open_streams"] == STREAMS)
        kubectl("-n", NAMESPACE, "patch", "schedulingpolicy/demo", "--type=merge", "-p",
                '{"spec": {"picker": {"logLevel": "debug"}}}')  # fmt: skip
        until("new pickers", lambda: {pod["metadata"]["name"] for pod in running("picker")} - before)
        rolled_out(NAMESPACE, PICKERS)
        settled(endpoints=3)
        load.more(30)
    load.assert_nothing_failed()
    assert load.tally["whole_streams"] == STREAMS


def test_back_to_an_envoy_of_its_own(front: str) -> None:
    kubectl("delete", "-f", "-", "--ignore-not-found", text=_without_policy(manifest("envoy-gateway.yaml")))
    kubectl("apply", "-f", "-", text=manifest("demo.yaml"))
    kubectl("-n", NAMESPACE, "wait", "--for=create", f"deployment/{ENVOY}", "--timeout=60s")
    rolled_out(NAMESPACE, ENVOY)
    settled(endpoints=3)


def _without_policy(text: str) -> str:
    return "\n---\n".join(part for part in text.split("\n---\n") if "kind: SchedulingPolicy" not in part)
