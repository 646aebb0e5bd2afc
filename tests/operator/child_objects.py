"""Pools, policies and an installation for the tests of what the operator makes for a pool."""

import copy
import re
from typing import Any

from trimtab_operator.api.policy import PolicySpec
from trimtab_operator.api.pool import Pool
from trimtab_operator.children.desired import desired
from trimtab_operator.children.store_secret import StoreAccess
from trimtab_operator.install import Install
from trimtab_operator.kube import Object

POOL_UID = "0b9a6e0e-6b7c-4c8e-9d51-0d3b8a7c9e10"
ACCESS = StoreAccess(url="redis://trimtab-ns.chat:word@store:6379/0", secret="seed", is_own_user=True)

POLICIES: dict[str, Object] = {
    "all defaults": {},
    "plaintext without Envoy": {"picker": {"tls": False}, "standalone": {"enabled": False}},
    "everything set": {
        "mode": "LeastRequest",
        "batchLimit": 64,
        "picker": {
            "replicas": 5,
            "image": "registry.example:5000/picker@sha256:" + "0" * 64,
            "streamSecondsMax": 86400,
            "bodyBytesMax": 1 << 30,
            "logLevel": "debug",
            "resources": {"requests": {"cpu": "0.5", "memory": "1e9"}, "limits": {"cpu": "1500m", "memory": "2.5Gi"}},
            "nodeSelector": {"kubernetes.io/arch": "amd64"},
            "tolerations": [{"key": "gpu", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 30}],
            "priorityClassName": "system-cluster-critical",
        },
        "standalone": {
            "enabled": True,
            "replicas": 1,
            "port": 8443,
            "serviceType": "LoadBalancer",
            "accessLog": True,
            "resources": {"limits": {"cpu": "2500m", "memory": "3Gi"}},
            "serviceAnnotations": {"service.beta.kubernetes.io/aws-load-balancer-internal": "true"},
            "nodeSelector": {"edge": "yes"},
            "tolerations": [{"key": "edge", "operator": "Exists"}],
            "priorityClassName": "system-cluster-critical",
        },
    },
    "one picker, shortest streams": {"picker": {"replicas": 1, "streamSecondsMax": 1, "bodyBytesMax": 1024}},
}


def pool_body(name: str = "chat", namespace: str = "ns", **spec: Any) -> Object:
    """An InferencePool as the API server would give it."""
    return {
        "metadata": {"name": name, "namespace": namespace, "uid": POOL_UID, "generation": 1},
        "spec": {
            "selector": {"matchLabels": {"app": "vllm"}},
            "targetPorts": [{"number": 8000}],
            "endpointPickerRef": {"name": f"trimtab-{name}", "port": {"number": 9002}},
            **spec,
        },
    }


def pool(name: str = "chat", namespace: str = "ns", **spec: Any) -> Pool:
    return Pool.of(pool_body(name, namespace, **spec))


def policy(body: Object | None = None) -> PolicySpec:
    """From the spec's JSON, without its target."""
    return PolicySpec.of({"targetRef": {"name": "chat"}, **copy.deepcopy(body or {})})


def install(**changes: Any) -> Install:
    fields: dict[str, Any] = {
        "namespace": "trimtab-system",
        "store_url": "redis://operator:its-own@store:6379/0",
        "secret": b"the secret of the installation",
        "picker_image": "registry.example/trimtab-picker:1",
        "sidecar_image": "registry.example/trimtab-sidecar:1",
        "envoy_image": "registry.example/trimtab-envoy:1",
    }
    return Install(**(fields | changes))


def objects(spec: Object | None = None, *, of: Pool | None = None, access: StoreAccess = ACCESS) -> list[Object]:
    return desired(of or pool(), policy(spec), install(), access)


def named(bodies: list[Object], kind: str, name: str) -> Object:
    """The one object of that kind and name."""
    (found,) = [body for body in bodies if (body["kind"], body["metadata"]["name"]) == (kind, name)]
    return found


def container(body: Object) -> Object:
    """Of a Deployment with one."""
    (found,) = body["spec"]["template"]["spec"]["containers"]
    return dict(found)


def on_this_machine(config: str, ports: dict[int, int]) -> str:
    """Envoy's configuration with this machine's names and addresses, and other ports for its listeners."""
    text = re.sub(r'"[-a-z0-9.]+\.svc\.cluster\.local"', '"localhost"', config).replace("0.0.0.0", "127.0.0.1")
    for old, new in ports.items():
        text = re.sub(rf'("portValue": ){old}\b', rf"\g<1>{new}", text)
    return text
