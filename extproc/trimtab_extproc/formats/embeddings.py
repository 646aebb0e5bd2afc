"""Embeddings and the other pooling tasks: text, token ids or conversations, in every form that the engine takes.

The one rule: a pooling task that looks at each token makes the engine compute each token, so it reads no cache.
"""

from typing import Any

import msgspec

from trimtab_extproc.formats.chat import brings_template
from trimtab_extproc.formats.completions import prompt_sources
from trimtab_extproc.formats.fields import SharedBody, bounded, salt_of
from trimtab_extproc.formats.json_body import NotUnderstood, decode_body
from trimtab_extproc.formats.parsed_request import (
    SEQUENCES_MAX,
    ChatSource,
    JsonObject,
    Kind,
    OpaqueSource,
    ParsedRequest,
    Source,
)


class PoolingBody(SharedBody, kw_only=True):
    """`POST /v1/embeddings` and `POST /pooling`: either `input` or `messages`; both may hold conversations."""

    input: Any = None
    messages: Any = None
    task: str | None = None
    truncate_prompt_tokens: Any = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: Any = None
    chat_template_kwargs: dict[str, Any] | None = None


class ScoreBody(SharedBody, kw_only=True):
    """`/score` and `/rerank`: the second list gives the number of engine requests."""

    documents: Any = None
    items: Any = None
    text_2: Any = None
    data_2: Any = None


POOLING = msgspec.json.Decoder(PoolingBody)
SCORE = msgspec.json.Decoder(ScoreBody)
CACHED_TASKS = frozenset({"embed", "classify"})
"""The tasks that look at the last token alone."""


def parse_embeddings(raw: bytes) -> ParsedRequest:
    """`/v1/embeddings`; raises `NotUnderstood`."""
    return _parse(decode_body(POOLING, raw), len(raw), reads=True)


def parse_pooling(raw: bytes) -> ParsedRequest:
    """`/pooling`. Without a task the model's own one runs, which we do not know: no hit is promised."""
    body = decode_body(POOLING, raw)
    return _parse(body, len(raw), reads=body.task in CACHED_TASKS)


def parse_score(raw: bytes) -> ParsedRequest:
    """`/score` and `/rerank`: how many engine requests, and how much text; no prefix is claimed."""
    body = decode_body(SCORE, raw)
    pairs = next((v for v in (body.documents, body.items, body.text_2, body.data_2) if v is not None), None)
    count = max(1, len(pairs)) if isinstance(pairs, list) else 1
    return ParsedRequest(
        model=body.model,
        sources=(OpaqueSource(size_bytes=len(raw)),),
        sequences=min(count, SEQUENCES_MAX),
        cache_reads=False,
        claims_prefix=False,
        cache_salt=salt_of(body),
    )


def _parse(body: PoolingBody, size_bytes: int, *, reads: bool) -> ParsedRequest:
    sources = _sources(body)
    return ParsedRequest(
        kind=Kind.EMBEDDINGS,
        model=body.model,
        sources=bounded(sources, size_bytes),
        sequences=min(len(sources), SEQUENCES_MAX),
        cache_reads=reads,
        claims_prefix=body.truncate_prompt_tokens is None
        and not brings_template(body.chat_template, body.chat_template_kwargs),
        cache_salt=salt_of(body),
        max_tokens=0,
    )


def _sources(body: PoolingBody) -> tuple[Source, ...]:
    conversations = body.messages if body.messages is not None else body.input
    if is_conversation(conversations):
        return (_chat_source(body, conversations),)
    if isinstance(conversations, list) and conversations and all(map(is_conversation, conversations)):
        return tuple(_chat_source(body, messages) for messages in conversations)
    if body.messages is not None:
        raise NotUnderstood("fields")
    if not isinstance(body.input, str | list):
        raise NotUnderstood("fields")
    return prompt_sources(body.input, body.add_special_tokens is not False)


def is_conversation(value: object) -> bool:
    """A list of messages, none of it anything else."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(item, dict) and isinstance(item.get("role"), str) for item in value)
    )


def _chat_source(body: PoolingBody, messages: list[JsonObject]) -> ChatSource:
    fields: JsonObject = {"messages": messages, "add_generation_prompt": bool(body.add_generation_prompt)}
    if body.continue_final_message:
        fields["continue_final_message"] = True
    if body.chat_template_kwargs is not None:
        fields["chat_template_kwargs"] = body.chat_template_kwargs
    return ChatSource(body=fields, adds_special_tokens=bool(body.add_special_tokens), takes_default_kwargs=False)
