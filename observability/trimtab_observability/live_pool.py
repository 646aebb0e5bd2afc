"""A pool of real parts that a real Prometheus watches: store, engines with sidecars, pickers, Envoy, and an operator
with an API server.

The one rule: every process is started with the command line that it has in a cluster. Nothing runs the pods that the
API server knows, so one pod stands for the engines that run here, and the Deployment says what the pickers do. New pods
come as dry runs: the webhook is asked about them, and they never are.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import secrets
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import aiohttp
import yaml

from trimtab.commands import LOOPBACK, POOL_NAME, POOL_NAMESPACE
from trimtab.probes import free_ports, http_ok
from trimtab.stack import Stack, StackSettings, running
from trimtab_observability.local_prometheus import LocalPrometheus, started
from trimtab_operator.api.pool import PoolKey
from trimtab_operator.injection.marks import ENABLED, INJECT
from trimtab_operator.install import Install
from trimtab_operator.kube import (
    CRDS,
    DEPLOYMENTS,
    NAMESPACES,
    PODS,
    POLICIES,
    POOLS,
    SECRETS,
    Kube,
    KubeError,
    Resource,
)

ROOT: Final = Path(__file__).parents[2]
RULES: Final = ROOT / "charts" / "trimtab" / "rules"
INSTALL_NAMESPACE: Final = "trimtab-system"
LABELS: Final = {"app": "engines"}
OTHER_LABELS: Final = {"app": "nobody"}
"""Of pods that are of no pool."""
ARRIVAL_S: Final = 0.5
"""From one new pod to the next."""
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
    install_secret = secrets.token_hex(32)
    settings = replace(settings, secret=_pool_secret(install_secret))
    async with running(settings) as stack, aiohttp.ClientSession() as session:
        kube = await Kube.connect(str(kube_config))
        try:
            await _serve_crds(kube)
            await _install(kube, install_secret)
            operator_port, webhook_port = await _start_operator(stack, kube, kube_config)
            jobs = {
                "pickers": [f"{LOOPBACK}:{ports.metrics}" for ports in stack.pickers],
                "sidecars": [f"{LOOPBACK}:{ports.sidecar_metrics}" for ports in stack.engines],
                "operator": [f"{LOOPBACK}:{operator_port}"],
                "webhook": [f"{LOOPBACK}:{webhook_port}"],
            }
            server = await started(
                stack.supervisor, session, command=prometheus, jobs=jobs, rule_files=sorted(RULES.glob("*.yaml"))
            )
            pool = LivePool(stack=stack, prometheus=server, session=session, kube=kube)
            await _settled(pool)
            async with _pods_coming(kube):
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


def _pool_secret(install_secret: str) -> str:
    """What the operator makes of the install's secret, for parts that run before it does."""
    install = Install(
        namespace=INSTALL_NAMESPACE,
        store_url="",
        secret=install_secret.encode(),
        picker_image="",
        sidecar_image="",
        envoy_image="",
    )
    return install.pool_secret(PoolKey(POOL_NAMESPACE, POOL_NAME))


async def _install(kube: Kube, install_secret: str) -> None:
    """The operator's namespace, and a pool's that opts in."""
    await kube.create(NAMESPACES, {"metadata": {"name": INSTALL_NAMESPACE}})
    metadata = {"name": "trimtab-install", "namespace": INSTALL_NAMESPACE}
    await kube.create(SECRETS, {"metadata": metadata, "stringData": {"secret": install_secret}})
    await kube.merge(NAMESPACES, None, POOL_NAMESPACE, {"metadata": {"labels": {INJECT: ENABLED}}})


async def _start_operator(stack: Stack, kube: Kube, kube_config: Path) -> tuple[int, int]:
    """The pool as a user declares it, the operator, and the webhook; returns their metrics ports."""
    # From now on the operator says who the endpoints are.
    await stack.hand_over()
    await kube.create(PODS, _pod("engines", LABELS, nodeName="here"))
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
    operator_port, webhook_port, asked_port = free_ports(3)
    flags: list[str | Path] = [
        *("--kubeconfig", kube_config, "--operator-namespace", INSTALL_NAMESPACE, "--namespace", POOL_NAMESPACE),
        *("--store", stack.store_url, "--bind", LOOPBACK),
        *("--webhook-port", str(asked_port), "--webhook-url", f"https://{LOOPBACK}:{asked_port}"),
    ]
    command: list[str | Path] = [sys.executable, "-m", "trimtab_operator"]
    # It is ready only once the operator has made its certificate, and nobody here waits for a sidecar.
    await stack.supervisor.start("webhook", [*command, "webhook", *flags, "--metrics-port", str(webhook_port)])
    await stack.supervisor.start(
        "operator",
        [*command, "run", *flags, "--metrics-port", str(operator_port)],
        ready=http_ok(f"http://{LOOPBACK}:{operator_port}/readyz"),
    )
    return operator_port, webhook_port


def _policy(stack: Stack) -> dict[str, Any]:
    picker = {"replicas": len(stack.pickers)}
    sidecar = {"inject": True}
    return {"targetRef": {"name": POOL_NAME}, "picker": picker, "sidecar": sidecar, "standalone": {"enabled": False}}


def _pod(name: str, labels: dict[str, str], **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": PODS.api_version,
        "kind": PODS.kind,
        "metadata": {"name": name, "namespace": POOL_NAMESPACE, "labels": labels},
        "spec": {"containers": [{"name": "engine", "image": "emulator"}], **spec},
    }


@asynccontextmanager
async def _pods_coming(kube: Kube) -> AsyncIterator[None]:
    """Again and again a pod of the pool and one of nobody are created, as the webhook sees it."""

    async def come() -> None:
        while True:
            for labels in (LABELS, OTHER_LABELS):
                await kube.create(PODS, _pod("newcomer", labels), is_dry_run=True)
            await asyncio.sleep(ARRIVAL_S)

    coming = asyncio.ensure_future(come())
    try:
        yield
    finally:
        coming.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await coming


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
