"""What `parse_request` reads in requests of every format."""

import gzip
import json
from typing import Any

import pytest

from trimtab_extproc.formats import (
    ChatSource,
    Kind,
    OpaqueSource,
    ParsedRequest,
    TextSource,
    TokenSource,
    parse_request,
)
from trimtab_extproc.formats.fields import OUTPUT_TOKENS_MAX, PROMPTS_MAX
from trimtab_extproc.formats.json_body import SLOW_BYTES_MAX
from trimtab_extproc.formats.parsed_request import SEQUENCES_MAX

JSON = {"content-type": "application/json"}
USER = {"role": "user", "content": "Hello"}


def parse(path: str, body: Any, headers: dict[str, str] = JSON) -> ParsedRequest:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return parse_request("POST", path, headers, raw)


def chat(**fields: Any) -> ParsedRequest:
    return parse("/v1/chat/completions", {"model": "m", "messages": [USER], **fields})


def completion(**fields: Any) -> ParsedRequest:
    return parse("/v1/completions", {"model": "m", "prompt": "Once", **fields})


def shape(parsed: ParsedRequest) -> list[Any]:
    """The sources in short: text, ids, or the kind of source."""
    found: list[Any] = []
    for source in parsed.sources:
        if isinstance(source, TextSource):
            found.append(source.text)
        elif isinstance(source, TokenSource):
            found.append(source.ids.tolist())
        else:
            found.append(type(source).__name__)
    return found


def test_a_chat_keeps_what_its_template_may_read_and_nothing_else() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    parsed = chat(tools=tools, temperature=0.5, reasoning_effort="low", chat_template_kwargs={"a": 1}, stop=["x"])
    (source,) = parsed.sources
    assert isinstance(source, ChatSource)
    assert source.body == {
        "messages": [USER],
        "tools": tools,
        "reasoning_effort": "low",
        "chat_template_kwargs": {"a": 1},
    }
    assert (parsed.kind, parsed.model, parsed.reason, parsed.sequences) == (Kind.CHAT, "m", None, 1)


def test_a_missing_model_is_no_reason_to_refuse() -> None:
    parsed = parse("/v1/chat/completions", {"messages": [USER]})
    assert (parsed.kind, parsed.model) == (Kind.CHAT, None)


@pytest.mark.parametrize(
    ("fields", "sequences"),
    [
        ({}, 1),
        ({"n": None}, 1),
        ({"n": 4}, 4),
        ({"n": "4"}, 4),
        ({"n": 3, "use_beam_search": True}, 3),
        ({"best_of": 5, "n": 2}, 5),
        ({"n": 10**40}, SEQUENCES_MAX),
    ],
)
def test_sequences_are_what_the_engine_will_run(fields: dict[str, Any], sequences: int) -> None:
    assert chat(**fields).sequences == sequences


def test_each_prompt_of_a_list_runs_n_times() -> None:
    parsed = completion(prompt=["a", "b", "c"], n=2)
    assert (shape(parsed), parsed.sequences) == (["a", "b", "c"], 6)


def test_more_prompts_than_the_engine_takes_claim_nothing_but_still_count() -> None:
    parsed = completion(prompt=["a"] * (PROMPTS_MAX + 1))
    assert (shape(parsed), parsed.sequences) == (["OpaqueSource"], PROMPTS_MAX + 1)


@pytest.mark.parametrize(
    ("prompt", "sources"),
    [
        ("Once", ["Once"]),
        (["Once", "upon"], ["Once", "upon"]),
        ([1, 2, 3], [[1, 2, 3]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        ([2**32 - 1], [[2**32 - 1]]),
        ("", None),
        ([], None),
        ([[]], None),
        ([1, "a"], None),
        (["a", [1]], None),
        ([-1], None),
        ([2**32], None),
        ([[1], [-1]], None),
        ({"a": 1}, None),
        (None, None),
        (7, None),
    ],
)
def test_a_completion_takes_text_or_ids_one_or_many(prompt: Any, sources: list[Any] | None) -> None:
    parsed = completion(prompt=prompt)
    if sources is None:
        assert (parsed.kind, parsed.model, parsed.reason) == (Kind.OTHER, "m", "fields")
    else:
        assert (parsed.kind, shape(parsed)) == (Kind.COMPLETIONS, sources)


def test_completions_get_special_tokens_unless_they_decline() -> None:
    (given,), (declined,) = completion().sources, completion(add_special_tokens=False).sources
    assert isinstance(given, TextSource)
    assert isinstance(declined, TextSource)
    assert (given.adds_special_tokens, declined.adds_special_tokens) == (True, False)


@pytest.mark.parametrize(
    ("parsed", "reads"),
    [
        (chat(), True),
        (chat(prompt_logprobs=0), False),
        (chat(prompt_logprobs=None), True),
        (chat(echo=True), False),
        (chat(echo=True, use_beam_search=True), True),
        (completion(echo=True), True),
        (completion(echo=True, logprobs=0), False),
        (completion(logprobs=3), True),
        (completion(prompt_logprobs=1), False),
        (parse("/pooling", {"input": "a", "task": "embed"}), True),
        (parse("/pooling", {"input": "a", "task": "classify"}), True),
        (parse("/pooling", {"input": "a", "task": "token_embed"}), False),
        (parse("/pooling", {"input": "a", "task": "token_classify"}), False),
        (parse("/pooling", {"input": "a"}), False),
        (parse("/v1/embeddings", {"input": "a"}), True),
        (parse("/v1/score", {"queries": "a", "documents": ["b"]}), False),
        (parse("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"prompt_logprobs": 1}}), False),
    ],
)
def test_a_request_that_wants_to_see_its_prompt_reads_no_cache(parsed: ParsedRequest, reads: bool) -> None:
    assert parsed.cache_reads is reads


@pytest.mark.parametrize(
    ("parsed", "claims"),
    [
        (chat(), True),
        (chat(truncate_prompt_tokens=5), False),
        (chat(truncate_prompt_tokens=-1), False),
        (chat(chat_template="{{ messages }}"), False),
        (chat(chat_template_kwargs={"chat_template": "x"}), False),
        (completion(), True),
        (completion(truncate_prompt_tokens=5), False),
        (completion(suffix="z"), False),
        (parse("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": 5}), False),
        (parse("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": None}), True),
        (parse("/v1/responses", {"input": "a", "previous_response_id": "resp_1"}), False),
        (parse("/v1/responses", {"input": "a", "truncation": "auto"}), True),
        (parse("/inference/v1/generate", {"token_ids": [1], "features": {"mm_hashes": {}}}), False),
        (parse("/v1/messages", {"messages": [USER], "chat_template_kwargs": {"chat_template": "x"}}), False),
    ],
)
def test_a_prompt_that_the_engine_changes_claims_no_prefix(parsed: ParsedRequest, claims: bool) -> None:
    assert parsed.reason is None
    assert parsed.claims_prefix is claims


def test_a_template_of_the_request_is_dropped_at_the_door() -> None:
    (source,) = chat(chat_template="{{ 7 * 7 }}").sources
    assert isinstance(source, ChatSource)
    assert "chat_template" not in source.body


def test_embeddings_of_prompts_claim_nothing_and_come_before_the_text() -> None:
    parsed = completion(prompt="text", prompt_embeds=["AAAA", "BBBB"])
    assert shape(parsed) == ["OpaqueSource", "OpaqueSource", "text"]
    assert completion(prompt="", prompt_embeds="AAAA").sources == (OpaqueSource(size_bytes=0),)


@pytest.mark.parametrize(
    ("body", "sources"),
    [
        ({"input": "a"}, ["a"]),
        ({"input": ["a", "b"]}, ["a", "b"]),
        ({"input": [1, 2]}, [[1, 2]]),
        ({"input": [[1, 2], [3]]}, [[1, 2], [3]]),
        ({"messages": [USER]}, ["ChatSource"]),
        ({"messages": [[USER], [USER, USER]]}, ["ChatSource", "ChatSource"]),
        ({"input": [USER]}, ["ChatSource"]),
        ({"input": [[USER], [USER]]}, ["ChatSource", "ChatSource"]),
        ({"input": []}, None),
        ({"input": None}, None),
        ({}, None),
        ({"input": [[1], "a"]}, None),
        ({"input": ["a", 1]}, None),
        ({"input": [1.5]}, None),
        ({"input": [[USER], "a"]}, None),
        ({"messages": [USER, 7]}, None),
        ({"messages": []}, None),
    ],
)
def test_embeddings_take_every_form_of_input(body: dict[str, Any], sources: list[Any] | None) -> None:
    parsed = parse("/v1/embeddings", body)
    if sources is None:
        assert (parsed.kind, parsed.reason) == (Kind.OTHER, "fields")
    else:
        assert (parsed.kind, shape(parsed), parsed.sequences) == (Kind.EMBEDDINGS, sources, len(sources))


def test_a_conversation_to_embed_is_not_asked_to_go_on() -> None:
    (source,) = parse("/v1/embeddings", {"messages": [USER]}).sources
    assert isinstance(source, ChatSource)
    assert source.body == {"messages": [USER], "add_generation_prompt": False}
    assert not source.takes_default_kwargs


@pytest.mark.parametrize(
    ("path", "body", "sequences"),
    [
        ("/v1/rerank", {"query": "q", "documents": ["a", "b", "c"]}, 3),
        ("/score", {"text_1": "q", "text_2": ["a", "b"]}, 2),
        ("/score", {"queries": "q", "items": "a"}, 1),
        ("/score", {}, 1),
    ],
)
def test_scores_are_routed_by_load_with_one_sequence_per_pair(path: str, body: Any, sequences: int) -> None:
    parsed = parse(path, body)
    assert (parsed.kind, parsed.sequences, parsed.claims_prefix) == (Kind.OTHER, sequences, False)
    assert shape(parsed) == ["OpaqueSource"]


def test_a_batch_of_conversations_is_a_prompt_each() -> None:
    parsed = parse("/v1/chat/completions/batch", {"messages": [[USER], [USER, USER]], "model": "m"})
    assert (parsed.kind, shape(parsed), parsed.sequences) == (Kind.CHAT, ["ChatSource", "ChatSource"], 2)


def test_a_stored_response_names_where_it_lives() -> None:
    parsed = parse("/v1/responses", {"input": "go on", "previous_response_id": "resp_1", "stream": True})
    assert (parsed.previous_response_id, parsed.stream, parsed.claims_prefix) == ("resp_1", True, False)
    assert parse_request("GET", "/v1/responses/resp_2", {}, b"").response_id == "resp_2"


def test_the_salt_is_kept_and_an_empty_one_is_refused() -> None:
    assert chat(cache_salt="s").cache_salt == "s"
    assert chat(cache_salt=None).cache_salt is None
    assert chat(cache_salt="").reason == "fields"
    assert chat(cache_salt=7).reason == "fields"


@pytest.mark.parametrize(
    ("parsed", "max_tokens"),
    [
        (chat(), None),
        (chat(max_tokens=5), 5),
        (chat(max_tokens=5, max_completion_tokens=6), 6),
        (chat(max_tokens=-1), None),
        (chat(max_tokens=OUTPUT_TOKENS_MAX + 1), None),
        (completion(), 16),
        (completion(max_tokens=0), 0),
        (parse("/v1/responses", {"input": "a", "max_output_tokens": 9}), 9),
        (parse("/v1/messages", {"messages": [USER], "max_tokens": 9}), 9),
        (parse("/v1/embeddings", {"input": "a"}), 0),
    ],
)
def test_the_limit_on_output_is_the_formats_own(parsed: ParsedRequest, max_tokens: int | None) -> None:
    assert parsed.max_tokens == max_tokens


@pytest.mark.parametrize(
    ("body", "reason", "model"),
    [
        (b"", "empty", None),
        (b"{", "json", None),
        (b"not json", "json", None),
        (b"[]", "json", None),
        (b"null", "json", None),
        (b'"text"', "json", None),
        (b'{"model":"m"} x', "json", None),
        (b'{"model":"m","messages":"hi"}', "fields", "m"),
        (b'{"model":"m","messages":[7]}', "fields", "m"),
        (b'{"model":"m","messages":[]}', "fields", "m"),
        (b'{"model":"m"}', "fields", "m"),
        (b'{"model":7,"messages":[{"role":"user"}]}', "fields", None),
        (b'{"model":"m","messages":[{"role":"user"}],"n":0}', "fields", "m"),
        (b'{"model":"m","messages":[{"role":"user"}],"n":1.5}', "fields", "m"),
        (b'{"model":"m","messages":[{"role":"user"}],"tools":{}}', "fields", "m"),
        (b'{"model":"m","messages":[{"role":"user","content":"\xff"}]}', "json", "m"),
        (b'{"model":"m","messages":[{"role":"user","content":"\xed\xa0\x80"}]}', "surrogate", "m"),
        (b'{"model":"m","messages":[{"role":"user","content":"\\ud83d"}]}', "surrogate", "m"),
        (b'{"model":"\\ud83d","messages":[{"role":"user","content":"a"}]}', "surrogate", None),
        (b'{"model":"m","messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nesting", None),
        (b'{"model":"m","messages":[{"a":' + b'{"a":' * 100_000 + b"1" + b"}" * 100_002, "nesting", None),
        (b'{"model":"m","x":NaN,"messages":[' + b" " * SLOW_BYTES_MAX + b"]}", "json", None),
    ],
)
def test_a_body_that_no_engine_takes_goes_by_load(body: bytes, reason: str, model: str | None) -> None:
    parsed = parse("/v1/chat/completions", body)
    assert parsed == ParsedRequest(model=model, reason=reason)


@pytest.mark.parametrize(
    "body",
    [
        b'{"messages":[{"role":"user","content":"Hello"}],"temperature":NaN,"top_p":-Infinity}',
        b'{"messages":[{"role":"user","content":"Hello"}],"temperature":1e999}',
        b'\xef\xbb\xbf{"messages":[{"role":"user","content":"Hello"}]}',
        '{"messages":[{"role":"user","content":"Hello"}]}'.encode("utf-16"),
        b'{"messages":[{"role":"user","content":"no"}],"messages":[{"role":"user","content":"Hello"}]}',
        b'{"messages":[{"role":"user","content":"no","content":"Hello"}]}',
        b' \n{"messages":[{"role":"user","content":"\\u0048ello"}]}\n',
        b'{"messages":[{"role":"user","content":"Hello"}],"seed":123456789012345678901234567890}',
        b'{"messages":[{"role":"user","content":"Hello"}],"unknown":{"deep":[1,{"a":null}]}}',
    ],
)
def test_what_pythons_json_reads_is_read_as_the_engine_reads_it(body: bytes) -> None:
    (source,) = parse("/v1/chat/completions", body).sources
    assert isinstance(source, ChatSource)
    assert source.body["messages"] == [USER]


@pytest.mark.parametrize(
    ("headers", "reason"),
    [
        ({}, None),
        ({"content-type": "application/json; charset=utf-8"}, None),
        ({"content-type": "APPLICATION/JSON"}, None),
        ({"content-type": "application/vnd.api+json"}, None),
        ({"content-type": "application/json", "content-encoding": "identity"}, None),
        ({"content-type": "application/json", "content-encoding": "gzip"}, "encoding"),
        ({"content-type": "text/plain"}, "content_type"),
        ({"content-type": "multipart/form-data; boundary=x"}, "content_type"),
    ],
)
def test_headers_say_whether_a_body_can_be_read(headers: dict[str, str], reason: str | None) -> None:
    raw = json.dumps({"messages": [USER]}).encode()
    body = gzip.compress(raw) if headers.get("content-encoding") == "gzip" else raw
    assert parse("/v1/chat/completions", body, headers).reason == reason


def test_a_request_without_a_prompt_still_names_its_model() -> None:
    assert parse("/tokenize", {"model": "m", "prompt": "x"}) == ParsedRequest(model="m", reason="path")
    assert parse("/tokenize", b"nothing") == ParsedRequest(reason="path")
    assert parse("/v1/messages/count_tokens", {"model": "m"}) == ParsedRequest(model="m", reason="path")
    form = b'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\nwhisper\r\n--x\r\n\x00\xff\r\n--x--\r\n'
    headers = {"content-type": "multipart/form-data; boundary=x"}
    assert parse("/v1/audio/transcriptions", form, headers) == ParsedRequest(model="whisper", reason="content_type")
    assert parse("/v1/audio/transcriptions", form[:60], headers).model is None


def test_nothing_that_a_client_wrote_shows_in_a_repr() -> None:
    secret = "attack at dawn"
    for parsed in (
        chat(messages=[{"role": "user", "content": secret}], cache_salt=secret),
        completion(prompt=[secret]),
        completion(prompt=[4242, 4243]),
        parse("/v1/messages", {"system": secret, "messages": [USER, {"role": "system", "content": secret}]}),
    ):
        assert secret not in repr(parsed)
        assert "4242" not in repr(parsed)
