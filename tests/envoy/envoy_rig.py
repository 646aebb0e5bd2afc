"""A running Envoy as a test sees it: how to ask the pool through it, and how to start one more."""

from __future__ import annotations

import io
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import envoy
import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from trimtab.probes import free_ports, http_ok
from trimtab.processes import Supervisor
from trimtab_operator.envoy.config import bootstrap_json
from trimtab_operator.envoy.front import EnvoyFront, Hosts, StaticHosts

ENVOY = Path(envoy.__file__).parent / "_bin" / "envoy"
WISHES = ("x-test-destination", "x-test-destination-header")
"""Request headers by which a test steers the toy pickers."""


def grpc_serving(port: int, *, service: str) -> Callable[[], Awaitable[bool]]:
    """Whether the gRPC health service on that port says SERVING for `service`."""

    async def probe() -> bool:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            try:
                answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=1.0)
            except grpc.aio.AioRpcError:
                return False
            return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    return probe


async def _chunks(body: bytes) -> AsyncIterator[bytes]:
    yield body


@dataclass(slots=True, kw_only=True)
class Rig:
    """Addresses of the running parts, and how to ask the pool something through Envoy."""

    supervisor: Supervisor
    session: aiohttp.ClientSession
    engines: dict[str, str]
    picker_ports: dict[str, int]
    directory: Path
    url: str = ""
    admin: str = ""
    is_announced: bool = True
    """Bodies are announced by their length, so that pickers are shown requests whole; else they come in chunks, and
    pickers see the headers first."""

    async def start_envoy(
        self,
        name: str,
        *,
        pool: Hosts | None = None,
        pickers: Hosts | None = None,
        plain: bool = False,
        **settings: Any,
    ) -> Rig:
        """One more Envoy over the same parts (`plain`: without pickers); returns the rig as seen from it."""
        listen, admin = free_ports(2)
        front = EnvoyFront(listen_port=listen, admin_port=admin, show_endpoint=True, shown_headers=WISHES, **settings)
        pool = pool or StaticHosts(addresses=tuple(self.engines.values()))
        pickers = pickers or StaticHosts(addresses=tuple(f"127.0.0.1:{p}" for p in self.picker_ports.values()))
        config = self.directory / f"{name}.json"
        config.write_text(bootstrap_json(front, pool=pool, pickers=None if plain else pickers))
        argv = [ENVOY, "-c", config, "--concurrency", "2", "--use-dynamic-base-id", "-l", "warning"]
        ready = http_ok(f"http://127.0.0.1:{admin}/ready")
        await self.supervisor.start(name, argv, ready=ready)
        return replace(self, url=f"http://127.0.0.1:{listen}", admin=f"http://127.0.0.1:{admin}")

    async def ask(self, *, body: bytes = b"{}", **headers: str) -> tuple[int, dict[str, Any], dict[str, str]]:
        """POST a completion; header names with `_` for `-`. Returns status, JSON body (or {}), response headers."""
        named = {key.replace("_", "-"): value for key, value in headers.items()}
        data = io.BytesIO(body) if self.is_announced else _chunks(body)
        async with self.session.post(f"{self.url}/v1/completions", data=data, headers=named) as response:
            answer = await response.json() if response.content_type == "application/json" else {}
            if "headers" in answer and "x-data-parallel-rank" in answer["headers"]:
                # Of a request that it is shown whole a picker can change one header, and the toy says its name there.
                answer["headers"]["x-test-picker"] = answer["headers"].pop("x-data-parallel-rank")
            return response.status, answer, dict(response.headers)

    async def stat(self, name: str) -> int:
        """One counter or gauge of Envoy."""
        async with self.session.get(f"{self.admin}/stats?filter=^{name}$") as response:
            text = await response.text()
        assert text.startswith(f"{name}: "), f"no statistic {name}: {text!r}"
        return int(text.rpartition(" ")[2])
