"""The exchange's table: what is answered to each event, and that a reservation ends exactly once."""

from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

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
from trimtab_extproc.exchange import Answer, Exchange, ExchangeSettings, State
from trimtab_extproc.formats.response_reader import ResponseReader
from trimtab_extproc.replies import (
    BODY_CHUNK_BYTES_MAX,
    ContinueRequestBody,
    ContinueRequestHeaders,
    ContinueRequestTrailers,
    ContinueResponseBody,
    ContinueResponseHeaders,
    ContinueResponseTrailers,
    Decide,
    Phase,
    Refuse,
    RequestBodyChunk,
    ResponseBodyChunk,
    Route,
)

BUFFERED = BodyModes(request=BodyMode.BUFFERED, response=BodyMode.NONE)
DUPLEX = BodyModes(request=BodyMode.DUPLEX, response=BodyMode.DUPLEX)
DUPLEX_REQUEST_ONLY = BodyModes(request=BodyMode.DUPLEX, response=BodyMode.NONE)
STREAMED = BodyModes(request=BodyMode.STREAMED, response=BodyMode.STREAMED)
HEADERS = {":method": "POST", ":path": "/v1/chat/completions"}
PLACED = Placed(reservation_id=7, endpoint="10.0.0.1:8000", destination="10.0.0.1:8000,10.0.0.2:8000")


class BookKeeper:
    """A ledger that writes down what it is told."""

    def __init__(self) -> None:
        self.first_tokens: list[int] = []
        self.served_by: list[tuple[int, str]] = []
        self.names: list[tuple[int, str]] = []
        self.usage: list[tuple[int, int, int]] = []
        self.finishes: Counter[int] = Counter()

    def first_token(self, reservation_id: int, *, now_s: float) -> None:
        self.first_tokens.append(reservation_id)

    def served(self, reservation_id: int, address: str, *, now_s: float) -> None:
        self.served_by.append((reservation_id, address))

    def named(self, reservation_id: int, response_id: str) -> None:
        self.names.append((reservation_id, response_id))

    def used(self, reservation_id: int, *, prompt_tokens: int, cached_tokens: int) -> None:
        self.usage.append((reservation_id, prompt_tokens, cached_tokens))

    def finished(self, reservation_id: int, *, now_s: float) -> None:
        self.finishes[reservation_id] += 1


class Conversation:
    """One exchange with its ledger."""

    def __init__(self, settings: ExchangeSettings | None = None, budget: BodyBudget | None = None) -> None:
        self.ledger = BookKeeper()
        self.budget = budget or BodyBudget(1 << 30)
        self.exchange = Exchange(ledger=self.ledger, settings=settings or ExchangeSettings(), budget=self.budget)

    def tell(self, event: Event) -> Answer:
        return self.exchange.receive(event, now_s=0.0)

    def decide(self, *events: Event) -> Decide:
        """Tell the events; the last must ask for a decision."""
        for event in events:
            answer = self.tell(event)
        assert isinstance(answer, Decide)
        return answer

    def placed(self, modes: BodyModes = BUFFERED, placed: Placed = PLACED) -> "Conversation":
        """As far as an endpoint being chosen."""
        self.tell(RequestHeaders(headers=HEADERS, end_of_stream=False, modes=modes))
        if modes.request is not BodyMode.STREAMED:
            self.tell(RequestBody(body=b"{}", end_of_stream=True))
        self.tell(placed)
        return self

    def route(self, placed: Placed) -> Route:
        """The answer to a choice that has no other."""
        answer = self.tell(placed)
        assert not isinstance(answer, Decide)
        (reply,) = answer
        assert isinstance(reply, Route)
        return reply


def route(phase: Phase, content_length: int | None = None) -> Route:
    return Route(
        phase=phase,
        destination=PLACED.destination,
        rank=None,
        is_rank_removed=False,
        content_length=content_length,
        is_route_cache_cleared=False,
    )


def test_a_buffered_body_is_waited_for_and_the_choice_answers_it() -> None:
    talk = Conversation()
    assert talk.tell(RequestHeaders(headers=HEADERS, end_of_stream=False, modes=BUFFERED)) == (
        ContinueRequestHeaders(is_stripped=False),
    )
    decide = talk.decide(RequestBody(body=b"hello", end_of_stream=True))
    assert (decide.body, decide.headers) == (b"hello", HEADERS)
    assert talk.tell(PLACED) == [route(Phase.BODY)]


def whole(*, is_usual_untold: bool = True) -> RequestBody:
    """A request that is shown at once."""
    head = RequestHeaders(headers=HEADERS, end_of_stream=False, modes=BUFFERED, is_usual_untold=is_usual_untold)
    return RequestBody(body=b"hello", end_of_stream=True, head=head)


def test_a_request_that_is_shown_whole_is_chosen_for_at_once() -> None:
    talk = Conversation()
    decide = talk.decide(whole(is_usual_untold=False))
    assert (decide.body, decide.headers) == (b"hello", HEADERS)
    assert talk.tell(PLACED) == [route(Phase.BODY)]
    assert talk.budget.held_bytes == 0


@pytest.mark.parametrize("is_streamed", [False, True])
def test_no_word_of_the_usual_response_is_as_good_as_its_headers(is_streamed: bool) -> None:
    """A document that was answered is a first token; of an event stream the engine's own events tell it."""
    talk = Conversation()
    talk.decide(whole())
    reply = talk.route(msgspec.structs.replace(PLACED, is_streamed=is_streamed))
    assert reply == msgspec.structs.replace(route(Phase.BODY), expected="10.0.0.1:8000")
    talk.exchange.close(now_s=1.0)
    talk.exchange.close(now_s=2.0)
    assert talk.ledger.first_tokens == ([] if is_streamed else [7])
    assert talk.ledger.finishes == {7: 1}


def test_what_is_told_of_an_unusual_response_counts_and_nothing_is_taken_for_granted() -> None:
    talk = Conversation()
    talk.decide(whole())
    talk.tell(PLACED)
    talk.tell(ResponseHeaders(status=503, content_type="application/json", served="10.0.0.2:8000"))
    talk.exchange.close(now_s=1.0)
    assert talk.ledger.served_by == [(7, "10.0.0.2:8000")]
    assert talk.ledger.first_tokens == []
    assert talk.ledger.finishes == {7: 1}


@pytest.mark.parametrize(
    ("wanted", "settings"),
    [
        ({"is_first_token_wanted": True}, ExchangeSettings()),
        ({"is_id_wanted": True}, ExchangeSettings()),
        ({}, ExchangeSettings(is_conformance_test=True)),
    ],
)
def test_a_response_that_tells_us_something_is_never_the_usual(
    wanted: dict[str, bool], settings: ExchangeSettings
) -> None:
    talk = Conversation(settings)
    talk.decide(whole())
    assert talk.route(msgspec.structs.replace(PLACED, **wanted)).expected is None
    talk.exchange.close(now_s=1.0)
    assert talk.ledger.first_tokens == []


def test_a_client_that_leaves_before_the_choice_was_not_answered() -> None:
    talk = Conversation()
    talk.decide(whole())
    talk.exchange.close(now_s=1.0)
    assert (talk.ledger.first_tokens, talk.ledger.finishes) == ([], {})
    assert talk.budget.held_bytes == 0


def test_a_buffered_body_is_whole_even_without_end_of_stream() -> None:
    talk = Conversation()
    headers = RequestHeaders(headers=HEADERS, end_of_stream=False, modes=BUFFERED)
    decide = talk.decide(headers, RequestBody(body=b"hello", end_of_stream=False))
    assert decide.body == b"hello"
    talk.tell(PLACED)
    assert talk.tell(RequestTrailers()) == (ContinueRequestTrailers(),)


@pytest.mark.parametrize(
    ("name", "value"), [("x-gateway-destination-endpoint", "169.254.169.254:80"), ("x-data-parallel-rank", "3")]
)
def test_the_clients_own_choice_is_taken_away_at_the_door(name: str, value: str) -> None:
    talk = Conversation()
    headers = {**HEADERS, name: value}
    assert talk.tell(RequestHeaders(headers=headers, end_of_stream=False, modes=BUFFERED)) == (
        ContinueRequestHeaders(is_stripped=True),
    )


def test_a_client_does_not_choose_the_rank_behind_an_endpoint_without_ranks() -> None:
    talk = Conversation()
    headers = {**HEADERS, "x-data-parallel-rank": "3"}
    talk.decide(RequestHeaders(headers=headers, end_of_stream=True, modes=DUPLEX))
    assert talk.tell(PLACED) == [msgspec.structs.replace(route(Phase.HEADERS), is_rank_removed=True)]


def test_a_streamed_body_is_gathered_and_follows_the_headers() -> None:
    talk = Conversation()
    assert talk.tell(RequestHeaders(headers=HEADERS, end_of_stream=False, modes=DUPLEX)) == ()
    assert talk.tell(RequestBody(body=b"hel", end_of_stream=False)) == ()
    assert talk.decide(RequestBody(body=b"lo", end_of_stream=True)).body == b"hello"
    assert talk.tell(PLACED) == [
        route(Phase.HEADERS, content_length=5),
        RequestBodyChunk(body=b"hello", end_of_stream=True),
    ]


def test_a_long_streamed_body_goes_on_in_pieces_that_gateways_take() -> None:
    talk = Conversation()
    body = bytes(range(256)) * 1_000
    talk.decide(
        RequestHeaders(headers=HEADERS, end_of_stream=False, modes=DUPLEX), RequestBody(body=body, end_of_stream=True)
    )
    answer = talk.tell(PLACED)
    assert not isinstance(answer, Decide)
    chunks = [reply for reply in answer if isinstance(reply, RequestBodyChunk)]
    assert b"".join(chunk.body for chunk in chunks) == body
    assert max(len(chunk.body) for chunk in chunks) == BODY_CHUNK_BYTES_MAX
    assert [chunk.end_of_stream for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


@pytest.mark.parametrize("modes", [BUFFERED, DUPLEX, STREAMED, None])
def test_a_request_without_body_is_placed_at_its_headers(modes: BodyModes | None) -> None:
    talk = Conversation()
    decide = talk.decide(RequestHeaders(headers={":method": "GET"}, end_of_stream=True, modes=modes))
    assert decide.is_body_known
    assert talk.tell(PLACED) == [route(Phase.HEADERS)]


def test_an_empty_body_is_not_the_same_as_none() -> None:
    talk = Conversation()
    talk.decide(
        RequestHeaders(headers=HEADERS, end_of_stream=False, modes=DUPLEX), RequestBody(body=b"", end_of_stream=True)
    )
    assert talk.tell(PLACED) == [
        route(Phase.HEADERS, content_length=0),
        RequestBodyChunk(body=b"", end_of_stream=True),
    ]


def test_a_gateway_that_does_not_say_its_modes_is_taken_for_a_streaming_one() -> None:
    talk = Conversation()
    assert talk.tell(RequestHeaders(headers=HEADERS, end_of_stream=False)) == ()
    talk.decide(RequestBody(body=b"{}", end_of_stream=True))
    assert talk.tell(PLACED) == [
        route(Phase.HEADERS, content_length=2),
        RequestBodyChunk(body=b"{}", end_of_stream=True),
    ]
    talk.tell(ResponseHeaders(status=200))
    assert talk.tell(ResponseBody(body=b"x", end_of_stream=True)) == [ResponseBodyChunk(body=b"x", end_of_stream=True)]


def test_a_body_that_is_never_shown_is_not_waited_for() -> None:
    talk = Conversation()
    decide = talk.decide(RequestHeaders(headers=HEADERS, end_of_stream=False, modes=STREAMED))
    assert not decide.is_body_known
    assert talk.tell(PLACED) == [route(Phase.HEADERS)]
    assert talk.tell(RequestBody(body=b"x", end_of_stream=True)) == (ContinueRequestBody(),)


def test_a_repeated_end_of_a_streamed_body_is_let_pass_in_silence() -> None:
    talk = Conversation().placed(DUPLEX)
    assert talk.tell(RequestBody(body=b"{}", end_of_stream=True)) == ()
    assert talk.tell(RequestBody(body=b"", end_of_stream=True)) == ()


def test_trailers_end_a_streamed_body_and_are_answered_behind_it() -> None:
    talk = Conversation()
    decide = talk.decide(
        RequestHeaders(headers=HEADERS, end_of_stream=False, modes=DUPLEX),
        RequestBody(body=b"hello", end_of_stream=False),
        RequestTrailers(),
    )
    assert decide.body == b"hello"
    assert talk.tell(PLACED) == [
        route(Phase.HEADERS, content_length=5),
        RequestBodyChunk(body=b"hello", end_of_stream=False),
        ContinueRequestTrailers(),
    ]


def test_trailers_without_a_body_are_placed_by_the_gateways_metadata_when_buffered() -> None:
    talk = Conversation()
    talk.decide(RequestHeaders(headers=HEADERS, end_of_stream=False, modes=BUFFERED), RequestTrailers())
    assert talk.tell(PLACED) == [route(Phase.TRAILERS)]


def test_a_refusal_ends_the_exchange_and_reserves_nothing() -> None:
    talk = Conversation()
    talk.decide(RequestHeaders(headers=HEADERS, end_of_stream=True, modes=BUFFERED))
    refused = Refused(status=429, reason="endpoints_full", message="full", retry_after_s=2.0)
    assert talk.tell(refused) == (Refuse(status=429, reason="endpoints_full", message="full", retry_after_s=2.0),)
    talk.exchange.close(now_s=1.0)
    assert not talk.ledger.finishes


def test_a_body_over_the_limit_is_refused_while_it_comes() -> None:
    talk = Conversation(ExchangeSettings(body_bytes_max=10))
    talk.tell(RequestHeaders(headers=HEADERS, end_of_stream=False, modes=DUPLEX))
    assert talk.tell(RequestBody(body=b"x" * 10, end_of_stream=False)) == ()
    answer = talk.tell(RequestBody(body=b"x", end_of_stream=False))
    assert isinstance(answer, tuple)
    assert isinstance(answer[0], Refuse)
    assert answer[0].status == 413
    assert talk.tell(RequestBody(body=b"x", end_of_stream=True)) == ()


def test_bodies_that_leave_no_room_are_refused_and_what_is_done_makes_room() -> None:
    budget = BodyBudget(10)
    first, second = Conversation(budget=budget), Conversation(budget=budget)
    for talk in (first, second):
        talk.tell(RequestHeaders(headers=HEADERS, end_of_stream=False, modes=DUPLEX))
    assert first.tell(RequestBody(body=b"x" * 8, end_of_stream=False)) == ()
    answer = second.tell(RequestBody(body=b"x" * 3, end_of_stream=False))
    assert isinstance(answer, tuple)
    assert isinstance(answer[0], Refuse)
    assert (answer[0].status, answer[0].reason) == (429, "bodies_full")
    first.decide(RequestBody(body=b"", end_of_stream=True))
    assert budget.held_bytes == 8
    first.tell(PLACED)
    assert budget.held_bytes == 0


def test_a_response_that_cannot_be_read_still_reaches_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> bool:
        raise RuntimeError("a bug")

    monkeypatch.setattr(ResponseReader, "feed", broken)
    talk = Conversation().placed(DUPLEX)
    talk.tell(ResponseHeaders(status=200))
    assert talk.tell(ResponseBody(body=b"x", end_of_stream=True)) == [ResponseBodyChunk(body=b"x", end_of_stream=True)]
    assert talk.ledger.finishes == {7: 1}


def test_the_endpoint_that_served_is_booked() -> None:
    talk = Conversation().placed()
    talk.tell(ResponseHeaders(status=200, served="10.0.0.2:8000"))
    assert talk.ledger.served_by == [(7, "10.0.0.2:8000")]


def test_the_endpoint_that_served_is_shown_in_conformance_tests_only() -> None:
    shown = Conversation(ExchangeSettings(is_conformance_test=True)).placed()
    assert shown.tell(ResponseHeaders(status=200, served="10.0.0.2:8000")) == (
        ContinueResponseHeaders(served="10.0.0.2:8000", is_body_asked=False),
    )
    hidden = Conversation().placed()
    assert hidden.tell(ResponseHeaders(status=200, served="10.0.0.2:8000")) == (
        ContinueResponseHeaders(served=None, is_body_asked=False),
    )


@pytest.mark.parametrize(
    ("placed", "is_allowed", "status", "is_asked"),
    [
        (Placed(reservation_id=7, endpoint="e", destination="e", is_first_token_wanted=True), True, 200, True),
        (Placed(reservation_id=7, endpoint="e", destination="e", is_id_wanted=True), True, 200, True),
        (Placed(reservation_id=7, endpoint="e", destination="e", is_id_wanted=True), False, 200, False),
        (Placed(reservation_id=7, endpoint="e", destination="e", is_id_wanted=True), True, 500, False),
        (PLACED, True, 200, False),
    ],
)
def test_the_response_body_is_asked_for_only_where_it_is_needed_and_allowed(
    placed: Placed, is_allowed: bool, status: int, is_asked: bool
) -> None:
    talk = Conversation(ExchangeSettings(is_mode_override_allowed=is_allowed)).placed(placed=placed)
    answer = talk.tell(ResponseHeaders(status=status, content_type="text/event-stream"))
    assert answer == (ContinueResponseHeaders(served=None, is_body_asked=is_asked),)


def test_a_body_that_was_asked_for_tells_the_first_token_the_id_and_the_usage() -> None:
    placed = Placed(reservation_id=7, endpoint="e", destination="e", is_id_wanted=True)
    talk = Conversation(ExchangeSettings(is_mode_override_allowed=True)).placed(placed=placed)
    talk.tell(ResponseHeaders(status=200, content_type="text/event-stream"))
    created = b'data: {"type":"response.created","response":{"id":"resp_1"}}\n\n'
    assert talk.tell(ResponseBody(body=created, end_of_stream=False)) == (ContinueResponseBody(),)
    assert (talk.ledger.names, talk.ledger.first_tokens) == ([(7, "resp_1")], [])
    talk.tell(ResponseBody(body=b'data: {"type":"response.output_text.delta","delta":"hi"}\n\n', end_of_stream=False))
    assert talk.ledger.first_tokens == [7]
    done = (
        b'data: {"type":"response.completed","response":{"id":"resp_1","usage":'
        b'{"input_tokens":96,"input_tokens_details":{"cached_tokens":64}}}}\n\n'
    )
    talk.tell(ResponseBody(body=done, end_of_stream=True))
    assert talk.ledger.usage == [(7, 96, 64)]
    assert talk.ledger.finishes == {7: 1}


def test_an_id_that_nobody_will_name_is_not_kept() -> None:
    talk = Conversation().placed(DUPLEX)
    talk.tell(ResponseHeaders(status=200, content_type="application/json"))
    talk.tell(ResponseBody(body=b'{"id":"chatcmpl-1"}', end_of_stream=True))
    assert talk.ledger.names == []


def test_response_bodies_that_stream_through_us_are_echoed_whole() -> None:
    talk = Conversation().placed(DUPLEX)
    talk.tell(ResponseHeaders(status=200, content_type="text/event-stream"))
    body = b"x" * (BODY_CHUNK_BYTES_MAX + 1)
    answer = talk.tell(ResponseBody(body=body, end_of_stream=False))
    assert answer == [
        ResponseBodyChunk(body=body[:BODY_CHUNK_BYTES_MAX], end_of_stream=False),
        ResponseBodyChunk(body=b"x", end_of_stream=False),
    ]
    assert talk.tell(ResponseTrailers()) == (ContinueResponseTrailers(),)
    assert talk.ledger.finishes == {7: 1}


def test_the_headers_of_an_event_stream_are_no_first_token_but_those_of_a_document_are() -> None:
    stream = Conversation().placed()
    stream.tell(ResponseHeaders(status=200, content_type="text/event-stream"))
    assert stream.ledger.first_tokens == []
    document = Conversation().placed()
    document.tell(ResponseHeaders(status=200, content_type="application/json"))
    assert document.ledger.first_tokens == [7]


def test_an_error_is_no_first_token() -> None:
    for modes in (BUFFERED, DUPLEX):
        talk = Conversation().placed(modes)
        talk.tell(ResponseHeaders(status=503, content_type="application/json"))
        if modes is DUPLEX:
            talk.tell(ResponseBody(body=b"{}", end_of_stream=True))
        assert talk.ledger.first_tokens == []


def test_the_response_body_may_come_without_its_headers() -> None:
    talk = Conversation().placed(BodyModes(request=BodyMode.BUFFERED, response=BodyMode.STREAMED))
    assert talk.tell(ResponseBody(body=b"x", end_of_stream=True)) == (ContinueResponseBody(),)
    assert talk.ledger.finishes == {7: 1}


def test_the_gateways_own_answer_passes_before_and_while_we_wait_for_the_request() -> None:
    untouched = Conversation()
    assert untouched.tell(ResponseHeaders(status=401, modes=BUFFERED)) == (
        ContinueResponseHeaders(served=None, is_body_asked=False),
    )
    waiting = Conversation()
    waiting.tell(RequestHeaders(headers=HEADERS, end_of_stream=False, modes=BUFFERED))
    assert waiting.tell(ResponseHeaders(status=413)) == (ContinueResponseHeaders(served=None, is_body_asked=False),)


def test_a_stream_that_ends_at_any_point_finishes_its_reservation_once() -> None:
    events: list[Event] = [
        ResponseHeaders(status=200, content_type="text/event-stream"),
        ResponseBody(body=b"data: {}\n\n", end_of_stream=False),
        ResponseBody(body=b"", end_of_stream=True),
        ResponseTrailers(),
    ]
    for count in range(len(events) + 1):
        talk = Conversation().placed(DUPLEX)
        for event in events[:count]:
            talk.tell(event)
        talk.exchange.close(now_s=1.0)
        talk.exchange.close(now_s=2.0)
        assert talk.ledger.finishes == {7: 1}


def test_a_placement_that_comes_at_the_wrong_time_is_finished_all_the_same() -> None:
    talk = Conversation()
    with pytest.raises(ProtocolError):
        talk.tell(PLACED)
    talk.exchange.close(now_s=1.0)
    assert talk.ledger.finishes == {7: 1}


@pytest.mark.parametrize(
    "events",
    [
        (RequestBody(body=b"", end_of_stream=True),),
        (RequestHeaders(headers=HEADERS, end_of_stream=True), RequestBody(body=b"", end_of_stream=True)),
        (
            RequestHeaders(headers=HEADERS, end_of_stream=False),
            RequestHeaders(headers=HEADERS, end_of_stream=False),
        ),
        (RequestHeaders(headers=HEADERS, end_of_stream=False), ResponseBody(body=b"", end_of_stream=True)),
    ],
)
def test_what_the_table_does_not_list_is_a_protocol_error(events: tuple[Event, ...]) -> None:
    talk = Conversation()
    *before, last = events
    for event in before:
        talk.tell(event)
    with pytest.raises(ProtocolError):
        talk.tell(last)


BODIES = st.binary(max_size=40) | st.sampled_from(
    [b'data: {"choices":[{"delta":{"content":"x"}}]}\n\n', b"data: [DONE]\n\n", b'{"usage":{"prompt_tokens":3}}']
)
MODES = st.none() | st.builds(BodyModes, request=st.sampled_from(BodyMode), response=st.sampled_from(BodyMode))
EVENTS = st.one_of(
    st.builds(
        RequestHeaders,
        headers=st.dictionaries(st.sampled_from([":path", ":method", "x-request-id"]), st.text(max_size=8)),
        end_of_stream=st.booleans(),
        modes=MODES,
    ),
    st.builds(RequestBody, body=BODIES, end_of_stream=st.booleans()),
    st.builds(
        RequestBody,
        body=BODIES,
        end_of_stream=st.booleans(),
        head=st.builds(
            RequestHeaders,
            headers=st.just(HEADERS),
            end_of_stream=st.just(False),
            modes=MODES,
            is_usual_untold=st.booleans(),
        ),
    ),
    st.just(RequestTrailers()),
    st.builds(
        ResponseHeaders,
        status=st.sampled_from([0, 200, 404, 503]),
        content_type=st.sampled_from(["", "text/event-stream", "application/json"]),
        end_of_stream=st.booleans(),
        served=st.none() | st.just("10.0.0.2:8000"),
        modes=MODES,
    ),
    st.builds(ResponseBody, body=BODIES, end_of_stream=st.booleans()),
    st.just(ResponseTrailers()),
)


@given(st.lists(EVENTS, max_size=12), st.booleans(), st.booleans())
def test_whatever_the_gateway_sends_no_reservation_is_left_and_none_ends_twice(
    events: list[Event], is_refused: bool, is_allowed: bool
) -> None:
    talk = Conversation(ExchangeSettings(is_mode_override_allowed=is_allowed, body_bytes_max=60))
    opened = 0
    try:
        for event in events:
            answer = talk.tell(event)
            while isinstance(answer, Decide):
                assert talk.exchange.state is State.CHOOSING
                if is_refused:
                    answer = talk.tell(Refused(status=503, reason="no_endpoints", message="none"))
                else:
                    opened += 1
                    answer = talk.tell(PLACED)
    except ProtocolError:
        pass
    talk.exchange.close(now_s=1.0)
    assert talk.ledger.finishes.total() == opened <= 1
    assert talk.budget.held_bytes == 0
    assert len(talk.ledger.first_tokens) <= opened


def test_a_reservation_ends_and_the_answer_goes_on_even_if_the_usage_cannot_be_booked(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(self: BookKeeper, reservation_id: int, *, prompt_tokens: int, cached_tokens: int) -> None:
        raise ValueError("no such number")

    monkeypatch.setattr(BookKeeper, "used", refuse)
    talk = Conversation().placed(DUPLEX)
    talk.tell(ResponseHeaders(status=200, content_type="application/json", end_of_stream=False))
    body = b'{"usage": {"prompt_tokens": 5, "prompt_tokens_details": {"cached_tokens": 3}}}'
    assert talk.tell(ResponseBody(body=body, end_of_stream=True)) == [ResponseBodyChunk(body=body, end_of_stream=True)]
    assert list(talk.ledger.finishes.values()) == [1]
    assert "could not be booked" in caplog.text
