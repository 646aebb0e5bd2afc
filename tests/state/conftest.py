"""Fixtures of the shared state's tests: a real server for each test that asks for one."""

from collections.abc import Iterator

import pytest
from valkey_server import ValkeyProcess, running


@pytest.fixture
def server() -> Iterator[ValkeyProcess]:
    with running() as process:
        yield process


@pytest.fixture
def store_url(server: ValkeyProcess) -> str:
    return server.url
