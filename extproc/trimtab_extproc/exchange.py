"""One HTTP exchange as the gateway tells it: events in, replies out, no I/O and no clock.

The one rule: the table at the end lists every (state, event) pair that may happen; any other is a ProtocolError. The
reservation that a Placed event brings is finished exactly once: at the response's end, or by `close`, which the shell
calls however the stream ended.

    await headers -> buffer body -> choosing -> placed -> streaming -> done

It must not choose endpoints, parse prompts or know protobuf.

Bounds: a request body of more than `body_bytes_max` is refused with 413, one that all bodies together leave no room for
with 429.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from trimtab_extproc.body_budget import BodyBudget
from trimtab_extproc.errors import ProtocolError
from trimtab_extproc.events import (
    BodyMode,
    BodyModes,
    Event,
    Placed,
    Refused,
    RequestBody,
    RequestHeaders,
    RequestTrailers,
    ResponseBody,
    ResponseHeaders,
    ResponseTrailers,
)
from trimtab_extproc.formats.response_reader import ResponseReader
from trimtab_extproc.replies import (
    BODY_CHUNK_BYTES_MAX,
    RANK_HEADER,
    ROUTING_HEADERS,
    ContinueRequestBody,
    ContinueRequestHeaders,
    ContinueRequestTrailers,
    ContinueResponseBody,
    ContinueResponseHeaders,
    ContinueResponseTrailers,
    Decide,
    Phase,
    Refuse,
    Reply,
    RequestBodyChunk,
    ResponseBodyChunk,
    Route,
)

log = logging.getLogger(__name__)

Answer = Decide | Sequence[Reply]
"""Replies to send, in order; or what the shell must decide before there are any."""

DUPLEX_BOTH_WAYS = BodyModes(request=BodyMode.DUPLEX, response=BodyMode.DUPLEX)
"""What a gateway that does not say its modes is taken for: the endpoint picker protocol prescribes it."""


class Ledger(Protocol):
    """Where the exchange books what happens to its reservation. Every call returns at once and never fails."""

    def first_token(self, reservation_id: int, *, now_s: float) -> None: ...

    def served(self, reservation_id: int, address: str, *, now_s: float) -> None: ...

    def named(self, reservation_id: int, response_id: str) -> None: ...

    def used(self, reservation_id: int, *, prompt_tokens: int, cached_tokens: int) -> None: ...

    def finished(self, reservation_id: int, *, now_s: float) -> None: ...


class State(Enum):
    """How far an exchange is."""

    # Members are compared by identity; the inherited hash is a Python call at every event.
    __hash__ = object.__hash__

    AWAIT_HEADERS = "await headers"
    BUFFER_BODY = "buffer body"
    CHOOSING = "choosing"
    PLACED = "placed"
    STREAMING = "streaming"
    DONE = "done"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeSettings:
    """What all exchanges of a process share."""

    body_bytes_max: int = 64 << 20
    """The largest request body, in bytes; a larger one is refused with 413."""
    is_mode_override_allowed: bool = False
    """The gateway's filter has allow_mode_override: ask it to stream a response's body where we need it."""
    is_route_cache_cleared: bool = False
    """Ask the gateway to choose its route anew after the choice, for gateways whose routes look at our header."""
    is_conformance_test: bool = False
    """Show the client which endpoint served."""


class Exchange:
    """One exchange. Feed it every event in order; the answer `Decide` asks the shell for Placed or Refused."""

    __slots__ = (
        "_body",
        "_body_bytes",
        "_budget",
        "_has_trailers",
        "_is_usual_untold",
        "_ledger",
        "_modes",
        "_phase",
        "_placed",
        "_reader",
        "_request",
        "_reservation_id",
        "_settings",
        "_trailing",
        "state",
    )

    def __init__(self, *, ledger: Ledger, settings: ExchangeSettings, budget: BodyBudget) -> None:
        self.state = State.AWAIT_HEADERS
        self._ledger = ledger
        self._budget = budget
        self._settings = settings
        self._modes = DUPLEX_BOTH_WAYS
        self._request: RequestHeaders | None = None
        self._body: list[bytes] = []
        self._body_bytes = 0
        """What is taken from the budget."""
        self._has_trailers = False
        """The request's trailers ended its body, and wait for their answer behind the choice."""
        self._phase = Phase.HEADERS
        """The message that the choice answers."""
        self._trailing: bytes | None = None
        """Duplex: the body that follows the choice; None: there is none."""
        self._placed: Placed | None = None
        self._reservation_id: int | None = None
        """The reservation that is still to be finished."""
        self._reader: ResponseReader | None = None
        self._is_usual_untold = False
        """The gateway will tell of the response only if it is not what we said we expect."""

    def receive(self, event: Event, *, now_s: float) -> Answer:
        """Take one event. Raises ProtocolError for an event that may not come here."""
        if type(event) is Placed:
            # Before anything can go wrong: whatever happens from here on, `close` finishes it.
            self._reservation_id = event.reservation_id
        handler = _TRANSITIONS.get((self.state, type(event)))
        if handler is None:
            raise ProtocolError(f"{type(event).__name__} while in state '{self.state.value}'")
        return handler(self, event, now_s)

    def close(self, *, now_s: float) -> None:
        """The stream has ended, in whatever way. Idempotent."""
        if self.state is State.PLACED and self._is_usual_untold:
            self._take_for_answered(now_s)
        self.state = State.DONE
        self._drop_body()
        self._finish(now_s)

    # The request.

    def _on_request_headers(self, event: RequestHeaders, now_s: float) -> Answer:
        if event.modes is not None:
            self._modes = event.modes
        self._request = event
        mode = self._modes.request
        if event.end_of_stream or mode in (BodyMode.NONE, BodyMode.STREAMED):
            # Without a body there is nothing to wait for; with one that is not shown to us, no use in waiting.
            return self._decide(Phase.HEADERS, is_body_known=event.end_of_stream)
        self.state = State.BUFFER_BODY
        if mode is BodyMode.BUFFERED:
            return (ContinueRequestHeaders(is_stripped=any(name in event.headers for name in ROUTING_HEADERS)),)
        return ()

    def _on_whole_request(self, event: RequestBody, now_s: float) -> Answer:
        if event.head is None:
            raise ProtocolError("a request's body before its headers")
        if event.head.modes is not None:
            self._modes = event.head.modes
        self._request = event.head
        self.state = State.BUFFER_BODY
        return self._on_request_body(event, now_s)

    def _on_request_body(self, event: RequestBody, now_s: float) -> Answer:
        size_bytes = len(event.body)
        if self._body_bytes + size_bytes > self._settings.body_bytes_max:
            message = f"the request's body is larger than {self._settings.body_bytes_max} bytes"
            return self._refuse(Refused(status=413, reason="body_too_large", message=message))
        if not self._budget.take(size_bytes):
            message = "too many large requests are in progress"
            return self._refuse(Refused(status=429, reason="bodies_full", message=message, retry_after_s=1.0))
        self._body_bytes += size_bytes
        self._body.append(event.body)
        is_buffered = self._modes.request is BodyMode.BUFFERED
        if not event.end_of_stream and not is_buffered:
            return ()
        return self._decide(Phase.BODY if is_buffered else Phase.HEADERS, is_body_known=True)

    def _on_trailers_end_body(self, event: RequestTrailers, now_s: float) -> Answer:
        self._has_trailers = True
        is_buffered = self._modes.request is BodyMode.BUFFERED
        return self._decide(Phase.TRAILERS if is_buffered else Phase.HEADERS, is_body_known=True)

    def _decide(self, phase: Phase, *, is_body_known: bool) -> Answer:
        request = self._request
        assert request is not None, "the headers come first"
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._trailing = body if self._body and phase is Phase.HEADERS else None
        self._phase = phase
        self._body = []
        self.state = State.CHOOSING
        return Decide(headers=request.headers, body=body, subset=request.subset, is_body_known=is_body_known)

    def _on_placed(self, event: Placed, now_s: float) -> Answer:
        self.state = State.PLACED
        self._placed = event
        body, self._trailing = self._trailing, None
        assert self._request is not None, "the headers come first"
        self._is_usual_untold = self._request.is_usual_untold and not (
            event.is_first_token_wanted or event.is_id_wanted or self._settings.is_conformance_test
        )
        route = Route(
            phase=self._phase,
            destination=event.destination,
            rank=event.rank,
            is_rank_removed=event.rank is None and RANK_HEADER in self._request.headers,
            content_length=None if body is None else len(body),
            is_route_cache_cleared=self._settings.is_route_cache_cleared,
            expected=event.destination.partition(",")[0] if self._is_usual_untold else None,
        )
        steps: list[Reply] = [route]
        if body is not None:
            steps += [
                RequestBodyChunk(body=piece, end_of_stream=is_last and not self._has_trailers)
                for piece, is_last in _pieces(body)
            ]
        if self._has_trailers and self._phase is Phase.HEADERS:
            steps.append(ContinueRequestTrailers())
        self._drop_body()
        return steps

    def _on_refused(self, event: Refused, now_s: float) -> Answer:
        return self._refuse(event)

    def _refuse(self, refused: Refused) -> Answer:
        self.state = State.DONE
        self._drop_body()
        return (
            Refuse(
                status=refused.status,
                reason=refused.reason,
                message=refused.message,
                retry_after_s=refused.retry_after_s,
            ),
        )

    def _drop_body(self) -> None:
        """Nothing of the request's body is held any more."""
        self._budget.give_back(self._body_bytes)
        self._body, self._trailing, self._body_bytes = [], None, 0

    def _on_late_request_body(self, event: RequestBody, now_s: float) -> Answer:
        # Duplex: Envoy can repeat the last piece of a body near 1 MB. All of it has gone on already.
        return () if self._modes.request is BodyMode.DUPLEX else (ContinueRequestBody(),)

    def _on_late_request_trailers(self, event: RequestTrailers, now_s: float) -> Answer:
        return (ContinueRequestTrailers(),)

    # The response.

    def _on_response_headers(self, event: ResponseHeaders, now_s: float) -> Answer:
        if event.modes is not None and self.state is State.AWAIT_HEADERS:
            self._modes = event.modes
        self.state = State.DONE if event.end_of_stream else State.STREAMING
        reservation_id, is_body_asked = self._reservation_id, False
        if reservation_id is not None:
            if event.served is not None:
                self._ledger.served(reservation_id, event.served, now_s=now_s)
            # An error computes no prompt: it is no first token.
            if event.status < 400:
                is_body_asked = self._follow_body(event, reservation_id, now_s)
            if event.end_of_stream:
                self._finish(now_s)
        served = event.served if self._settings.is_conformance_test else None
        return (ContinueResponseHeaders(served=served, is_body_asked=is_body_asked),)

    def _follow_body(self, event: ResponseHeaders, reservation_id: int, now_s: float) -> bool:
        """Prepare for the first token; whether the gateway has to be asked for the body."""
        assert self._placed is not None, "a reservation comes with a placement"
        is_event_stream = event.content_type.startswith("text/event-stream")
        is_shown = self._modes.response is not BodyMode.NONE and not event.end_of_stream
        is_asked = (
            not is_shown
            and not event.end_of_stream
            and (self._placed.is_first_token_wanted or self._placed.is_id_wanted)
            and self._settings.is_mode_override_allowed
        )
        if is_asked:
            self._modes = BodyModes(request=self._modes.request, response=BodyMode.STREAMED)
        if is_shown or is_asked:
            self._reader = ResponseReader(event.content_type, event.content_encoding)
        elif not is_event_stream:
            # Engines send a document's headers once all of it is there; those of an event stream come first of all.
            self._ledger.first_token(reservation_id, now_s=now_s)
        return is_asked

    def _on_response_body(self, event: ResponseBody, now_s: float) -> Answer:
        self.state = State.DONE if event.end_of_stream else State.STREAMING
        self._read(event, now_s)
        if event.end_of_stream:
            self._finish(now_s)
        if self._modes.response is not BodyMode.DUPLEX:
            return (ContinueResponseBody(),)
        return [
            ResponseBodyChunk(body=piece, end_of_stream=is_last and event.end_of_stream)
            for piece, is_last in _pieces(event.body)
        ]

    def _read(self, event: ResponseBody, now_s: float) -> None:
        reader, reservation_id = self._reader, self._reservation_id
        if reader is None or reservation_id is None:
            return
        had_id = reader.response_id is not None
        try:
            is_first_token = reader.feed(event.body, end=event.end_of_stream)
        except Exception:
            # What we learn on the way must never cost the client its answer.
            log.exception("a response body could not be read")
            self._reader = None
            return
        if is_first_token:
            self._ledger.first_token(reservation_id, now_s=now_s)
        if reader.response_id is not None and not had_id and self._placed is not None and self._placed.is_id_wanted:
            self._ledger.named(reservation_id, reader.response_id)

    def _on_response_trailers(self, event: ResponseTrailers, now_s: float) -> Answer:
        self.state = State.DONE
        self._finish(now_s)
        return (ContinueResponseTrailers(),)

    def _take_for_answered(self, now_s: float) -> None:
        """No word came of the response: it was the usual one, or the client left before it; both end alike."""
        if self._reservation_id is not None and self._placed is not None and not self._placed.is_streamed:
            # As at a document's headers. Of an event stream the engine's own events tell the first token.
            self._ledger.first_token(self._reservation_id, now_s=now_s)

    # After the end.

    def _on_nothing(self, event: Event, now_s: float) -> Answer:
        return ()

    def _on_late_response_body(self, event: ResponseBody, now_s: float) -> Answer:
        # A repeated end of stream; where each piece waits for its answer, this one does too.
        return () if self._modes.response is BodyMode.DUPLEX else (ContinueResponseBody(),)

    def _finish(self, now_s: float) -> None:
        reservation_id, self._reservation_id = self._reservation_id, None
        if reservation_id is None:
            return
        reader = self._reader
        usage = None if reader is None else reader.usage
        if usage is not None and usage.prompt_tokens is not None and usage.cached_tokens is not None:
            try:
                self._ledger.used(reservation_id, prompt_tokens=usage.prompt_tokens, cached_tokens=usage.cached_tokens)
            except Exception:
                # As in `_read`; and a reservation must end whatever the engine says of its tokens.
                log.exception("a response's token usage could not be booked")
        self._ledger.finished(reservation_id, now_s=now_s)


def _pieces(body: bytes) -> list[tuple[bytes, bool]]:
    """The body in pieces that a gateway takes, each with whether it is the last; an empty body is one empty piece."""
    if len(body) <= BODY_CHUNK_BYTES_MAX:
        return [(body, True)]
    return [
        (body[start : start + BODY_CHUNK_BYTES_MAX], start + BODY_CHUNK_BYTES_MAX >= len(body))
        for start in range(0, len(body), BODY_CHUNK_BYTES_MAX)
    ]


_Handler = Callable[[Exchange, Any, float], Answer]

_TRANSITIONS: dict[tuple[State, type], _Handler] = {
    (State.AWAIT_HEADERS, RequestHeaders): Exchange._on_request_headers,
    # A gateway may be set to tell of the headers together with the whole body.
    (State.AWAIT_HEADERS, RequestBody): Exchange._on_whole_request,
    # The gateway answered before it asked us (another filter refused the request): nothing is reserved.
    (State.AWAIT_HEADERS, ResponseHeaders): Exchange._on_response_headers,
    (State.BUFFER_BODY, RequestBody): Exchange._on_request_body,
    (State.BUFFER_BODY, RequestTrailers): Exchange._on_trailers_end_body,
    # The same while the body was on its way: too large for the gateway's buffer, or too slow.
    (State.BUFFER_BODY, ResponseHeaders): Exchange._on_response_headers,
    (State.CHOOSING, Placed): Exchange._on_placed,
    (State.CHOOSING, Refused): Exchange._on_refused,
    (State.PLACED, RequestBody): Exchange._on_late_request_body,
    (State.PLACED, RequestTrailers): Exchange._on_late_request_trailers,
    (State.PLACED, ResponseHeaders): Exchange._on_response_headers,
    # A gateway may be set to skip the response's headers.
    (State.PLACED, ResponseBody): Exchange._on_response_body,
    (State.PLACED, ResponseTrailers): Exchange._on_response_trailers,
    # An endpoint may answer before it has read the whole request.
    (State.STREAMING, RequestBody): Exchange._on_late_request_body,
    (State.STREAMING, RequestTrailers): Exchange._on_late_request_trailers,
    (State.STREAMING, ResponseBody): Exchange._on_response_body,
    (State.STREAMING, ResponseTrailers): Exchange._on_response_trailers,
    (State.DONE, RequestBody): Exchange._on_nothing,
    (State.DONE, RequestTrailers): Exchange._on_nothing,
    (State.DONE, ResponseHeaders): Exchange._on_nothing,
    (State.DONE, ResponseBody): Exchange._on_late_response_body,
    (State.DONE, ResponseTrailers): Exchange._on_response_trailers,
}
