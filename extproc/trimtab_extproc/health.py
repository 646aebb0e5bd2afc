"""gRPC health, under every name that gateways and kubelets ask for.

The one rule: "liveness" says that the process runs; every other name says whether it can choose: NOT_SERVING until the
pool is known, and again from the moment that the process is told to stop.
"""

from typing import Any

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio

from trimtab_extproc.wire import SERVICE

LIVENESS = "liveness"
READINESS_NAMES = ("", "readiness", SERVICE, "inference-extension")


class Health:
    """The health service; add it to any number of servers."""

    def __init__(self) -> None:
        self._servicer: Any = health_aio.HealthServicer()
        self._is_ready: bool | None = None

    def add_to(self, server: grpc.aio.Server) -> None:
        """Answer health checks there too."""
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    async def start(self) -> None:
        """Alive, and not ready."""
        await self._servicer.set(LIVENESS, health_pb2.HealthCheckResponse.SERVING)
        await self.set_ready(False)

    async def set_ready(self, is_ready: bool) -> None:
        """Whether choices can be made. Watchers are told only of changes."""
        if is_ready == self._is_ready:
            return
        self._is_ready = is_ready
        status = health_pb2.HealthCheckResponse.SERVING if is_ready else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in READINESS_NAMES:
            await self._servicer.set(name, status)
