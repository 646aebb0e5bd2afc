"""A parsed request's prompts as chains of chunks, for one model card.

The one rule: a chain is claimed only for bytes that the engine will really have. With an exact card these are the
rendered text's; without one they are the request's canonical text, and the `Rendering` says so. What cannot be rendered
claims nothing: its chain is empty, and only its size is told.
"""

import time
from dataclasses import dataclass, replace
from datetime import datetime

import msgspec
import numpy as np

from trimtab_core.chunks import U64, root_hash
from trimtab_core.model_card import ModelCard
from trimtab_core.placement import Prompt
from trimtab_core.rendering import (
    NotRenderable,
    RenderClock,
    RenderLimits,
    render_completion,
    render_prompt,
)
from trimtab_core.selection import hash_chunks
from trimtab_extproc.formats.canonical import canonical_bytes
from trimtab_extproc.formats.inline_system import wants_system_first
from trimtab_extproc.formats.parsed_request import (
    ChatSource,
    JsonObject,
    OpaqueSource,
    ParsedRequest,
    Source,
    TextSource,
    TokenSource,
)

SYSTEM_CLOCK = RenderClock(monotonic=time.monotonic, local_time=datetime.now)
EFFORTS = ("low", "medium", "high", "xhigh", "max")
NO_CHAIN: U64 = np.empty(0, dtype=np.uint64)


class Rendering(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The prompts of one request as one card gives them."""

    prompts: tuple[Prompt, ...]
    """One per engine prompt, in the client's order."""
    is_exact: bool
    """The chains are of the engine's own text. False: of the request's canonical text, fit for learned indexes only."""
    reason: str = ""
    """Why not exact, or why a prompt claims nothing; free of the client's text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderRules:
    """What a rendering depends on besides the request."""

    limits: RenderLimits
    clock: RenderClock
    tokens_per_byte: float | None = None
    """What lengths in bytes will be counted at; None: the card's own."""


def prompts_for(
    parsed: ParsedRequest,
    card: ModelCard | None,
    lora_name: str | None,
    seed: int,
    *,
    limits: RenderLimits | None = None,
    clock: RenderClock = SYSTEM_CLOCK,
) -> tuple[Prompt, ...]:
    """The prompts of `rendering_for` alone."""
    return rendering_for(parsed, card, lora_name, seed, limits=limits, clock=clock).prompts


def rendering_for(
    parsed: ParsedRequest,
    card: ModelCard | None,
    lora_name: str | None,
    seed: int,
    *,
    limits: RenderLimits | None = None,
    clock: RenderClock = SYSTEM_CLOCK,
    tokens_per_byte: float | None = None,
) -> Rendering:
    """The request's prompts for endpoints of this card; never raises on what a client sent."""
    rules = RenderRules(limits=limits or RenderLimits(), clock=clock, tokens_per_byte=tokens_per_byte)
    root = root_hash(seed, lora_name, parsed.cache_salt)
    is_exact = card is not None and card.exact
    reason = "" if is_exact else "no card" if card is None else card.reason
    prompts: list[Prompt] = []
    for source in parsed.sources:
        if not parsed.claims_prefix:
            prompts.append(_unclaimed(source))
            continue
        try:
            if card is None or not card.exact:
                prompts.append(_approximate(source, root, seed))
            else:
                prompts.append(_exact(source, card, root, seed, rules))
        except NotRenderable as refusal:
            reason = refusal.reason
            prompts.append(_unclaimed(source))
        except RecursionError:
            reason = "nesting"
            prompts.append(Prompt(chain=NO_CHAIN, size_bytes=0))
    return Rendering(prompts=tuple(prompts), is_exact=is_exact, reason=reason)


def _exact(source: Source, card: ModelCard, root: int, seed: int, rules: RenderRules) -> Prompt:
    if isinstance(source, TextSource):
        text = card.normalize(render_completion(card, source.text, add_special_tokens=source.adds_special_tokens))
        return Prompt(chain=hash_chunks(text, root, seed), size_bytes=len(text))
    if isinstance(source, TokenSource):
        text = card.text_of_tokens(source.ids)  # type: ignore[arg-type]  # an array will do, and is fast
        return Prompt(chain=hash_chunks(text, root, seed), size_bytes=len(text), tokens=len(source.ids))
    if isinstance(source, OpaqueSource):
        return _unclaimed(source)
    if not source.takes_default_kwargs and card.default_template_kwargs:
        card = replace(card, default_template_kwargs={})
    rendered = render_prompt(card, _body_for(source, card, rules), rules.limits, clock=rules.clock)
    text = card.normalize(rendered.text)
    size_bytes = len(text)
    if not rendered.complete:
        # Past its first media item the text is not known; what the client sent tells about how long it is.
        media_bytes = int(rendered.media_items * card.image_tokens / (rules.tokens_per_byte or card.tokens_per_byte))
        size_bytes = max(size_bytes, len(canonical_bytes(source))) + media_bytes
    return Prompt(chain=hash_chunks(text, root, seed), size_bytes=size_bytes)


def _approximate(source: Source, root: int, seed: int) -> Prompt:
    if isinstance(source, OpaqueSource):
        return _unclaimed(source)
    text = canonical_bytes(source)
    tokens = len(source.ids) if isinstance(source, TokenSource) else None
    return Prompt(chain=hash_chunks(text, root, seed), size_bytes=len(text), tokens=tokens)


def _unclaimed(source: Source) -> Prompt:
    """A prompt of which only the size counts."""
    if isinstance(source, OpaqueSource):
        return Prompt(chain=NO_CHAIN, size_bytes=source.size_bytes)
    tokens = len(source.ids) if isinstance(source, TokenSource) else None
    return Prompt(chain=NO_CHAIN, size_bytes=len(canonical_bytes(source)), tokens=tokens)


def _body_for(source: ChatSource, card: ModelCard, rules: RenderRules) -> JsonObject:
    """The source's body with what this card decides filled in."""
    body = source.body
    if source.system_first is not None and wants_system_first(card):
        body = source.system_first
    if source.is_thinking_off:
        body = {**body, "reasoning_effort": _effort_without_thinking(card, rules)}
    if source.adds_special_tokens:
        body = {**body, "add_special_tokens": True}
    return body


def _effort_without_thinking(card: ModelCard, rules: RenderRules) -> str:
    """The effort that the engine sets when a client of Anthropic's API turns thinking off: "none" if the template heeds
    it, else "low". The engine finds out by rendering one short chat with each effort, and so do we."""
    none = _probe_effort("none", card, rules)
    if none is None or any(_probe_effort(effort, card, rules) == none for effort in EFFORTS):
        return "low"
    return "none"


def _probe_effort(effort: str, card: ModelCard, rules: RenderRules) -> str | None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "reasoning_effort": effort}
    try:
        return render_prompt(card, body, rules.limits, clock=rules.clock).text
    except NotRenderable:
        return None
