"""Fixtures of the shared state's tests: a real server for each test that asks for one."""

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings
from valkey_server import ValkeyProcess, running

# No deadlines: how long an example takes says only how busy the machine is.
settings.register_profile("state", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("state")


@pytest.fixture
def server() -> Iterator[ValkeyProcess]:
    with running() as process:
        yield process


@pytest.fixture
def store_url(server: ValkeyProcess) -> str:
    return server.url
