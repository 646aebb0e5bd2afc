"""The picker behind a real Envoy, in the ways that gateways are set: buffered, streamed both ways, and our own."""

import asyncio
import hashlib
import io
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from front_envoy import OURS, FrontEnvoy
from live_picker import LivePicker, picker_settings
from toy_upstream import ToyUpstream
from valkey_server import ValkeyProcess
from waiting import until

pytestmark = [pytest.mark.stack, pytest.mark.usefixtures("each_front")]

MODES = ("BUFFERED", "FULL_DUPLEX_STREAMED", OURS)
CHAT = "/v1/chat/completions"


class Front:
    """Envoy's address, and a client's session."""

    def __init__(self, url: str, admin_url: str, session: aiohttp.ClientSession) -> None:
        self.url = url
        self.admin_url = admin_url
        self.session = session

    async def messages_sent(self) -> int:
        """To the picker, so far."""
        async with self.session.get(f"{self.admin_url}/stats?filter=ext_proc.stream_msgs_sent$") as response:
            return int((await response.text()).rpartition(" ")[2])

    async def post(self, body: bytes, *, path: str = CHAT, **headers: str) -> tuple[int, Any]:
        async with self.session.post(self.url + path, data=io.BytesIO(body), headers=headers) as response:
            return response.status, await response.json()


Opener = Callable[..., AbstractAsyncContextManager[Front]]


@pytest.fixture
def front(tmp_path: Path, picker: LivePicker, upstreams: list[ToyUpstream]) -> Opener:
    """Starts an Envoy: `async with front(mode="BUFFERED", ...) as opened`."""

    @asynccontextmanager
    async def opened(*, port: int | None = None, **options: Any) -> AsyncIterator[Front]:
        addresses = options.pop("upstreams", [upstream.address for upstream in upstreams])
        envoy = FrontEnvoy(tmp_path, picker_port=port or picker.port, upstreams=addresses, **options)
        try:
            await envoy.start()
            connector = aiohttp.TCPConnector(limit=0)
            json_by_default = {"content-type": "application/json"}
            async with aiohttp.ClientSession(connector=connector, headers=json_by_default) as session:
                yield Front(envoy.url, f"http://127.0.0.1:{envoy.admin_port}", session)
        finally:
            await envoy.stop()

    return opened


def chat(text: str = "hello", **fields: Any) -> bytes:
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": text}]} | fields).encode()


async def is_idle(picker: LivePicker) -> bool:
    """Nothing in flight and nothing reserved, on any endpoint."""
    state = await picker.get("/state")
    in_flight = await picker.metric("trimtab_exchanges_in_flight")
    return not in_flight and not state["open_reservations"] and not any(row["requests"] for row in state["endpoints"])


async def until_idle(picker: LivePicker) -> None:
    await until(lambda: is_idle(picker), "nothing in flight")


@pytest.mark.parametrize("mode", MODES)
async def test_requests_go_where_the_picker_says_with_body_and_without(
    mode: str, front: Opener, picker: LivePicker, upstreams: list[ToyUpstream]
) -> None:
    async with front(mode=mode) as envoy:
        served = Counter[str]()
        for index in range(12):
            body = chat("hello " * index)
            status, answer = await envoy.post(body)
            assert status == 200
            assert answer["seen"]["body_sha256"] == hashlib.sha256(body).hexdigest()
            chosen = answer["seen"]["headers"]["x-gateway-destination-endpoint"].split(",")
            assert chosen[0] == answer["seen"]["endpoint"]
            assert sorted(chosen) == sorted(upstream.address for upstream in upstreams)
            served[chosen[0]] += 1
        async with envoy.session.get(envoy.url + "/v1/models") as response:
            assert response.status == 200
        async with envoy.session.post(envoy.url + CHAT, data=b"") as response:
            assert response.status == 200
        await until_idle(picker)
    assert len(served) > 1
    assert await picker.metric("trimtab_decisions_total") == 14
    assert await picker.metric("trimtab_moved_requests_total") == 0
    assert await picker.metric("trimtab_protocol_errors_total") + await picker.metric("trimtab_failures_total") == 0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size_bytes", [40_000, 400_000, 1_048_576, 5_000_000])
async def test_large_bodies_arrive_whole(mode: str, size_bytes: int, front: Opener, picker: LivePicker) -> None:
    body = chat("x" * size_bytes)
    async with front(mode=mode) as envoy:
        status, answer = await envoy.post(body)
        assert (status, answer["seen"]["body_sha256"]) == (200, hashlib.sha256(body).hexdigest())
        await until_idle(picker)
    decision = (await picker.get("/decisions"))["decisions"][0]
    assert decision["prompt_tokens"] > size_bytes / 5


@pytest.mark.parametrize("mode", MODES)
async def test_a_body_that_ends_with_trailers_is_placed_like_any_other(
    mode: str, front: Opener, picker: LivePicker, upstreams: list[ToyUpstream]
) -> None:
    """Without retries: where a route retries, Envoy 1.40 sends a streamed body with trailers on twice, by itself."""
    body = chat("hello")
    async with front(mode=mode, is_retrying=False) as envoy:
        port = int(envoy.url.rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(
            f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nconnection: close\r\n"
            f"transfer-encoding: chunked\r\ntrailer: x-last\r\n\r\n{len(body):x}\r\n".encode()
            + body
            + b"\r\n0\r\nx-last: 1\r\n\r\n"
        )
        answer = await reader.read()
        writer.close()
        await writer.wait_closed()
        assert answer.startswith(b"HTTP/1.1 200")
        assert hashlib.sha256(body).hexdigest().encode() in answer
        await until_idle(picker)
    decision = (await picker.get("/decisions"))["decisions"][0]
    assert decision["kind"] == "chat"
    assert decision["endpoint"].encode() in answer


@pytest.mark.parametrize("mode", MODES)
async def test_a_stream_is_queued_until_its_first_token_and_in_flight_until_its_end(
    mode: str, front: Opener, picker: LivePicker, upstreams: list[ToyUpstream]
) -> None:
    """Buffered, the first token is seen only because Envoy heeds the mode override on its response headers."""

    async def load() -> list[tuple[int, bool]]:
        rows = (await picker.get("/state"))["endpoints"]
        return sorted((row["requests"], row["queued_tokens"] > 0) for row in rows)

    async def is_prefilled() -> bool:
        return await load() == [(0, False), (0, False), (1, False)]

    async with front(mode=mode, is_mode_override_allowed=True) as envoy:
        body = chat("x" * 900_000, stream=True, hold=True, linger=True, events=500)
        async with envoy.session.post(envoy.url + CHAT, data=body) as response:
            assert response.status == 200
            assert await load() == [(0, False), (0, False), (1, True)]
            for upstream in upstreams:
                upstream.release.set()
            await until(is_prefilled, "the first token is seen")
            for upstream in upstreams:
                upstream.finish.set()
            text = await response.text()
            assert text.count("data: ") == 501
            assert text.endswith("data: [DONE]\n\n")
        await until_idle(picker)


async def test_without_leave_the_gateways_response_bodies_stay_unasked(
    front: Opener, picker: LivePicker, server: ValkeyProcess, upstreams: list[ToyUpstream]
) -> None:
    """Envoy ignores the override where its filter does not allow it, and nothing breaks."""
    async with front(mode="BUFFERED", is_mode_override_allowed=False) as envoy:
        status, _ = await envoy.post(chat())
        assert status == 200
        async with envoy.session.post(envoy.url + CHAT, data=chat(stream=True)) as response:
            assert (await response.text()).endswith("data: [DONE]\n\n")
        await until_idle(picker)


@pytest.mark.parametrize("mode", MODES)
async def test_clients_that_leave_by_the_hundred_leave_nothing_behind(
    mode: str, front: Opener, picker: LivePicker, upstreams: list[ToyUpstream]
) -> None:
    async with front(mode=mode, is_mode_override_allowed=True) as envoy:

        async def leave(index: int) -> None:
            try:
                async with asyncio.timeout(0.02 + 0.004 * index):
                    async with envoy.session.post(
                        envoy.url + CHAT, data=chat("x" * (index * 100), stream=True, hold=True)
                    ) as response:
                        await response.text()
            except TimeoutError:
                return

        await asyncio.gather(*(leave(index) for index in range(200)))
        await until_idle(picker)
        await until(lambda: not any(upstream.streaming_count for upstream in upstreams), "idle upstreams")
    assert await picker.metric("trimtab_protocol_errors_total") + await picker.metric("trimtab_failures_total") == 0


async def test_a_client_cannot_choose_its_endpoint(
    front: Opener, picker: LivePicker, upstreams: list[ToyUpstream]
) -> None:
    stranger = ToyUpstream()
    await stranger.start()
    try:
        addresses = [upstream.address for upstream in [*upstreams, stranger]]
        async with front(mode="BUFFERED", upstreams=addresses) as envoy:
            for header in ("x-gateway-destination-endpoint", "test-epp-endpoint-selection"):
                status, answer = await envoy.post(chat(), **{header: stranger.address})
                assert status == 200
                assert answer["seen"]["endpoint"] != stranger.address
    finally:
        await stranger.stop()
    assert not stranger.requests


@pytest.mark.parametrize("mode", MODES)
async def test_the_gateways_subset_is_kept_to(
    mode: str, front: Opener, picker: LivePicker, upstreams: list[ToyUpstream]
) -> None:
    allowed = upstreams[1].address
    async with front(mode=mode, subset=[allowed]) as envoy:
        for _ in range(4):
            status, answer = await envoy.post(chat())
            assert status == 200
            assert answer["seen"]["headers"]["x-gateway-destination-endpoint"] == allowed
        async with envoy.session.get(envoy.url + "/v1/models") as response:
            assert (await response.json())["seen"]["endpoint"] == allowed


@pytest.mark.parametrize("mode", MODES)
async def test_a_subset_without_a_match_is_503(mode: str, front: Opener, picker: LivePicker) -> None:
    async with front(mode=mode, subset=["10.9.9.9"]) as envoy:
        status, answer = await envoy.post(chat())
        assert status == 503
        assert answer["error"]["code"] == "subset_empty"
        async with envoy.session.get(envoy.url + "/v1/models") as response:
            assert response.status == 503
    assert await picker.metric("trimtab_rejected_total", reason="subset_empty") == 2


async def test_a_pool_without_endpoints_is_503(front: Opener, picker: LivePicker) -> None:
    await picker.announce([])
    async with front(mode="BUFFERED") as envoy:
        status, answer = await envoy.post(chat())
    assert status == 503
    assert answer["error"]["type"] == "service_unavailable_error"


@pytest.mark.parametrize("mode", MODES)
async def test_a_reservation_moves_with_its_request_to_the_endpoint_that_served(
    mode: str, front: Opener, picker: LivePicker, upstreams: list[ToyUpstream]
) -> None:
    dead = "127.0.0.1:9"
    await picker.announce([dead, upstreams[0].address])
    async with front(mode=mode, upstreams=[dead, upstreams[0].address], is_mode_override_allowed=True) as envoy:
        while not await picker.metric("trimtab_moved_requests_total"):
            async with envoy.session.post(envoy.url + CHAT, data=chat(stream=True, hold=True)) as response:
                assert response.status == 200
                rows = {row["endpoint"]: row["requests"] for row in (await picker.get("/state"))["endpoints"]}
                assert (rows[dead], rows[upstreams[0].address]) == (0, 1)
        await until_idle(picker)


async def test_our_own_envoy_asks_once_for_a_request_and_tells_of_no_usual_response(
    front: Opener, picker: LivePicker, upstreams: list[ToyUpstream]
) -> None:
    addresses = [upstream.address for upstream in upstreams]
    picker.make_exact(addresses)
    async with front(mode=OURS) as envoy:
        for number in range(4):
            status, answer = await envoy.post(chat(f"hello {number}"))
            assert (status, answer["seen"]["endpoint"] in addresses) == (200, True)
            assert answer["seen"]["headers"]["x-gateway-destination-endpoint"].startswith(answer["seen"]["endpoint"])
        async with envoy.session.post(envoy.url + CHAT, data=chat(stream=True)) as response:
            assert (await response.text()).endswith("data: [DONE]\n\n")
        await until_idle(picker)
        assert await envoy.messages_sent() == 5
        # An error is told of; a body of unknown length comes after its headers.
        for upstream in upstreams:
            upstream.status = 400
        assert (await envoy.post(chat()))[0] == 400
        assert await envoy.messages_sent() == 5 + 2
        for upstream in upstreams:
            upstream.status = 200

        async def chunks() -> AsyncIterator[bytes]:
            yield chat()

        async with envoy.session.post(envoy.url + CHAT, data=chunks()) as response:
            assert response.status == 200
        await until_idle(picker)
        assert await envoy.messages_sent() == 7 + 2
    assert await picker.metric("trimtab_decisions_total") == 7
    assert await picker.metric("trimtab_moved_requests_total") == 0
    assert await picker.metric("trimtab_protocol_errors_total") + await picker.metric("trimtab_failures_total") == 0


async def test_our_own_envoy_tells_of_a_response_from_another_endpoint_than_the_chosen_one(
    front: Opener, picker: LivePicker, upstreams: list[ToyUpstream]
) -> None:
    dead, alive = "127.0.0.1:9", upstreams[0].address
    await picker.announce([dead, alive])
    picker.make_exact([dead, alive])
    async with front(mode=OURS, upstreams=[dead, alive]) as envoy:
        while not await picker.metric("trimtab_moved_requests_total"):
            async with envoy.session.post(envoy.url + CHAT, data=chat(stream=True, hold=True)) as response:
                assert response.status == 200
                rows = {row["endpoint"]: row["requests"] for row in (await picker.get("/state"))["endpoints"]}
                assert (rows[dead], rows[alive]) == (0, 1)
        await until_idle(picker)


async def test_a_later_request_finds_the_endpoint_that_made_its_response(
    front: Opener, picker: LivePicker, upstreams: list[ToyUpstream]
) -> None:
    async with front(mode="BUFFERED", is_mode_override_allowed=True) as envoy:
        _, first = await envoy.post(json.dumps({"model": "m", "input": "hi"}).encode(), path="/v1/responses")
        await until_idle(picker)
        body = json.dumps({"model": "m", "input": "more", "previous_response_id": "resp_toy"}).encode()
        for _ in range(5):
            _, again = await envoy.post(body, path="/v1/responses")
            assert again["seen"]["endpoint"] == first["seen"]["endpoint"]
            async with envoy.session.get(envoy.url + "/v1/responses/resp_toy") as response:
                assert (await response.json())["seen"]["endpoint"] == first["seen"]["endpoint"]


async def test_in_conformance_tests_the_client_may_choose_and_sees_who_served(
    front: Opener, server: ValkeyProcess, upstreams: list[ToyUpstream]
) -> None:
    async with LivePicker(picker_settings(server.url, is_conformance_test=True)) as picker:
        await picker.announce([upstream.address for upstream in upstreams])
        async with front(mode="FULL_DUPLEX_STREAMED", port=picker.port) as envoy:
            for upstream in upstreams:
                headers = {"test-epp-endpoint-selection": upstream.address}
                async with envoy.session.post(envoy.url + CHAT, data=chat(), headers=headers) as response:
                    assert (await response.json())["seen"]["endpoint"] == upstream.address
                    assert response.headers["x-conformance-test-served-endpoint"] == upstream.address


async def test_before_the_pool_is_known_the_gateway_can_go_on_without_us(
    front: Opener, server: ValkeyProcess, upstreams: list[ToyUpstream]
) -> None:
    async with LivePicker(picker_settings(server.url, pool_name="a-pool-nobody-announced")) as picker:
        for mode, is_failure_allowed, expected in (("BUFFERED", True, 200), ("BUFFERED", False, 500)):
            async with (
                front(mode=mode, port=picker.port, is_failure_allowed=is_failure_allowed) as envoy,
                envoy.session.post(envoy.url + CHAT, data=chat()) as response,
            ):
                assert response.status == expected
        assert await picker.metric("trimtab_not_ready_total") == 2


async def test_tls_with_a_certificate_of_our_own_is_what_a_gateway_can_speak(
    front: Opener, server: ValkeyProcess, upstreams: list[ToyUpstream]
) -> None:
    async with LivePicker(picker_settings(server.url, is_secure_serving=True)) as picker:
        await picker.announce([upstream.address for upstream in upstreams])
        async with front(mode="FULL_DUPLEX_STREAMED", port=picker.port, is_picker_tls=True) as envoy:
            assert (await envoy.post(chat()))[0] == 200
        assert await picker.metric("trimtab_decisions_total") == 1


@pytest.mark.parametrize("mode", MODES)
async def test_a_client_names_no_rank_behind_an_endpoint(
    mode: str, front: Opener, picker: LivePicker, upstreams: list[ToyUpstream]
) -> None:
    async with front(mode=mode) as opened:
        status, body = await opened.post(chat(), **{"X-Data-Parallel-Rank": "3"})
        assert status == 200
        assert "x-data-parallel-rank" not in body["seen"]["headers"]
    await until_idle(picker)
