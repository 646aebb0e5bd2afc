"""The examples for real engines, applied as they are: their images do not run here, but everything up to them does."""

from collections.abc import Iterator

import pytest
from demo_pool import MANIFESTS
from kubectl import get, items, kubectl, log, until

NAMESPACE = "models"
EXAMPLES = {"vllm": ("chat", 8000), "sglang": ("assist", 30000)}


@pytest.fixture(scope="module", autouse=True)
def namespace() -> Iterator[None]:
    kubectl("create", "namespace", NAMESPACE)
    kubectl("label", "namespace", NAMESPACE, "trimtab.dev/inject=enabled")
    yield
    # The pools first: a namespace is looked at again only after half of the longest grace period in it, and a picker's
    # is an hour, however soon it ends.
    for engine in EXAMPLES:
        kubectl("-n", NAMESPACE, "delete", "-f", str(MANIFESTS / f"{engine}.yaml"))
    until("no pod is left", lambda: not items("-n", NAMESPACE, "pods"))
    kubectl("delete", "namespace", NAMESPACE, "--timeout=120s")
    log.info("not run: the engines' own images, %s", ", ".join(EXAMPLES))


@pytest.mark.parametrize("engine", EXAMPLES)
def test_the_api_server_takes_every_object(engine: str) -> None:
    kubectl("-n", NAMESPACE, "apply", "--dry-run=server", "-f", str(MANIFESTS / f"{engine}.yaml"))


@pytest.mark.parametrize("engine", EXAMPLES)
def test_each_pod_gets_its_sidecar_and_the_pool_its_parts(engine: str) -> None:
    pool, port = EXAMPLES[engine]
    kubectl("-n", NAMESPACE, "apply", "-f", str(MANIFESTS / f"{engine}.yaml"))
    kubectl("-n", NAMESPACE, "wait", "--for=create", f"deployment/trimtab-{pool}", "--timeout=60s")

    def restarted() -> bool:
        """The pool may be known a moment after the first pods are made: as the manifest says, they are made again."""
        pods = [
            pod
            for pod in items("-n", NAMESPACE, "pods", "-l", f"app={engine}")
            if "deletionTimestamp" not in pod["metadata"]
        ]
        missing = [pod["metadata"]["name"] for pod in pods if not sidecar(pod)]
        if missing:
            kubectl("-n", NAMESPACE, "delete", "pod", *missing, "--wait=false", "--grace-period=1")
        return len(pods) == 2 and not missing

    def sidecar(pod: dict[str, object]) -> object:
        containers = pod["spec"].get("initContainers", [])  # type: ignore[attr-defined]
        return next((one for one in containers if one["name"] == "trimtab-sidecar"), None)

    until("each pod has its sidecar", restarted)
    pod = items("-n", NAMESPACE, "pods", "-l", f"app={engine}")[0]
    container = next(one for one in pod["spec"]["initContainers"] if one["name"] == "trimtab-sidecar")
    assert container["restartPolicy"] == "Always"
    assert {f"--engine={engine}", f"--engine-url=http://127.0.0.1:{port}"} <= set(container["args"])
    mounts = {mount["mountPath"]: mount.get("readOnly") for mount in container["volumeMounts"]}
    assert mounts["/root/.cache/huggingface"] is True
    engine_container = pod["spec"]["containers"][0]
    assert engine_container["resources"]["limits"] == {"nvidia.com/gpu": "1"}

    def names_its_trouble() -> bool:
        """No engine answers; the pool's parts are there all the same."""
        status = get("-n", NAMESPACE, f"schedulingpolicy/{pool}").get("status", {})
        return {one["type"]: one["status"] for one in status["conditions"]}.get("SidecarsInjected") == "True"

    until("the policy says that all have sidecars", names_its_trouble)


def test_a_sidecar_runs_and_waits_where_the_engine_does_not_come() -> None:
    """Its image cannot be had here. A small pod finds a place on a small node, one with the needs of a GPU does not."""
    kubectl("-n", NAMESPACE, "set", "resources", "deployment/vllm", "--requests=cpu=10m,memory=64Mi")

    def runs() -> bool:
        pods = items("-n", NAMESPACE, "pods", "-l", "app=vllm")
        states = [one for pod in pods for one in pod["status"].get("initContainerStatuses", [])]
        return any(one["name"] == "trimtab-sidecar" and "running" in one["state"] for one in states)

    until("a sidecar runs", runs)
