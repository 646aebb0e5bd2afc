"""The whole process: health, the admin port, draining, and the store's coming and going."""

import asyncio
import json
import signal
import sys
from pathlib import Path

import aiohttp
import grpc
import grpc.aio
import pytest
from envoy_data_plane.envoy.service.ext_proc import v3 as ext_proc
from gateway_messages import body, headers, response_headers
from grpc_health.v1 import health_pb2, health_pb2_grpc
from live_picker import NAMESPACE, POOL, LivePicker, picker_settings
from toy_upstream import ToyUpstream
from valkey_server import ValkeyProcess, free_port
from waiting import until

from trimtab_extproc.health import READINESS_NAMES
from trimtab_extproc.wire import METHOD, SERVICE

pytestmark = [pytest.mark.stack, pytest.mark.usefixtures("each_front")]

A, B = "10.0.0.1:8000", "10.0.0.2:8000"
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


async def health(port: int, service: str) -> int:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=5)
        return int(answer.status)


async def test_health_follows_readiness_under_every_name_on_both_ports(server: ValkeyProcess) -> None:
    async with LivePicker(picker_settings(server.url)) as picker:
        ports = (picker.service.ports["grpc"], picker.service.ports["health"])
        for port in ports:
            assert await health(port, "liveness") == SERVING
            for name in READINESS_NAMES:
                assert await health(port, name) == NOT_SERVING
        await picker.announce([A])

        async def is_serving() -> bool:
            return all([await health(port, name) == SERVING for port in ports for name in READINESS_NAMES])

        await until(is_serving, "serving")
        with pytest.raises(grpc.aio.AioRpcError, match="NOT_FOUND"):
            await health(ports[0], "never-heard-of")


async def test_the_admin_port_shows_state_decisions_and_metrics(server: ValkeyProcess) -> None:
    async with LivePicker(picker_settings(server.url)) as picker:
        assert await picker.get("/healthz") == {"alive": True, "ready": False}
        await picker.announce([A, f"{B}/1"])
        async with grpc.aio.insecure_channel(f"127.0.0.1:{picker.port}") as channel:
            stream = channel.stream_stream(f"/{SERVICE}/{METHOD}")()
            for message in (headers(), body()):
                await stream.write(message)
                await stream.read()
            state = await picker.get("/state")
            assert [row["endpoint"] for row in state["endpoints"]] == [A, f"{B}/1"]
            assert [row["rank"] for row in state["endpoints"]] == [None, 1]
            assert sum(row["requests"] for row in state["endpoints"]) == state["open_reservations"] == 1
            await stream.done_writing()
            assert await stream.code() is grpc.StatusCode.OK
        decisions = (await picker.get("/decisions?count=5"))["decisions"]
        assert [decision["request_id"] for decision in decisions] == ["r1"]
        assert len(decisions[0]["endpoints"]) == 2
        assert (await picker.get("/decisions?request_id=other"))["decisions"] == []
        assert (await picker.get(f"/state?chunks={A}"))["chunks"] == []
        assert "no endpoint" in (await picker.get("/state?chunks=x"))["error"]
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"http://127.0.0.1:{picker.service.ports['metrics']}/metrics") as response,
        ):
            text = await response.text()
        for name in ("trimtab_decisions_total", "trimtab_decision_seconds_bucket", "trimtab_hop_seconds_count"):
            assert name in text
        for label in ("endpoint=", "pod=", "namespace=", "service=", "job=", "instance="):
            assert f"{{{label}" not in text
            assert f",{label}" not in text
        assert f'trimtab_endpoint_requests{{model_server="{A}",pool="{POOL}",pool_namespace="{NAMESPACE}"}}' in text


async def test_a_replica_sees_the_reservations_of_another(server: ValkeyProcess) -> None:
    async with (
        LivePicker(picker_settings(server.url)) as one,
        LivePicker(picker_settings(server.url)) as two,
        grpc.aio.insecure_channel(f"127.0.0.1:{one.port}") as channel,
    ):
        await one.announce([A, B])
        await two.announce([A, B])
        stream = channel.stream_stream(f"/{SERVICE}/{METHOD}")()
        for message in (headers(), body()):
            await stream.write(message)
            await stream.read()

        async def total() -> int:
            return sum(row["requests"] for row in (await two.get("/state"))["endpoints"])

        async def is_seen() -> bool:
            return await total() == 1

        async def is_over() -> bool:
            return await total() == 0

        await until(is_seen, "the other replica sees it")
        await stream.done_writing()
        await stream.code()
        await until(is_over, "the other replica sees its end")


async def test_routing_goes_on_without_the_store(server: ValkeyProcess) -> None:
    async with LivePicker(picker_settings(server.url)) as picker:
        await picker.announce([A, B])
        server.kill()

        async def is_away() -> bool:
            return await picker.metric("trimtab_state_connected") == 0

        await until(is_away, "the store's absence is noticed")
        async with grpc.aio.insecure_channel(f"127.0.0.1:{picker.port}") as channel:
            for _ in range(5):
                stream = channel.stream_stream(f"/{SERVICE}/{METHOD}")()
                for message in (headers(), body()):
                    await stream.write(message)
                    reply = ext_proc.ProcessingResponse.parse(await stream.read())
                assert reply.dynamic_metadata is not None
                await stream.done_writing()
                assert await stream.code() is grpc.StatusCode.OK
        assert await picker.metric("trimtab_ready") == 1
        server.start()

        async def is_back() -> bool:
            return await picker.metric("trimtab_state_connected") == 1

        await until(is_back, "the store's return is noticed")


async def test_a_process_that_never_saw_its_store_is_alive_not_ready_and_ends_in_peace() -> None:
    async with LivePicker(picker_settings(f"redis://127.0.0.1:{free_port()}")) as picker:
        assert await health(picker.service.ports["health"], "liveness") == SERVING
        assert await health(picker.service.ports["health"], "readiness") == NOT_SERVING
        async with grpc.aio.insecure_channel(f"127.0.0.1:{picker.port}") as channel:
            stream = channel.stream_stream(f"/{SERVICE}/{METHOD}")()
            await stream.write(headers())
            assert await stream.code() is grpc.StatusCode.UNAVAILABLE


async def test_on_sigterm_streams_in_flight_finish_before_the_process_ends(
    server: ValkeyProcess, tmp_path: Path, picker: LivePicker, upstreams: list[ToyUpstream]
) -> None:
    ports = [free_port() for _ in range(3)]
    secret = tmp_path / "secret"
    secret.write_text("a secret")
    output = tmp_path / "output"
    with output.open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "trimtab_extproc", "--pool-name", POOL, "--pool-namespace", NAMESPACE),
            *("--store", server.url, "--secret-file", str(secret), "--secure-serving=false", "--bind", "127.0.0.1"),
            *("--grpc-port", str(ports[0]), "--grpc-health-port", str(ports[1]), "--metrics-port", str(ports[2])),
            *("--drain-delay", "0.5", "--drain-timeout", "20"),
            stderr=log,
        )
    try:

        async def is_ready() -> bool:
            assert process.returncode is None, output.read_text()
            try:
                return await health(ports[1], "readiness") == SERVING
            except grpc.aio.AioRpcError:
                return False

        async def is_draining() -> bool:
            return await health(ports[1], "readiness") == NOT_SERVING

        await until(is_ready, "the process is ready")
        async with grpc.aio.insecure_channel(f"127.0.0.1:{ports[0]}") as channel:
            stream = channel.stream_stream(f"/{SERVICE}/{METHOD}")()
            await stream.write(headers())
            await stream.read()
            process.send_signal(signal.SIGTERM)
            await until(is_draining, "NOT_SERVING at once")
            await asyncio.sleep(0.7)
            await stream.write(body())
            assert ext_proc.ProcessingResponse.parse(await stream.read()).request_body is not None
            await stream.write(response_headers(end_of_stream=True))
            await stream.read()
            await stream.done_writing()
            assert await stream.code() is grpc.StatusCode.OK
        assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert any("drained: 0" in line["message"] for line in lines)


async def test_a_setting_that_cannot_work_is_said_in_one_line(tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "trimtab_extproc", "--pool-name", "p", "--store", "http://x", "--config-file", "y"),
        stderr=asyncio.subprocess.PIPE,
    )
    _, errors = await process.communicate()
    assert process.returncode == 2
    assert errors.decode().startswith("trimtab-extproc: --config-file is another endpoint picker's flag")
    assert errors.count(b"\n") == 1
