"""A webhook that a real API server calls on loopback, with its pools, policies and namespaces."""

import asyncio
import contextlib
import functools
import itertools
import json
import os
import ssl
import subprocess
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import waiting_on
import yaml
from aiohttp import web
from control_plane import binaries
from declared import declared_policy, declared_pool
from injection_pods import INSTALL, LABELS
from valkey_server import free_port

from trimtab_operator.injection.authority import ServingPair, make_pair
from trimtab_operator.injection.certificates import CertificateKeeper
from trimtab_operator.injection.marks import ENABLED, INJECT
from trimtab_operator.injection.served_certificate import ServedCertificate
from trimtab_operator.injection.server import WebhookServer, WebhookSettings
from trimtab_operator.injection.webhook_configuration import WebhookAddress, configuration_name
from trimtab_operator.install import Install
from trimtab_operator.kube import NAMESPACES, PODS, POLICIES, POOLS, WEBHOOKS, Kube, Object

WITHIN_S = 20.0
eventually = functools.partial(waiting_on.eventually, within_s=WITHIN_S)
_numbers = itertools.count(1)


async def kubectl(kube_config: Path, *words: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [str(binaries() / "kubectl"), "--kubeconfig", str(kube_config), *words]
    return await asyncio.to_thread(
        subprocess.run, command, input=text, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


class Cluster:
    """One installation in the API server, its webhook in this process."""

    def __init__(self, kube: Kube, kube_config: Path) -> None:
        self.kube = kube
        self.kube_config = kube_config
        self.number = f"{os.getpid()}-{next(_numbers)}"
        self.install = Install(
            namespace=f"trimtab-system-{self.number}",
            store_url=INSTALL.store_url,
            secret=INSTALL.secret,
            picker_image=INSTALL.picker_image,
            sidecar_image=INSTALL.sidecar_image,
            envoy_image=INSTALL.envoy_image,
        )
        self.port = free_port()
        self.address = WebhookAddress(namespace=self.install.namespace, url=f"https://127.0.0.1:{self.port}")
        self.server: WebhookServer | None = None
        self._stop = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def keeper(self, **more: Any) -> CertificateKeeper:
        return CertificateKeeper(self.kube, self.install.namespace, address=self.address, **more)

    async def start(self, kube: Kube | None = None) -> WebhookServer:
        """A replica, ready; `kube`: another way to the API server than this test's own."""
        settings = WebhookSettings(
            install=self.install, bind="127.0.0.1", port=self.port, health_port=0, drain_s=0.0, rng_seed=1
        )
        self.server = WebhookServer(settings, kube or self.kube)
        self._stop = asyncio.Event()
        self._task = asyncio.create_task(self.server.run(self._stop))

        async def is_ready() -> bool:
            assert self._task is not None
            if self._task.done():
                await self._task
            return self.server is not None and self.server.is_ready

        await eventually(is_ready)
        return self.server

    async def stop(self) -> None:
        if self._task is not None:
            self._stop.set()
            await self._task
            self._task = None

    async def namespace(self, *, enabled: bool = True) -> str:
        labels = {INJECT: ENABLED} if enabled else {}
        made = await self.kube.create(NAMESPACES, {"metadata": {"generateName": "models-", "labels": labels}})
        return str(made["metadata"]["name"])

    async def pool(self, namespace: str, name: str = "chat", *, ports: tuple[int, ...] = (8000,)) -> None:
        numbers = [{"number": port} for port in ports]
        await self.kube.create(POOLS, declared_pool(namespace, name, targetPorts=numbers))

    async def policy(self, namespace: str, pool: str = "chat", *, name: str = "", **sidecar: Any) -> None:
        wanted = {"inject": True, **sidecar}
        await self.kube.create(POLICIES, declared_policy(namespace, name or pool, pool=pool, sidecar=wanted))

    async def place(self, *, ports: tuple[int, ...] = (8000,), **sidecar: Any) -> str:
        """A namespace that opted in, with a pool that asks for the sidecar; the webhook knows both."""
        namespace = await self.namespace()
        await self.pool(namespace, ports=ports)
        await self.policy(namespace, **sidecar)
        await self.knows(namespace)
        return namespace

    async def knows(self, namespace: str) -> None:
        async def known() -> bool:
            assert self.server is not None
            return not hasattr(self.server.book.match(namespace, LABELS), "reason")

        await eventually(known)

    async def create(self, namespace: str, pod: Object) -> Object:
        body = {**pod, "metadata": {**pod["metadata"], "namespace": namespace}}
        return await self.kube.create(PODS, body)

    async def is_called(self, namespace: str, pod: Object) -> None:
        """API servers hear of a webhook a moment after it was made."""

        async def is_injected() -> bool:
            return has_sidecar(await self.create(namespace, pod))

        await eventually(is_injected)

    async def close(self) -> None:
        await self.stop()
        await self.kube.delete(WEBHOOKS, None, configuration_name(self.install.namespace))


@contextlib.asynccontextmanager
async def cluster(kube_config: Path) -> AsyncIterator[Cluster]:
    """An installation whose certificate is made; its webhook is not started yet."""
    kube = await Kube.connect(str(kube_config))
    made = Cluster(kube, kube_config)
    try:
        await kube.create(NAMESPACES, {"metadata": {"name": made.install.namespace, "labels": {INJECT: ENABLED}}})
        await made.keeper().ensure()
        yield made
    finally:
        await made.close()
        await kube.close()


@contextlib.asynccontextmanager
async def other_webhook(
    kube: Kube, name: str, answer: Callable[[Object], Awaitable[web.StreamResponse]], *, reinvoked: bool = False
) -> AsyncIterator[None]:
    """Somebody else's webhook of pods, called after those whose names come before `name`."""
    pair = make_pair(["127.0.0.1"], now_s=1_790_000_000.0, life_s=10 * 365 * 86_400.0)
    async with tls_server(pair, answer) as port:
        address = WebhookAddress(namespace=name, url=f"https://127.0.0.1:{port}")
        body = {
            "apiVersion": WEBHOOKS.api_version,
            "kind": WEBHOOKS.kind,
            "metadata": {"name": name},
            "webhooks": [
                {
                    "name": "other.example.com",
                    "clientConfig": address.client_config(pair.ca),
                    "admissionReviewVersions": ["v1"],
                    "failurePolicy": "Fail",
                    "sideEffects": "None",
                    "reinvocationPolicy": "IfNeeded" if reinvoked else "Never",
                    "rules": [
                        {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}
                    ],
                    "namespaceSelector": {"matchLabels": {INJECT: ENABLED}},
                }
            ],
        }
        await kube.create(WEBHOOKS, body)
        try:
            yield
        finally:
            await kube.delete(WEBHOOKS, None, name)


@contextlib.asynccontextmanager
async def tls_server(
    pair: ServingPair, answer: Callable[[Object], Awaitable[web.StreamResponse]], port: int = 0
) -> AsyncIterator[int]:
    served = ServedCertificate()
    served.use(pair)

    async def review(request: web.Request) -> web.StreamResponse:
        return await answer(await request.json())

    app = web.Application()
    app.router.add_post("/inject", review)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", port, ssl_context=served.context).start()
        yield int(runner.addresses[0][1])
    finally:
        await runner.cleanup()


class Relay:
    """Connections to the API server that can be cut. `kube_config` leads through it."""

    def __init__(self, kube_config: Path, folder: Path) -> None:
        config = yaml.safe_load(kube_config.read_text())
        server = config["clusters"][0]["cluster"]
        self._target = int(server["server"].rpartition(":")[2])
        self._port = free_port()
        server["server"] = f"https://127.0.0.1:{self._port}"
        self.kube_config = folder / "kubeconfig"
        self.kube_config.write_text(yaml.safe_dump(config))
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def mend(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self._port)

    async def cut(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        ends = [writer]
        try:
            there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self._target)
            ends.append(there_writer)
            await asyncio.gather(_pipe(reader, there_writer), _pipe(there_reader, writer))
        except (OSError, asyncio.CancelledError):
            pass  # cut
        finally:
            for end in ends:
                end.transport.abort()


async def _pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65_536):
        writer.write(data)
        await writer.drain()
    writer.close()


@contextlib.asynccontextmanager
async def relayed(kube_config: Path) -> AsyncIterator[Relay]:
    with tempfile.TemporaryDirectory() as folder:
        relay = Relay(kube_config, Path(folder))
        await relay.mend()
        try:
            yield relay
        finally:
            await relay.cut()


def has_sidecar(pod: Object) -> bool:
    spec = pod["spec"]
    names = [container["name"] for container in [*spec.get("initContainers", []), *spec["containers"]]]
    return "trimtab-sidecar" in names


def client_context(ca: bytes) -> ssl.SSLContext:
    return ssl.create_default_context(cadata=ca.decode())


def as_text(*bodies: Object) -> str:
    return "\n---\n".join(json.dumps(body) for body in bodies)
