"""Pods of engines as people write them, for the tests of injection."""

import copy
import json
from collections.abc import Callable
from typing import Any

from trimtab_operator.api.policy import PolicySpec
from trimtab_operator.api.pool import Pool
from trimtab_operator.injection.advice import EVENTS_CONFIG
from trimtab_operator.injection.marks import CONTAINER
from trimtab_operator.injection.outcome import Injection, Skip
from trimtab_operator.injection.pod_injection import inject
from trimtab_operator.install import Install
from trimtab_operator.kube import Object

EVENTS = ["--kv-events-config", EVENTS_CONFIG["vllm"]]
LABELS = {"app": "vllm"}
INSTALL = Install(
    namespace="trimtab-system",
    store_url="redis://store",
    secret=b"secret",
    picker_image="registry.example/picker:1",
    sidecar_image="registry.example/sidecar:1",
    envoy_image="registry.example/envoy:1",
)


def pod(*containers: Object, volumes: list[Object] | None = None, **spec: Any) -> Object:
    """As a controller creates it: a name to be made, no namespace."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"generateName": "engine-", "labels": dict(LABELS)},
        "spec": {"containers": list(containers), **({"volumes": volumes} if volumes else {}), **spec},
    }


def engine(*args: str, name: str = "vllm", port: int | None = 8000, **fields: Any) -> Object:
    body: Object = {"name": name, "image": "vllm/vllm-openai:v0.20.0", "args": list(args), **fields}
    if port is not None:
        body.setdefault("ports", [{"containerPort": port}])
    return body


CACHE: Object = {"name": "cache", "emptyDir": {}}
MODELS: Object = {"name": "models", "persistentVolumeClaim": {"claimName": "models"}}
CACHE_MOUNT: Object = {"name": "cache", "mountPath": "/root/.cache/huggingface"}
MODELS_MOUNT: Object = {"name": "models", "mountPath": "/models"}
GUARANTEED: Object = {"requests": {"cpu": "8", "memory": "64Gi"}, "limits": {"cpu": "8000m", "memory": "64Gi"}}
SCRIPT = """set -e
export VLLM_LOGGING_LEVEL=INFO
exec vllm serve "$MODEL" \\
  --served-model-name ${NAME} \\
  --kv-events-config '{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:5557"}'
"""

SHAPES: dict[str, Callable[[], Object]] = {
    "vLLM from a hub": lambda: pod(
        engine("--model", "Qwen/Qwen3-8B", *EVENTS, volumeMounts=[CACHE_MOUNT]), volumes=[CACHE]
    ),
    "vLLM whose first argument is the model": lambda: pod(
        engine("/models/qwen", volumeMounts=[MODELS_MOUNT]), volumes=[MODELS]
    ),
    "SGLang": lambda: pod(
        engine(
            "--model-path=/models/qwen",
            "--port=8000",
            name="main",
            image="lmsysorg/sglang:v0.5.9",
            command=["python3", "-m", "sglang.launch_server"],
            volumeMounts=[{**MODELS_MOUNT, "subPath": "shared"}],
        ),
        volumes=[MODELS],
    ),
    "a shell's script": lambda: pod(
        engine(
            SCRIPT,
            command=["/bin/bash", "-c"],
            env=[
                {"name": "MODEL", "value": "/models/qwen"},
                {
                    "name": "NAME",
                    "valueFrom": {"configMapKeyRef": {"name": "names", "key": "served", "optional": True}},
                },
            ],
            volumeMounts=[MODELS_MOUNT],
        ),
        volumes=[MODELS],
    ),
    "references of every kind": lambda: pod(
        engine(
            "--model=$(ROOT)/$(MODEL)",
            "--api-key=$(KEY)",
            "--host=$(POD_IP)",
            '--served-model-name=a $$(b) "c"',
            env=[
                {"name": "ROOT", "value": "/models"},
                {"name": "MODEL", "valueFrom": {"configMapKeyRef": {"name": "m", "key": "m", "optional": True}}},
                {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "k", "key": "k", "optional": True}}},
                {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
                {"name": "POD", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
            ],
            volumeMounts=[{**MODELS_MOUNT, "subPathExpr": "$(POD)/x"}],
        ),
        volumes=[MODELS],
    ),
    "variables from a whole Secret": lambda: pod(
        engine(
            "--model",
            "Qwen/Qwen3-8B",
            envFrom=[{"secretRef": {"name": "s", "optional": True}}],
            volumeMounts=[CACHE_MOUNT],
        ),
        volumes=[CACHE],
    ),
    "eight ports": lambda: pod(engine("--model", "m", ports=[{"containerPort": 8000 + n} for n in range(8)])),
    "a proxy, and metrics on our port": lambda: pod(
        {"name": "proxy", "image": "envoyproxy/envoy:v1", "ports": [{"containerPort": 8000}]},
        engine("--model", "m", "--port", "8200", port=8200, command=["vllm", "serve"]),
        {"name": "exporter", "image": "exporter:1", "ports": [{"containerPort": 9091}]},
    ),
    "LeaderWorkerSet with Ray": lambda: pod(
        engine(
            "ray start --head; python3 -m vllm.entrypoints.openai.api_server --port 8000 --model /models/big",
            name="vllm-leader",
            command=["sh", "-c"],
            port=8000,
            volumeMounts=[MODELS_MOUNT, {"name": "dshm", "mountPath": "/dev/shm"}],
        ),
        {"name": "log-shipper", "image": "fluent/fluent-bit:3"},
        volumes=[MODELS, {"name": "dshm", "emptyDir": {"medium": "Memory", "sizeLimit": "15Gi"}}],
    ),
    "Guaranteed": lambda: pod(engine("--model", "m", resources=copy.deepcopy(GUARANTEED))),
    "a limit of the processor everywhere": lambda: pod(
        engine("--model", "m", resources={"limits": {"cpu": "8", "memory": "64Gi"}, "requests": {"cpu": "4"}})
    ),
    "amounts of the whole pod": lambda: pod(
        engine("--model", "m"),
        resources={"limits": {"cpu": "8", "memory": "64Gi"}, "requests": {"cpu": "8", "memory": "64Gi"}},
    ),
    "the node's network": lambda: pod(engine("--model", "m"), hostNetwork=True),
    "init containers and a mesh": lambda: pod(
        engine("--model", "/models/m", volumeMounts=[MODELS_MOUNT]),
        volumes=[{"name": "models", "emptyDir": {}}],
        initContainers=[
            {"name": "download", "image": "busybox:1", "volumeMounts": [MODELS_MOUNT]},
            {"name": "istio-proxy", "image": "istio/proxyv2:1", "restartPolicy": "Always"},
        ],
    ),
    "another user than root": lambda: pod(
        engine("--model", "m", volumeMounts=[{"name": "cache", "mountPath": "/home/user/.cache"}]),
        volumes=[CACHE],
        securityContext={"runAsUser": 1000, "runAsGroup": 2000, "fsGroup": 3000, "runAsNonRoot": True},
    ),
    "root by name": lambda: pod(
        engine("--model", "m", securityContext={"runAsUser": 0}, volumeMounts=[CACHE_MOUNT]), volumes=[CACHE]
    ),
    "annotations of the autoscaler": lambda: _with_notes(
        pod(engine("--model", "m")),
        {"cluster-autoscaler.kubernetes.io/safe-to-evict-local-volumes": "scratch", "a/b": "c"},
    ),
    "only one container, of an image that says it all": lambda: pod(
        {"name": "server", "image": "registry.example/our-llm:7"}
    ),
}


def _with_notes(body: Object, notes: dict[str, str]) -> Object:
    body["metadata"]["annotations"] = notes
    return body


def policy(**sidecar: Any) -> PolicySpec:
    return PolicySpec.of({"targetRef": {"name": "chat"}, "sidecar": {"inject": True, **sidecar}})


def pool(*ports: int, name: str = "chat", namespace: str = "ns") -> Pool:
    return Pool.of(
        {
            "metadata": {"name": name, "namespace": namespace, "uid": "u", "generation": 1},
            "spec": {
                "selector": {"matchLabels": dict(LABELS)},
                "targetPorts": [{"number": port} for port in ports or (8000,)],
            },
        }
    )


def patched(body: Object, patch: list[Object]) -> Object:
    """`body` after a JSON patch, as the API server applies it."""
    result = copy.deepcopy(body)
    for operation in patch:
        *parents, last = [part.replace("~1", "/").replace("~0", "~") for part in operation["path"].split("/")[1:]]
        target: Any = result
        for part in parents:
            target = target[int(part)] if isinstance(target, list) else target[part]
        value = copy.deepcopy(operation.get("value"))
        if isinstance(target, list):
            if operation["op"] == "add":
                target.insert(len(target) if last == "-" else int(last), value)
            elif operation["op"] == "remove":
                del target[int(last)]
            else:
                target[int(last)] = value
        elif operation["op"] == "remove":
            del target[last]
        else:
            assert operation["op"] == "add" or last in target
            target[last] = value
    return result


def injection(
    body: Object, *ports: int, secret: str = "trimtab-chat-store", install: Install = INSTALL, **sidecar: Any
) -> Injection:
    result = inject(body, pool(*ports), policy(**sidecar), install, secret)
    assert isinstance(result, Injection), result
    return result


def injected(body: Object, *ports: int, **sidecar: Any) -> Object:
    return patched(body, injection(body, *ports, **sidecar).patch)


def skipped(body: Object, *ports: int, **sidecar: Any) -> Skip:
    result = inject(body, pool(*ports), policy(**sidecar), INSTALL, "secret")
    assert isinstance(result, Skip), result
    return result


def sidecar_of(body: Object) -> Object:
    spec = body["spec"]
    (found,) = [c for c in [*spec.get("initContainers", []), *spec["containers"]] if c["name"] == CONTAINER]
    return dict(found)


def env_of(container: Object) -> dict[str, Any]:
    """Values, or where they come from."""
    return {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in container["env"]}


def words_of(container: Object) -> list[str]:
    """The engine's words as the sidecar reads them, where only literal values are in them."""
    words = json.loads(env_of(container)["TRIMTAB_ENGINE_ARGS"].replace("$$", "$"))
    assert isinstance(words, list)
    return words
