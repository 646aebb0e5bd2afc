"""How far a Deployment has come, in the words of Kubernetes.

The one rule: only what its own status says. Pure.
"""

from collections.abc import Mapping
from typing import Any


def replicas(deployment: Mapping[str, Any] | None) -> tuple[int, int]:
    """(ready, wanted) of a Deployment. While it is rolled there are more than are wanted: they count up to those."""
    if deployment is None:
        return 0, 0
    status, spec = deployment.get("status") or {}, deployment.get("spec") or {}
    wanted = spec.get("replicas")
    wanted = 1 if wanted is None else int(wanted)
    return min(int(status.get("readyReplicas") or 0), wanted), wanted


def why(deployment: Mapping[str, Any]) -> str:
    """What Kubernetes itself says is wrong with a Deployment."""
    for found in (deployment.get("status") or {}).get("conditions") or ():
        is_bad = (found.get("type"), found.get("status")) in (("ReplicaFailure", "True"), ("Progressing", "False"))
        if is_bad and found.get("message"):
            return f" ({str(found['message'])[:300]})"
    return ""


def is_starting(deployment: Mapping[str, Any]) -> bool:
    """Whether Kubernetes still takes it for a start: no replica was ever there, and it has not given up on them."""
    conditions = (deployment.get("status") or {}).get("conditions") or ()
    found = {entry.get("type"): (entry.get("status"), entry.get("reason")) for entry in conditions}
    status, reason = found.get("Progressing", ("True", ""))
    has_failed = found.get("ReplicaFailure", ("False", ""))[0] == "True"
    return not has_failed and status == "True" and reason != "NewReplicaSetAvailable"
