"""Completions: text or token ids, one prompt or a list; and vLLM's token-in, token-out generation.

The one rule: each prompt of a list is a prompt of the engine's, in the client's order.
"""

from typing import Any

import msgspec

from trimtab_extproc.formats.fields import (
    PROMPTS_MAX,
    GeneratingBody,
    SharedBody,
    bounded,
    output_tokens,
    salt_of,
    sequences_of,
    token_source,
)
from trimtab_extproc.formats.json_body import NotUnderstood, decode_body
from trimtab_extproc.formats.parsed_request import (
    SEQUENCES_MAX,
    Kind,
    OpaqueSource,
    ParsedRequest,
    Source,
    TextSource,
)

Prompts = str | list[int | str | list[int]]


class CompletionBody(GeneratingBody, kw_only=True):
    """`POST /v1/completions`."""

    prompt: Prompts | None = None
    prompt_embeds: str | list[str] | None = None
    suffix: str | None = None
    logprobs: Any = None


class GenerateSampling(msgspec.Struct):
    """The sampling parameters that matter here."""

    n: int | None = None
    max_tokens: int | None = None
    prompt_logprobs: Any = None
    skip_reading_prefix_cache: bool | None = None


class GenerateBody(SharedBody, kw_only=True):
    """`POST /inference/v1/generate`."""

    token_ids: list[int]
    features: Any = None
    sampling_params: GenerateSampling | None = None


COMPLETION = msgspec.json.Decoder(CompletionBody)
GENERATE = msgspec.json.Decoder(GenerateBody)
MAX_TOKENS_DEFAULT = 16
"""Output tokens of a completion that does not say."""


def parse_completion(raw: bytes) -> ParsedRequest:
    """A completion; raises `NotUnderstood`."""
    body = decode_body(COMPLETION, raw)
    embeds = _embeds(body.prompt_embeds)
    special = body.add_special_tokens is not False
    texts = () if body.prompt is None or (embeds and not body.prompt) else prompt_sources(body.prompt, special)
    # The engine puts embeddings first, then the text.
    sources: tuple[Source, ...] = (*embeds, *texts)
    if not sources:
        raise NotUnderstood("fields")
    shows_prompt = body.prompt_logprobs is not None or (bool(body.echo) and body.logprobs is not None)
    return ParsedRequest(
        kind=Kind.COMPLETIONS,
        model=body.model,
        sources=bounded(sources, len(raw)),
        sequences=sequences_of(body, len(sources)),
        stream=bool(body.stream),
        cache_reads=not shows_prompt or bool(body.use_beam_search),
        # With a suffix the engine makes a fill-in-the-middle prompt of its own.
        claims_prefix=body.truncate_prompt_tokens is None and body.suffix is None,
        cache_salt=salt_of(body),
        max_tokens=MAX_TOKENS_DEFAULT if body.max_tokens is None else output_tokens(body.max_tokens),
    )


def parse_generate(raw: bytes) -> ParsedRequest:
    """A generation from token ids."""
    body = decode_body(GENERATE, raw)
    if not body.token_ids:
        raise NotUnderstood("fields")
    sampling = body.sampling_params or GenerateSampling()
    n = 1 if sampling.n is None else sampling.n
    if n < 1:
        raise NotUnderstood("fields")
    reads = (
        sampling.prompt_logprobs is None
        if sampling.skip_reading_prefix_cache is None
        else (not sampling.skip_reading_prefix_cache)
    )
    return ParsedRequest(
        kind=Kind.COMPLETIONS,
        model=body.model,
        sources=(token_source(body.token_ids),),
        sequences=min(n, SEQUENCES_MAX),
        stream=bool(body.stream),
        cache_reads=reads,
        # Placeholder tokens of an image say nothing of which image it is.
        claims_prefix=body.features is None,
        cache_salt=salt_of(body),
        max_tokens=output_tokens(sampling.max_tokens),
    )


def prompt_sources(prompt: Prompts, adds_special_tokens: bool) -> tuple[Source, ...]:
    """One source per prompt: text, a list of texts, token ids, a list of lists of ids. Raises `NotUnderstood`."""
    if isinstance(prompt, str):
        if not prompt:
            raise NotUnderstood("fields")
        return (TextSource(text=prompt, adds_special_tokens=adds_special_tokens),)
    if not prompt:
        raise NotUnderstood("fields")
    if isinstance(prompt[0], int):
        return (token_source(prompt),)
    if len(set(map(type, prompt))) != 1:
        raise NotUnderstood("fields")
    if len(prompt) > PROMPTS_MAX:
        # None of them will claim a prefix (`bounded`), so there is no need to look at each.
        return (OpaqueSource(size_bytes=0),) * len(prompt)
    return tuple(
        TextSource(text=item, adds_special_tokens=adds_special_tokens) if isinstance(item, str) else token_source(item)
        for item in prompt
    )


def _embeds(embeds: str | list[str] | None) -> tuple[OpaqueSource, ...]:
    if embeds is None:
        return ()
    # Base64 of a tensor: its length says little of the tokens, so it counts as no text.
    return tuple(OpaqueSource(size_bytes=0) for _ in ([embeds] if isinstance(embeds, str) else embeds))
