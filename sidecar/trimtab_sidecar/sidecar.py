"""The sidecar process: its parts put together, started, and ended.

The one rule: everything is made here and handed down; a part that fails unexpectedly ends the process, which the
kubelet starts again from its checkpoint. At SIGTERM it writes its checkpoints and is gone within a second. It says
goodbye to the shared state only if its engine is going too: a sidecar that merely restarts keeps what it knows.
"""

import asyncio
import contextlib
import logging
import signal
from collections.abc import Callable, Coroutine
from typing import Any

import aiohttp
import zmq.asyncio
from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from trimtab_core.chunks import U32, U64
from trimtab_core.selection import CORE_NAME, CORE_REASON
from trimtab_sidecar.drain_socket import DrainSocketError, serve_drain
from trimtab_sidecar.endpoint_sidecar import MakePublisher
from trimtab_sidecar.engine_sidecar import EngineSidecar
from trimtab_sidecar.own_metrics import SidecarCollector
from trimtab_sidecar.pool_access import PoolAccess
from trimtab_sidecar.settings import SettingsError, SidecarSettings
from trimtab_state.errors import StateUnavailable
from trimtab_state.keys import PoolKeys
from trimtab_state.kv_publisher import KvPublisher
from trimtab_state.store import Store, connect

logger = logging.getLogger(__name__)

GOODBYE_S = 0.8
"""How long the last words to the store may take."""
DRAIN_FLUSH_S = 3.0
"""How long `drain` waits for the store to have the draining state."""


class Sidecar:
    """All of one pod: one engine, or one for each of its ports."""

    def __init__(self, settings: SidecarSettings) -> None:
        self._settings = settings
        self.engines: tuple[EngineSidecar, ...] = ()
        """None yet while the pool's Secret is waited for."""
        self._is_draining = False
        self.metrics_port = 0
        """Where the own metrics are served, once they are."""

    async def run(self) -> None:
        """Until SIGTERM, SIGINT or cancellation. Raises what a part raised unexpectedly."""
        logger.info("core", extra={"core": CORE_NAME, "reason": CORE_REASON})
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        try:
            async with self._served():
                await _first(stop.wait(), self._work())
            logger.info("ended")
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    async def drain(self) -> None:
        """Say `draining` for every endpoint; returns once the store has it, or after a while if it is away."""
        self._is_draining = True
        for engine in self.engines:
            engine.drain()
        with contextlib.suppress(StateUnavailable, TimeoutError):
            async with asyncio.timeout(DRAIN_FLUSH_S):
                for engine in self.engines:
                    for endpoint in engine.endpoints:
                        await endpoint.publisher.flushed()
        logger.info("draining")

    async def _work(self) -> None:
        """With the pool's access as it is, and anew with each other one. Until cancelled."""
        folder = self._settings.access_folder
        if folder is None:
            assert self._settings.access is not None
            await self._work_with(self._settings.access)
            return
        access = await folder.found()
        while True:
            # What it has changed to, and not what is there once the parts have ended: that may be nothing, or nonsense.
            access = await _first(folder.changed(access), self._work_with(access))
            logger.warning("the pool's Secret has changed: starting anew with it")

    async def _work_with(self, access: PoolAccess) -> None:
        settings = self._settings
        keys = PoolKeys(settings.pool_namespace, settings.pool_name)
        store = connect(access.store_url)
        headers = {"Authorization": f"Bearer {settings.api_key}"} if settings.api_key else {}
        context = zmq.asyncio.Context()
        try:
            async with aiohttp.ClientSession(headers=headers, trust_env=False) as session:
                self.engines = tuple(
                    EngineSidecar(
                        settings,
                        url,
                        seed=access.seed,
                        session=session,
                        context=context,
                        make_publisher=publisher_maker(store, keys),
                    )
                    for url in settings.engine_urls
                )
                if self._is_draining:
                    for engine in self.engines:
                        engine.drain()
                try:
                    await _together([engine.run() for engine in self.engines])
                finally:
                    logger.info("ending")
                    await self._end()
        finally:
            context.destroy(linger=0)
            await store.close()

    async def _end(self) -> None:
        """Last things, when the parts have stopped."""
        for engine in self.engines:
            engine.write_checkpoints()
        try:
            async with asyncio.timeout(GOODBYE_S):
                for engine in self.engines:
                    if engine.is_draining or not engine.is_reachable:
                        for endpoint in engine.endpoints:
                            await endpoint.publisher.close()
        except (StateUnavailable, TimeoutError) as error:
            logger.warning("no goodbye: the heartbeats end by their time to live", extra={"error": str(error)})

    @contextlib.asynccontextmanager
    async def _served(self) -> Any:
        """The own metrics over HTTP, and the drain socket."""
        settings = self._settings
        registry = CollectorRegistry()
        collector = SidecarCollector(
            lambda: self.engines or None, pool=settings.pool_name, namespace=settings.pool_namespace
        )
        registry.register(collector)
        async with contextlib.AsyncExitStack() as stack:
            if settings.metrics_port >= 0:
                runner = web.AppRunner(metrics_app(registry), access_log=None)
                await runner.setup()
                stack.push_async_callback(runner.cleanup)
                try:
                    await web.TCPSite(runner, settings.bind, settings.metrics_port).start()
                except OSError as error:
                    raise SettingsError(f"--metrics-port {settings.metrics_port}: {error}; give another one") from error
                self.metrics_port = runner.addresses[0][1]
                logger.info("metrics served", extra={"port": self.metrics_port})
            if settings.checkpoint_dir is not None:
                try:
                    settings.checkpoint_dir.mkdir(parents=True, exist_ok=True)
                except OSError as error:
                    raise SettingsError(
                        f"--checkpoint-dir {settings.checkpoint_dir}: {error.strerror}; give a folder that can be made"
                    ) from error
                try:
                    server = await serve_drain(settings.checkpoint_dir, self.drain)
                    stack.callback(server.close)
                except (DrainSocketError, OSError) as error:
                    logger.warning("no drain socket", extra={"error": str(error)})
            yield


def publisher_maker(store: Store, keys: PoolKeys) -> MakePublisher:
    def make(endpoint: str, snapshot: Callable[[], tuple[U64, U32]], epoch: str) -> KvPublisher:
        return KvPublisher(store, keys, endpoint, snapshot=snapshot, epoch=epoch)

    return make


def metrics_app(registry: CollectorRegistry) -> web.Application:
    """GET /metrics, and /healthz for the kubelet: it answers, so the event loop runs."""

    async def metrics(request: web.Request) -> web.Response:
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        return web.Response(body=encode(registry), headers={"Content-Type": content_type})

    async def healthz(request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/healthz", healthz)
    return app


async def _together(parts: list[Coroutine[Any, Any, None]]) -> None:
    async with asyncio.TaskGroup() as tasks:
        for part in parts:
            tasks.create_task(part)


async def _first(*parts: Coroutine[Any, Any, Any]) -> Any:
    """Until one of them has ended; the others are cancelled, and have ended too. What the first part has returned, if
    it was that. Raises what one has raised."""
    tasks = [asyncio.ensure_future(part) for part in parts]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
    for error in ended:
        if isinstance(error, Exception):
            raise error
    return ended[0]
