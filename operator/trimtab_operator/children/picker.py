"""The pickers of a pool: Deployment, headless Service, PodDisruptionBudget.

The one rule: a picker's command line says all that it is to do; only what must stay secret comes by the environment.
This module must not know what a picker is made of: its flags are its interface.
"""

from dataclasses import dataclass
from typing import Final, Self

from trimtab_operator.api.policy import PolicySpec
from trimtab_operator.api.pool import Pool
from trimtab_operator.children.labels import CONFIG, metadata, selector
from trimtab_operator.children.names import picker_name
from trimtab_operator.children.store_secret import secret_env
from trimtab_operator.children.workload import (
    CONTAINER_SECURITY,
    deployment,
    disruption_budget,
    pod_security,
    resources,
    scheduling,
    scrape_annotations,
)
from trimtab_operator.install import Install
from trimtab_operator.kube import Object

HEALTH_PORT: Final = 9003
METRICS_PORT: Final = 9090
DRAIN_DELAY_S: Final = 5
"""How long a picker that is told to stop still serves new streams, while gateways notice that it is not ready."""
LAST_WORDS_S: Final = 10
"""What remains of the grace period after the streams: to tell the others, and to be late."""

MIB: Final = 1 << 20
BODIES_BYTES_MIN: Final = 256 * MIB
"""All bodies that a picker holds at once, at least; two of the largest in any case."""
OWN_BYTES: Final = 512 * MIB
"""Memory of a picker besides bodies: 81 MiB when it has started, 60 MiB for 64 endpoints of 60,000 chunks (15.6 bytes
each), three times that to spare."""
COPIES_OF_BODIES: Final = 2
"""A body and its rendered prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PickerPorts:
    """Where a picker listens."""

    grpc: int
    health: int
    metrics: int

    @classmethod
    def of(cls, pool: Pool) -> Self:
        """The pool chooses the first; the others make way."""
        grpc = pool.picker_port
        return cls(
            grpc=grpc,
            health=HEALTH_PORT if grpc != HEALTH_PORT else HEALTH_PORT + 1,
            metrics=METRICS_PORT if grpc != METRICS_PORT else METRICS_PORT + 1,
        )


def picker_objects(
    pool: Pool, spec: PolicySpec, install: Install, *, is_standalone: bool, config_hash: str
) -> list[Object]:
    """`config_hash`: of what the pods read from the Secret; another one rolls them out."""
    ports = PickerPorts.of(pool)
    return [
        _service(pool, spec, ports),
        _deployment(pool, spec, install, ports, is_standalone=is_standalone, config_hash=config_hash),
        disruption_budget(pool, name=picker_name(pool.key.name), component="picker"),
    ]


def _service(pool: Pool, spec: PolicySpec, ports: PickerPorts) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(pool, picker_name(pool.key.name), "picker"),
        "spec": {
            "type": "ClusterIP",
            # Gateways then see every picker, and not one address that pins a connection to one of them.
            "clusterIP": "None",
            "publishNotReadyAddresses": False,
            "selector": selector(pool.key, "picker"),
            "ports": [
                {
                    "name": "grpc-ext-proc",
                    "protocol": "TCP",
                    "port": ports.grpc,
                    "targetPort": ports.grpc,
                    # TLS has no protocol name of its own for HTTP/2; gateways take it from their own settings.
                    "appProtocol": "grpc" if spec.picker.tls else "kubernetes.io/h2c",
                }
            ],
        },
    }


def _deployment(
    pool: Pool, spec: PolicySpec, install: Install, ports: PickerPorts, *, is_standalone: bool, config_hash: str
) -> Object:
    picker = spec.picker
    pod: Object = {
        "securityContext": pod_security(ports.grpc),
        "containers": [_container(pool, spec, install, ports, is_standalone=is_standalone)],
        # The root file system is read-only.
        "volumes": [{"name": "tmp", "emptyDir": {"sizeLimit": "64Mi"}}],
        **scheduling(picker),
    }
    return deployment(
        pool,
        install,
        name=picker_name(pool.key.name),
        component="picker",
        replicas=picker.replicas,
        grace_s=DRAIN_DELAY_S + picker.stream_seconds_max + LAST_WORDS_S,
        pod=pod,
        annotations={**scrape_annotations(ports.metrics, "/metrics"), CONFIG: config_hash},
    )


def _container(pool: Pool, spec: PolicySpec, install: Install, ports: PickerPorts, *, is_standalone: bool) -> Object:
    picker = spec.picker
    bodies_bytes = max(BODIES_BYTES_MIN, 2 * picker.body_bytes_max)
    memory_mib = (OWN_BYTES + COPIES_OF_BODIES * bodies_bytes) // MIB
    return {
        "name": "picker",
        "image": picker.image or install.picker_image,
        "imagePullPolicy": install.image_pull_policy,
        "command": ["trimtab-extproc"],
        "args": [
            f"--pool-name={pool.key.name}",
            f"--pool-namespace={pool.key.namespace}",
            f"--grpc-port={ports.grpc}",
            f"--grpc-health-port={ports.health}",
            f"--metrics-port={ports.metrics}",
            f"--secure-serving={_flag(picker.tls)}",
            # Our own Envoy heeds it. A gateway that does not would leave the picker waiting for bodies that never come.
            f"--allow-mode-override={_flag(is_standalone)}",
            f"--body-bytes-max={picker.body_bytes_max}",
            f"--bodies-bytes-max={bodies_bytes}",
            f"--drain-delay={DRAIN_DELAY_S}",
            f"--drain-timeout={picker.stream_seconds_max}",
            f"--log-level={picker.log_level}",
        ],
        "env": [*secret_env(pool.key.name), {"name": "PYTHONDONTWRITEBYTECODE", "value": "1"}],
        "ports": [
            {"name": "grpc-ext-proc", "containerPort": ports.grpc, "protocol": "TCP"},
            {"name": "grpc-health", "containerPort": ports.health, "protocol": "TCP"},
            {"name": "metrics", "containerPort": ports.metrics, "protocol": "TCP"},
        ],
        # Both say "alive" whether or not the store can be reached: a picker without it goes on with what it knows.
        "startupProbe": {**_alive(ports), "periodSeconds": 1, "timeoutSeconds": 2, "failureThreshold": 60},
        "livenessProbe": {**_alive(ports), "periodSeconds": 10, "timeoutSeconds": 5, "failureThreshold": 6},
        # Not before the pool is known, and no more once it is told to stop.
        "readinessProbe": {
            "grpc": {"port": ports.health, "service": "readiness"},
            "periodSeconds": 2,
            "timeoutSeconds": 2,
            "failureThreshold": 2,
        },
        # No limit of the processor: throttling would show in every decision's tail.
        "resources": resources(
            picker.resources,
            {"requests": {"cpu": "250m", "memory": "256Mi"}, "limits": {"memory": f"{memory_mib}Mi"}},
        ),
        "securityContext": CONTAINER_SECURITY,
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
    }


def _alive(ports: PickerPorts) -> Object:
    # By way of the event loop, which is what would hang.
    return {"httpGet": {"path": "/healthz", "port": ports.metrics, "scheme": "HTTP"}}


def _flag(value: bool) -> str:
    return str(value).lower()
