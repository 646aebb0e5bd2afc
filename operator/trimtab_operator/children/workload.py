"""What the Deployments of a pool have in common: how they are rolled out, spread, and kept from doing harm.

The one rule: nothing here knows what a container runs. Lists and objects that would be empty are left out, because the
API server drops some of them and they would look changed ever after.
"""

from collections.abc import Mapping
from typing import Final

from trimtab_operator.api.policy import Picker, ResourceRequirements, Standalone
from trimtab_operator.api.pool import Pool
from trimtab_operator.children.labels import INSTALL, Component, labels, metadata, selector
from trimtab_operator.install import Install
from trimtab_operator.kube import Object

USER_ID: Final = 65532
"""Nobody's id, and no root's."""
MIN_READY_S: Final = 10
"""A pod that became ready counts as available after this: longer than cluster DNS keeps an answer (5 s), so that who
finds pods by DNS knows the new one before an old one goes."""
PROGRESS_S: Final = 180
"""A start or an update that gets no further for so long is told of as failed; it goes on all the same."""
REVISIONS_KEPT: Final = 3
FIRST_UNPRIVILEGED_PORT: Final = 1024

CONTAINER_SECURITY: Final[Object] = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "privileged": False,
    "readOnlyRootFilesystem": True,
    "runAsGroup": USER_ID,
    "runAsNonRoot": True,
    "runAsUser": USER_ID,
    "seccompProfile": {"type": "RuntimeDefault"},
}


def deployment(
    pool: Pool,
    install: Install,
    *,
    name: str,
    component: Component,
    replicas: int,
    grace_s: int,
    pod: Object,
    annotations: Mapping[str, str],
) -> Object:
    """A Deployment whose pods are `pod` (a pod's spec: containers and what is special) and what all pods have."""
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata(pool, name, component),
        "spec": {
            "replicas": replicas,
            "minReadySeconds": MIN_READY_S,
            "progressDeadlineSeconds": PROGRESS_S,
            "revisionHistoryLimit": REVISIONS_KEPT,
            "selector": {"matchLabels": selector(pool.key, component)},
            # A new one first, then an old one goes: there are never fewer than asked for.
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": "25%", "maxUnavailable": 0}},
            "template": {
                "metadata": {
                    "labels": {**labels(pool.key, component), INSTALL: install.namespace},
                    "annotations": dict(annotations),
                },
                "spec": {
                    **_every_pod(install),
                    "terminationGracePeriodSeconds": grace_s,
                    "topologySpreadConstraints": [
                        _spread(pool, component, key)
                        for key in ("topology.kubernetes.io/zone", "kubernetes.io/hostname")
                    ],
                    **pod,
                },
            },
        },
    }


def disruption_budget(pool: Pool, *, name: str, component: Component) -> Object:
    """One pod at a time may be evicted; with a single replica that means it may, or no node could ever be drained."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": metadata(pool, name, component),
        "spec": {
            "maxUnavailable": 1,
            "selector": {"matchLabels": selector(pool.key, component)},
            # A pod that does not work yet protects nothing, and must not hold up a drain.
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    }


def pod_security(*ports: int) -> Object:
    """Of a pod that listens on these ports."""
    security: Object = {
        "fsGroup": USER_ID,
        "runAsGroup": USER_ID,
        "runAsNonRoot": True,
        "runAsUser": USER_ID,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    if any(port < FIRST_UNPRIVILEGED_PORT for port in ports):
        # One of the safe ones: it lets a process without capabilities listen there.
        security["sysctls"] = [{"name": "net.ipv4.ip_unprivileged_port_start", "value": "0"}]
    return security


def resources(asked: ResourceRequirements, default: Object) -> Object:
    """As the policy says; the default where it says nothing at all."""
    given = {"requests": dict(asked.requests), "limits": dict(asked.limits)}
    return {kind: amounts for kind, amounts in given.items() if amounts} or default


def scheduling(asked: Picker | Standalone) -> Object:
    """Where the pods may run, as the policy says."""
    pod: Object = {}
    if asked.node_selector:
        pod["nodeSelector"] = dict(asked.node_selector)
    if asked.tolerations:
        pod["tolerations"] = list(asked.tolerations)
    if asked.priority_class_name:
        pod["priorityClassName"] = asked.priority_class_name
    return pod


def scrape_annotations(port: int, path: str) -> dict[str, str]:
    """For Prometheus installations that find pods by annotations."""
    return {"prometheus.io/scrape": "true", "prometheus.io/port": str(port), "prometheus.io/path": path}


def _every_pod(install: Install) -> Object:
    pod: Object = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
    }
    if install.image_pull_secrets:
        pod["imagePullSecrets"] = [{"name": name} for name in install.image_pull_secrets]
    return pod


def _spread(pool: Pool, component: Component, topology_key: str) -> Object:
    return {
        "maxSkew": 1,
        "topologyKey": topology_key,
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": selector(pool.key, component)},
        # The old pods of a rolling update are going; they must not push the new ones together.
        "matchLabelKeys": ["pod-template-hash"],
    }
