"""A pool of real parts under load, which a real Prometheus watches; one for all tests that only look."""

from __future__ import annotations

import os
import random
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from prometheus_commands import command

from trimtab.stack import StackSettings
from trimtab_observability.chatter import Chatter
from trimtab_observability.live_pool import LivePool, api_server, live_pool

TALKERS = 8


@pytest.fixture(scope="session")
def kube_config() -> Iterator[Path]:
    """Of a real API server."""
    server = api_server()
    try:
        path = server.__enter__()
    except (OSError, subprocess.CalledProcessError) as error:
        reason = f"no kube-apiserver: {error}. Set KUBEBUILDER_ASSETS, or see e2e/cluster/build"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    try:
        yield path
    finally:
        server.__exit__(None, None, None)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool(kube_config: Path) -> AsyncIterator[LivePool]:
    """Talked to all the time."""
    prometheus = Path(command("prometheus"))
    async with live_pool(StackSettings(endpoints=3, pickers=2), prometheus=prometheus, kube_config=kube_config) as pool:
        chatter = Chatter(session=pool.session, url=pool.stack.url, seed=5, talkers=TALKERS)
        async with chatter.going_on():
            await chatter.oddities(random.Random(6))
            yield pool
