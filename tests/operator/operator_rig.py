"""A whole pool as a user has it: operator, store and node as real processes on one real API server."""

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from control_plane import free_ports
from declared import LABELS, POOL, declared_policy, declared_pool
from loopback_node import LoopbackNode
from valkey_server import ValkeyProcess, free_port

from trimtab.processes import Supervisor
from trimtab.stack import MODEL_DIR as TINY_MODEL
from trimtab_operator.api.pool import PoolKey
from trimtab_operator.kube import PODS, POLICIES, Kube, Object
from trimtab_state import ControlDocument, PoolKeys, connect
from trimtab_state.documents import decode_control

ENGINE_PORT = 8000


class OperatorRig:
    """`namespace` holds both the operator's own objects and the pool, so that tests do not meet."""

    def __init__(
        self, *, kube: Kube, kube_config: Path, namespace: str, folder: Path, node: LoopbackNode, store: ValkeyProcess
    ) -> None:
        self.kube = kube
        self.namespace = namespace
        self.node = node
        self.store = store
        self.keys = PoolKeys(namespace, POOL)
        self.key = PoolKey(namespace, POOL)
        self.metrics_port = free_port()
        self._kube_config = kube_config
        self._folder = folder

    @property
    def supervisor(self) -> Supervisor:
        return self.node.supervisor

    async def start_operator(self, *flags: str, name: str = "operator") -> None:
        await self.supervisor.start(name, self.operator_words(*flags))

    def operator_words(self, *flags: str, metrics_port: int | None = None) -> list[str]:
        return [
            *(sys.executable, "-m", "trimtab_operator", "run", "--kubeconfig", str(self._kube_config)),
            *("--operator-namespace", self.namespace, "--namespace", self.namespace, "--store", self.store.url),
            *("--bind", "127.0.0.1", "--metrics-port", str(metrics_port or self.metrics_port)),
            *("--webhook-certificate", "none", *flags),
        ]

    async def apply_pool(self, **spec: Any) -> Object:
        return await self.kube.apply(declared_pool(self.namespace, **spec), manager="test")

    async def apply_policy(self, name: str = POOL, **spec: Any) -> Object:
        return await self.kube.apply(declared_policy(self.namespace, name, **spec), manager="test")

    async def start_engine(self, name: str, *flags: str) -> None:
        """A pod with an emulated engine, and beside it the sidecar, as the docs' snippet has it."""
        kv_port, replay_port = free_ports(2)
        args = ["-m", "trimtab_lab.emulator", "--host", "$(POD_IP)", "--port", str(ENGINE_PORT)]
        args += ["--kv-events-port", str(kv_port), "--kv-replay-port", str(replay_port)]
        args += ["--model-name", "tiny", "--model-dir", str(TINY_MODEL), *flags]
        ip = {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
        engine = {
            "name": "engine",
            "image": "vllm-emulator",
            "command": ["python"],
            "args": args,
            "env": [ip],
            "ports": [{"containerPort": ENGINE_PORT}],
            "readinessProbe": {"httpGet": {"path": "/health", "port": ENGINE_PORT}},
        }
        flags_of_sidecar = [
            *("--pool-name", POOL, "--pool-namespace", self.namespace, "--endpoint-host", "$(POD_IP)"),
            *("--engine-url", f"http://127.0.0.1:{ENGINE_PORT}", "--model-dir", str(TINY_MODEL)),
            *("--access-dir", "/var/run/trimtab-access"),
            *("--checkpoint-dir", "/var/run/trimtab", "--metrics-port", "0"),
        ]
        secret = {"secretName": f"trimtab-{POOL}-store", "optional": True}
        sidecar = {
            "name": "trimtab-sidecar",
            "image": "trimtab",
            "command": ["trimtab-sidecar"],
            "args": flags_of_sidecar,
            "env": [
                ip,
                {"name": "TRIMTAB_ENGINE_ARGS", "value": json.dumps(["python", *args])},
            ],
            "restartPolicy": "Always",
            "volumeMounts": [
                {"name": "state", "mountPath": "/var/run/trimtab"},
                {"name": "access", "mountPath": "/var/run/trimtab-access"},
            ],
            "lifecycle": {"preStop": {"exec": {"command": ["trimtab-sidecar", "drain", *flags_of_sidecar]}}},
        }
        await self.kube.create(
            PODS,
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": name, "namespace": self.namespace, "labels": LABELS},
                "spec": {
                    "nodeName": "loopback",
                    "initContainers": [sidecar],
                    "containers": [engine],
                    "volumes": [{"name": "state", "emptyDir": {}}, {"name": "access", "secret": secret}],
                },
            },
        )

    async def control(self) -> ControlDocument | None:
        """As the store holds it."""
        store = connect(self.store.url)
        try:
            data = await store.execute("GET", self.keys.control)
            return None if data is None else decode_control(data)
        finally:
            await store.close()

    async def store_keys(self) -> list[bytes]:
        """Of the pool."""
        store = connect(self.store.url)
        try:
            return await store.keys_with_prefix(self.keys.prefix, 500)
        finally:
            await store.close()

    async def condition(self, type_: str, name: str = POOL) -> Mapping[str, Any]:
        """Of the policy; empty if there is none."""
        body = await self.kube.get(POLICIES, self.namespace, name) or {}
        found = [c for c in body.get("status", {}).get("conditions", []) if c["type"] == type_]
        return found[0] if found else {}

    def front(self) -> str:
        """URL of the pool's own Envoy."""
        return f"http://{self.node.ip_of(self.node.pods_of(f'trimtab-{POOL}-envoy')[0])}:8080"


@contextlib.asynccontextmanager
async def operator_rig(kube: Kube, kube_config: Path, namespace: str, folder: Path) -> AsyncIterator[OperatorRig]:
    """Store and node run; the operator is for the test to start."""
    store = ValkeyProcess(folder / "store")
    (folder / "store").mkdir()
    await asyncio.to_thread(store.start)
    try:
        async with LoopbackNode(kube, namespace, folder / "node") as node:
            yield OperatorRig(
                kube=kube, kube_config=kube_config, namespace=namespace, folder=folder, node=node, store=store
            )
    finally:
        store.kill()
