"""What is left when the release goes: what docs/install.md says, and nothing else."""

from demo_pool import FRONT, NAMESPACE, manifest
from kubectl import items, kubectl, log, until
from release import NAME, helm
from release import NAMESPACE as SYSTEM
from traffic import NAMESPACE as CLIENT
from traffic import Load

STAYS = {
    # With a kind all its objects would go.
    "customresourcedefinition.apiextensions.k8s.io/inferencepools.inference.networking.k8s.io",
    "customresourcedefinition.apiextensions.k8s.io/schedulingpolicies.trimtab.dev",
    # A release that comes back finds running sidecars logged in.
    "secret/trimtab-install",
    # The operator's own, made while it ran.
    "secret/trimtab-webhook-certificate",
    "lease.coordination.k8s.io/trimtab-operator",
}
NOT_OURS = ("configmap/kube-root-ca.crt", "serviceaccount/default", "event", "endpointslice", "pod")


def all_of_the_release() -> set[str]:
    """Everything in its namespace, and what is of the whole cluster and named after it."""
    kinds = kubectl("api-resources", "--verbs=list", "--namespaced", "-o", "name").split()
    kinds = [kind for kind in kinds if not kind.startswith(("events", "endpoints")) and "metrics" not in kind]
    inside = kubectl("-n", SYSTEM, "get", ",".join(kinds), "-o", "name", "--ignore-not-found").split()
    kinds = kubectl("api-resources", "--verbs=list", "--namespaced=false", "-o", "name").split()
    kinds = [kind for kind in kinds if not kind.startswith(("namespaces", "componentstatuses", "apiservices"))]
    cluster = kubectl("get", ",".join(kinds), "-o", "name", "--ignore-not-found").split()
    found = {name for name in inside if not name.startswith(NOT_OURS)}
    return found | {name for name in cluster if "trimtab" in name or "inferencepools" in name}


def only_what_stays() -> bool:
    found = all_of_the_release()
    assert found == STAYS, f"left: {sorted(found - STAYS)}; missing: {sorted(STAYS - found)}"
    return True


def test_traffic_goes_on_without_the_release_and_only_what_is_said_stays() -> None:
    before = all_of_the_release()
    log.info("there are %d objects of the release", len(before))
    assert before > STAYS
    with Load(FRONT) as load:
        helm("uninstall", NAME, "--namespace", SYSTEM, "--wait", "--timeout=180s")
        until("only what is said is left", only_what_stays, timeout_s=60.0)
        load.more(30)
    load.assert_nothing_failed()


def test_the_demo_goes_with_its_namespace() -> None:
    kubectl("delete", "-f", "-", "--timeout=180s", text=manifest("demo.yaml"), timeout_s=200)
    left = [one["metadata"]["name"] for one in items("namespaces") if one["metadata"]["name"] == NAMESPACE]
    assert not left
    kubectl("delete", "namespace", CLIENT, SYSTEM, "--timeout=120s")
