"""What the request formats have in common: bodies' shared fields, and the numbers that come from them.

The one rule: a field is read as the engine reads it, or the request is `NotUnderstood`.
"""

from array import array
from typing import Any

import msgspec
import numpy as np

from trimtab_extproc.formats.json_body import NotUnderstood
from trimtab_extproc.formats.parsed_request import SEQUENCES_MAX, JsonObject, OpaqueSource, Source, TokenSource

PROMPTS_MAX = 1_024
"""The engine's own limit on a list of prompts. More count as sequences, but none of them claims a prefix."""
OUTPUT_TOKENS_MAX = 2**31 - 1
"""A larger limit on output tokens counts as none."""


class SharedBody(msgspec.Struct):
    """Fields of every format. `Any` where only presence matters, or where the engine takes more than one type."""

    model: str | None = None
    stream: bool | None = None
    cache_salt: str | None = None
    kv_transfer_params: Any = None


class GeneratingBody(SharedBody):
    """Fields of the OpenAI formats that generate text."""

    n: int | None = None
    best_of: int | None = None
    use_beam_search: bool | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    echo: bool | None = None
    prompt_logprobs: Any = None
    truncate_prompt_tokens: Any = None
    add_special_tokens: bool | None = None


def salt_of(body: SharedBody) -> str | None:
    """The cache salt; an empty one is refused by the engine."""
    if body.cache_salt == "":
        raise NotUnderstood("fields")
    return body.cache_salt


def sequences_of(body: GeneratingBody, prompts: int) -> int:
    """Engine requests in all. `best_of` is what older engines run at once; beam search runs n beams."""
    n = 1 if body.n is None else body.n
    if n < 1:
        raise NotUnderstood("fields")
    return min(prompts * max(n, body.best_of or 1), SEQUENCES_MAX)


def output_tokens(said: int | None) -> int | None:
    """The client's limit on output tokens; None where it says none, or nonsense."""
    return said if said is not None and 0 <= said <= OUTPUT_TOKENS_MAX else None


def bounded(sources: tuple[Source, ...], size_bytes: int) -> tuple[Source, ...]:
    """`sources`, or one opaque prompt in place of too many."""
    return sources if len(sources) <= PROMPTS_MAX else (OpaqueSource(size_bytes=size_bytes),)


def forwarded_ids(body: SharedBody, messages: list[JsonObject], *, echo: bool = False) -> TokenSource | None:
    """The prompt's ids that a prefill stage hands to a decode stage: the engine takes them in place of the chat."""
    if not isinstance(body.kv_transfer_params, dict) or echo:
        return None
    ids = body.kv_transfer_params.get("prompt_token_ids")
    if ids is None or any(has_media(message) for message in messages):
        return None
    if not isinstance(ids, list):
        raise NotUnderstood("fields")
    return token_source(ids)


def token_source(ids: Any) -> TokenSource:
    """A list of token ids as an array. No engine takes a negative one, one beyond 32 bits, or none at all."""
    try:
        packed = array("I", ids)
    except (OverflowError, TypeError):
        raise NotUnderstood("fields") from None
    if not packed:
        raise NotUnderstood("fields")
    return TokenSource(ids=np.frombuffer(packed, dtype=np.uint32))


TEXT_PARTS = frozenset({"text", "input_text", "output_text", "refusal", "thinking", "tool_reference"})
"""Types of content parts that carry no media."""


def is_text_part(part: JsonObject) -> bool:
    """Whether a content part is text, and no image, sound or video."""
    kind = part.get("type", "text")
    return isinstance(kind, str) and kind in TEXT_PARTS


def has_media(message: JsonObject) -> bool:
    """Whether a message holds an image, a sound or a video."""
    content = message.get("content")
    return isinstance(content, list) and any(isinstance(part, dict) and not is_text_part(part) for part in content)
