"""What we answer in one HTTP exchange, and the one thing the exchange asks of its shell: a decision.

The one rule: one type per kind of answer, and `wire` has one builder per type. No protobuf here.
"""

from collections.abc import Mapping
from enum import Enum

import msgspec

DESTINATION = "x-gateway-destination-endpoint"
RANK_HEADER = "x-data-parallel-rank"
ROUTING_HEADERS = (DESTINATION, RANK_HEADER)
"""What says where a request goes, and is never the client's to say."""
BODY_CHUNK_BYTES_MAX = 62_000
"""The largest piece of a body in one message: gateways refuse more than 64 KiB with its framing."""


class Phase(Enum):
    """The message of the gateway that an answer belongs to."""

    HEADERS = "headers"
    BODY = "body"
    TRAILERS = "trailers"


class Decide(msgspec.Struct, frozen=True, kw_only=True):
    """Not an answer: the request is complete, choose an endpoint and come back with Placed or Refused."""

    headers: Mapping[str, str]
    body: bytes
    subset: tuple[str, ...] | None
    is_body_known: bool
    """False: the gateway does not show us the body before we have to choose."""


class ContinueRequestHeaders(msgspec.Struct, frozen=True, kw_only=True):
    """Go on without a choice yet (the body is still to come)."""

    is_stripped: bool
    """Take the client's own routing headers away, so that a failure from here on cannot obey them."""


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """Send the request there."""

    phase: Phase
    destination: str
    rank: int | None
    is_rank_removed: bool
    """There is no rank, but the client named one: an engine would obey it."""
    content_length: int | None
    """Set where the body is sent on by us, so that the header says what we send; None: leave it as it is."""
    is_route_cache_cleared: bool
    expected: str | None = None
    """`ip:port`: a success from there is the usual, and the gateway need not tell us of it."""


class RequestBodyChunk(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of the body on its way to the endpoint (duplex)."""

    body: bytes
    end_of_stream: bool


class ContinueRequestBody(msgspec.Struct, frozen=True, kw_only=True):
    """Leave this piece of the body as it is."""


class ContinueRequestTrailers(msgspec.Struct, frozen=True, kw_only=True):
    """Leave the trailers as they are."""


class Refuse(msgspec.Struct, frozen=True, kw_only=True):
    """Answer the client ourselves with an OpenAI-style error."""

    status: int
    reason: str
    message: str
    retry_after_s: float | None


class ContinueResponseHeaders(msgspec.Struct, frozen=True, kw_only=True):
    """Let the response's headers pass."""

    served: str | None
    """Show the endpoint that served to the client (conformance tests only)."""
    is_body_asked: bool
    """Ask the gateway to stream the response's body to us from here on (mode_override)."""


class ResponseBodyChunk(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of the response's body on its way to the client (duplex)."""

    body: bytes
    end_of_stream: bool


class ContinueResponseBody(msgspec.Struct, frozen=True, kw_only=True):
    """Leave this piece of the response's body as it is."""


class ContinueResponseTrailers(msgspec.Struct, frozen=True, kw_only=True):
    """Leave the response's trailers as they are."""


Reply = (
    ContinueRequestHeaders
    | Route
    | RequestBodyChunk
    | ContinueRequestBody
    | ContinueRequestTrailers
    | Refuse
    | ContinueResponseHeaders
    | ResponseBodyChunk
    | ContinueResponseBody
    | ContinueResponseTrailers
)
