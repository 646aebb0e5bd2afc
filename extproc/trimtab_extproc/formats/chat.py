"""Chat completions, one conversation or a batch of them.

The one rule: only the fields that reach the template go into a source, and a template of the request's own never does.
"""

from typing import Any

import msgspec

from trimtab_extproc.formats.fields import GeneratingBody, bounded, forwarded_ids, output_tokens, salt_of, sequences_of
from trimtab_extproc.formats.json_body import NotUnderstood, decode_body
from trimtab_extproc.formats.parsed_request import ChatSource, JsonObject, Kind, ParsedRequest, Source


class TemplateFields(GeneratingBody):
    """What a chat completion says to its template, besides the messages."""

    tools: list[JsonObject] | None = None
    tool_choice: Any = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    documents: list[JsonObject] | None = None
    reasoning_effort: str | None = None
    chat_template: Any = None
    chat_template_kwargs: dict[str, Any] | None = None


class ChatBody(TemplateFields, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: list[JsonObject]


class BatchBody(TemplateFields, kw_only=True):
    """`POST /v1/chat/completions/batch`."""

    messages: list[list[JsonObject]]


CHAT = msgspec.json.Decoder(ChatBody)
BATCH = msgspec.json.Decoder(BatchBody)


def parse_chat(raw: bytes) -> ParsedRequest:
    """A chat completion; raises `NotUnderstood`."""
    body = decode_body(CHAT, raw)
    ids = forwarded_ids(body, body.messages, echo=bool(body.echo))
    source: Source = ids or ChatSource(
        body=template_body(body, body.messages), adds_special_tokens=bool(body.add_special_tokens)
    )
    return _parsed(body, (source,), len(raw))


def parse_batch(raw: bytes) -> ParsedRequest:
    """A batch of conversations: one engine prompt each; the engine takes no tools with it."""
    body = decode_body(BATCH, raw)
    body.tools = None
    sources = tuple(ChatSource(body=template_body(body, messages)) for messages in body.messages)
    return _parsed(body, sources, len(raw))


def template_body(body: TemplateFields, messages: list[JsonObject]) -> JsonObject:
    """What `render_chat` reads of a request: its fields that are set."""
    if not messages:
        raise NotUnderstood("fields")
    fields: JsonObject = {"messages": messages}
    for name in (
        "tools",
        "tool_choice",
        "add_generation_prompt",
        "continue_final_message",
        "documents",
        "reasoning_effort",
        "chat_template_kwargs",
    ):
        if (value := getattr(body, name)) is not None:
            fields[name] = value
    return fields


def brings_template(chat_template: Any, kwargs: dict[str, Any] | None) -> bool:
    """Whether a request brings a template of its own: the engine refuses it, or renders what we never do."""
    return chat_template is not None or bool(kwargs and kwargs.get("chat_template") is not None)


def _parsed(body: TemplateFields, sources: tuple[Source, ...], size_bytes: int) -> ParsedRequest:
    own_template = brings_template(body.chat_template, body.chat_template_kwargs)
    # The engine takes an echo for a wish to see the prompt's logprobs; beam search leaves those out.
    skips_cache = (body.prompt_logprobs is not None or bool(body.echo)) and not body.use_beam_search
    return ParsedRequest(
        kind=Kind.CHAT,
        model=body.model,
        sources=bounded(sources, size_bytes),
        sequences=sequences_of(body, len(sources)),
        stream=bool(body.stream),
        cache_reads=not skips_cache,
        claims_prefix=body.truncate_prompt_tokens is None and not own_template,
        cache_salt=salt_of(body),
        max_tokens=output_tokens(body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens),
    )
