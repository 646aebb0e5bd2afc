"""Which versions a pool's pickers run: what is, where the Deployment says what is wanted.

The one rule: pods are asked for only while an update is not over, and only these few.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from trimtab_operator.api.pool import PoolKey
from trimtab_operator.children.labels import selector
from trimtab_operator.kube import PODS, Kube

VERSION_CHARS_MAX: Final = 512


async def running_versions(kube: Kube, key: PoolKey, deployment: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Of the pickers that are ready. Raises KubeError."""
    if deployment is None:
        return ()
    if is_settled(deployment):
        return (wanted_version(deployment),)
    labels = ",".join(f"{name}={value}" for name, value in selector(key, "picker").items())
    pods, _ = await kube.list_all(PODS, key.namespace, label_selector=labels)
    return versions_of(pods)


def versions_of(pods: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """Of those that are ready, in order."""
    return tuple(sorted({_version(pod["spec"]) for pod in pods if _is_ready(pod)}))


def shown_version(deployment: Mapping[str, Any] | None, running: Sequence[str]) -> str:
    """`v1`, or `v1 -> v2` where not all that are ready are of the version that is wanted."""
    wanted = wanted_version(deployment)
    shown = wanted if not running or list(running) == [wanted] else f"{', '.join(running)} -> {wanted}"
    return shown[:VERSION_CHARS_MAX]


def wanted_version(deployment: Mapping[str, Any] | None) -> str:
    return "" if deployment is None else _version(deployment["spec"]["template"]["spec"])


def is_settled(deployment: Mapping[str, Any]) -> bool:
    """Every pod is of the newest template, as far as its controller has seen that template."""
    status, generation = deployment.get("status") or {}, int(deployment["metadata"].get("generation") or 0)
    replicas = int(status.get("replicas") or 0)
    return (
        int(status.get("observedGeneration") or 0) >= generation
        and replicas > 0
        and int(status.get("updatedReplicas") or 0) == replicas
    )


def _version(pod_spec: Mapping[str, Any]) -> str:
    """The image's digest, else its tag."""
    containers = pod_spec.get("containers") or [{}]
    reference, _, digest = str(containers[0].get("image") or "").partition("@")
    return digest or reference.rpartition("/")[2].partition(":")[2]


def _is_ready(pod: Mapping[str, Any]) -> bool:
    conditions = (pod.get("status") or {}).get("conditions") or ()
    return "deletionTimestamp" not in pod["metadata"] and any(
        each.get("type") == "Ready" and each.get("status") == "True" for each in conditions
    )
