"""The operator's page for kubelet and Prometheus: /healthz, /readyz, /metrics.

The one rule: alive means that the work moves; a queue or a heart that has stood still for STUCK_S is not alive. A long
queue that moves is alive, and so is one that waits for the store: a new process would have to wait too. Ready is a
replica that works, and one that waits for its turn.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from trimtab_operator.listening import METRICS_FLAG, listen

STUCK_S: Final = 120.0
BEAT_S: Final = 5.0


class Health:
    """One per process. `age_s`: how long the work has stood still. `waits_for`: why it is not ready, empty if it is."""

    def __init__(
        self, *, age_s: Callable[[], float], waits_for: Callable[[], str], registry: CollectorRegistry
    ) -> None:
        self._age_s = age_s
        self._waits_for = waits_for
        self._registry = registry
        self._beat_s = time.monotonic()

    async def beat(self) -> None:
        """Shows that the event loop runs. Until cancelled."""
        while True:
            self._beat_s = time.monotonic()
            await asyncio.sleep(BEAT_S)

    @property
    def trouble(self) -> str:
        """Why the process is not alive, empty if it is."""
        if (age_s := self._age_s()) > STUCK_S:
            return f"the work on pools has stood still for {age_s:.0f} s"
        if (age_s := time.monotonic() - self._beat_s) > STUCK_S:
            return f"the event loop has stood still for {age_s:.0f} s"
        return ""

    @asynccontextmanager
    async def served(self, bind: str | None, port: int) -> AsyncIterator[int]:
        """Yields the port. Raises ListenError where it is taken."""
        app = web.Application()
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/readyz", self._readyz)
        app.router.add_get("/metrics", self._metrics)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        try:
            yield await listen(runner, bind, port, flag=METRICS_FLAG)
        finally:
            await runner.cleanup()

    async def _healthz(self, request: web.Request) -> web.Response:
        trouble = self.trouble
        return web.Response(status=503 if trouble else 200, text=f"{trouble or 'ok'}\n")

    async def _readyz(self, request: web.Request) -> web.Response:
        reason = self._waits_for()
        return web.Response(status=503 if reason else 200, text=f"{reason or 'ok'}\n")

    async def _metrics(self, request: web.Request) -> web.Response:
        return metrics_page(request, self._registry)


def metrics_page(request: web.Request, registry: CollectorRegistry) -> web.Response:
    """All metrics, in the form that the asker takes."""
    encode, content_type = choose_encoder(request.headers.get("Accept", ""))
    return web.Response(body=encode(registry), headers={"Content-Type": content_type})
