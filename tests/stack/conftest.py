"""A whole stack of real processes (Envoy, Valkey, emulated engines, sidecars, pickers), and a client of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio
from stack_client import StackClient

from trimtab.stack import StackSettings, running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[StackClient]:
    log_dir: Path = tmp_path_factory.mktemp("stack") / "logs"
    settings = StackSettings(endpoints=3, pickers=2)
    async with running(settings, log_dir=log_dir) as stack, aiohttp.ClientSession() as session:
        yield StackClient(stack=stack, session=session)
