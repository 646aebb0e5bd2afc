"""A real store, toy upstreams, a whole picker and a real Envoy, for the tests that ask for them."""

from collections.abc import AsyncIterator, Iterator

import pytest
from live_picker import LivePicker, picker_settings
from toy_upstream import ToyUpstream
from valkey_server import ValkeyProcess, running


@pytest.fixture(params=["native", "grpcio"])
def each_front(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The test runs with each of the gRPC servers, in this process and in those that it starts."""
    name: str = request.param
    if name == "native":
        pytest.importorskip("trimtab_extproc._front", reason="the native front is not built")
    monkeypatch.setenv("TRIMTAB_FRONT", name)
    return name


@pytest.fixture
def server() -> Iterator[ValkeyProcess]:
    with running() as process:
        yield process


@pytest.fixture
async def upstreams() -> AsyncIterator[list[ToyUpstream]]:
    started = [ToyUpstream() for _ in range(3)]
    for upstream in started:
        await upstream.start()
    yield started
    for upstream in started:
        await upstream.stop()


@pytest.fixture
async def picker(server: ValkeyProcess, upstreams: list[ToyUpstream]) -> AsyncIterator[LivePicker]:
    """Knows the three upstreams, and may ask for response bodies."""
    async with LivePicker(picker_settings(server.url, is_mode_override_allowed=True)) as live:
        await live.announce([upstream.address for upstream in upstreams])
        yield live
