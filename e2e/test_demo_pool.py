"""The demo's manifest, as it is: engines with sidecars, pickers, an Envoy in front."""

from typing import Any

import pytest
from demo_pool import ENGINES, ENVOY, FRONT, NAMESPACE, PICKERS, decisions, manifest, restarts, running, settled
from kubectl import get, items, kubectl, rolled_out, run
from traffic import Load, start_client


@pytest.fixture(scope="module", autouse=True)
def demo() -> None:
    start_client()
    kubectl("apply", "-f", "-", text=manifest("demo.yaml"))
    for deployment in (ENGINES, PICKERS, ENVOY):
        # The operator makes two of them.
        kubectl("-n", NAMESPACE, "wait", "--for=create", f"deployment/{deployment}", "--timeout=60s")
        rolled_out(NAMESPACE, deployment)
    settled(endpoints=3)


def first_start(status: dict[str, Any]) -> str:
    """Of a container that was started once or twice; what comes before is not told."""
    of = status["lastState"] or status["state"]
    return str(next(iter(of.values()))["startedAt"])


def test_each_engine_has_its_sidecar_which_starts_after_downloads_and_before_the_engine() -> None:
    pods = items("-n", NAMESPACE, "pods", "-l", f"app={ENGINES}")
    assert len(pods) == 3
    for pod in pods:
        assert [container["name"] for container in pod["spec"]["initContainers"]] == ["model", "trimtab-sidecar"]
        began = {
            one["name"]: first_start(one)
            for kind in ("initContainerStatuses", "containerStatuses")
            for one in pod["status"][kind]
        }
        sidecar = next(one for one in pod["status"]["initContainerStatuses"] if one["name"] == "trimtab-sidecar")
        assert began["model"] <= began["trimtab-sidecar"]
        assert began["trimtab-sidecar"] <= began["engine"] or sidecar["restartCount"] > 1


def test_conversations_stay_where_their_prefix_is() -> None:
    with Load(FRONT, talkers=4) as load:
        load.more(60)
    load.assert_nothing_failed()
    chosen = [one for one in decisions() if one["kind"] == "chat"]
    followers = [one for one in chosen if max(endpoint["hit_tokens"] for endpoint in one["endpoints"]) > 0]
    assert len(followers) > len(chosen) / 2
    best = [max(one["endpoints"], key=lambda endpoint: endpoint["hit_tokens"])["endpoint"] for one in followers]
    kept = sum(one["endpoint"] == endpoint for one, endpoint in zip(followers, best, strict=True))
    assert kept > 0.8 * len(followers), f"{kept} of {len(followers)}"
    assert {one["approximate"] for one in chosen} == {None}
    # No conversation is everybody's: with four of them more than one endpoint has work.
    assert len({one["endpoint"] for one in chosen}) > 1


def test_both_pickers_are_asked_and_agree() -> None:
    pods = running("picker")
    assert len(pods) == 2
    assert {one["picker"] for one in decisions()} == {f"http://{pod['status']['podIP']}:9090" for pod in pods}


def test_nothing_was_restarted_but_sidecars_that_came_before_their_login() -> None:
    login = get("-n", NAMESPACE, "secret/trimtab-demo-store")
    for component in ("picker", "envoy"):
        assert restarts(component) == 0
    for pod in items("-n", NAMESPACE, "pods", "-l", f"app={ENGINES}"):
        for kind in ("initContainerStatuses", "containerStatuses"):
            for one in pod["status"][kind]:
                if one["restartCount"]:
                    # A sidecar whose pod is made together with its pool may come before the Secret with its login.
                    assert one["name"] == "trimtab-sidecar", one
                    assert one["lastState"]["terminated"]["startedAt"] <= login["metadata"]["creationTimestamp"], one


def test_pods_of_the_pool_have_no_token_and_no_root() -> None:
    for component in ("picker", "envoy"):
        pod = running(component)[0]["metadata"]["name"]
        assert get("-n", NAMESPACE, f"pod/{pod}")["spec"]["automountServiceAccountToken"] is False
    name = running("picker")[0]["metadata"]["name"]
    user = kubectl("-n", NAMESPACE, "exec", name, "--", "id", "-u").strip()
    assert user == "65532"
    with pytest.raises(AssertionError, match="Read-only file system"):
        run("kubectl", "-n", NAMESPACE, "exec", name, "--", "touch", "/opt/trimtab/here")


def test_the_headless_service_has_exactly_the_engines() -> None:
    slices = items("-n", NAMESPACE, "endpointslices", "-l", "kubernetes.io/service-name=trimtab-demo-endpoints")
    found = {address for one in slices for endpoint in one["endpoints"] for address in endpoint["addresses"]}
    assert found == {pod["status"]["podIP"] for pod in items("-n", NAMESPACE, "pods", "-l", f"app={ENGINES}")}
