"""What can happen to one HTTP exchange, as the gateway (or our own decision) tells it.

The one rule: an event is a plain value, so that a test can write one down and a fuzzer can make one up. Nothing here
knows protobuf, gRPC or the scheduler. (Structs rather than dataclasses: several are made for every request, and these
cost a tenth.)
"""

from collections.abc import Mapping
from enum import Enum

import msgspec


class BodyMode(Enum):
    """How the gateway hands a body to us, and so how it wants to be answered."""

    NONE = "none"
    """No body comes."""
    STREAMED = "streamed"
    """Piece by piece; each piece waits for its own answer, and the headers have gone on before the first."""
    BUFFERED = "buffered"
    """The headers are answered first, then the whole body comes in one message."""
    DUPLEX = "duplex"
    """FULL_DUPLEX_STREAMED: pieces come without waiting, and all that we answer is all that goes on."""


class BodyModes(msgspec.Struct, frozen=True, kw_only=True):
    """The modes of both directions, from the first message's protocol_config."""

    request: BodyMode
    response: BodyMode


class RequestHeaders(msgspec.Struct, frozen=True, kw_only=True):
    """The request's headers: names in lower case, the pseudo-headers (`:path`, ...) among them, none guaranteed."""

    headers: Mapping[str, str]
    end_of_stream: bool
    modes: BodyModes | None = None
    """None: the gateway does not say."""
    subset: tuple[str, ...] | None = None
    """The endpoints that the gateway allows (`ip:port` or a bare IP); None: no such hint, empty: none is allowed."""
    is_usual_untold: bool = False
    """The gateway says nothing of a response that is a success of the very endpoint that we said we expect."""


class RequestBody(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of the request's body."""

    body: bytes
    end_of_stream: bool
    head: RequestHeaders | None = None
    """What the gateway says of the headers where it sends none before the body: only those that it was set to."""


class RequestTrailers(msgspec.Struct, frozen=True, kw_only=True):
    """The request's trailers: they end a body that had no end of stream of its own."""


class ResponseHeaders(msgspec.Struct, frozen=True, kw_only=True):
    """The response's headers, from the endpoint or from the gateway itself."""

    status: int
    """0 where the gateway does not say."""
    content_type: str = ""
    content_encoding: str = ""
    end_of_stream: bool = False
    served: str | None = None
    """`ip:port` of the endpoint that really served it, after the gateway's retries."""
    modes: BodyModes | None = None


class ResponseBody(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of the response's body."""

    body: bytes
    end_of_stream: bool


class ResponseTrailers(msgspec.Struct, frozen=True, kw_only=True):
    """The response's trailers."""


class Placed(msgspec.Struct, frozen=True, kw_only=True):
    """The picker chose an endpoint and has reserved it; from here on the exchange owns the reservation."""

    reservation_id: int
    endpoint: str
    destination: str
    """`ip:port[,ip:port]`: the choice, then fallbacks for the gateway's retries."""
    rank: int | None = None
    """The data-parallel rank to ask the engine for."""
    is_first_token_wanted: bool = False
    """Nobody else tells of the first token: the endpoint has no sidecar, or not an exact one."""
    is_id_wanted: bool = False
    """The response carries an id that later requests will name."""
    is_streamed: bool = False
    """The answer comes as an event stream, not as one document."""


class Refused(msgspec.Struct, frozen=True, kw_only=True):
    """The picker chose nobody: what the client is told instead."""

    status: int
    reason: str
    """One word for metrics and the error body's `code`."""
    message: str
    retry_after_s: float | None = None


GatewayEvent = RequestHeaders | RequestBody | RequestTrailers | ResponseHeaders | ResponseBody | ResponseTrailers
Event = GatewayEvent | Placed | Refused
