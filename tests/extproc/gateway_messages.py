"""The messages of a gateway, as bytes, made by the second implementation of the protocol."""

from typing import Any

from envoy_data_plane.envoy.config.core import v3 as core
from envoy_data_plane.envoy.extensions.filters.http.ext_proc import v3 as filter_v3
from envoy_data_plane.envoy.service.ext_proc import v3 as ext_proc
from picker_rig import chat

BODY_MODE = filter_v3.ProcessingModeBodySendMode


def headers(*, mode: Any = BODY_MODE.BUFFERED, end_of_stream: bool = False) -> bytes:
    pairs = ((":method", b"POST"), (":path", b"/v1/chat/completions"), ("x-request-id", b"r1"))
    carried = core.HeaderMap(headers=[core.HeaderValue(key=key, raw_value=value) for key, value in pairs])
    config = ext_proc.ProtocolConfiguration(request_body_mode=mode)
    part = ext_proc.HttpHeaders(headers=carried, end_of_stream=end_of_stream)
    return bytes(ext_proc.ProcessingRequest(request_headers=part, protocol_config=config))


def body(content: bytes | None = None, *, end_of_stream: bool = True) -> bytes:
    content = chat("hello " * 200).body if content is None else content
    return bytes(ext_proc.ProcessingRequest(request_body=ext_proc.HttpBody(body=content, end_of_stream=end_of_stream)))


def response_headers(*, end_of_stream: bool = False) -> bytes:
    carried = core.HeaderMap(headers=[core.HeaderValue(key=":status", raw_value=b"200")])
    return bytes(
        ext_proc.ProcessingRequest(response_headers=ext_proc.HttpHeaders(headers=carried, end_of_stream=end_of_stream))
    )
