"""What every gRPC server of the picker does, over real connections, whichever of the two runs."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import pytest
from envoy_data_plane.envoy.service.ext_proc import v3 as ext_proc
from front_rig import PROCESS, FrontRig, GatewayStream
from gateway_messages import BODY_MODE, body, headers, response_headers
from grpc_health.v1 import health_pb2, health_pb2_grpc
from picker_rig import chat
from test_ext_proc_server import SAMPLES
from waiting import until

from trimtab_extproc.certificate import self_signed, server_certificate
from trimtab_extproc.errors import ConfigError
from trimtab_extproc.offload import INLINE_BYTES_MAX

A, B = "10.0.0.1:8000", "10.0.0.2:8000"
DUPLEX = BODY_MODE.FULL_DUPLEX_STREAMED
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
LARGE = chat("many words " * (INLINE_BYTES_MAX // 5)).body
"""Prepared on another thread: its choice has to be waited for."""


def part(reply: ext_proc.ProcessingResponse | None) -> str:
    """Which message a reply answers."""
    names = ("request_headers", "request_body", "response_headers", "response_body", "immediate_response")
    return next((name for name in names if reply is not None and getattr(reply, name) is not None), "nothing")


def made(name: str, *, is_ready: bool = True, **bounds: int) -> FrontRig:
    rig = FrontRig(name, **bounds)
    if is_ready:
        rig.announce(A, B)
    return rig


@pytest.fixture
async def rig(each_front: str) -> AsyncIterator[FrontRig]:
    async with made(each_front).serving() as serving:
        yield serving


async def test_a_whole_exchange_is_answered_message_by_message(rig: FrontRig) -> None:
    async with rig.gateway() as gateway:
        replies, status = await gateway.run(headers(), body(), response_headers())
    assert [part(reply) for reply in replies] == ["request_headers", "request_body", "response_headers"]
    assert status is grpc.StatusCode.OK
    assert rig.count("trimtab_hop_seconds_count") == 1
    assert rig.count("trimtab_decisions_total") == 1


async def test_many_streams_at_once_on_one_connection_keep_to_themselves(rig: FrontRig) -> None:
    async with rig.gateway() as gateway:
        bodies = [chat(f"question {number} " * 50).body for number in range(200)]
        results = await asyncio.gather(*(gateway.run(headers(mode=DUPLEX), body(content)) for content in bodies))
    for content, (replies, status) in zip(bodies, results, strict=True):
        assert status is grpc.StatusCode.OK
        chunk = replies[1].request_body
        assert chunk is not None
        assert chunk.response is not None
        assert chunk.response.body_mutation is not None
        streamed = chunk.response.body_mutation.streamed_response
        assert streamed is not None
        assert streamed.body == content


async def test_messages_that_come_while_a_choice_is_waited_for_are_answered_after_it(rig: FrontRig) -> None:
    async with rig.gateway() as gateway:
        replies, status = await gateway.run(headers(), body(LARGE), response_headers())
    assert [part(reply) for reply in replies] == ["request_headers", "request_body", "response_headers"]
    assert status is grpc.StatusCode.OK


async def test_a_body_of_many_messages_and_megabytes_comes_back_whole(rig: FrontRig) -> None:
    content = chat("many words " * 400_000).body
    pieces = [content[start : start + 60_000] for start in range(0, len(content), 60_000)]
    sent = [body(piece, end_of_stream=piece is pieces[-1]) for piece in pieces]
    async with rig.gateway() as gateway:
        replies, status = await gateway.run(headers(mode=DUPLEX), *sent)
    assert status is grpc.StatusCode.OK
    returned = b""
    for reply in replies[1:]:
        assert reply.request_body is not None
        assert reply.request_body.response is not None
        assert reply.request_body.response.body_mutation is not None
        assert reply.request_body.response.body_mutation.streamed_response is not None
        returned += reply.request_body.response.body_mutation.streamed_response.body
    assert returned == content


async def test_one_message_of_many_megabytes_is_taken(rig: FrontRig) -> None:
    content = chat("many words " * 1_000_000).body
    async with rig.gateway(max_send_message_length=-1) as gateway:
        replies, status = await gateway.run(headers(), body(content))
    assert [part(reply) for reply in replies] == ["request_headers", "request_body"]
    assert status is grpc.StatusCode.OK


async def test_not_ready_ends_the_stream_at_its_headers(each_front: str) -> None:
    async with made(each_front, is_ready=False).serving() as rig, rig.gateway() as gateway:
        assert await gateway.refused(headers(mode=DUPLEX)) is grpc.StatusCode.UNAVAILABLE
        assert rig.count("trimtab_not_ready_total") == 1


async def test_a_refusal_is_answered_and_ends_the_stream(rig: FrontRig) -> None:
    rig.announce()
    async with rig.gateway() as gateway:
        stream = gateway.open()
        await stream.send(headers(), body())
        assert part(await stream.read()) == "request_headers"
        assert part(await stream.read()) == "immediate_response"
        assert await stream.end() is grpc.StatusCode.OK


async def test_what_breaks_the_protocol_ends_its_stream_alone(rig: FrontRig) -> None:
    async with rig.gateway() as gateway:
        other = gateway.open()
        await other.send(headers())
        assert part(await other.read()) == "request_headers"
        for messages in ((b"\xff\xff",), (body(),), (headers(), headers()), (b"",)):
            assert await gateway.refused(*messages) is grpc.StatusCode.INVALID_ARGUMENT
        assert rig.count("trimtab_protocol_errors_total") == 4
        assert [part(reply) for reply in await other.talk(body())] == ["request_body"]
        assert await other.end() is grpc.StatusCode.OK


@pytest.mark.parametrize("content", [None, LARGE], ids=["at once", "after a wait"])
async def test_a_fault_of_our_own_is_an_internal_error_of_its_stream(
    content: bytes | None, rig: FrontRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(rig.telemetry, "answered", broken)
    async with rig.gateway() as gateway:
        assert await gateway.refused(headers(), body(content)) is grpc.StatusCode.INTERNAL
        assert rig.count("trimtab_failures_total") == 1
        await rig.until_idle()


async def begun(rig: FrontRig, stream: GatewayStream, count: int) -> None:
    """A stream of which so many messages are answered."""
    for message in (headers(), body(), response_headers())[:count]:
        await stream.send(message)
        assert await stream.read() is not None
    await rig.until_in_flight(1)


@pytest.mark.parametrize("count", [1, 2, 3])
async def test_a_gateway_that_resets_a_stream_leaves_nothing(count: int, rig: FrontRig) -> None:
    async with rig.gateway() as gateway:
        stream = gateway.open()
        await begun(rig, stream, count)
        stream.call.cancel()
        await rig.until_idle()


@pytest.mark.parametrize("count", [1, 2, 3])
async def test_a_gateway_that_closes_its_connection_leaves_nothing(count: int, rig: FrontRig) -> None:
    async with rig.gateway() as gateway:
        await begun(rig, gateway.open(), count)
    await rig.until_idle()


async def test_a_connection_that_breaks_leaves_nothing(rig: FrontRig) -> None:
    """Between the two stands a relay that drops both sides without a word."""
    writers: list[asyncio.StreamWriter] = []

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        while data := await reader.read(65_536):
            writer.write(data)

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", rig.port)
        await asyncio.gather(pump(reader, there_writer), pump(there_reader, writer), return_exceptions=True)

    server = await asyncio.start_server(relay, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stream = GatewayStream(channel.stream_stream(PROCESS)())
        await begun(rig, stream, 2)
        for writer in writers:
            writer.transport.abort()
        await rig.until_idle()
        assert await stream.end() is grpc.StatusCode.UNAVAILABLE
    server.close()
    await server.wait_closed()


async def test_a_stream_that_is_reset_while_its_choice_is_waited_for_reserves_nothing(
    rig: FrontRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_asked, may_go_on = asyncio.Event(), asyncio.Event()
    run = rig.offload.run

    async def slow(size_bytes: int, job: object) -> object:
        is_asked.set()
        await may_go_on.wait()
        return await run(size_bytes, job)  # type: ignore[arg-type]

    monkeypatch.setattr(rig.offload, "run", slow)
    async with rig.gateway() as gateway:
        stream = gateway.open()
        await stream.send(headers(), body(LARGE))
        await is_asked.wait()
        stream.call.cancel()
        await rig.until_idle()
        may_go_on.set()
        assert rig.log.entries == []


async def test_a_deadline_ends_a_stream_that_nobody_ends(rig: FrontRig) -> None:
    async with rig.gateway() as gateway:
        stream = gateway.open(timeout=0.3)
        await stream.send(headers(), body())
        await stream.rest()
        assert await stream.end() is grpc.StatusCode.DEADLINE_EXCEEDED
        await rig.until_idle()


async def test_more_exchanges_than_the_bound_are_refused_and_the_others_go_on(each_front: str) -> None:
    async with made(each_front, exchanges_max=3).serving() as rig, rig.gateway() as gateway:
        streams = [gateway.open() for _ in range(3)]
        for stream in streams:
            await stream.send(headers())
            assert part(await stream.read()) == "request_headers"
        assert await gateway.refused() is grpc.StatusCode.RESOURCE_EXHAUSTED
        for stream in streams:
            assert [part(reply) for reply in await stream.talk(body())] == ["request_body"]
            assert await stream.end() is grpc.StatusCode.OK
        _, status = await gateway.run(headers(), body())
        assert status is grpc.StatusCode.OK


async def test_a_message_beyond_the_bound_ends_its_stream(each_front: str) -> None:
    rig = made(each_front, body_bytes_max=1_000)
    async with rig.serving(), rig.gateway() as gateway:
        assert await gateway.refused(headers(), body(b"x" * (2 << 20))) is grpc.StatusCode.RESOURCE_EXHAUSTED
        await rig.until_idle()
        _, status = await gateway.run(headers(), body())
        assert status is grpc.StatusCode.OK


async def test_a_gateway_that_does_not_read_holds_up_nobody_else(rig: FrontRig) -> None:
    content = b"x" * 60_000
    async with rig.gateway() as slow, rig.gateway() as other:
        stream = slow.open()

        async def pour() -> None:
            await stream.send(headers(mode=DUPLEX, end_of_stream=True), response_headers())
            while True:
                piece = ext_proc.HttpBody(body=content)
                await stream.send(bytes(ext_proc.ProcessingRequest(response_body=piece)))

        pouring = asyncio.create_task(pour())
        await rig.until_in_flight(1)
        for _ in range(20):
            _, status = await other.run(headers(), body())
            assert status is grpc.StatusCode.OK
        pouring.cancel()
        stream.call.cancel()
        await rig.until_idle()


async def test_a_gateway_may_ping_as_often_as_it_likes(rig: FrontRig) -> None:
    options = {"keepalive_time_ms": 20, "keepalive_permit_without_calls": 1, "http2.max_pings_without_data": 0}
    async with rig.gateway(**options) as gateway:
        stream = gateway.open()
        await stream.send(headers())
        assert part(await stream.read()) == "request_headers"
        # Some dozens of them.
        await asyncio.sleep(1.0)
        assert [part(reply) for reply in await stream.talk(body())] == ["request_body"]
        assert await stream.end() is grpc.StatusCode.OK


async def test_who_speaks_something_else_is_let_go(rig: FrontRig) -> None:
    for greeting in (b"GET / HTTP/1.1\r\nhost: x\r\n\r\n", b"\x16\x03\x01\x02\x00" + b"\x00" * 600, b"\x00" * 64):
        reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
        writer.write(greeting)
        await asyncio.wait_for(reader.read(), 10)
        writer.close()
    async with rig.gateway() as gateway:
        assert (await gateway.run(headers(), body()))[1] is grpc.StatusCode.OK


async def test_a_method_that_nobody_has_is_said_to_be_unknown(rig: FrontRig) -> None:
    async with rig.gateway() as gateway:
        for path in ("/envoy.service.ext_proc.v3.ExternalProcessor/Other", "/x.y.Z/Process"):
            call = gateway.channel.stream_stream(path)()
            assert await call.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_with_a_certificate_it_serves_tls_alone(each_front: str) -> None:
    certificate = self_signed()
    async with made(each_front).serving(certificate) as rig:
        credentials = grpc.ssl_channel_credentials(certificate.chain)
        async with grpc.aio.secure_channel(f"localhost:{rig.port}", credentials) as channel:
            stream = GatewayStream(channel.stream_stream(PROCESS)())
            assert len(await stream.talk(headers(), body(LARGE), response_headers())) == 3
            assert await stream.end() is grpc.StatusCode.OK
        async with rig.gateway() as gateway:
            assert await gateway.open().end() is grpc.StatusCode.UNAVAILABLE


async def test_a_certificate_that_is_none_is_refused_with_its_flag(tmp_path: Path) -> None:
    pytest.importorskip("trimtab_extproc._front")
    rig = made("native")
    with pytest.raises(ConfigError, match="--cert-path"):
        await rig.front.start("127.0.0.1", 0, self_signed()._replace(chain=b"no certificate"))
    with pytest.raises(ConfigError, match="--cert-path"):
        server_certificate(tmp_path)


async def test_a_port_that_is_taken_is_an_error_of_the_system(rig: FrontRig) -> None:
    with pytest.raises(OSError, match=r"in use|Failed to bind"):
        await made(rig.name).front.start("127.0.0.1", rig.port, None)


async def test_health_is_checked_and_watched(rig: FrontRig) -> None:
    async with rig.gateway() as gateway:
        stub = health_pb2_grpc.HealthStub(gateway.channel)

        async def check(name: str) -> int:
            return int((await stub.Check(health_pb2.HealthCheckRequest(service=name))).status)

        assert [await check("liveness"), await check("readiness"), await check("")] == [1, 2, 2]
        watch = stub.Watch(health_pb2.HealthCheckRequest(service="readiness"))
        nobody = stub.Watch(health_pb2.HealthCheckRequest(service="nobody"))
        assert (await watch.read()).status == NOT_SERVING
        assert (await nobody.read()).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        rig.health.set_ready(True)
        rig.health.set_ready(True)
        assert (await watch.read()).status == SERVING
        rig.health.set_ready(False)
        assert (await watch.read()).status == NOT_SERVING
        assert [await check("liveness"), await check("readiness")] == [1, 2]
        with pytest.raises(grpc.aio.AioRpcError, match="NOT_FOUND"):
            await check("nobody")
        watch.cancel()
        nobody.cancel()


async def test_when_told_to_stop_it_takes_no_new_streams_and_lets_those_in_flight_finish(rig: FrontRig) -> None:
    async with rig.gateway() as gateway:
        stream = gateway.open()
        await stream.send(headers())
        assert part(await stream.read()) == "request_headers"
        stopping = asyncio.create_task(rig.front.stop(20))

        async def is_closed() -> bool:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", rig.port)
            except OSError:
                return True
            writer.close()
            return False

        await until(is_closed, "nobody is accepted any more")
        assert [part(reply) for reply in await stream.talk(body(), response_headers())] == [
            "request_body",
            "response_headers",
        ]
        assert await stream.end() is grpc.StatusCode.OK
        await stopping


async def test_when_its_time_is_over_streams_in_flight_are_cut(rig: FrontRig) -> None:
    async with rig.gateway() as gateway:
        stream = gateway.open()
        await stream.send(headers(), body())
        await rig.until_in_flight(1)
        await rig.front.stop(0.1)
        rig.assert_idle()
        await stream.rest()
        assert await stream.end() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


@pytest.mark.parametrize("seed", range(8))
async def test_any_bytes_in_any_order_leave_nothing_in_flight(seed: int, rig: FrontRig) -> None:
    rng = random.Random(seed)

    async def one(stream: GatewayStream, messages: list[bytes], is_reset: bool) -> None:
        async with asyncio.timeout(5):
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError, TimeoutError):
                for message in messages:
                    await stream.call.write(message)
        if is_reset or stream.call.done():
            stream.call.cancel()
        else:
            await stream.talk()

    async with rig.gateway() as gateway:
        streams = [
            one(gateway.open(), [rng.choice(SAMPLES) for _ in range(rng.randrange(8))], rng.random() < 0.3)
            for _ in range(rng.randrange(1, 20))
        ]
        await asyncio.gather(*streams, return_exceptions=True)
    await rig.until_idle()
    assert rig.count("trimtab_failures_total") == 0
