"""The sidecar's container in one pod.

The one rule: all that it is told is in its manifest, by name: the pool by namespace and name, secrets by reference.
What the kubelet runs at the pod's end gets no variables put in, so what only the kubelet knows comes by environment.
"""

import ipaddress
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Final

from trimtab_operator.api.policy import PolicySpec
from trimtab_operator.api.pool import Pool
from trimtab_operator.children.workload import CONTAINER_SECURITY
from trimtab_operator.injection.engine_container import EngineContainer
from trimtab_operator.injection.engine_words import EngineWords
from trimtab_operator.injection.environment import Environment
from trimtab_operator.injection.marks import (
    ACCESS_PATH,
    ACCESS_VOLUME,
    CONTAINER,
    HOME_VOLUME,
    METRICS_PORT,
    METRICS_PORT_NAME,
    OTHER_ACCESS_PATH,
    OTHER_STATE_PATH,
    STATE_PATH,
    STATE_VOLUME,
)
from trimtab_operator.injection.model_access import ROOT_HOME, ModelAccess, in_full
from trimtab_operator.injection.quality import sidecar_resources
from trimtab_operator.injection.references import escaped_but, names_in
from trimtab_operator.install import Install
from trimtab_operator.kube import Object

PROGRAM: Final = "trimtab-sidecar"
HOST_PORT_OFFSET: Final = 10_000
"""On the node's own network: the first target port plus this is the metrics port, so that pods of one node differ."""
PORT_MIN: Final = 1_024
"""Of the ports that anybody may listen on."""
PORT_MAX: Final = 65_535
HOLD_S: Final = 5
"""A start that fails is held for this long, so that the kubelet sees the sidecar running and goes on with its pod."""
NOT_OURS: Final = ("LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONHOME", "PYTHONPATH")
"""Variables of an engine that would change or break another program; they may come with a whole ConfigMap."""


def sidecar_container(
    pod_spec: Mapping[str, Any],
    engine: EngineContainer,
    words: EngineWords,
    environment: Environment,
    access: ModelAccess,
    *,
    pool: Pool,
    spec: PolicySpec,
    install: Install,
    others: Sequence[Object],
    is_native: bool,
) -> Object:
    """`others`: the pod's other containers and init containers."""
    on_node = bool(pod_spec.get("hostNetwork"))
    metrics_port = _metrics_port(pool, others, on_node=on_node)
    state_path = _free_path(access, STATE_PATH, OTHER_STATE_PATH)
    access_path = _free_path(access, ACCESS_PATH, OTHER_ACCESS_PATH)
    flags = [
        f"--pool-name={pool.key.name}",
        f"--pool-namespace={pool.key.namespace}",
        f"--engine={engine.engine}",
        *(f"--engine-url={_engine_url(words, port)}" for port in pool.target_ports),
        f"--access-dir={access_path}",
        f"--checkpoint-dir={state_path}",
        f"--metrics-port={metrics_port}",
        "--bind=",  # all addresses of both families, as far as the node has them
    ]
    container: Object = {
        "name": CONTAINER,
        "image": spec.sidecar.image or install.sidecar_image,
        "imagePullPolicy": install.image_pull_policy,
        "command": [PROGRAM],
        "args": flags,
        "env": _env(engine, words, environment, access),
        "volumeMounts": _mounts(access, state_path, access_path),
        # A sidecar that hangs is started again. It never holds its pod back: no startup, no readiness probe.
        "livenessProbe": {
            "httpGet": {"path": "/healthz", "port": metrics_port, "scheme": "HTTP"},
            "periodSeconds": 10,
            "timeoutSeconds": 5,
            "failureThreshold": 6,
        },
        "lifecycle": {"preStop": {"exec": {"command": [PROGRAM, "drain", *flags]}}},
        "securityContext": _security(pod_spec, engine.body),
    }
    if resources := sidecar_resources(spec.sidecar.resources, pod_spec, others):
        container["resources"] = resources
    if environment.sources:
        container["envFrom"] = [dict(source) for source in environment.sources]
    if not on_node:
        # On the node's own network a declared port would be taken from the node, and keep the pod from being placed.
        container["ports"] = [{"name": METRICS_PORT_NAME, "containerPort": metrics_port, "protocol": "TCP"}]
    if is_native:
        container["restartPolicy"] = "Always"
    return container


def runs_as_root(pod_spec: Mapping[str, Any], engine: Mapping[str, Any]) -> bool:
    """The manifest says so; an image may, where the manifest says nothing."""
    return _user(pod_spec, engine, "runAsUser") == 0


def needs_home(access: ModelAccess) -> bool:
    """Files lie in root's home, into which only root may look in most images: a volume in its place lets others in."""
    return any(_is_in_home(mount) for mount in access.mounts) and not any(
        str(mount["mountPath"]).rstrip("/") == ROOT_HOME for mount in access.mounts
    )


def _is_in_home(mount: Mapping[str, Any]) -> bool:
    return str(mount["mountPath"]).startswith(f"{ROOT_HOME}/")


def _free_path(access: ModelAccess, wanted: str, other: str) -> str:
    """Where none of the engine's volumes is: two cannot be in one place, and in one that is read-only no place can be
    made for another."""
    names = (f"{other}-{number}" for number in itertools.count(2))
    taken = {in_full(str(mount["mountPath"])) for mount in access.mounts}
    for path in itertools.chain((wanted, other), names):
        place = in_full(path)
        if taken.isdisjoint((place, *place.parents)):
            return path
    raise AssertionError("there are more paths than mounts")


def _mounts(access: ModelAccess, state_path: str, access_path: str) -> list[Object]:
    mounts: list[Object] = [
        {"name": STATE_VOLUME, "mountPath": state_path},
        {"name": ACCESS_VOLUME, "mountPath": access_path, "readOnly": True},
    ]
    if needs_home(access):
        mounts.append({"name": HOME_VOLUME, "mountPath": ROOT_HOME})
    return [*mounts, *access.mounts]


def _env(engine: EngineContainer, words: EngineWords, environment: Environment, access: ModelAccess) -> list[Object]:
    key = words.flag("api-key")
    host = words.flag("host") or ""
    used = {*words.references, *names_in(host), *(["VLLM_API_KEY"] if engine.engine == "vllm" else [])}
    copied = {str(entry["name"]): entry for entry in [*environment.entries(used), *access.env]}
    entries: list[Object] = [entry for name, entry in copied.items() if not name.startswith("TRIMTAB_")]
    if environment.sources:
        entries += [{"name": name, "value": ""} for name in NOT_OURS if name not in copied]
    entries.append({"name": "TRIMTAB_ENDPOINT_HOST", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}})
    entries.append({"name": "TRIMTAB_ENGINE_ARGS", "value": words.encoded()})
    if key is not None:
        entries.append({"name": "TRIMTAB_ENGINE_API_KEY", "value": escaped_but(key, words.references)})
    entries.append({"name": "TRIMTAB_HOLD_S", "value": str(HOLD_S)})
    entries.append({"name": "PYTHONDONTWRITEBYTECODE", "value": "1"})
    return entries


def _engine_url(words: EngineWords, port: int) -> str:
    scheme = "https" if words.has("ssl-certfile") else "http"
    host = words.flag("host") or ""
    if any(names_in(host)):
        return f"{scheme}://{host}:{port}"
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return f"{scheme}://127.0.0.1:{port}"
    if address.is_unspecified:
        return f"{scheme}://127.0.0.1:{port}"
    return f"{scheme}://[{address}]:{port}" if address.version == 6 else f"{scheme}://{address}:{port}"


def _metrics_port(pool: Pool, others: Sequence[Object], *, on_node: bool) -> int:
    taken = {
        port.get("containerPort") for container in others for port in container.get("ports") or ()
    } | set(pool.target_ports)  # fmt: skip
    wanted = METRICS_PORT
    if on_node:
        first = pool.target_ports[0]
        wanted = first + HOST_PORT_OFFSET if first + HOST_PORT_OFFSET <= PORT_MAX else first - HOST_PORT_OFFSET
    while wanted in taken:
        # A pod that is looked at has fewer ports than there are.
        wanted = wanted + 1 if wanted < PORT_MAX else PORT_MIN
    return wanted


def _security(pod_spec: Mapping[str, Any], engine: Mapping[str, Any]) -> Object:
    """Nobody's user, or the engine's own where that is told and is not root: it may read what the engine may."""
    security = {**CONTAINER_SECURITY, "capabilities": {"drop": ["ALL"]}, "seccompProfile": {"type": "RuntimeDefault"}}
    user, group = _user(pod_spec, engine, "runAsUser"), _user(pod_spec, engine, "runAsGroup")
    if user:
        security["runAsUser"] = user
        if group is not None:
            security["runAsGroup"] = group
    return security


def _user(pod_spec: Mapping[str, Any], engine: Mapping[str, Any], field: str) -> int | None:
    for holder in (engine, pod_spec):
        value = (holder.get("securityContext") or {}).get(field)
        if value is not None:
            return int(value)
    return None
