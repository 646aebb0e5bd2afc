"""The ext_proc messages: bytes of the gateway to events, replies to bytes for the gateway.

The one rule: this is the only module that sees protobuf; the others know events and replies. It decides nothing: what
a message means for the exchange is not its business.
"""

import json
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from envoy.config.core.v3 import base_pb2
from envoy.extensions.filters.http.ext_proc.v3 import processing_mode_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc
from google.protobuf.message import DecodeError

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
    DESTINATION,
    RANK_HEADER,
    ROUTING_HEADERS,
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

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
METHOD = "Process"

SUBSET_NAMESPACE = "envoy.lb.subset_hint"
SUBSET_KEY = "x-gateway-destination-endpoint-subset"
LB_NAMESPACE = "envoy.lb"
SERVED_KEY = "x-gateway-destination-endpoint-served"
SERVED_ATTRIBUTE = "upstream.address"
EXPECTED_KEY = "trimtab.expected-endpoint"
"""Metadata: the endpoint of whose success a gateway that heeds it need not tell us."""
USUAL_UNTOLD_ATTRIBUTE = "'trimtab.usual-response-untold'"
"""What a gateway that heeds it says of itself: a constant, so its name is all that it has to say."""
CONFORMANCE_SERVED_HEADER = "x-conformance-test-served-endpoint"

ROUTES_KEPT_MAX = 4_096
"""Answers that are kept: a pool has few destinations, with their fallbacks."""

_OVERWRITE = base_pb2.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
MODES = {
    processing_mode_pb2.ProcessingMode.NONE: BodyMode.NONE,
    processing_mode_pb2.ProcessingMode.STREAMED: BodyMode.STREAMED,
    processing_mode_pb2.ProcessingMode.BUFFERED: BodyMode.BUFFERED,
    processing_mode_pb2.ProcessingMode.BUFFERED_PARTIAL: BodyMode.BUFFERED,
    processing_mode_pb2.ProcessingMode.FULL_DUPLEX_STREAMED: BodyMode.DUPLEX,
}
_HEADER_OF_ATTRIBUTE = {
    "request.method": ":method",
    "request.path": ":path",
    "request.id": "x-request-id",
}
"""What a gateway can tell in place of the request's headers, besides each header by its name."""
_HEADER_ATTRIBUTE = ("request.headers['", "']")
_RESPONSE_HEADERS = frozenset({":status", "content-type", "content-encoding"})
_ERROR_TYPES = {413: "invalid_request_error", 429: "rate_limit_error"}


def decode(data: bytes) -> GatewayEvent:
    """One message of the gateway as an event; ProtocolError where it is none that we know."""
    try:
        message = ext_proc.ProcessingRequest.FromString(data)
        kind = message.WhichOneof("request")
        decoder = _DECODERS.get(kind)
        if decoder is None:
            raise ProtocolError(f"a message without a request part: {kind}")
        return decoder(message)
    except (DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(f"an undecodable message: {error}") from error


def _request_headers(message: Any) -> RequestHeaders:
    part = message.request_headers
    return RequestHeaders(
        headers={
            header.key.lower(): header.raw_value.decode("utf-8", "replace") or header.value
            for header in part.headers.headers
        },
        end_of_stream=part.end_of_stream,
        modes=_modes(message),
        subset=_subset(message),
        is_usual_untold=_is_usual_untold(message),
    )


def _request_body(message: Any) -> RequestBody:
    part = message.request_body
    return RequestBody(
        body=part.body,
        end_of_stream=part.end_of_stream or part.end_of_stream_without_message,
        head=_head(message) if message.attributes else None,
    )


def _head(message: Any) -> RequestHeaders:
    """The request's headers as attributes of its body."""
    before, after = _HEADER_ATTRIBUTE
    headers = {}
    for attributes in message.attributes.values():
        for attribute, value in attributes.fields.items():
            name = _HEADER_OF_ATTRIBUTE.get(attribute)
            if name is None and attribute.startswith(before) and attribute.endswith(after):
                name = attribute[len(before) : -len(after)]
            if name is not None and value.string_value:
                headers[name] = value.string_value
    return RequestHeaders(
        headers=headers,
        end_of_stream=False,
        modes=_modes(message),
        subset=_subset(message),
        is_usual_untold=_is_usual_untold(message),
    )


def _is_usual_untold(message: Any) -> bool:
    return any(USUAL_UNTOLD_ATTRIBUTE in attributes.fields for attributes in message.attributes.values())


def _request_trailers(message: Any) -> RequestTrailers:
    return RequestTrailers()


def _response_headers(message: Any) -> ResponseHeaders:
    part = message.response_headers
    wanted = {
        name: header.raw_value.decode("utf-8", "replace") or header.value
        for header in part.headers.headers
        if (name := header.key.lower()) in _RESPONSE_HEADERS
    }
    served, modes = _served(message), _modes(message)
    return response_headers(wanted, end_of_stream=part.end_of_stream, served=served, modes=modes)


def response_headers(
    headers: Mapping[str, str], *, end_of_stream: bool, served: str | None, modes: BodyModes | None
) -> ResponseHeaders:
    """What the picker needs of a response's headers."""
    status = headers.get(":status", "")
    return ResponseHeaders(
        status=int(status) if len(status) == 3 and status.isascii() and status.isdecimal() else 0,
        content_type=headers.get("content-type", "").lower(),
        content_encoding=headers.get("content-encoding", ""),
        end_of_stream=end_of_stream,
        served=served,
        modes=modes,
    )


def _response_body(message: Any) -> ResponseBody:
    part = message.response_body
    return ResponseBody(body=part.body, end_of_stream=part.end_of_stream or part.end_of_stream_without_message)


def _response_trailers(message: Any) -> ResponseTrailers:
    return ResponseTrailers()


_DECODERS: dict[str | None, Callable[[Any], GatewayEvent]] = {
    "request_headers": _request_headers,
    "request_body": _request_body,
    "request_trailers": _request_trailers,
    "response_headers": _response_headers,
    "response_body": _response_body,
    "response_trailers": _response_trailers,
}


def _modes(message: Any) -> BodyModes | None:
    if not message.HasField("protocol_config"):
        return None
    config = message.protocol_config
    request, response = MODES.get(config.request_body_mode), MODES.get(config.response_body_mode)
    if request is None or response is None:
        raise ProtocolError(f"body modes {config.request_body_mode} and {config.response_body_mode} are not supported")
    return BodyModes(request=request, response=response)


def _subset(message: Any) -> tuple[str, ...] | None:
    if not message.HasField("metadata_context"):
        return None
    value = _metadata_value(message, SUBSET_NAMESPACE, SUBSET_KEY)
    if value is None:
        return None
    kind = value.WhichOneof("kind")
    if kind == "list_value":
        names = [item.string_value for item in value.list_value.values]
    elif kind == "string_value":
        names = value.string_value.split(",")
    else:
        names = []
    return tuple(name.strip() for name in names if name.strip())


def _served(message: Any) -> str | None:
    for attributes in message.attributes.values():
        if SERVED_ATTRIBUTE in attributes.fields:
            address: str = attributes.fields[SERVED_ATTRIBUTE].string_value
            if address:
                return address
    if message.HasField("metadata_context"):
        value = _metadata_value(message, LB_NAMESPACE, SERVED_KEY)
        if value is not None and value.string_value:
            served: str = value.string_value
            return served
    return None


def _metadata_value(message: Any, namespace: str, key: str) -> Any:
    """A value of the message's metadata, or None; looked up without creating what is not there."""
    metadata = message.metadata_context.filter_metadata
    if namespace not in metadata:
        return None
    fields = metadata[namespace].fields
    return fields.get(key)


def encode(reply: Reply) -> bytes:
    """One reply as the bytes of its message."""
    return _ENCODERS[type(reply)](reply)


def _set_header(headers: Any, name: str, value: str) -> None:
    option = headers.add()
    option.header.key = name
    option.header.raw_value = value.encode()
    option.append_action = _OVERWRITE


def _continue_request_headers(reply: ContinueRequestHeaders) -> bytes:
    return _HEADERS_GO_ON_STRIPPED if reply.is_stripped else _HEADERS_GO_ON


@lru_cache(ROUTES_KEPT_MAX)
def _route(reply: Route) -> bytes:
    message = ext_proc.ProcessingResponse()
    lb = message.dynamic_metadata.fields[LB_NAMESPACE].struct_value
    lb.fields[DESTINATION].string_value = reply.destination
    if reply.rank is not None and reply.phase is not Phase.HEADERS:
        # A gateway that showed no headers lets none be changed: it makes a header of this.
        lb.fields[RANK_HEADER].string_value = str(reply.rank)
    if reply.expected is not None:
        lb.fields[EXPECTED_KEY].string_value = reply.expected
    if reply.phase is Phase.TRAILERS:
        # Trailers cannot change the request's headers: there the metadata alone carries the choice.
        message.request_trailers.SetInParent()
    else:
        part = message.request_headers if reply.phase is Phase.HEADERS else message.request_body
        if reply.is_route_cache_cleared:
            part.response.clear_route_cache = True
        headers = part.response.header_mutation.set_headers
        _set_header(headers, DESTINATION, reply.destination)
        if reply.rank is not None:
            _set_header(headers, RANK_HEADER, str(reply.rank))
        elif reply.is_rank_removed:
            part.response.header_mutation.remove_headers.append(RANK_HEADER)
        if reply.content_length is not None:
            _set_header(headers, "content-length", str(reply.content_length))
    return _bytes(message)


def _request_body_chunk(reply: RequestBodyChunk) -> bytes:
    message = ext_proc.ProcessingResponse()
    streamed = message.request_body.response.body_mutation.streamed_response
    streamed.body = reply.body
    streamed.end_of_stream = reply.end_of_stream
    return _bytes(message)


def _response_body_chunk(reply: ResponseBodyChunk) -> bytes:
    message = ext_proc.ProcessingResponse()
    streamed = message.response_body.response.body_mutation.streamed_response
    streamed.body = reply.body
    streamed.end_of_stream = reply.end_of_stream
    return _bytes(message)


def _refuse(reply: Refuse) -> bytes:
    message = ext_proc.ProcessingResponse()
    immediate = message.immediate_response
    immediate.status.code = reply.status
    _set_header(immediate.headers.set_headers, "content-type", "application/json")
    if reply.retry_after_s is not None:
        _set_header(immediate.headers.set_headers, "retry-after", str(max(1, round(reply.retry_after_s))))
    immediate.body = error_body(status=reply.status, reason=reply.reason, message=reply.message)
    immediate.details = f"trimtab_{reply.reason}"
    return _bytes(message)


def error_body(*, status: int, reason: str, message: str) -> bytes:
    """The JSON that OpenAI's clients know how to read as an error."""
    kind = _ERROR_TYPES.get(status, "service_unavailable_error")
    return json.dumps({"error": {"message": message, "type": kind, "param": None, "code": reason}}).encode()


def _continue_response_headers(reply: ContinueResponseHeaders) -> bytes:
    if reply.served is None and not reply.is_body_asked:
        return _RESPONSE_HEADERS_GO_ON
    message = ext_proc.ProcessingResponse()
    message.response_headers.SetInParent()
    if reply.served is not None:
        headers = message.response_headers.response.header_mutation.set_headers
        _set_header(headers, CONFORMANCE_SERVED_HEADER, reply.served)
    if reply.is_body_asked:
        mode = message.mode_override
        mode.response_header_mode = processing_mode_pb2.ProcessingMode.SEND
        mode.response_body_mode = processing_mode_pb2.ProcessingMode.STREAMED
        mode.response_trailer_mode = processing_mode_pb2.ProcessingMode.SEND
    return _bytes(message)


def _bytes(message: Any) -> bytes:
    encoded: bytes = message.SerializeToString()
    return encoded


def _empty(part: str) -> bytes:
    message = ext_proc.ProcessingResponse()
    getattr(message, part).SetInParent()
    return _bytes(message)


def _stripped() -> bytes:
    message = ext_proc.ProcessingResponse()
    message.request_headers.response.header_mutation.remove_headers.extend(ROUTING_HEADERS)
    return _bytes(message)


_HEADERS_GO_ON = _empty("request_headers")
_HEADERS_GO_ON_STRIPPED = _stripped()
_BODY_GOES_ON = _empty("request_body")
_TRAILERS_GO_ON = _empty("request_trailers")
_RESPONSE_HEADERS_GO_ON = _empty("response_headers")
_RESPONSE_BODY_GOES_ON = _empty("response_body")
_RESPONSE_TRAILERS_GO_ON = _empty("response_trailers")

_ENCODERS: Mapping[type, Callable[[Any], bytes]] = {
    ContinueRequestHeaders: _continue_request_headers,
    Route: _route,
    RequestBodyChunk: _request_body_chunk,
    ContinueRequestBody: lambda _: _BODY_GOES_ON,
    ContinueRequestTrailers: lambda _: _TRAILERS_GO_ON,
    Refuse: _refuse,
    ContinueResponseHeaders: _continue_response_headers,
    ResponseBodyChunk: _response_body_chunk,
    ContinueResponseBody: lambda _: _RESPONSE_BODY_GOES_ON,
    ContinueResponseTrailers: lambda _: _RESPONSE_TRAILERS_GO_ON,
}
