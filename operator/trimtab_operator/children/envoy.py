"""The Envoy of a pool's own: ConfigMap, Deployment, Service, PodDisruptionBudget.

The one rule: what Envoy does with a request is said by `envoy_config`; here is only where it runs and where its pool
and its pickers are. A change of the configuration rolls the Deployment out, since Envoy reads it once.
"""

import math
import re
from functools import lru_cache
from typing import Final

from trimtab_operator.api.policy import PolicySpec
from trimtab_operator.api.pool import Pool
from trimtab_operator.children.labels import CONFIG, keyed_hash, metadata, selector
from trimtab_operator.children.names import endpoints_name, envoy_name, picker_name
from trimtab_operator.children.picker import PickerPorts
from trimtab_operator.children.workload import (
    CONTAINER_SECURITY,
    deployment,
    disruption_budget,
    pod_security,
    resources,
    scheduling,
    scrape_annotations,
)
from trimtab_operator.envoy.config import bootstrap_json
from trimtab_operator.envoy.drain import PORT as DRAIN_PORT
from trimtab_operator.envoy.drain import SETTLE_S
from trimtab_operator.envoy.front import DnsHosts, EnvoyFront
from trimtab_operator.install import Install
from trimtab_operator.kube import Object
from trimtab_operator.policy_document import ANSWER_S, shown_headers, wait_s

LISTEN_PORT: Final = 8080
"""In the pod; the Service's port is the policy's."""
ADMIN_PORT: Final = 9901
STATS_PORT: Final = 9902
CONFIG_FOLDER: Final = "/etc/envoy"
CONFIG_FILE: Final = "envoy.json"
LAST_WORDS_S: Final = 10
DEFAULT_RESOURCES: Final[Object] = {
    "requests": {"cpu": "1", "memory": "256Mi"},
    # 66 MiB when it has started; the rest is for requests whose bodies wait for a choice.
    "limits": {"memory": "1Gi"},
}
WORKERS_MAX: Final = 64
CONFIGS_KEPT: Final = 256
"""Configurations that need not be made anew each time that a pool is looked at: one takes 70 ms."""


def envoy_objects(pool: Pool, spec: PolicySpec, install: Install) -> list[Object]:
    """All of it."""
    name = envoy_name(pool.key.name)
    config = envoy_bootstrap(pool, spec, install)
    return [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": metadata(pool, name, "envoy"),
            "data": {CONFIG_FILE: config},
        },
        _service(pool, spec),
        _deployment(pool, spec, install, config_hash=envoy_config_hash(pool, spec, install)),
        disruption_budget(pool, name=name, component="envoy"),
    ]


def envoy_config_hash(pool: Pool, spec: PolicySpec, install: Install) -> str:
    """On every Envoy's pod: which configuration it runs with."""
    return keyed_hash(envoy_bootstrap(pool, spec, install), install.secret)


def envoy_bootstrap(pool: Pool, spec: PolicySpec, install: Install) -> str:
    """Envoy's configuration as JSON text."""
    ports = PickerPorts.of(pool)
    domain = f"{pool.key.namespace}.svc.{install.cluster_domain}"
    front = EnvoyFront(
        listen_address=install.listen_address,
        listen_port=LISTEN_PORT,
        admin_port=ADMIN_PORT,
        stats_port=STATS_PORT,
        # A picker that is down costs the good choice, not the request: `failureMode` is for gateways that have nothing
        # better to fall back on than not knowing the pool.
        fail_open=True,
        # With TLS the health check has to speak it too, and the picker's own port answers it.
        picker_health_port=None,
        picker_tls=spec.picker.tls,
        pool_http2=pool.app_protocol == "kubernetes.io/h2c",
        body_bytes_max=spec.picker.body_bytes_max,
        message_timeout_s=ANSWER_S + wait_s(spec),
        shown_headers=shown_headers(spec),
        access_log=spec.standalone.access_log,
    )
    return _bootstrap(
        front,
        DnsHosts(name=f"{endpoints_name(pool.key.name)}.{domain}", ports=tuple(dict.fromkeys(pool.target_ports))),
        DnsHosts(name=f"{picker_name(pool.key.name)}.{domain}", ports=(ports.grpc,)),
    )


@lru_cache(maxsize=CONFIGS_KEPT)
def _bootstrap(front: EnvoyFront, pool: DnsHosts, pickers: DnsHosts) -> str:
    return bootstrap_json(front, pool=pool, pickers=pickers)


def _service(pool: Pool, spec: PolicySpec) -> Object:
    about = metadata(pool, envoy_name(pool.key.name), "envoy")
    about["annotations"] = {**spec.standalone.service_annotations, **about["annotations"]}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": about,
        "spec": {
            "type": spec.standalone.service_type,
            "selector": selector(pool.key, "envoy"),
            "ports": [
                {
                    "name": "http",
                    "protocol": "TCP",
                    "port": spec.standalone.port,
                    "targetPort": LISTEN_PORT,
                    "appProtocol": "http",
                }
            ],
        },
    }


def _deployment(pool: Pool, spec: PolicySpec, install: Install, *, config_hash: str) -> Object:
    name = envoy_name(pool.key.name)
    stream_s = spec.picker.stream_seconds_max
    pod: Object = {
        "securityContext": pod_security(LISTEN_PORT),
        # The names are whole ones: without this each look-up would first try every search domain.
        "dnsConfig": {"options": [{"name": "ndots", "value": "1"}]},
        "initContainers": [_drain_container(install, stream_s=stream_s)],
        "containers": [_container(spec, install)],
        "volumes": [{"name": "config", "configMap": {"name": name}}],
        **scheduling(spec.standalone),
    }
    return deployment(
        pool,
        install,
        name=name,
        component="envoy",
        replicas=spec.standalone.replicas,
        grace_s=stream_s + math.ceil(SETTLE_S) + LAST_WORDS_S,
        pod=pod,
        annotations={**scrape_annotations(STATS_PORT, "/stats/prometheus"), CONFIG: config_hash},
    )


def _container(spec: PolicySpec, install: Install) -> Object:
    amounts = resources(spec.standalone.resources, DEFAULT_RESOURCES)
    ready = {"httpGet": {"path": "/ready", "port": STATS_PORT, "scheme": "HTTP"}}
    return {
        "name": "envoy",
        "image": spec.standalone.image or install.envoy_image,
        "imagePullPolicy": install.image_pull_policy,
        "command": ["envoy"],
        "args": [
            *("--config-path", f"{CONFIG_FOLDER}/{CONFIG_FILE}"),
            *("--concurrency", str(workers(amounts))),
            # No second Envoy takes over in this pod, and the file system is read-only.
            "--disable-hot-restart",
            *("--log-level", "info"),
        ],
        "ports": [
            {"name": "http", "containerPort": LISTEN_PORT, "protocol": "TCP"},
            {"name": "stats", "containerPort": STATS_PORT, "protocol": "TCP"},
        ],
        "startupProbe": {**ready, "periodSeconds": 1, "timeoutSeconds": 2, "failureThreshold": 60},
        "livenessProbe": {**ready, "periodSeconds": 10, "timeoutSeconds": 5, "failureThreshold": 6},
        "readinessProbe": {**ready, "periodSeconds": 5, "timeoutSeconds": 2, "failureThreshold": 2},
        # Envoy ends at once when it is told to: this answers when its streams have finished.
        "lifecycle": {"preStop": {"httpGet": {"path": "/drained", "port": DRAIN_PORT, "scheme": "HTTP"}}},
        "resources": amounts,
        "securityContext": CONTAINER_SECURITY,
        "volumeMounts": [{"name": "config", "mountPath": CONFIG_FOLDER, "readOnly": True}],
    }


def _drain_container(install: Install, *, stream_s: int) -> Object:
    """A native sidecar: it ends after Envoy. Envoy's own image has nothing but Envoy in it, so this is ours."""
    program = ["python", "-m", "trimtab_operator.envoy.drain"]
    admin = f"--admin=127.0.0.1:{ADMIN_PORT}"
    alive = {"httpGet": {"path": "/healthz", "port": DRAIN_PORT, "scheme": "HTTP"}}
    return {
        "name": "drain",
        "image": install.picker_image,
        "imagePullPolicy": install.image_pull_policy,
        "restartPolicy": "Always",
        "command": program,
        "args": ["serve", "--bind=$(POD_IP)", f"--port={DRAIN_PORT}", admin, f"--streams-max={stream_s}"],
        "env": [
            {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {"name": "PYTHONDONTWRITEBYTECODE", "value": "1"},
        ],
        "ports": [{"name": "drain", "containerPort": DRAIN_PORT, "protocol": "TCP"}],
        "livenessProbe": {**alive, "periodSeconds": 30, "timeoutSeconds": 5, "failureThreshold": 3},
        "lifecycle": {"preStop": {"exec": {"command": [*program, "begin", admin]}}},
        # 21 MiB are used.
        "resources": {"requests": {"cpu": "5m", "memory": "32Mi"}, "limits": {"memory": "64Mi"}},
        "securityContext": CONTAINER_SECURITY,
    }


def workers(amounts: Object) -> int:
    """Worker threads: as many as the container may use cores; on its own Envoy would take all of the node's."""
    cpu = str(amounts.get("limits", {}).get("cpu") or amounts.get("requests", {}).get("cpu") or "1")
    found = re.fullmatch(r"([0-9]*\.?[0-9]+)(m?)", cpu)
    cores = float(found[1]) / (1000 if found[2] else 1) if found else 1.0
    # Two at least: one that is busy with a large body then does not hold up everybody.
    return min(WORKERS_MAX, max(2, math.ceil(cores)))
