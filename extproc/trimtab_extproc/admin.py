"""The HTTP port for people, Prometheus and `trimtab explain`: /metrics, /decisions, /state, /healthz.

The one rule: it reads and never changes anything, and a big answer gives the event loop back between endpoints. Only
numbers, names and seeded hashes leave here.
"""

import asyncio
import hashlib
from collections.abc import Callable
from typing import Any

import msgspec
from aiohttp import web

from trimtab_extproc.decisions import DECISIONS_MAX, DecisionLog
from trimtab_extproc.pool_report import PoolReport
from trimtab_extproc.telemetry import Telemetry

DECISIONS_SHOWN_DEFAULT = 20
METRICS_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Admin:
    """The handlers."""

    def __init__(
        self,
        *,
        telemetry: Telemetry,
        decisions: DecisionLog,
        report: PoolReport,
        clock: Callable[[], float],
    ) -> None:
        self._telemetry = telemetry
        self._decisions = decisions
        self._report = report
        self._clock = clock

    def application(self) -> web.Application:
        """The routes."""
        application = web.Application()
        application.add_routes(
            [
                web.get("/metrics", self.metrics),
                web.get("/decisions", self.decisions),
                web.get("/state", self.state),
                web.get("/healthz", self.healthz),
            ]
        )
        return application

    async def metrics(self, request: web.Request) -> web.Response:
        """Prometheus's text format."""
        return web.Response(body=self._telemetry.expose(), headers={"content-type": METRICS_CONTENT_TYPE})

    async def decisions(self, request: web.Request) -> web.Response:
        """`?count=20`, newest first; `?request_id=` for one."""
        text = request.query.get("count", str(DECISIONS_SHOWN_DEFAULT))
        count = int(text) if text.isascii() and text.isdecimal() and len(text) < 6 else DECISIONS_SHOWN_DEFAULT
        rows = self._decisions.to_json(
            now_s=self._clock(), count=min(count, DECISIONS_MAX), request_id=request.query.get("request_id")
        )
        return _json({"decisions": rows})

    async def state(self, request: web.Request) -> web.Response:
        """The pool as this replica knows it; `?chunks=endpoint` for the chunks of one endpoint."""
        name = request.query.get("chunks")
        if name is None:
            rows = []
            for endpoint in self._report.endpoint_names():
                row = self._report.endpoint(endpoint)
                if row is not None:
                    rows.append(row)
                await asyncio.sleep(0)
            return _json({**self._report.pool(), "index_digest": _digest(rows), "endpoints": rows})
        chunks = self._report.chunks(name)
        if chunks is None:
            return _json({"error": f"no endpoint {name!r}"}, status=404)
        hashes, tokens = chunks
        return _json({"endpoint": name, "chunks": [f"{value:016x}" for value in hashes], "tokens": tokens})

    async def healthz(self, request: web.Request) -> web.Response:
        """200 while the process lives; whether it is ready is in the body and in gRPC health."""
        return _json({"alive": True, "ready": self._report.is_ready})


def _digest(rows: list[dict[str, Any]]) -> str:
    """One name for the whole index: equal on replicas that know the same."""
    text = "\n".join(f"{row['endpoint']} {row['index_digest']}" for row in rows if row["index_chunks"])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _json(value: object, *, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")
