"""The grpcio front's loop over a scripted stream: whatever comes and however it ends, nothing stays reserved."""

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any

import grpc
import grpc.aio
import pytest
from envoy_data_plane.envoy.service.ext_proc import v3 as ext_proc
from front_rig import ProcessorRig
from gateway_messages import BODY_MODE, body, headers, response_headers
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab_extproc.front import FrontSettings
from trimtab_extproc.grpcio_front import GrpcioFront
from trimtab_extproc.health import Health

A, B = "10.0.0.1:8000", "10.0.0.2:8000"


class AbortedError(Exception):
    """The stream was ended with an error status."""


class ScriptedStream:
    """A gateway's stream: gives out messages, takes replies, and ends by half-close or by an error."""

    def __init__(self, messages: Sequence[bytes | BaseException]) -> None:
        self._messages = list(messages)
        self.replies: list[ext_proc.ProcessingResponse] = []
        self.status: grpc.StatusCode | None = None
        self.write_error: BaseException | None = None

    async def read(self) -> Any:
        await asyncio.sleep(0)
        if not self._messages:
            return grpc.aio.EOF
        message = self._messages.pop(0)
        if isinstance(message, BaseException):
            raise message
        return message

    async def write(self, data: bytes) -> None:
        if self.write_error is not None:
            raise self.write_error
        self.replies.append(ext_proc.ProcessingResponse.parse(data))

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        self.status = code
        raise AbortedError(details)


class ServerRig(ProcessorRig):
    """A picker with the service over it."""

    def __init__(self) -> None:
        super().__init__()
        self.front = GrpcioFront(settings=FrontSettings(), health=Health(), processor=self.processor)

    async def run(self, *messages: bytes | BaseException) -> ScriptedStream:
        """One stream from beginning to end."""
        stream = ScriptedStream(messages)
        await self.run_stream(stream)
        return stream

    async def run_stream(self, stream: ScriptedStream) -> None:
        with contextlib.suppress(AbortedError, asyncio.CancelledError, grpc.aio.BaseError):
            await self.front.process(None, stream)


@pytest.fixture
def rig() -> ServerRig:
    made = ServerRig()
    made.announce(A, B)
    return made


async def test_a_whole_exchange_is_answered_message_by_message(rig: ServerRig) -> None:
    stream = await rig.run(headers(), body(), response_headers())
    kinds = [
        next(
            name for name in ("request_headers", "request_body", "response_headers") if getattr(reply, name) is not None
        )
        for reply in stream.replies
    ]
    assert kinds == ["request_headers", "request_body", "response_headers"]
    assert stream.status is None
    rig.assert_idle()
    assert rig.count("trimtab_hop_seconds_count") == 1


async def test_not_ready_ends_the_stream_at_its_headers() -> None:
    rig = ServerRig()
    stream = await rig.run(headers(mode=BODY_MODE.FULL_DUPLEX_STREAMED), body())
    assert stream.status is grpc.StatusCode.UNAVAILABLE
    assert stream.replies == []
    rig.assert_idle()


async def test_a_refusal_is_answered_and_ends_the_stream(rig: ServerRig) -> None:
    rig.announce()
    stream = await rig.run(headers(), body(), body())
    assert stream.replies[-1].immediate_response is not None
    assert int(stream.replies[-1].immediate_response.status.code) == 503
    assert stream.status is None


async def test_what_breaks_the_protocol_ends_the_stream_with_an_error(rig: ServerRig) -> None:
    for messages in ((b"\xff\xff",), (body(),), (headers(), headers()), (b"",)):
        stream = await rig.run(*messages)
        assert stream.status is grpc.StatusCode.INVALID_ARGUMENT
    assert rig.count("trimtab_protocol_errors_total") == 4
    rig.assert_idle()


@pytest.mark.parametrize("ending", [asyncio.CancelledError(), grpc.aio.InternalError("gone"), grpc.aio.UsageError()])
@pytest.mark.parametrize("count", [1, 2, 3])
async def test_a_stream_that_breaks_off_leaves_nothing(ending: BaseException, count: int, rig: ServerRig) -> None:
    messages = [headers(), body(), response_headers()][:count]
    await rig.run(*messages, ending)
    rig.assert_idle()


async def test_a_reply_that_cannot_be_sent_releases_its_reservation(rig: ServerRig) -> None:
    stream = ScriptedStream([headers(mode=BODY_MODE.FULL_DUPLEX_STREAMED), body()])
    stream.write_error = grpc.aio.InternalError("gone")
    await rig.run_stream(stream)
    assert [entry[0] for entry in rig.log.entries] == ["reserve", "finished"]
    rig.assert_idle()


async def test_a_fault_of_our_own_is_an_internal_error_and_leaves_nothing(
    rig: ServerRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(rig.telemetry, "answered", broken)
    stream = await rig.run(headers(), body())
    assert stream.status is grpc.StatusCode.INTERNAL
    assert rig.count("trimtab_failures_total") == 1
    rig.assert_idle()


SAMPLES = [
    b"\xff\xff",
    headers(),
    headers(end_of_stream=True),
    headers(mode=BODY_MODE.FULL_DUPLEX_STREAMED),
    headers(mode=BODY_MODE.STREAMED),
    headers(mode=BODY_MODE.NONE),
    body(),
    body(b"", end_of_stream=True),
    body(b"{", end_of_stream=False),
    bytes(ext_proc.ProcessingRequest(request_trailers=ext_proc.HttpTrailers())),
    response_headers(),
    response_headers(end_of_stream=True),
    bytes(ext_proc.ProcessingRequest(response_body=ext_proc.HttpBody(body=b"data: {}\n\n"))),
    bytes(ext_proc.ProcessingRequest(response_body=ext_proc.HttpBody(end_of_stream=True))),
    bytes(ext_proc.ProcessingRequest(response_trailers=ext_proc.HttpTrailers())),
]
MESSAGES = st.one_of(st.binary(max_size=30), st.sampled_from(SAMPLES))
ENDINGS = st.sampled_from([None, asyncio.CancelledError(), grpc.aio.InternalError("gone")])


@settings(deadline=None)
@given(st.lists(st.tuples(st.lists(MESSAGES, max_size=8), ENDINGS), min_size=1, max_size=4))
def test_any_bytes_in_any_order_leave_nothing_in_flight(
    streams: list[tuple[list[bytes], BaseException | None]],
) -> None:
    rig = ServerRig()
    rig.announce(A, B)

    async def all_at_once() -> None:
        await asyncio.gather(
            *(rig.run(*messages, *([] if ending is None else [ending])) for messages, ending in streams)
        )

    asyncio.run(all_at_once())
    rig.assert_idle()
    assert rig.count("trimtab_failures_total") == 0
