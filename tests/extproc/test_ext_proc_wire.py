"""The wire against a second, independent implementation of the same messages (envoy-data-plane)."""

import json
from typing import Any

import pytest
from envoy_data_plane.envoy.config.core import v3 as core
from envoy_data_plane.envoy.extensions.filters.http.ext_proc import v3 as filter_v3
from envoy_data_plane.envoy.service.ext_proc import v3 as ext_proc
from envoy_data_plane.envoy.type import v3 as type_v3
from envoy_data_plane.google.protobuf import Struct
from hypothesis import given
from hypothesis import strategies as st

from trimtab_extproc import wire
from trimtab_extproc.errors import ProtocolError
from trimtab_extproc.events import (
    BodyMode,
    BodyModes,
    GatewayEvent,
    RequestBody,
    RequestHeaders,
    RequestTrailers,
    ResponseBody,
    ResponseHeaders,
    ResponseTrailers,
)
from trimtab_extproc.replies import (
    RANK_HEADER,
    ContinueRequestBody,
    ContinueRequestHeaders,
    ContinueRequestTrailers,
    ContinueResponseBody,
    ContinueResponseHeaders,
    ContinueResponseTrailers,
    Phase,
    Refuse,
    Reply,
    RequestBodyChunk,
    ResponseBodyChunk,
    Route,
)
from trimtab_operator.envoy import ext_proc as envoy_ext_proc

OVERWRITE = core.HeaderValueOptionHeaderAppendAction.OVERWRITE_IF_EXISTS_OR_ADD
SEND_MODE = filter_v3.ProcessingModeHeaderSendMode
BODY_MODE = filter_v3.ProcessingModeBodySendMode


def headers(*pairs: tuple[str, bytes]) -> core.HeaderMap:
    return core.HeaderMap(headers=[core.HeaderValue(key=key, raw_value=value) for key, value in pairs])


def decoded(**parts: Any) -> GatewayEvent:
    return wire.decode(bytes(ext_proc.ProcessingRequest(**parts)))


def request_headers(**parts: Any) -> RequestHeaders:
    event = decoded(request_headers=ext_proc.HttpHeaders(headers=headers((":path", b"/x"))), **parts)
    assert isinstance(event, RequestHeaders)
    return event


def test_request_headers_arrive_with_names_in_lower_case_from_either_field() -> None:
    carried = core.HeaderMap(
        headers=[
            core.HeaderValue(key="X-Request-Id", value="abc"),
            core.HeaderValue(key=":method", raw_value=b"POST"),
            core.HeaderValue(key="odd", raw_value=b"\xff"),
        ]
    )
    event = decoded(request_headers=ext_proc.HttpHeaders(headers=carried, end_of_stream=True))
    assert event == RequestHeaders(
        headers={"x-request-id": "abc", ":method": "POST", "odd": "\ufffd"}, end_of_stream=True
    )


@pytest.mark.parametrize(
    ("request_mode", "mode"),
    [
        (BODY_MODE.NONE, BodyMode.NONE),
        (BODY_MODE.STREAMED, BodyMode.STREAMED),
        (BODY_MODE.BUFFERED, BodyMode.BUFFERED),
        (BODY_MODE.BUFFERED_PARTIAL, BodyMode.BUFFERED),
        (BODY_MODE.FULL_DUPLEX_STREAMED, BodyMode.DUPLEX),
    ],
)
def test_the_body_modes_come_from_the_protocol_config(request_mode: Any, mode: BodyMode) -> None:
    config = ext_proc.ProtocolConfiguration(request_body_mode=request_mode, response_body_mode=BODY_MODE.STREAMED)
    event = request_headers(protocol_config=config)
    assert event.modes == BodyModes(request=mode, response=BodyMode.STREAMED)
    assert request_headers().modes is None


def test_a_body_mode_that_we_cannot_speak_is_a_protocol_error() -> None:
    config = ext_proc.ProtocolConfiguration(request_body_mode=BODY_MODE.GRPC)
    with pytest.raises(ProtocolError):
        request_headers(protocol_config=config)


@pytest.mark.parametrize(
    ("hint", "subset"),
    [
        (["10.0.0.1:8000", " 10.0.0.2 "], ("10.0.0.1:8000", "10.0.0.2")),
        ("10.0.0.1:8000, 10.0.0.2:8000", ("10.0.0.1:8000", "10.0.0.2:8000")),
        ([], ()),
        ("", ()),
        (7, ()),
    ],
)
def test_the_subset_hint_may_be_a_list_or_a_comma_string(hint: object, subset: tuple[str, ...]) -> None:
    fields = {"x-gateway-destination-endpoint-subset": hint}
    metadata = core.Metadata(filter_metadata={"envoy.lb.subset_hint": Struct.from_dict(fields)})
    assert request_headers(metadata_context=metadata).subset == subset


def test_headers_may_come_as_attributes_of_the_body() -> None:
    attributes = {
        "request.method": "POST",
        "request.path": "/v1/completions",
        "request.id": "r1",
        "request.headers['content-type']": "application/json",
        "request.headers['x-team']": "blue",
        "request.size": 17,
        wire.USUAL_UNTOLD_ATTRIBUTE: "trimtab.usual-response-untold",
    }
    event = decoded(
        request_body=ext_proc.HttpBody(body=b"{}", end_of_stream=True),
        attributes={"envoy.filters.http.ext_proc": Struct.from_dict(attributes)},
        protocol_config=ext_proc.ProtocolConfiguration(request_body_mode=BODY_MODE.BUFFERED),
    )
    headers_told = {
        ":method": "POST",
        ":path": "/v1/completions",
        "x-request-id": "r1",
        "content-type": "application/json",
        "x-team": "blue",
    }
    head = RequestHeaders(
        headers=headers_told,
        end_of_stream=False,
        modes=BodyModes(request=BodyMode.BUFFERED, response=BodyMode.NONE),
        is_usual_untold=True,
    )
    assert event == RequestBody(body=b"{}", end_of_stream=True, head=head)


def test_a_gateway_may_say_with_the_headers_that_it_tells_no_usual_response() -> None:
    assert not request_headers().is_usual_untold
    attributes = {"envoy.filters.http.ext_proc": Struct.from_dict({wire.USUAL_UNTOLD_ATTRIBUTE: "x"})}
    assert request_headers(attributes=attributes).is_usual_untold


def test_what_the_operators_configuration_says_is_what_is_read_here() -> None:
    assert envoy_ext_proc.EXPECTED_KEY == wire.EXPECTED_KEY
    assert envoy_ext_proc.USUAL_UNTOLD == wire.USUAL_UNTOLD_ATTRIBUTE
    assert envoy_ext_proc.RANK_HEADER == RANK_HEADER


def test_no_subset_hint_is_not_an_empty_one() -> None:
    other = core.Metadata(filter_metadata={"envoy.lb": Struct.from_dict({"x": "y"})})
    assert request_headers(metadata_context=other).subset is None
    without_key = core.Metadata(filter_metadata={"envoy.lb.subset_hint": Struct.from_dict({"other": "y"})})
    assert request_headers(metadata_context=without_key).subset is None


def test_the_served_endpoint_comes_from_the_attribute_or_from_the_metadata() -> None:
    part = ext_proc.HttpHeaders(
        headers=headers((":status", b"200"), ("Content-Type", b"Text/Event-Stream"), ("content-encoding", b"gzip"))
    )
    attributes = {"envoy.filters.http.ext_proc": Struct.from_dict({"upstream.address": "10.0.0.2:8000"})}
    assert decoded(response_headers=part, attributes=attributes) == ResponseHeaders(
        status=200, content_type="text/event-stream", content_encoding="gzip", served="10.0.0.2:8000"
    )
    fields = {"x-gateway-destination-endpoint-served": "10.0.0.3:8000"}
    metadata = core.Metadata(filter_metadata={"envoy.lb": Struct.from_dict(fields)})
    event = decoded(response_headers=part, metadata_context=metadata)
    assert isinstance(event, ResponseHeaders)
    assert event.served == "10.0.0.3:8000"


@pytest.mark.parametrize("status", [b"", b"abc", b"20", b"2000", b"\xb2\xb2\xb2"])
def test_a_status_that_is_none_reads_as_zero(status: bytes) -> None:
    event = decoded(response_headers=ext_proc.HttpHeaders(headers=headers((":status", status))))
    assert isinstance(event, ResponseHeaders)
    assert event.status == 0


@pytest.mark.parametrize(
    ("parts", "event"),
    [
        ({"request_body": ext_proc.HttpBody(body=b"x")}, RequestBody(body=b"x", end_of_stream=False)),
        (
            {"request_body": ext_proc.HttpBody(end_of_stream_without_message=True)},
            RequestBody(body=b"", end_of_stream=True),
        ),
        ({"request_trailers": ext_proc.HttpTrailers()}, RequestTrailers()),
        (
            {"response_body": ext_proc.HttpBody(body=b"x", end_of_stream=True)},
            ResponseBody(body=b"x", end_of_stream=True),
        ),
        ({"response_trailers": ext_proc.HttpTrailers()}, ResponseTrailers()),
    ],
)
def test_bodies_and_trailers_are_read(parts: dict[str, Any], event: GatewayEvent) -> None:
    assert decoded(**parts) == event


def header_option(key: str, value: bytes) -> core.HeaderValueOption:
    return core.HeaderValueOption(header=core.HeaderValue(key=key, raw_value=value), append_action=OVERWRITE)


def mutated(*options: core.HeaderValueOption, clear_route_cache: bool = False) -> ext_proc.CommonResponse:
    return ext_proc.CommonResponse(
        header_mutation=ext_proc.HeaderMutation(set_headers=list(options)), clear_route_cache=clear_route_cache
    )


def streamed(body: bytes, end_of_stream: bool) -> ext_proc.BodyResponse:
    chunk = ext_proc.StreamedBodyResponse(body=body, end_of_stream=end_of_stream)
    return ext_proc.BodyResponse(
        response=ext_proc.CommonResponse(body_mutation=ext_proc.BodyMutation(streamed_response=chunk))
    )


DESTINATION = "10.0.0.1:8000,10.0.0.2:8000"
METADATA = Struct.from_dict({"envoy.lb": {"x-gateway-destination-endpoint": DESTINATION}})
DESTINATION_OPTION = header_option("x-gateway-destination-endpoint", DESTINATION.encode())
ERROR = {
    "error": {"message": "full", "type": "rate_limit_error", "param": None, "code": "endpoints_full"},
}


def route(
    phase: Phase,
    rank: int | None = None,
    content_length: int | None = None,
    cleared: bool = False,
    rank_removed: bool = False,
    expected: str | None = None,
) -> Route:
    return Route(
        phase=phase,
        destination=DESTINATION,
        rank=rank,
        is_rank_removed=rank_removed,
        content_length=content_length,
        is_route_cache_cleared=cleared,
        expected=expected,
    )


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (
            route(Phase.BODY, rank=3, expected="10.0.0.1:8000"),
            {
                "request_body": ext_proc.BodyResponse(
                    response=mutated(DESTINATION_OPTION, header_option("x-data-parallel-rank", b"3"))
                ),
                "dynamic_metadata": Struct.from_dict(
                    {
                        "envoy.lb": {
                            "x-gateway-destination-endpoint": DESTINATION,
                            "x-data-parallel-rank": "3",
                            "trimtab.expected-endpoint": "10.0.0.1:8000",
                        }
                    }
                ),
            },
        ),
        (
            ContinueRequestHeaders(is_stripped=False),
            {"request_headers": ext_proc.HeadersResponse()},
        ),
        (
            ContinueRequestHeaders(is_stripped=True),
            {
                "request_headers": ext_proc.HeadersResponse(
                    response=ext_proc.CommonResponse(
                        header_mutation=ext_proc.HeaderMutation(
                            remove_headers=["x-gateway-destination-endpoint", "x-data-parallel-rank"]
                        )
                    )
                )
            },
        ),
        (
            route(Phase.HEADERS, rank=3, content_length=12, cleared=True),
            {
                "request_headers": ext_proc.HeadersResponse(
                    response=mutated(
                        DESTINATION_OPTION,
                        header_option("x-data-parallel-rank", b"3"),
                        header_option("content-length", b"12"),
                        clear_route_cache=True,
                    )
                ),
                "dynamic_metadata": METADATA,
            },
        ),
        (
            route(Phase.BODY),
            {
                "request_body": ext_proc.BodyResponse(response=mutated(DESTINATION_OPTION)),
                "dynamic_metadata": METADATA,
            },
        ),
        (
            route(Phase.BODY, rank_removed=True),
            {
                "request_body": ext_proc.BodyResponse(
                    response=ext_proc.CommonResponse(
                        header_mutation=ext_proc.HeaderMutation(
                            set_headers=[DESTINATION_OPTION], remove_headers=["x-data-parallel-rank"]
                        )
                    )
                ),
                "dynamic_metadata": METADATA,
            },
        ),
        (route(Phase.TRAILERS), {"request_trailers": ext_proc.TrailersResponse(), "dynamic_metadata": METADATA}),
        (RequestBodyChunk(body=b"abc", end_of_stream=True), {"request_body": streamed(b"abc", True)}),
        (ResponseBodyChunk(body=b"abc", end_of_stream=False), {"response_body": streamed(b"abc", False)}),
        (ContinueRequestBody(), {"request_body": ext_proc.BodyResponse()}),
        (ContinueRequestTrailers(), {"request_trailers": ext_proc.TrailersResponse()}),
        (ContinueResponseBody(), {"response_body": ext_proc.BodyResponse()}),
        (ContinueResponseTrailers(), {"response_trailers": ext_proc.TrailersResponse()}),
        (
            ContinueResponseHeaders(served=None, is_body_asked=False),
            {"response_headers": ext_proc.HeadersResponse()},
        ),
        (
            ContinueResponseHeaders(served="10.0.0.2:8000", is_body_asked=True),
            {
                "response_headers": ext_proc.HeadersResponse(
                    response=mutated(header_option("x-conformance-test-served-endpoint", b"10.0.0.2:8000"))
                ),
                "mode_override": filter_v3.ProcessingMode(
                    response_header_mode=SEND_MODE.SEND,
                    response_body_mode=BODY_MODE.STREAMED,
                    response_trailer_mode=SEND_MODE.SEND,
                ),
            },
        ),
        (
            Refuse(status=429, reason="endpoints_full", message="full", retry_after_s=0.2),
            {
                "immediate_response": ext_proc.ImmediateResponse(
                    status=type_v3.HttpStatus(code=type_v3.StatusCode(429)),
                    headers=ext_proc.HeaderMutation(
                        set_headers=[
                            header_option("content-type", b"application/json"),
                            header_option("retry-after", b"1"),
                        ]
                    ),
                    body=json.dumps(ERROR).encode(),
                    details="trimtab_endpoints_full",
                )
            },
        ),
    ],
)
def test_every_reply_reads_back_in_the_other_implementation(reply: Reply, message: dict[str, Any]) -> None:
    assert ext_proc.ProcessingResponse.parse(wire.encode(reply)) == ext_proc.ProcessingResponse(**message)


@given(st.binary(max_size=200))
def test_bytes_that_are_no_message_are_a_protocol_error_and_nothing_else(data: bytes) -> None:
    try:
        wire.decode(data)
    except ProtocolError:
        return


@given(st.data())
def test_a_damaged_message_is_an_event_or_a_protocol_error(data: st.DataObject) -> None:
    part = ext_proc.HttpHeaders(headers=headers((":path", b"/v1/chat/completions"), ("x-request-id", b"1")))
    metadata = core.Metadata(
        filter_metadata={
            "envoy.lb.subset_hint": Struct.from_dict({"x-gateway-destination-endpoint-subset": ["10.0.0.1"]})
        }
    )
    message = bytearray(bytes(ext_proc.ProcessingRequest(request_headers=part, metadata_context=metadata)))
    for _ in range(data.draw(st.integers(1, 4))):
        message[data.draw(st.integers(0, len(message) - 1))] = data.draw(st.integers(0, 255))
    try:
        wire.decode(bytes(message))
    except ProtocolError:
        return
