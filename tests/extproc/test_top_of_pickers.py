"""`trimtab top` and `trimtab explain` on real pickers."""

import asyncio

import grpc.aio
import pytest
from gateway_messages import body, headers
from live_picker import LivePicker, picker_settings
from valkey_server import ValkeyProcess

from trimtab.top import top, watch
from trimtab_extproc.wire import METHOD, SERVICE

pytestmark = pytest.mark.stack

A, B = "10.0.0.1:8000", "10.0.0.2:8000"


async def test_pickers_are_shown_with_their_endpoints_and_what_is_open(server: ValkeyProcess) -> None:
    async with LivePicker(picker_settings(server.url)) as one, LivePicker(picker_settings(server.url)) as other:
        for picker in (one, other):
            await picker.announce([A, B])
            picker.make_exact([A])
        urls = [f"http://127.0.0.1:{picker.service.ports['metrics']}" for picker in (one, other)]
        shown: list[str] = []
        watching = asyncio.ensure_future(watch(urls, every_s=0.01, show=shown.append))
        async with grpc.aio.insecure_channel(f"127.0.0.1:{one.port}") as channel:
            stream = channel.stream_stream(f"/{SERVICE}/{METHOD}")()
            for message in (headers(), body()):
                await stream.write(message)
                await stream.read()
            lines = (await top(urls)).splitlines()
            while len(shown) < 2:  # noqa: ASYNC110 (it tells nobody but by what it shows)
                await asyncio.sleep(0.01)
            await stream.done_writing()
            await stream.code()
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
    assert lines[0] == "placed by product, 2 of 2 endpoints may be chosen, no hotspot, pickers know the same caches"
    assert lines[3].split()[:5] == [urls[0], "yes", "yes", "1", "1"]
    assert lines[4].split()[:5] == [urls[1], "yes", "yes", "0", "0"]
    cells = [line.split() for line in lines[-2:]]
    assert [row[0] for row in cells] == [A, B]
    assert cells[0][1:3] == ["serving", "exact"]
    assert "no_heartbeat" in cells[1]
    assert "requests/s" in shown[1]
