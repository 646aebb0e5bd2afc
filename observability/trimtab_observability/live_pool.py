"""A pool of real parts that a real Prometheus watches: store, engines with sidecars, pickers, Envoy, and an operator
with an API server.

The one rule: every process is started with the command line that it has in a cluster. Nothing runs the pods that the
API server knows, so one pod stands for the engines that run here, and the Deployment says what the pickers do.
"""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp
import yaml

from trimtab.commands import LOOPBACK, POOL_NAME, POOL_NAMESPACE
from trimtab.probes import free_ports, http_ok
from trimtab.stack import Stack, StackSettings, running
from trimtab_observability.local_prometheus import LocalPrometheus, started
from trimtab_operator.kube import CRDS, DEPLOYMENTS, PODS, POLICIES, POOLS, Kube, KubeError, Resource

ROOT: Final = Path(__file__).parents[2]
RULES: Final = ROOT / "charts" / "trimtab" / "rules"
LABELS: Final = {"app": "engines"}
POLL_S: Final = 0.1
SERVED_S: Final = 60.0
"""How long the API server may take to serve our CRDs, and the operator to know the pool."""
TLS_GOODBYE_S: Final = 0.3
"""TLS connections that were closed need a moment to say goodbye; else they are left open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LivePool:
    """What runs."""

    stack: Stack
    prometheus: LocalPrometheus
    session: aiohttp.ClientSession
    kube: Kube

    async def set_policy(self, **spec: Any) -> None:
        """Make this the pool's SchedulingPolicy; the operator tells it to the pickers."""
        await _apply(self.kube, POLICIES, {**_policy(self.stack), **spec})


@asynccontextmanager
async def live_pool(settings: StackSettings, *, prometheus: Path, kube_config: Path) -> AsyncIterator[LivePool]:
    """All of it, scraped, and the pool known to everybody. Raises ProcessError, and TimeoutError."""
    async with running(settings) as stack, aiohttp.ClientSession() as session:
        kube = await Kube.connect(str(kube_config))
        try:
            await _serve_crds(kube)
            port = await _start_operator(stack, kube, kube_config)
            jobs = {
                "pickers": [f"{LOOPBACK}:{ports.metrics}" for ports in stack.pickers],
                "sidecars": [f"{LOOPBACK}:{ports.sidecar_metrics}" for ports in stack.engines],
                "operator": [f"{LOOPBACK}:{port}"],
            }
            server = await started(
                stack.supervisor, session, command=prometheus, jobs=jobs, rule_files=sorted(RULES.glob("*.yaml"))
            )
            pool = LivePool(stack=stack, prometheus=server, session=session, kube=kube)
            await _settled(pool)
            yield pool
        finally:
            await kube.close()
            await asyncio.sleep(TLS_GOODBYE_S)


@contextmanager
def api_server() -> Iterator[Path]:
    """A kubeconfig of an administrator. Raises OSError and CalledProcessError where no API server can be had."""
    path = ROOT / "e2e" / "cluster" / "control_plane.py"
    spec = importlib.util.spec_from_file_location("control_plane", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with ExitStack() as stack:
        yield stack.enter_context(module.control_plane())


async def _start_operator(stack: Stack, kube: Kube, kube_config: Path) -> int:
    """The pool as a user declares it, and the operator; returns its metrics port."""
    # From now on the operator says who the endpoints are.
    await stack.hand_over()
    pod = {
        "metadata": {"name": "engines", "namespace": POOL_NAMESPACE, "labels": LABELS},
        "spec": {"nodeName": "here", "containers": [{"name": "engine", "image": "emulator"}]},
    }
    await kube.create(PODS, {"apiVersion": PODS.api_version, "kind": PODS.kind, **pod})
    ready = {"phase": "Running", "podIP": LOOPBACK, "podIPs": [{"ip": LOOPBACK}]}
    ready["conditions"] = [{"type": "Ready", "status": "True"}]
    await kube.merge(PODS, POOL_NAMESPACE, "engines", {"status": ready}, subresource="status")
    await _apply(
        kube,
        POOLS,
        {
            "selector": {"matchLabels": LABELS},
            "targetPorts": [{"number": ports.http} for ports in stack.engines],
            "endpointPickerRef": {"name": f"trimtab-{POOL_NAME}", "port": {"number": 9002}},
        },
    )
    await _apply(kube, POLICIES, _policy(stack))
    (port,) = free_ports(1)
    argv: list[str | Path] = [
        *(sys.executable, "-m", "trimtab_operator", "run", "--kubeconfig", kube_config),
        *("--operator-namespace", POOL_NAMESPACE, "--namespace", POOL_NAMESPACE, "--store", stack.store_url),
        *("--bind", LOOPBACK, "--metrics-port", str(port)),
    ]
    await stack.supervisor.start("operator", argv, ready=http_ok(f"http://{LOOPBACK}:{port}/readyz"))
    return port


def _policy(stack: Stack) -> dict[str, Any]:
    picker = {"replicas": len(stack.pickers)}
    return {"targetRef": {"name": POOL_NAME}, "picker": picker, "standalone": {"enabled": False}}


async def _settled(pool: LivePool) -> None:
    """Every target answers, and the operator has seen every engine's sidecar."""
    endpoints = len(pool.stack.engines)
    where = f'pool="{POOL_NAME}"'
    async with asyncio.timeout(SERVED_S):
        while not await _says(pool, f'trimtab_operator_pool_endpoints_known{{{where}, how="exact"}} == {endpoints}'):
            await _say_that_pickers_run(pool)
            await asyncio.sleep(POLL_S)
        while set((await pool.prometheus.targets()).values()) != {"up"}:  # noqa: ASYNC110 (processes send no events)
            await asyncio.sleep(POLL_S)


async def _says(pool: LivePool, expr: str) -> bool:
    return bool(await pool.prometheus.now(expr))


async def _say_that_pickers_run(pool: LivePool) -> None:
    """What a cluster's controllers would say of the pickers' Deployment."""
    name, count = f"trimtab-{POOL_NAME}", len(pool.stack.pickers)
    if await pool.kube.get(DEPLOYMENTS, POOL_NAMESPACE, name) is not None:
        status = {"replicas": count, "readyReplicas": count, "availableReplicas": count, "updatedReplicas": count}
        await pool.kube.merge(DEPLOYMENTS, POOL_NAMESPACE, name, {"status": status}, subresource="status")


async def _apply(kube: Kube, resource: Resource, spec: dict[str, Any]) -> None:
    metadata = {"name": POOL_NAME, "namespace": POOL_NAMESPACE}
    body = {"apiVersion": resource.api_version, "kind": resource.kind, "metadata": metadata, "spec": spec}
    await kube.apply(body, manager="user")


async def _serve_crds(kube: Kube) -> None:
    for file in sorted((ROOT / "crds").glob("*.yaml")):
        body = yaml.safe_load(file.read_text())
        await kube.create(CRDS, body)
        spec = body["spec"]
        served = Resource(
            f"{spec['group']}/{spec['versions'][0]['name']}", spec["names"]["plural"], spec["names"]["kind"]
        )
        async with asyncio.timeout(SERVED_S):
            while not await _is_served(kube, served):  # noqa: ASYNC110
                await asyncio.sleep(POLL_S)


async def _is_served(kube: Kube, resource: Resource) -> bool:
    try:
        await kube.list_all(resource, POOL_NAMESPACE)
    except KubeError as error:
        if error.status == 404:
            return False
        raise
    return True
