"""What a user declares, as bodies for a real API server: a pool and its policy."""

from typing import Any

from trimtab_operator.kube import POLICIES, POOLS, Object

POOL = "chat"
LABELS = {"app": "vllm"}


def declared_pool(namespace: str, name: str = POOL, *, picker: str = "", **spec: Any) -> Object:
    """Its pickers are ours where no other `picker` is named."""
    return {
        "apiVersion": POOLS.api_version,
        "kind": POOLS.kind,
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "selector": {"matchLabels": LABELS},
            "targetPorts": [{"number": 8000}],
            "endpointPickerRef": {"name": picker or f"trimtab-{name}", "port": {"number": 9002}},
            **spec,
        },
    }


def declared_policy(namespace: str, name: str = POOL, *, pool: str = POOL, **spec: Any) -> Object:
    return {
        "apiVersion": POLICIES.api_version,
        "kind": POLICIES.kind,
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"targetRef": {"name": pool}, **spec},
    }
