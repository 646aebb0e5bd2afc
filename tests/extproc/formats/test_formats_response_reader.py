"""Response bodies, as vLLM 0.32.0 sent them (`tests/data/formats/bodies`) and as they may arrive."""

import json
import tracemalloc
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab_extproc.formats import ResponseReader
from trimtab_extproc.formats.head_and_tail import HEAD_BYTES, TAIL_BYTES, HeadAndTail

BODIES = Path(__file__).parents[2] / "data" / "formats" / "bodies"
STREAM = "text/event-stream; charset=utf-8"
WHOLE = "application/json"
RECORDED = sorted(file.name for file in BODIES.iterdir())


def content_type(name: str) -> str:
    return STREAM if name.endswith(".sse") else WHOLE


def read(body: bytes, kind: str, cuts: list[int] | None = None) -> ResponseReader:
    reader = ResponseReader(kind)
    places = [0, *sorted(cuts or []), len(body)]
    for start, end in pairwise(places):
        reader.feed(body[start:end], end=False)
    reader.feed(b"", end=True)
    return reader


def facts(reader: ResponseReader) -> tuple[object, ...]:
    usage = reader.usage
    return (
        reader.first_token,
        reader.response_id,
        usage.prompt_tokens,
        usage.cached_tokens,
        usage.completion_tokens,
    )


@pytest.mark.parametrize(
    ("name", "id_start", "prompt_tokens", "completion_tokens"),
    [
        ("chat_stream.sse", "chatcmpl-", True, 6),
        ("chat_stream_usage.sse", "chatcmpl-", True, 6),
        ("chat_stream_token_ids.sse", "chatcmpl-", True, 3),
        ("chat_json.json", "chatcmpl-", True, 6),
        ("chat_json_logprobs.json", "chatcmpl-", True, 200),
        ("completion_stream.sse", "cmpl-", True, 6),
        ("completion_json.json", "cmpl-", True, 6),
        ("messages_stream.sse", "chatcmpl-", True, 6),
        ("messages_json.json", "chatcmpl-", True, 6),
        ("responses_stream.sse", "resp_", True, 6),
        ("responses_json.json", "resp_", True, 6),
        ("responses_background.json", "resp_", False, None),
    ],
)
def test_a_recorded_body_tells_its_id_and_its_tokens(
    name: str, id_start: str, prompt_tokens: bool, completion_tokens: int | None
) -> None:
    reader = read((BODIES / name).read_bytes(), content_type(name))
    assert reader.first_token
    assert reader.response_id is not None
    assert reader.response_id.startswith(id_start)
    assert (reader.usage.prompt_tokens is not None) is prompt_tokens
    assert reader.usage.completion_tokens == completion_tokens


def test_every_recorded_body_is_tried() -> None:
    assert len(RECORDED) == 12


@settings(deadline=None)
@given(name=st.sampled_from(RECORDED), data=st.data())
def test_where_a_body_is_cut_makes_no_difference(name: str, data: st.DataObject) -> None:
    body = (BODIES / name).read_bytes()
    cuts = data.draw(st.lists(st.integers(0, len(body)), max_size=12))
    assert facts(read(body, content_type(name), cuts)) == facts(read(body, content_type(name)))


@pytest.mark.parametrize("name", [name for name in RECORDED if (BODIES / name).stat().st_size < 8000])
def test_byte_by_byte_is_no_different(name: str) -> None:
    body = (BODIES / name).read_bytes()
    assert facts(read(body, content_type(name), list(range(1, len(body))))) == facts(read(body, content_type(name)))


def test_the_tokens_of_messages_count_the_cached_ones_in() -> None:
    body = {"id": "m", "usage": {"input_tokens": 4, "cache_read_input_tokens": 96, "output_tokens": 2}}
    assert facts(read(json.dumps(body).encode(), WHOLE)) == (True, "m", 100, 96, 2)


def test_cached_tokens_are_read_in_each_formats_words() -> None:
    chat = {"id": "c", "usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 8}}}
    response = {"id": "r", "usage": {"input_tokens": 9, "input_tokens_details": {"cached_tokens": 8}}}
    assert facts(read(json.dumps(chat).encode(), WHOLE)) == (True, "c", 9, 8, None)
    assert facts(read(json.dumps(response).encode(), WHOLE)) == (True, "r", 9, 8, None)


def test_a_later_event_takes_no_number_back() -> None:
    stream = (
        b'data: {"id":"a","choices":[{"delta":{}}],"usage":{"prompt_tokens":50,"completion_tokens":3}}\n\n'
        b'data: {"id":"a","choices":[],"usage":{"prompt_tokens":0,"completion_tokens":7}}\n\n'
        b'data: {"id":"a","choices":[],"usage":null}\n\ndata: [DONE]\n\n'
    )
    assert facts(read(stream, STREAM)) == (True, "a", 50, None, 7)


FIRST_TOKENS = [
    (b'data: {"id":"a","choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n', True),
    (b'data: {"id":"a","choices":[{"index":0,"text":" x"}]}\n\n', True),
    (b'event: message_start\ndata: {"type":"message_start","message":{"id":"m"}}\n\n', True),
    (b'event: response.output_item.added\ndata: {"type":"response.output_item.added"}\n\n', True),
    (b'data: {"text":"x","meta_info":{}}\n\n', True),
    (b'data:{"id":"a","choices":[{}]}\n', True),
    (b'event: response.created\ndata: {"response":{"id":"resp_1"},"type":"response.created"}\n\n', False),
    (b'event: response.in_progress\ndata: {"response":{"id":"resp_1"},"type":"response.in_progress"}\n\n', False),
    (b'event: ping\ndata: {"type": "ping"}\n\n', False),
    (b'event: error\ndata: {"type":"error","message":"no","error":{"message":"no"}}\n\n', False),
    (b'data: {"error":{"message":"no","type":"BadRequestError"}}\n\ndata: [DONE]\n\n', False),
    (b"data: [DONE]\n\n", False),
    (b'data: {"id":"a","choices":[]}\n\n', False),
    (b": keep-alive\n\n", False),
    (b"event: response.created\n", False),
    (b"\n\n\n", False),
    (b"", False),
]


@pytest.mark.parametrize(("stream", "is_first"), FIRST_TOKENS)
def test_the_first_token_shows_with_the_first_event_made_from_output(stream: bytes, is_first: bool) -> None:
    assert ResponseReader(STREAM).feed(stream) is is_first


def test_the_first_token_is_reported_once_and_at_its_piece() -> None:
    reader = ResponseReader(STREAM)
    event = b'data: {"id":"a","choices":[{"index":0}]}\n\n'
    assert [reader.feed(piece) for piece in (event[:10], event[10:], event)] == [False, True, False]


def test_an_id_comes_before_the_first_token_where_the_engine_sends_it_so() -> None:
    reader = ResponseReader(STREAM)
    reader.feed(
        b'event: response.created\ndata: {"response":{"id":"resp_9","usage":null},"type":"response.created"}\n\n'
    )
    assert (reader.response_id, reader.first_token) == ("resp_9", False)


@pytest.mark.parametrize("filler", [HEAD_BYTES, TAIL_BYTES, 200_000])
def test_an_event_too_long_to_keep_still_tells_its_kind_its_id_and_its_usage(filler: int) -> None:
    text = "x" * filler
    created = f'event: response.created\ndata: {{"response":{{"id":"resp_9","instructions":"{text}"}}}}\n\n'
    done = (
        f'event: response.completed\ndata: {{"response":{{"id":"resp_9","output":"{text}",'
        f'"usage":{{"input_tokens":5,"output_tokens":6}}}}}}\n\n'
    )
    reader = ResponseReader(STREAM)
    assert reader.feed(created.encode()) is False
    assert reader.response_id == "resp_9"
    assert reader.feed(done.encode()) is True
    assert (reader.usage.prompt_tokens, reader.usage.completion_tokens) == (5, 6)


@pytest.mark.parametrize("filler", [10, HEAD_BYTES, TAIL_BYTES, 200_000])
def test_a_body_too_long_to_keep_still_tells_its_id_and_its_usage(filler: int) -> None:
    text = 'say "usage":{"prompt_tokens":1} ' * (filler // 32 + 1)
    body = {"id": "chatcmpl-1", "choices": [{"message": {"content": text}}], "usage": {"prompt_tokens": 77}}
    reader = read(json.dumps(body).encode(), WHOLE)
    assert (reader.response_id, reader.usage.prompt_tokens) == ("chatcmpl-1", 77)


def test_memory_is_bounded_whatever_comes() -> None:
    reader = ResponseReader(STREAM)
    piece = b"x" * 65_536
    tracemalloc.start()
    for _ in range(200):
        reader.feed(piece)
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert used < 4 * (HEAD_BYTES + TAIL_BYTES)


def test_head_and_tail_never_hold_more_than_they_say() -> None:
    kept = HeadAndTail()
    for size in (1, HEAD_BYTES, 5, TAIL_BYTES * 3, 7):
        kept.add(bytes(size))
        assert len(kept.kept) <= HEAD_BYTES + TAIL_BYTES
        assert kept.is_whole is (kept.size <= HEAD_BYTES + TAIL_BYTES)


@pytest.mark.parametrize("encoding", ["gzip", "br", "zstd"])
def test_a_packed_body_tells_its_first_byte_only(encoding: str) -> None:
    reader = ResponseReader(STREAM, encoding)
    assert reader.feed(b"\x1f\x8b") is True
    assert facts(reader) == (True, None, None, None, None)


def test_a_body_in_one_piece_shows_its_first_token_with_its_first_byte() -> None:
    reader = ResponseReader(WHOLE)
    assert [reader.feed(piece) for piece in (b"", b" \n", b'{"id":', b'"a"}')] == [False, False, True, False]


@settings(deadline=None)
@given(st.lists(st.binary(max_size=300), max_size=20), st.sampled_from([STREAM, WHOLE, "", "text/plain", "\xff"]))
def test_no_body_makes_it_raise(pieces: list[bytes], kind: str) -> None:
    reader = ResponseReader(kind)
    for piece in pieces:
        reader.feed(piece)
    reader.feed(b"", end=True)


FIELDS = st.sampled_from(["id", "type", "choices", "error", "response", "message", "usage", "input_tokens", "x"])
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(FIELDS, inner, max_size=4),
    max_leaves=12,
)


@settings(deadline=None)
@given(st.lists(st.dictionaries(FIELDS, JSON_VALUES, max_size=6), max_size=4))
def test_no_event_makes_it_raise(events: list[dict[str, object]]) -> None:
    stream = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)
    read(stream, STREAM)
    for event in events:
        read(json.dumps(event).encode(), WHOLE)


@pytest.mark.parametrize("kind", [WHOLE, STREAM])
@pytest.mark.parametrize("count", ["-5", "99999999999999999999", "1e400", "NaN", "true", "[]"])
def test_token_counts_that_no_engine_can_mean_are_none(kind: str, count: str) -> None:
    details = f'"prompt_tokens_details": {{"cached_tokens": {count}}}'
    payload = f'{{"id": "r", "choices": [{{}}], "usage": {{"prompt_tokens": {count}, {details}}}}}'
    reader = read((f"data: {payload}\n\n" if kind == STREAM else payload).encode(), kind)
    assert facts(reader) == (True, "r", None, None, None)
