"""A real Envoy with its real configuration, two toy pickers and three toy engines, all steered by the test."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio
from envoy_rig import Rig, grpc_serving

from trimtab.probes import free_ports, http_ok
from trimtab.processes import Supervisor

HERE = Path(__file__).parent
SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=[True, False], ids=["whole", "headers first"])
async def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    directory = tmp_path_factory.mktemp("envoy")
    ports = free_ports(5)
    engines = {name: f"127.0.0.1:{port}" for name, port in zip(("a", "b", "c"), ports[:3], strict=True)}
    pickers = dict(zip(("picker-1", "picker-2"), ports[3:], strict=True))
    connector = aiohttp.TCPConnector(limit=0)
    async with (
        Supervisor(log_dir=directory / "logs") as supervisor,
        aiohttp.ClientSession(connector=connector) as session,
    ):
        for name, address in engines.items():
            port = address.rpartition(":")[2]
            ready = http_ok(f"http://{address}/health")
            await supervisor.start(name, [sys.executable, HERE / "toy_engine.py", name, port], ready=ready)
        for name, number in pickers.items():
            ready = grpc_serving(number, service=SERVICE)
            await supervisor.start(name, [sys.executable, HERE / "toy_picker.py", name, str(number)], ready=ready)
        base = Rig(
            supervisor=supervisor, session=session, engines=engines, picker_ports=pickers, directory=directory,
            is_announced=request.param,
        )  # fmt: skip
        yield await base.start_envoy("envoy", body_bytes_max=8 << 20)
