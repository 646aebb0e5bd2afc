"""Several whole pickers on one store: a burst comes out as if one of them had decided."""

import asyncio
from collections import Counter
from contextlib import AsyncExitStack

import grpc.aio
import pytest
from envoy_data_plane.envoy.service.ext_proc import v3 as ext_proc
from gateway_messages import body, headers
from live_picker import LivePicker, picker_settings
from picker_rig import chat
from valkey_server import ValkeyProcess
from waiting import until

from trimtab_extproc import confirmation
from trimtab_extproc.wire import METHOD, SERVICE

pytestmark = [pytest.mark.stack, pytest.mark.usefixtures("each_front")]

ENDPOINTS = [f"10.0.0.{number}:8000" for number in range(1, 5)]
BURSTS = 12


async def started(stack: AsyncExitStack, server: ValkeyProcess, count: int) -> list[LivePicker]:
    """Pickers that know the pool and each other."""
    settings = picker_settings(server.url)
    pickers = [await stack.enter_async_context(LivePicker(settings)) for _ in range(count)]
    for picker in pickers:
        await picker.announce(ENDPOINTS)
        picker.make_exact(ENDPOINTS)
    for picker in pickers:
        await until(lambda picker=picker: len(picker.service._follower.load.peers) == count - 1, "peers")
        await until(lambda picker=picker: picker.service._publisher.connected, "the store")
    return pickers


def destination(answer: bytes) -> str:
    mutation = ext_proc.ProcessingResponse.parse(answer).request_body.response.header_mutation
    named = {option.header.key: option.header.raw_value.decode() for option in mutation.set_headers}
    return named["x-gateway-destination-endpoint"].split(",")[0]


async def test_pickers_that_are_asked_at_once_use_all_endpoints(
    server: ValkeyProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    # However busy the machine is with other things.
    monkeypatch.setattr(confirmation, "ROUND_TRIPS_MIN", 0)
    monkeypatch.setattr(confirmation, "CONFIRM_S_MAX", 10.0)
    async with AsyncExitStack() as stack:
        pickers = await started(stack, server, 4)
        channels = [
            await stack.enter_async_context(grpc.aio.insecure_channel(f"127.0.0.1:{picker.port}")) for picker in pickers
        ]

        async def ask(channel: grpc.aio.Channel, text: str) -> tuple[str, grpc.aio.StreamStreamCall]:
            stream = channel.stream_stream(f"/{SERVICE}/{METHOD}")()
            await stream.write(headers())
            await stream.read()
            await stream.write(body(chat(text).body))
            return destination(await stream.read()), stream

        met = 0
        for burst in range(BURSTS):
            text = "".join(f"{burst} {word} " for word in range(1_500))
            found = await asyncio.gather(*(ask(channel, f"{n} {text}") for n, channel in enumerate(channels)))
            met += sum(count - 1 for count in Counter(endpoint for endpoint, _ in found).values())
            for _, stream in found:
                stream.cancel()
            await until(
                lambda: not any(int(p.service._scheduler.load().requests.sum()) for p in pickers), "all is over"
            )
        counts = {
            result: sum([await picker.metric("trimtab_confirmations_total", result=result) for picker in pickers])
            for result in ("kept", "moved", "late", "unknown", "unsettled")
        }
        assert counts["moved"] > 0, "they did not meet at all"
        assert met <= counts["unsettled"], (met, counts)
        assert counts["late"] == counts["unknown"] == 0
        moved = [
            decision["moved_from"]
            for picker in pickers
            for decision in (await picker.get("/decisions?count=256"))["decisions"]
            if decision["moved_from"]
        ]
        assert len(moved) == counts["moved"] + counts["unsettled"]
        assert all(int(picker.service._follower.counters.resyncs) == 0 for picker in pickers)


async def test_clients_that_leave_a_burst_leave_nothing_behind(server: ValkeyProcess) -> None:
    async with AsyncExitStack() as stack:
        pickers = await started(stack, server, 2)
        channels = [
            await stack.enter_async_context(grpc.aio.insecure_channel(f"127.0.0.1:{picker.port}")) for picker in pickers
        ]
        for number in range(30):
            streams = []
            for channel in channels:
                stream = channel.stream_stream(f"/{SERVICE}/{METHOD}")()
                streams.append(stream)
                await stream.write(headers())
                await stream.read()
                await stream.write(body(chat(f"{number} " + "word " * 2_000).body))
            await asyncio.sleep(number * 0.0002)
            for stream in streams:
                stream.cancel()
        await until(lambda: not any(len(p.service.reservations) for p in pickers), "no reservation is left")
        await until(lambda: not any(int(p.service._scheduler.load().requests.sum()) for p in pickers), "nor load")
