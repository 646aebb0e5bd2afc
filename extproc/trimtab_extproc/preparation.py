"""What a request says, rendered and hashed: all that a choice needs besides the fleet.

The one rule: it holds nothing and fails nobody. What is large is worked on beside the event loop; whatever goes wrong
costs the prefix, not the request, which is then routed by load with the reason counted.
"""

import logging
from collections.abc import Mapping

import msgspec

from trimtab_core.placement import Prompt
from trimtab_extproc.fleet_view import FleetView
from trimtab_extproc.formats.parse import parse_request
from trimtab_extproc.formats.parsed_request import ParsedRequest
from trimtab_extproc.formats.prompts import NO_CHAIN, Rendering, rendering_for
from trimtab_extproc.model_view import Variant
from trimtab_extproc.offload import INLINE_BYTES_MAX, PROMPT_BYTES, Offload, OffloadOverflow
from trimtab_extproc.replies import Decide
from trimtab_extproc.response_directory import ResponseDirectory

log = logging.getLogger(__name__)

CANONICAL = Variant(digest=None, card=None, lora_name=None)
"""Rendered where no endpoint tells how it renders: no prefix is claimed then, but the size of the prompt counts."""
_GUESSED_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
_NO_TEXT_REASONS = frozenset({"path", "content_type", "encoding"})


class Prepared(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A request with its prompts hashed: all that the choice needs besides the fleet."""

    parsed: ParsedRequest
    variants: tuple[Variant, ...] = ()
    renderings: tuple[Rendering, ...] = ()
    """One per variant. Empty: no text is known, the choice goes by load."""
    prompts: tuple[tuple[Prompt, ...], ...] = ()
    """The same as the scheduler wants it: [engine prompts][variants]."""
    reason: str | None = None
    """Why the prompts are not known; None: they are."""
    holder: str | None = None
    """The endpoint that alone can answer."""


class Preparation:
    """Prepares requests of one pool; `seed` is that of its hashes. All calls from one event loop."""

    def __init__(self, *, fleet: FleetView, responses: ResponseDirectory, offload: Offload, seed: int) -> None:
        self._fleet = fleet
        self._responses = responses
        self._offload = offload
        self._seed = seed

    def now(self, request: Decide) -> Prepared | None:
        """Without waiting for anything: the usual small request. None: it is large, or somebody has to be asked."""
        headers, body = request.headers, request.body
        if not request.is_body_known:
            length = headers.get("content-length", "")
            size_bytes = int(length) if length.isascii() and length.isdecimal() and len(length) < 12 else 0
            return _unknown("body_not_shown", ParsedRequest(), size_bytes=size_bytes)
        if len(body) > INLINE_BYTES_MAX:
            return None
        parsed = _parse(headers, body)
        if (parsed.response_id or parsed.previous_response_id) is not None:
            return None
        if not parsed.sources:
            return _without_text(parsed, len(body), holder=None)
        view = self._fleet.view(parsed.model)
        variants = view.variants or (CANONICAL,)
        if _work_bytes(parsed, variants, len(body)) > INLINE_BYTES_MAX:
            return None
        try:
            renderings = _render(parsed, variants, self._seed, view.tokens_per_byte)
        except Exception:
            return _render_failed(parsed, len(body), holder=None)
        return _rendered(parsed, variants, renderings, holder=None)

    async def later(self, request: Decide) -> Prepared:
        """With all that may have to be waited for."""
        headers, body = request.headers, request.body
        try:
            parsed = await self._offload.run(len(body), lambda: _parse(headers, body))
        except OffloadOverflow as overflow:
            return _unknown(overflow.reason, ParsedRequest(), size_bytes=len(body))
        holder = None
        stateful_id = parsed.response_id or parsed.previous_response_id
        if stateful_id is not None:
            holder = await self._responses.endpoint_of(stateful_id)
        if not parsed.sources:
            return _without_text(parsed, len(body), holder=holder)
        view = self._fleet.view(parsed.model)
        variants = view.variants or (CANONICAL,)
        try:
            renderings = await self._offload.run(
                _work_bytes(parsed, variants, len(body)),
                lambda: _render(parsed, variants, self._seed, view.tokens_per_byte),
            )
        except OffloadOverflow as overflow:
            return _unknown(overflow.reason, parsed, size_bytes=len(body), holder=holder)
        except Exception:
            return _render_failed(parsed, len(body), holder=holder)
        return _rendered(parsed, variants, renderings, holder=holder)


def _parse(headers: Mapping[str, str], body: bytes) -> ParsedRequest:
    """The request as its format says. Runs on any thread."""
    method = headers.get(":method", "POST" if body else "GET")
    path = headers.get(":path", "")
    if path or not body:
        return parse_request(method, path, headers, body)
    # Some gateways send no path: the body's own shape tells the format.
    guesses = (parse_request("POST", guess, headers, body) for guess in _GUESSED_PATHS)
    return next((parsed for parsed in guesses if parsed.sources), ParsedRequest(reason="path"))


def _unknown(reason: str, parsed: ParsedRequest, *, size_bytes: int, holder: str | None = None) -> Prepared:
    """A request of which no more is known than about how large it is."""
    prompts = ((Prompt(chain=NO_CHAIN, size_bytes=size_bytes),),) if size_bytes else ()
    return Prepared(parsed=parsed, prompts=prompts, reason=reason, holder=holder)


def _without_text(parsed: ParsedRequest, body_bytes: int, *, holder: str | None) -> Prepared:
    # A body that is no JSON (an upload, say) tells nothing about tokens.
    size_bytes = 0 if parsed.reason in _NO_TEXT_REASONS else body_bytes
    return _unknown(parsed.reason or "no_prompt", parsed, size_bytes=size_bytes, holder=holder)


def _render_failed(parsed: ParsedRequest, body_bytes: int, *, holder: str | None) -> Prepared:
    # A bug in rendering must cost a cache hit, not the service.
    log.exception("rendering failed")
    return _unknown("render_failed", parsed, size_bytes=body_bytes, holder=holder)


def _rendered(
    parsed: ParsedRequest, variants: tuple[Variant, ...], renderings: tuple[Rendering, ...], *, holder: str | None
) -> Prepared:
    return Prepared(
        parsed=parsed,
        variants=variants,
        renderings=renderings,
        prompts=tuple(zip(*(rendering.prompts for rendering in renderings), strict=True)),
        holder=holder,
    )


def _work_bytes(parsed: ParsedRequest, variants: tuple[Variant, ...], body_bytes: int) -> int:
    """What rendering takes, as bytes of text."""
    return (body_bytes + PROMPT_BYTES * (len(parsed.sources) - 1)) * len(variants)


def _render(
    parsed: ParsedRequest, variants: tuple[Variant, ...], seed: int, tokens_per_byte: float
) -> tuple[Rendering, ...]:
    """Every engine prompt in every variant. Runs on any thread."""
    return tuple(
        rendering_for(parsed, variant.card, variant.lora_name, seed, tokens_per_byte=tokens_per_byte)
        for variant in variants
    )
