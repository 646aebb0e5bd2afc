"""Every object that the chart renders, under every set of values, is one that a real API server takes."""

from pathlib import Path

import pytest
import yaml
from cluster import Cluster
from go_module import GoModule, object_in
from helm import NAMESPACE, Helm, pod_specs
from value_sets import VALUE_SETS

pytestmark = pytest.mark.timeout(240)

PROMETHEUS = GoModule(
    "github.com/prometheus-operator/prometheus-operator",
    "v0.85.0",
    "h1:M5xLCLEoaW2IJfnuCwFzzpL+jSVQu3KGT84Pye+fW8s=",
)
CERT_MANAGER = GoModule(
    "github.com/cert-manager/cert-manager", "v1.18.2", "h1:H2P75ycGcTMauV3gvpkDqLdS3RSXonWF2S49QGA1PZE="
)
OTHERS = (
    (PROMETHEUS, "example/prometheus-operator-crd/monitoring.coreos.com_podmonitors.yaml"),
    (PROMETHEUS, "example/prometheus-operator-crd/monitoring.coreos.com_servicemonitors.yaml"),
    (PROMETHEUS, "example/prometheus-operator-crd/monitoring.coreos.com_prometheusrules.yaml"),
    (CERT_MANAGER, "deploy/crds/crd-issuers.yaml"),
    (CERT_MANAGER, "deploy/crds/crd-certificates.yaml"),
)


@pytest.fixture(scope="module")
def cluster(kube_config: Path) -> Cluster:
    """With the kinds of the Prometheus operator and of cert-manager, as these publish them."""
    cluster = Cluster(kube_config)
    cluster.run("create", "namespace", NAMESPACE)
    names = []
    for module, file in OTHERS:
        body = object_in(module, file)
        # cert-manager's are templates where they stand; what matters is the schema.
        body["metadata"] = {"name": body["metadata"]["name"]}
        names.append(f"crd/{body['metadata']['name']}")
        cluster.apply(body)
    cluster.done("wait", "--for=condition=Established", "--timeout=30s", *names)
    return cluster


@pytest.mark.parametrize("case", VALUE_SETS)
def test_the_api_server_takes_every_object(helm4: Helm, cluster: Cluster, case: str) -> None:
    objects = helm4.of_set(case)
    dry = ("apply", "--server-side", "--force-conflicts", "--dry-run=server", "--validate=strict", "--filename", "-")
    said = cluster.done(*dry, body=yaml.safe_dump_all(objects))
    assert said.count("(server dry run)") == len(objects)


def test_its_pods_are_admitted_where_only_restricted_ones_are(helm4: Helm, cluster: Cluster) -> None:
    name = "restricted"
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}})
    specs = pod_specs(helm4.of_set("defaults"))
    assert len(specs) == 4
    for each, spec in specs.items():
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": each, "namespace": name}, "spec": spec}
        cluster.done("create", "--dry-run=server", "--filename", "-", body=yaml.safe_dump(pod))
    spec["hostNetwork"] = True
    ran = cluster.run("create", "--dry-run=server", "--filename", "-", body=yaml.safe_dump(pod))
    assert "violates PodSecurity" in ran.stderr


def test_an_object_that_is_wrong_is_not_taken(helm4: Helm, cluster: Cluster) -> None:
    objects = helm4.objects({"operator": {"securityContext": {"runAsRoot": True}}})
    dry = ("apply", "--server-side", "--dry-run=server", "--validate=strict", "--force-conflicts", "--filename", "-")
    ran = cluster.run(*dry, body=yaml.safe_dump_all(objects))
    assert ran.returncode != 0
    assert "runAsRoot" in ran.stderr
