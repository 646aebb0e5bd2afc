"""Chooses an endpoint for one complete request.

The one rule: choosing and reserving are one step, `_place`, in which nothing is awaited. What comes before it (parsing,
rendering, hashing) is awaited where the prompt is large, and holds nothing; whatever goes wrong there costs the prefix,
not the request, which is then routed by load with the reason counted. It never chooses at random.
"""

import logging
from collections.abc import Callable, Hashable, Mapping, Set
from dataclasses import dataclass
from itertools import islice

import msgspec
import numpy as np

from trimtab_core.placement import I8, Bools, Placement, PlacementRequest, Prompt, Rejection
from trimtab_core.scheduler import Scheduler
from trimtab_extproc.decisions import REQUEST_ID_CHARS_MAX, Decision, DecisionLog
from trimtab_extproc.eligibility import Eligibility, Group, overlap, without
from trimtab_extproc.endpoint_table import Endpoint, EndpointTable
from trimtab_extproc.errors import NotReady
from trimtab_extproc.events import Placed, Refused
from trimtab_extproc.fleet_view import FleetView
from trimtab_extproc.formats.parse import parse_request
from trimtab_extproc.formats.parsed_request import Kind, ParsedRequest
from trimtab_extproc.formats.prompts import NO_CHAIN, Rendering, rendering_for
from trimtab_extproc.model_view import ModelView, Variant
from trimtab_extproc.offload import INLINE_BYTES_MAX, PROMPT_BYTES, Offload, OffloadOverflow
from trimtab_extproc.replies import Decide
from trimtab_extproc.reservations import Reservations
from trimtab_extproc.response_directory import ResponseDirectory
from trimtab_extproc.telemetry import Telemetry
from trimtab_extproc.waiting_room import WaitingRoom
from trimtab_state.request_class import RequestClass

log = logging.getLogger(__name__)

TEST_SELECTION_HEADER = "test-epp-endpoint-selection"

OVERTAKEN_GROUPS_MAX = 64
"""Groups of waiting requests that a new one is compared with; where there are more, it waits for its turn."""
KEPT = "kept free for a larger request"

CANONICAL = Variant(digest=None, card=None, lora_name=None)
"""Rendered where no endpoint tells how it renders: no prefix is claimed then, but the size of the prompt counts."""
_GUESSED_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
_BUSY_MESSAGES = {
    "endpoints_full": "every endpoint of the pool is at its limit",
    "too_many_open": "the gateway has too many requests in progress",
    "wait_over": "every endpoint of the pool is at its limit, and none became free in time",
    "wait_queue_full": "every endpoint of the pool is at its limit, and too many requests wait already",
}
_NO_TEXT_REASONS = frozenset({"path", "content_type", "encoding"})


@dataclass(frozen=True, slots=True, kw_only=True)
class PickerSettings:
    """What all decisions of a process share."""

    seed: int
    """The pool's hash seed."""
    is_conformance_test: bool = False
    """Obey the request header that names the endpoints to choose from. Never where clients are not trusted."""


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


class Picker:
    """Chooses endpoints. All calls from one event loop."""

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        table: EndpointTable,
        fleet: FleetView,
        reservations: Reservations,
        responses: ResponseDirectory,
        offload: Offload,
        telemetry: Telemetry,
        decisions: DecisionLog,
        settings: PickerSettings,
        clock: Callable[[], float],
    ) -> None:
        self._scheduler = scheduler
        self._table = table
        self._fleet = fleet
        self._eligible = Eligibility(fleet=fleet, table=table)
        self._reservations = reservations
        self._responses = responses
        self._offload = offload
        self._telemetry = telemetry
        self._decisions = decisions
        self._settings = settings
        self._clock = clock
        self.waiting: WaitingRoom[tuple[Decide, Prepared]] = WaitingRoom(
            place=self._place_waiting,
            keep=self._kept_for,
            give_back=self._give_back,
            endpoints_of=self._endpoints_of,
            observer=telemetry,
            clock=clock,
        )
        """Requests for which every endpoint is at its limit, where the policy lets them wait."""
        reservations.on_freed = self.waiting.freed

    @property
    def is_ready(self) -> bool:
        """Whether a choice can be made at all."""
        return self._fleet.is_ready

    def pick_now(self, request: Decide) -> Placed | Refused | None:
        """The same as `pick` without waiting: None where that cannot be had. Raises NotReady."""
        started_s = self._started_s()
        prepared = self._prepare_now(request)
        if prepared is None or self._is_behind_others(request, prepared):
            return None
        return self._decided(request, prepared, started_s)

    async def pick(self, request: Decide) -> Placed | Refused:
        """An endpoint, reserved, or the refusal to tell the client. Raises NotReady."""
        started_s = self._started_s()
        prepared = self._prepare_now(request) or await self._prepare(request)
        if not self._is_behind_others(request, prepared):
            outcome = self._decided(request, prepared, started_s)
            if outcome is not None:
                return outcome
        return await self._wait(request, prepared, started_s)

    def _started_s(self) -> float:
        if not self._fleet.is_ready:
            raise NotReady("the pool's members are not known yet")
        return self._clock()

    def _decided(self, request: Decide, prepared: Prepared, started_s: float) -> Placed | Refused | None:
        hashed_s = self._clock()
        outcome = self._place(request, prepared, hashed_s)
        if outcome is not None:  # else nothing is decided yet, and it will be tried again
            ended_s = self._clock()
            self._telemetry.decided(seconds=ended_s - started_s, scheduler_seconds=ended_s - hashed_s)
        return outcome

    # Where every endpoint is at its limit.

    def _is_behind_others(self, request: Decide, prepared: Prepared) -> bool:
        """Whether it might overtake requests that wait for an endpoint that could take it."""
        if not len(self.waiting) or not self._fleet.policy.overflow.wait_s:
            return False
        groups = list(islice(self.waiting.waited_for, OVERTAKEN_GROUPS_MAX))
        group = self._group(request, prepared)
        if group in groups or len(groups) == OVERTAKEN_GROUPS_MAX:
            return True
        own = self._eligible.of(group)
        if self._priority(request, prepared) < 0:
            # It would be refused: where it has more to choose from than they, others may well be free.
            return any(np.array_equal(own, self._waited_for(other)) for other in groups)
        return any(overlap(own, self._waited_for(other)) for other in groups)

    def _priority(self, request: Decide, prepared: Prepared) -> int:
        return self._fleet.class_terms.classes.of(request.headers, prepared.parsed.model).priority

    def _group(self, request: Decide, prepared: Prepared, view: ModelView | None = None) -> Group:
        headers, is_test = request.headers, self._settings.is_conformance_test
        model = prepared.parsed.model
        view = view or self._fleet.view(model)
        return Group(
            model=model if view.model_label == model else None,
            subset=request.subset,
            holder=prepared.holder,
            wanted=headers.get(TEST_SELECTION_HEADER) if is_test else None,
        )

    def _waited_for(self, group: Hashable) -> Bools:
        assert isinstance(group, Group), "the waiting room has no others"
        return self._eligible.of(group)

    def _endpoints_of(self, group: Hashable) -> bytes:
        return self._waited_for(group).tobytes()

    def _kept_for(self, ticket: tuple[Decide, Prepared]) -> int | None:
        """Of the endpoints that could take it the one with the fewest requests: the next to have room for it."""
        candidates = np.flatnonzero(self._eligible.of(self._group(*ticket)))
        if not len(candidates):
            return None
        load = self._scheduler.load()
        return int(candidates[np.argmin((load.requests + load.external)[candidates])])

    async def _wait(self, request: Decide, prepared: Prepared, started_s: float) -> Placed | Refused:
        priority = self._priority(request, prepared)
        if priority < 0:
            return self._refused("endpoints_full", self._scheduler.settings.retry_after_s, is_restricted=False)
        outcome = await self.waiting.wait(
            (request, prepared),
            group=self._group(request, prepared),
            tenant=self._fleet.class_terms.classes.tenant(request.headers),
            priority=priority,
            size=prepared.parsed.sequences,
            since_s=started_s,
            overflow=self._fleet.policy.overflow,
        )
        if not isinstance(outcome, str):
            return outcome
        return self._refused(outcome, self._scheduler.settings.retry_after_s, is_restricted=False)

    def _place_waiting(
        self, ticket: tuple[Decide, Prepared], now_s: float, waited_s: float, kept: Set[int]
    ) -> Placed | Refused | None:
        started_s = self._clock()
        outcome = self._place(*ticket, now_s, waited_s=waited_s, kept=kept)
        if outcome is not None:
            took_s = self._clock() - started_s
            self._telemetry.decided(seconds=took_s, scheduler_seconds=took_s)
        return outcome

    def _give_back(self, placed: Placed) -> None:
        """Nobody is there any more to use it."""
        self._reservations.finished(placed.reservation_id, now_s=self._clock())

    # Before the choice.

    def _prepare_now(self, request: Decide) -> Prepared | None:
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
            renderings = _render(parsed, variants, self._settings.seed, view.tokens_per_byte)
        except Exception:
            return _render_failed(parsed, len(body), holder=None)
        return _rendered(parsed, variants, renderings, holder=None)

    async def _prepare(self, request: Decide) -> Prepared:
        """The same with all that may have to be waited for."""
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
                lambda: _render(parsed, variants, self._settings.seed, view.tokens_per_byte),
            )
        except OffloadOverflow as overflow:
            return _unknown(overflow.reason, parsed, size_bytes=len(body), holder=holder)
        except Exception:
            return _render_failed(parsed, len(body), holder=holder)
        return _rendered(parsed, variants, renderings, holder=holder)

    # The choice.

    def _place(
        self,
        request: Decide,
        prepared: Prepared,
        now_s: float,
        *,
        waited_s: float = 0.0,
        kept: Set[int] = frozenset(),
    ) -> Placed | Refused | None:
        """None: every endpoint is at its limit, and the policy lets the request wait. `kept`: slots that are kept free
        for larger ones that wait."""
        parsed = prepared.parsed
        view = self._fleet.view(parsed.model)
        class_terms = self._fleet.class_terms
        request_class = class_terms.classes.of(request.headers, parsed.model)
        group = self._group(request, prepared, view)
        allowed = candidates = self._eligible.of(group, view)
        policy = self._fleet.policy
        if kept and policy.overflow.wait_s > 0:
            candidates = without(allowed, kept)
            if allowed.any() and not candidates.any():
                return None
        variant_of_slot = _variants_of_slots(view, prepared)
        outcome = self._scheduler.place(
            PlacementRequest(
                prompts=prepared.prompts,
                variant_of_slot=variant_of_slot,
                exact=view.exact,
                candidates=candidates,
                tokens_per_byte=view.tokens_per_byte,
                batch=parsed.sequences,
                cache_reads=parsed.cache_reads,
                policy=policy.policy,
                batch_max=policy.batch_limit,
                extra=class_terms.of(request_class),
            ),
            now_s,
        )
        if isinstance(outcome, Rejection):
            if outcome.reason == "endpoints_full" and policy.overflow.wait_s > 0:
                return None
            return self._refused(outcome.reason, outcome.retry_after_s, is_restricted=group.is_restricted)
        excluded = _excluded(view, allowed)
        if candidates is not allowed:
            excluded = {**dict.fromkeys(np.flatnonzero(allowed & ~candidates).tolist(), KEPT), **excluded}
        try:
            return self._booked(
                outcome, request, prepared, view, candidates, excluded, variant_of_slot, now_s, request_class, waited_s
            )
        except BaseException:
            # Nobody would ever end it: the exchange has not heard of it.
            self._reservations.finished(outcome.reservation_id, now_s=now_s)
            self._scheduler.finish(outcome.reservation_id, now_s)
            raise

    def _booked(
        self,
        outcome: Placement,
        request: Decide,
        prepared: Prepared,
        view: ModelView,
        candidates: Bools,
        excluded: Mapping[int, str],
        variant_of_slot: I8,
        now_s: float,
        request_class: RequestClass,
        waited_s: float,
    ) -> Placed:
        """Tell everybody of the choice: the others, the metrics, whoever asks for decisions."""
        parsed = prepared.parsed
        endpoint = self._table.at_slot(outcome.slot)
        assert endpoint is not None, "the scheduler chooses among the slots that it was given"
        reason = prepared.reason or view.approximate_reasons.get(outcome.slot)
        detail = ""
        variant = int(variant_of_slot[outcome.slot])
        if prepared.renderings and variant >= 0:
            detail = prepared.renderings[variant].reason
            if detail and reason is None:
                reason = "not_rendered"
        self._reservations.opened(
            outcome,
            endpoint,
            batch=parsed.sequences,
            model_label=view.model_label,
            now_s=now_s,
            weight_milli=request_class.weight_milli,
        )
        # Without a prompt (a list of models, say) there is nothing to know, and no first token to wait for.
        is_blind = reason is not None and bool(prepared.prompts)
        self._telemetry.placed(outcome, approximate_reason=reason if is_blind else None, model_label=view.model_label)
        self._decisions.add(
            Decision(
                time_s=now_s,
                request_id=request.headers.get("x-request-id", "")[:REQUEST_ID_CHARS_MAX],
                kind=parsed.kind.value,
                model=view.model_label,
                endpoint=endpoint.name,
                placement=outcome,
                approximate=reason,
                approximate_detail=detail,
                candidates=candidates,
                excluded=excluded,
                policy=self._fleet.policy.policy,
                request_class=request_class.name,
                waited_s=waited_s,
            )
        )
        return Placed(
            reservation_id=outcome.reservation_id,
            endpoint=endpoint.name,
            destination=self._destination(endpoint, outcome.alternatives),
            rank=endpoint.rank,
            is_first_token_wanted=is_blind,
            is_id_wanted=parsed.kind is Kind.RESPONSES,
            is_streamed=parsed.stream,
        )

    def _destination(self, endpoint: Endpoint, alternatives: tuple[int, ...]) -> str:
        """The choice and the fallbacks for the gateway's retries: only those that the same rank header suits."""
        addresses = [endpoint.address]
        for slot in alternatives:
            other = self._table.at_slot(slot)
            if other is not None and other.rank == endpoint.rank and other.address not in addresses:
                addresses.append(other.address)
        return ",".join(addresses)

    def _refused(self, reason: str, retry_after_s: float, *, is_restricted: bool) -> Refused:
        if reason == "no_endpoints":
            self._telemetry.rejected(reason="subset_empty" if is_restricted else reason)
            message = (
                "no endpoint that the gateway allows can take the request"
                if is_restricted
                else "no endpoint of the pool can take the request"
            )
            return Refused(status=503, reason=reason, message=message, retry_after_s=None)
        self._telemetry.rejected(reason=reason)
        message = _BUSY_MESSAGES.get(reason, "the pool cannot take more requests now")
        return Refused(status=429, reason=reason, message=message, retry_after_s=retry_after_s)


def _excluded(view: ModelView, candidates: Bools) -> Mapping[int, str]:
    """Why members of the pool were no candidates, the request's own narrowing included."""
    if candidates is view.candidates:
        return view.excluded
    left_out = np.flatnonzero(view.candidates & ~candidates[: len(view.candidates)]).tolist()
    return {**dict.fromkeys(left_out, "outside the request's subset"), **view.excluded}


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


def _variants_of_slots(view: ModelView, prepared: Prepared) -> I8:
    """The view's variants as indices into the prepared prompts; the fleet may have changed since they were rendered."""
    if view.variants is prepared.variants or not view.variants:
        return view.variant_of_slot
    rendered = {variant.key: index for index, variant in enumerate(prepared.variants)}
    # One more entry, so that the index -1 of a slot without a variant stays -1.
    new_index = np.array([rendered.get(variant.key, -1) for variant in view.variants] + [-1], dtype=np.int8)
    translated: I8 = new_index[view.variant_of_slot]
    return translated
