"""The native reader of a request's messages against the full one: the same events, whatever the bytes."""

from typing import Any

import pytest
from envoy.config.core.v3 import base_pb2
from envoy.extensions.filters.http.ext_proc.v3 import processing_mode_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc
from google.protobuf.struct_pb2 import Value
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab_extproc import wire
from trimtab_extproc.errors import ProtocolError
from trimtab_extproc.events import BodyMode, BodyModes, GatewayEvent, RequestBody, RequestHeaders

native = pytest.importorskip("trimtab_extproc._front", reason="the native front is not built")
native_wire = pytest.importorskip("trimtab_extproc.native_wire")

ATTRIBUTES = {
    "request.method": "POST",
    "request.path": "/v1/chat/completions?x=\u00fc",
    "request.id": "r1",
    "request.headers['content-type']": "application/json",
    wire.USUAL_UNTOLD_ATTRIBUTE: "trimtab.usual-response-untold",
}


def outcome(decode: Any, data: bytes) -> GatewayEvent | str:
    try:
        event: GatewayEvent = decode(data)
        return event
    except ProtocolError as error:
        return str(error)


def whole(attributes: dict[str, Any], body: bytes = b"{}", **parts: Any) -> Any:
    message = ext_proc.ProcessingRequest(request_body=ext_proc.HttpBody(body=body, end_of_stream=True), **parts)
    fields = message.attributes["envoy.filters.http.ext_proc"].fields
    for name, value in attributes.items():
        fields[name].CopyFrom(_value(value))
    return message


def _value(value: Any) -> Any:
    return Value(string_value=value) if isinstance(value, str) else Value(number_value=value)


CONFIG = ext_proc.ProtocolConfiguration(request_body_mode=processing_mode_pb2.ProcessingMode.BUFFERED)


def test_a_whole_request_of_our_own_gateway_is_read_natively() -> None:
    data = whole(ATTRIBUTES, protocol_config=CONFIG, metadata_context=base_pb2.Metadata()).SerializeToString()
    assert native.read_message(data) is not None
    event = native_wire.decode(data)
    assert event == wire.decode(data)
    assert event == RequestBody(
        body=b"{}",
        end_of_stream=True,
        head=RequestHeaders(
            headers={
                ":method": "POST",
                ":path": "/v1/chat/completions?x=\u00fc",
                "x-request-id": "r1",
                "content-type": "application/json",
            },
            end_of_stream=False,
            modes=BodyModes(request=BodyMode.BUFFERED, response=BodyMode.NONE),
            is_usual_untold=True,
        ),
    )


def test_the_headers_and_bodies_of_other_gateways_are_read_natively() -> None:
    status = base_pb2.HeaderMap(
        headers=[base_pb2.HeaderValue(key=":status", raw_value=b"200"), base_pb2.HeaderValue(key="server", value="x")]
    )
    headers = base_pb2.HeaderMap(
        headers=[base_pb2.HeaderValue(key=":path", raw_value=b"/x"), base_pb2.HeaderValue(key="X-Own", value="1")]
    )
    config = ext_proc.ProtocolConfiguration(request_body_mode=4, response_body_mode=4)
    for message in (
        ext_proc.ProcessingRequest(request_headers=ext_proc.HttpHeaders(headers=headers), protocol_config=config),
        ext_proc.ProcessingRequest(request_body=ext_proc.HttpBody(body=b"half")),
        ext_proc.ProcessingRequest(response_headers=ext_proc.HttpHeaders(headers=status, end_of_stream=True)),
        ext_proc.ProcessingRequest(response_body=ext_proc.HttpBody(body=b"half", end_of_stream=True)),
    ):
        data = message.SerializeToString()
        assert native.read_message(data) is not None
        assert native_wire.decode(data) == wire.decode(data)


@pytest.mark.parametrize(
    "message",
    [
        whole(ATTRIBUTES | {"request.size": 3}),
        whole(ATTRIBUTES, protocol_config=ext_proc.ProtocolConfiguration(request_body_mode=17)),
        whole({}, protocol_config=ext_proc.ProtocolConfiguration(request_body_mode=17)),
        ext_proc.ProcessingRequest(observability_mode=True, request_body=ext_proc.HttpBody(body=b"x")),
        ext_proc.ProcessingRequest(response_trailers=ext_proc.HttpTrailers()),
        ext_proc.ProcessingRequest(),
    ],
)
def test_what_is_out_of_the_usual_comes_out_the_same(message: Any) -> None:
    data = message.SerializeToString()
    assert outcome(native_wire.decode, data) == outcome(wire.decode, data)


def test_a_subset_hint_is_not_lost() -> None:
    message = whole(ATTRIBUTES)
    subset = message.metadata_context.filter_metadata[wire.SUBSET_NAMESPACE].fields[wire.SUBSET_KEY]
    subset.string_value = "10.0.0.1:8000"
    event = native_wire.decode(message.SerializeToString())
    assert isinstance(event, RequestBody)
    assert event.head is not None
    assert event.head.subset == ("10.0.0.1:8000",)


NAMES = st.sampled_from([*ATTRIBUTES, "request.headers['']", "request.headers['x", "upstream.address", ""])
TEXTS = st.text(max_size=4)
HEADERS = st.builds(
    base_pb2.HeaderValue,
    key=st.sampled_from([":path", ":status", "Content-Type", "X-Own", "x-own", "caf\u00c9", ""]) | TEXTS,
    value=TEXTS,
    raw_value=st.binary(max_size=4),
)
MESSAGES = st.one_of(
    st.builds(
        lambda headers, end: ext_proc.ProcessingRequest(
            request_headers=ext_proc.HttpHeaders(headers=base_pb2.HeaderMap(headers=headers), end_of_stream=end)
        ),
        st.lists(HEADERS, max_size=4),
        st.booleans(),
    ),
    st.builds(
        lambda headers, end: ext_proc.ProcessingRequest(
            response_headers=ext_proc.HttpHeaders(headers=base_pb2.HeaderMap(headers=headers), end_of_stream=end)
        ),
        st.lists(HEADERS, max_size=4),
        st.booleans(),
    ),
    st.builds(
        lambda body, end: ext_proc.ProcessingRequest(response_body=ext_proc.HttpBody(body=body, end_of_stream=end)),
        st.binary(max_size=9),
        st.booleans(),
    ),
    st.builds(whole, st.dictionaries(NAMES, TEXTS | st.floats(allow_nan=False), max_size=5), st.binary(max_size=9)),
)


@settings(deadline=None)
@given(message=MESSAGES, modes=st.none() | st.tuples(st.integers(0, 6), st.integers(0, 6)), wreck=st.data())
def test_any_message_damaged_or_not_comes_out_the_same(
    message: Any, modes: tuple[int, int] | None, wreck: st.DataObject
) -> None:
    if modes is not None:
        message.protocol_config.request_body_mode, message.protocol_config.response_body_mode = modes
    data = message.SerializeToString()
    assert outcome(native_wire.decode, data) == outcome(wire.decode, data)
    for _ in range(wreck.draw(st.integers(0, 3))):
        place = wreck.draw(st.integers(0, len(data)))
        data = data[:place] + bytes([wreck.draw(st.integers(0, 255))]) + data[place + 1 :]
    if wreck.draw(st.booleans()):
        data = data[: wreck.draw(st.integers(0, len(data)))]
    elif wreck.draw(st.booleans()):
        # Fields that come twice.
        data += data
    assert outcome(native_wire.decode, data) == outcome(wire.decode, data)
