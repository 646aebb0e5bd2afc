"""An empty cluster, and one command."""

from kubectl import get, items, kubectl, log, until
from release import NAME, NAMESPACE, helm, install_or_upgrade


def test_the_chart_installs_and_everything_becomes_ready() -> None:
    install_or_upgrade()
    for deployment in items("-n", NAMESPACE, "deployments"):
        wanted, ready = deployment["spec"]["replicas"], deployment["status"].get("readyReplicas", 0)
        assert ready == wanted, f"{deployment['metadata']['name']}: {ready} of {wanted}"


def test_its_own_test_passes() -> None:
    log.info("%s", helm("test", NAME, "--namespace", NAMESPACE)[-1500:])


def test_one_of_two_operators_leads() -> None:
    def holder() -> str:
        lease = get("-n", NAMESPACE, "lease/trimtab-operator")
        return str(lease["spec"].get("holderIdentity") or "")

    leader = until("a leader", holder)
    names = [
        pod["metadata"]["name"] for pod in items("-n", NAMESPACE, "pods", "-l", "app.kubernetes.io/component=operator")
    ]
    assert len(names) == 2
    assert any(leader.startswith(name) for name in names), (leader, names)


def test_the_api_server_trusts_the_webhook() -> None:
    def bundles() -> bool:
        found = [
            hook["clientConfig"].get("caBundle")
            for configuration in items("mutatingwebhookconfigurations")
            if "trimtab" in configuration["metadata"]["name"]
            for hook in configuration["webhooks"]
        ]
        return bool(found) and all(found)

    until("the webhook's CA is known to the API server", bundles)


def test_nothing_has_rights_that_a_container_does_not_need() -> None:
    for pod in items("-n", NAMESPACE, "pods"):
        name = pod["metadata"]["name"]
        for container in pod["spec"]["containers"]:
            security = {**pod["spec"].get("securityContext", {}), **container.get("securityContext", {})}
            assert security.get("runAsNonRoot") is True, name
            assert security.get("readOnlyRootFilesystem") is True, name
            assert security.get("allowPrivilegeEscalation") is False, name
            assert security.get("capabilities") == {"drop": ["ALL"]}, name
    kubectl("auth", "can-i", "list", "inferencepools.inference.networking.k8s.io", "-A",
            f"--as=system:serviceaccount:{NAMESPACE}:{NAME}-operator")  # fmt: skip
