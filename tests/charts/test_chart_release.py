"""A release's whole life on a real API server, with the real operator under the rights that the release gives it."""

import base64
import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster import Cluster
from control_plane import control_plane
from helm import CHART, NAMESPACE, ROOT, Helm, Object, helm_of, pod_specs
from valkey_server import ValkeyProcess, free_port

from trimtab_operator.injection.authority import make_pair
from trimtab_operator.injection.webhook_configuration import configuration_name

pytestmark = pytest.mark.timeout(300)

WITHIN_S = 60.0
POOLS = "inferencepools.inference.networking.k8s.io"
POLICIES = "schedulingpolicies.trimtab.dev"
OUR_KINDS = {f"customresourcedefinition.apiextensions.k8s.io/{name}" for name in (POOLS, POLICIES)}
CONFIGURATION = configuration_name(NAMESPACE)
RELEASE = ("--namespace", NAMESPACE)
SLOWER = {"webhook": {"timeoutSeconds": 5}}
AS_BEFORE = {"webhook": {"timeoutSeconds": 3}}


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """Without any kind of ours."""
    try:
        with control_plane() as config:
            yield Cluster(config)
    except (OSError, subprocess.CalledProcessError) as error:
        if os.environ.get("CI"):
            pytest.fail(f"no kube-apiserver: {error}")
        pytest.skip(f"no kube-apiserver: {error}. Set KUBEBUILDER_ASSETS, or see e2e/cluster/build")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ValkeyProcess]:
    (tmp_path / "store").mkdir()
    server = ValkeyProcess(tmp_path / "store", password="secret")
    server.start()
    yield server
    server.kill()


class Operator:
    """The process that the release's Deployment describes, outside the cluster, with its service account's token."""

    def __init__(self, cluster: Cluster, deployment: Object, store: ValkeyProcess, folder: Path) -> None:
        config = yaml.safe_load(cluster.config.read_text())
        config["users"][0]["user"] = {"token": cluster.token("trimtab-operator")}
        path = folder / "operator.kubeconfig"
        path.write_text(yaml.safe_dump(config))
        (container,) = deployment["containers"]
        own = [
            "--store",
            store.url,
            "--bind",
            "127.0.0.1",
            "--metrics-port",
            str(free_port()),
            "--kubeconfig",
            str(path),
        ]
        self.log = folder / "operator.log"
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "trimtab_operator", *container["args"], *own],
                env={"PATH": os.environ["PATH"], "POD_NAMESPACE": NAMESPACE, "POD_NAME": "trimtab-operator-0"},
                stderr=log,
            )

    def stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(30)


def until(what: Any, within_s: float = WITHIN_S) -> Any:
    """The first answer that is something."""
    end_s = time.monotonic() + within_s
    while not (found := what()):
        assert time.monotonic() < end_s, "not in time"
        time.sleep(0.2)
    return found


def configuration(cluster: Cluster) -> Object:
    found = cluster.get("mutatingwebhookconfiguration", CONFIGURATION)
    assert found is not None
    return found


def trusted(cluster: Cluster) -> str:
    return str(configuration(cluster)["webhooks"][0]["clientConfig"].get("caBundle", ""))


def timeout_s(cluster: Cluster) -> int:
    return int(configuration(cluster)["webhooks"][0]["timeoutSeconds"])


def password(cluster: Cluster) -> str:
    secret = cluster.get("secret", "trimtab-store", NAMESPACE)
    assert secret is not None
    return base64.b64decode(secret["data"]["password"]).decode()


def install(helm: Helm, cluster: Cluster, values: dict[str, Any] | None = None) -> str:
    return helm.done(
        "install", "trimtab", CHART, *RELEASE, "--create-namespace", values=values or {}, config=cluster.config
    )


def upgrade(helm: Helm, cluster: Cluster, values: dict[str, Any]) -> str:
    return helm.done("upgrade", "trimtab", CHART, *RELEASE, values=values, config=cluster.config)


def test_a_release_is_installed_upgraded_rolled_back_and_removed(
    helm: Helm, cluster: Cluster, store: ValkeyProcess, tmp_path: Path
) -> None:
    before = cluster.names("all,configmap,secret,clusterrole,clusterrolebinding,mutatingwebhookconfiguration,crd")
    said = install(helm, cluster)
    assert "helm test trimtab --namespace trimtab-system" in said
    assert "pool-example.yaml" in said
    assert "WARNING" not in said
    assert cluster.names("crd") == OUR_KINDS
    assert trusted(cluster) == ""
    first_password = password(cluster)
    assert len(first_password) >= 32

    operator = Operator(cluster, pod_specs(helm.objects())["trimtab-operator"], store, tmp_path)
    try:
        authority = until(lambda: trusted(cluster))
        until(lambda: cluster.get("secret", "trimtab-webhook-certificate", NAMESPACE))
    finally:
        operator.stop()
    assert "Forbidden" not in operator.log.read_text()
    assert writers(cluster, "f:caBundle") == {"trimtab"}
    assert writers(cluster, "f:timeoutSeconds") == {"helm"}

    # Somebody brings the standard's CRD up to date; no upgrade and no rollback of ours takes that back.
    newer = '[{"op": "replace", "path": "/spec/versions/0/schema/openAPIV3Schema/description", "value": "newer"}]'
    cluster.done("patch", "crd", POOLS, "--type=json", "--patch", newer)
    pools = crd(cluster, POOLS)["spec"]

    pods = pod_templates(cluster)
    upgrade(helm, cluster, SLOWER)
    assert pod_templates(cluster) == pods
    for kept in ("--reuse-values", "--reset-then-reuse-values"):
        helm.done("upgrade", "trimtab", CHART, *RELEASE, kept, config=cluster.config)
        assert pod_templates(cluster) == pods
    assert (timeout_s(cluster), trusted(cluster), password(cluster)) == (5, authority, first_password)
    assert crd(cluster, POOLS)["spec"] == pools
    helm.done("rollback", "trimtab", "1", *RELEASE, config=cluster.config)
    assert (timeout_s(cluster), trusted(cluster), password(cluster)) == (3, authority, first_password)
    assert crd(cluster, POOLS)["spec"] == pools
    assert pod_templates(cluster) == pods

    # A password that was lost is made anew, and Valkey starts with the new one; nobody else has to.
    cluster.done("delete", "secret", "trimtab-store", *RELEASE)
    upgrade(helm, cluster, AS_BEFORE)
    assert len(password(cluster)) == len(first_password)
    assert password(cluster) != first_password
    now = pod_templates(cluster)
    assert {name for name in now if now[name] != pods[name]} == {"trimtab-valkey"}

    helm.done("uninstall", "trimtab", *RELEASE, config=cluster.config)
    kinds = "all,configmap,secret,clusterrole,clusterrolebinding,mutatingwebhookconfiguration,crd"
    assert cluster.names(kinds) - before == OUR_KINDS
    left = cluster.names("all,configmap,secret,role,rolebinding,serviceaccount,lease,pdb,networkpolicy", NAMESPACE)
    # What docs/install.md says.
    assert left == {
        "secret/trimtab-install",
        "secret/trimtab-webhook-certificate",
        "lease.coordination.k8s.io/trimtab-operator",
    }
    # And what is left is no obstacle.
    install(helm, cluster)
    assert trusted(cluster) == ""


def pod_templates(cluster: Cluster) -> dict[str, Object]:
    """By Deployment: where one changes, its pods are made again."""
    found = json.loads(cluster.done("get", "deployments", *RELEASE, "--output", "json"))["items"]
    return {body["metadata"]["name"]: body["spec"]["template"] for body in found}


def crd(cluster: Cluster, name: str) -> Object:
    found = cluster.get("crd", name)
    assert found is not None
    return found


def writers(cluster: Cluster, field: str) -> set[str]:
    """Of a field of the webhook."""
    found = set()
    for entry in configuration(cluster)["metadata"]["managedFields"]:
        if field in str(entry["fieldsV1"]):
            found.add(entry["manager"])
    return found


def test_a_release_of_helm_3_is_taken_over_by_helm_4(cluster: Cluster, tmp_path: Path) -> None:
    for name in ("helm3", "helm4"):
        (tmp_path / name).mkdir()
    helm3, helm4 = helm_of(3, tmp_path / "helm3"), helm_of(4, tmp_path / "helm4")
    install(helm3, cluster)
    first_password = password(cluster)
    body = configuration(cluster)
    patch = {
        "apiVersion": body["apiVersion"],
        "kind": body["kind"],
        "metadata": {"name": CONFIGURATION},
        "webhooks": [{"name": body["webhooks"][0]["name"], "clientConfig": {"caBundle": certificate()}}],
    }
    cluster.apply(patch, manager="trimtab")
    upgrade(helm4, cluster, SLOWER)
    assert (timeout_s(cluster), trusted(cluster), password(cluster)) == (5, certificate(), first_password)
    server_side = ("--server-side=true",)
    helm4.done("upgrade", "trimtab", CHART, *RELEASE, *server_side, values=AS_BEFORE, config=cluster.config)
    assert (timeout_s(cluster), trusted(cluster), password(cluster)) == (3, certificate(), first_password)


@functools.cache
def certificate() -> str:
    return base64.b64encode(make_pair(("a",), now_s=time.time()).ca).decode()


def test_kinds_of_others_are_left_as_they_are(helm: Helm, cluster: Cluster) -> None:
    for path in (ROOT / "crds").glob("*.yaml"):
        body = yaml.safe_load(path.read_text())
        body["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["description"] = "theirs"
        if body["metadata"]["name"] == POLICIES:
            body["metadata"]["annotations"]["trimtab.dev/schema-revision"] = "0"
        cluster.apply(body, manager="vendor")
    said = install(helm, cluster)
    # The operator would not understand it, so somebody has to be told.
    assert f"WARNING: the CRD {POLICIES} is no part of this release, and of schema revision 0" in said
    upgrade(helm, cluster, SLOWER)
    for name in (POOLS, POLICIES):
        body = crd(cluster, name)
        assert body["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["description"] == "theirs"
        assert "meta.helm.sh/release-name" not in body["metadata"]["annotations"]
    # Unless it is told to: as docs/install.md says.
    notes = ("meta.helm.sh/release-name=trimtab", f"meta.helm.sh/release-namespace={NAMESPACE}")
    cluster.done("annotate", "crd", POLICIES, *notes, "--overwrite")
    cluster.done("label", "crd", POLICIES, "app.kubernetes.io/managed-by=Helm", "--overwrite")
    forced = ("--force-conflicts",) if helm.version == 4 else ()
    said = helm.done("upgrade", "trimtab", CHART, *RELEASE, *forced, values=AS_BEFORE, config=cluster.config)
    assert "WARNING" not in said
    schemas = [crd(cluster, name)["spec"]["versions"][0]["schema"]["openAPIV3Schema"] for name in (POOLS, POLICIES)]
    assert [schema["description"] == "theirs" for schema in schemas] == [True, False]
    helm.done("uninstall", "trimtab", *RELEASE, config=cluster.config)
    assert len(cluster.names("crd")) == 2


def test_our_own_kind_is_brought_up_to_date_by_an_upgrade(helm: Helm, cluster: Cluster, tmp_path: Path) -> None:
    older = tmp_path / "older"
    subprocess.run(["cp", "-rL", CHART, older], check=True)
    path = older / "files" / "crds" / "trimtab.dev_schedulingpolicies.yaml"
    body = yaml.safe_load(path.read_text())
    body["metadata"]["annotations"]["trimtab.dev/schema-revision"] = "0"
    properties = body["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
    del properties["sidecar"]
    path.write_text(yaml.safe_dump(body))
    helm.done("install", "trimtab", older, *RELEASE, "--create-namespace", values={}, config=cluster.config)

    def spec_fields() -> set[str]:
        schema = crd(cluster, POLICIES)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
        return set(schema["properties"]["spec"]["properties"])

    assert "sidecar" not in spec_fields()
    said = upgrade(helm, cluster, {})
    assert "sidecar" in spec_fields()
    assert "WARNING" not in said


def test_a_second_installation_beside_the_first_takes_nothing_from_it(helm: Helm, cluster: Cluster) -> None:
    install(helm, cluster)
    version = crd(cluster, POLICIES)["metadata"]["generation"]
    where = ("--namespace", "other-system", "--create-namespace")
    said = helm.done("install", "trimtab", CHART, *where, values={}, config=cluster.config)
    assert "WARNING" not in said
    assert crd(cluster, POLICIES)["metadata"]["generation"] == version
    helm.done("uninstall", "trimtab", "--namespace", "other-system", config=cluster.config)
    assert configuration(cluster)
    assert len(cluster.names("crd")) == 2
    # In the first one's own namespace there is no room for another.
    for values in ({}, {"webhook": {"enabled": False}}):
        ran = helm.run("install", "another", CHART, *RELEASE, values=values, config=cluster.config)
        assert ran.returncode != 0
        assert f"namespace {NAMESPACE} has an installation already, by release trimtab" in ran.stderr
