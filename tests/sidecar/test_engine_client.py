"""What an engine answers over HTTP is taken as far as it makes sense, and no further."""

from collections.abc import AsyncIterator

import aiohttp
import pytest
from aiohttp import web

from trimtab_sidecar.engine_client import MODEL_CHARS_MAX, EngineClient


class Engine:
    """Answers every GET with `body`."""

    def __init__(self) -> None:
        self.body = b""

    async def answer(self, request: web.Request) -> web.Response:
        return web.Response(body=self.body, content_type="application/json")


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
async def client(engine: Engine) -> AsyncIterator[EngineClient]:
    app = web.Application()
    app.router.add_get("/{path:.*}", engine.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    async with aiohttp.ClientSession() as session:
        yield EngineClient(session, f"http://127.0.0.1:{runner.addresses[0][1]}")
    await runner.cleanup()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[1]",
        b'{"data": 5}',
        b'{"data": [null, 1, [], {}, {"id": 7}]}',
        # Half a UTF-16 pair, which no heartbeat could pass on.
        b'{"data": [{"id": "\\ud800"}]}',
        b"[" * 100_000,
        b'{"data": [{"id": "' + b"m" * (MODEL_CHARS_MAX + 1) + b'"}]}',
    ],
    ids=range(8),
)
async def test_odd_lists_of_models_are_none(engine: Engine, client: EngineClient, body: bytes) -> None:
    engine.body = body
    assert await client.models() == ()


async def test_models_beside_an_odd_one_are_told(engine: Engine, client: EngineClient) -> None:
    engine.body = b'{"data": [{"id": 7}, {"id": "adapter", "parent": "m"}, {"id": "m", "root": 5}]}'
    assert [(model.name, model.is_lora, model.root) for model in await client.models()] == [
        ("m", False, "m"),
        ("adapter", True, "adapter"),
    ]
