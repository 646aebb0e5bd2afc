"""The choice of an endpoint for a prepared request.

The one rule: choosing and reserving are one step, `choose`, in which nothing is awaited. A choice is withdrawn or
announced; only then do metrics and decisions know of it. It never chooses at random.
"""

from collections.abc import Callable, Mapping, Set

import msgspec
import numpy as np

from trimtab_core.placement import I8, Bools, Placement, PlacementRequest, Rejection
from trimtab_core.scheduler import Scheduler
from trimtab_extproc.decisions import REQUEST_ID_CHARS_MAX, Asked, Decision, DecisionLog, Refusal
from trimtab_extproc.eligibility import Eligibility, Group, without
from trimtab_extproc.endpoint_table import Endpoint, EndpointTable
from trimtab_extproc.events import Placed, Refused
from trimtab_extproc.fleet_view import FleetView
from trimtab_extproc.formats.parsed_request import Kind
from trimtab_extproc.model_view import ModelView
from trimtab_extproc.preparation import Prepared
from trimtab_extproc.replies import Decide
from trimtab_extproc.reservations import Reservations
from trimtab_extproc.telemetry import Telemetry
from trimtab_state.request_class import RequestClass

TEST_SELECTION_HEADER = "test-epp-endpoint-selection"
KEPT = "kept free for a larger request"

_BUSY_MESSAGES = {
    "endpoints_full": "every endpoint of the pool is at its limit",
    "sheddable": "every endpoint of the pool is at its limit, and a priority below 0 does not wait",
    "too_many_open": "the gateway has too many requests in progress",
    "wait_over": "every endpoint of the pool is at its limit, and none became free in time",
    "wait_queue_full": "every endpoint of the pool is at its limit, and too many requests wait already",
}


class Choice(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A placement that is reserved, and what it was made from."""

    placement: Placement
    endpoint: Endpoint
    request: Decide
    prepared: Prepared
    view: ModelView
    candidates: Bools
    excluded: Mapping[int, str]
    variant: int
    """The chosen endpoint's, among the prepared renderings; -1: none."""
    request_class: RequestClass
    waited_s: float
    now_s: float


class Chooser:
    """Chooses for one pool. All calls from one event loop."""

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        table: EndpointTable,
        fleet: FleetView,
        eligible: Eligibility,
        reservations: Reservations,
        telemetry: Telemetry,
        decisions: DecisionLog,
        is_conformance_test: bool,
        clock: Callable[[], float],
    ) -> None:
        self._scheduler = scheduler
        self._table = table
        self._fleet = fleet
        self._eligible = eligible
        self._reservations = reservations
        self._telemetry = telemetry
        self._decisions = decisions
        self._is_conformance_test = is_conformance_test
        self._clock = clock

    def group(self, request: Decide, prepared: Prepared, view: ModelView | None = None) -> Group:
        """What says which endpoints can take it."""
        headers, is_test = request.headers, self._is_conformance_test
        model = prepared.parsed.model
        view = view or self._fleet.view(model)
        return Group(
            model=model if view.model_label == model else None,
            subset=request.subset,
            holder=prepared.holder,
            wanted=headers.get(TEST_SELECTION_HEADER) if is_test else None,
        )

    def choose(
        self,
        request: Decide,
        prepared: Prepared,
        now_s: float,
        *,
        waited_s: float = 0.0,
        kept: Set[int] = frozenset(),
        is_again: bool = False,
    ) -> Choice | Refused | None:
        """Chooses and reserves, and tells the other replicas. None: every endpoint is at its limit, and the policy lets
        the request wait. `kept`: slots that are kept free for larger ones that wait. `is_again`: it was placed a moment
        ago, and that was withdrawn."""
        parsed = prepared.parsed
        view = self._fleet.view(parsed.model)
        class_terms = self._fleet.class_terms
        request_class = class_terms.classes.of(request.headers, parsed.model)
        group = self.group(request, prepared, view)
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
                is_again=is_again,
            ),
            now_s,
        )
        if isinstance(outcome, Rejection):
            if outcome.reason == "endpoints_full" and policy.overflow.wait_s > 0:
                return None
            return self.refused(request, prepared, outcome.reason, waited_s=waited_s)
        excluded = _excluded(view, allowed)
        if candidates is not allowed:
            excluded = {**dict.fromkeys(np.flatnonzero(allowed & ~candidates).tolist(), KEPT), **excluded}
        try:
            endpoint = self._table.at_slot(outcome.slot)
            assert endpoint is not None, "the scheduler chooses among the slots that it was given"
            choice = Choice(
                placement=outcome,
                endpoint=endpoint,
                request=request,
                prepared=prepared,
                view=view,
                candidates=candidates,
                excluded=excluded,
                variant=int(variant_of_slot[outcome.slot]),
                request_class=request_class,
                waited_s=waited_s,
                now_s=now_s,
            )
            self._reservations.opened(
                outcome,
                endpoint,
                batch=parsed.sequences,
                model_label=view.model_label,
                now_s=now_s,
                weight_milli=request_class.weight_milli,
            )
            return choice
        except BaseException:
            # Nobody would ever end it: the exchange has not heard of it.
            self._reservations.finished(outcome.reservation_id, now_s=now_s)
            self._scheduler.finish(outcome.reservation_id, now_s)
            raise

    def announce(self, choice: Choice, *, moved_from: tuple[str, ...] = ()) -> Placed:
        """The choice stands: tell whoever counts, and whoever asks for decisions. `moved_from`: endpoints that were
        chosen before and given up."""
        placement, prepared, view, request = choice.placement, choice.prepared, choice.view, choice.request
        parsed, endpoint = prepared.parsed, choice.endpoint
        reason = prepared.reason or view.approximate_reasons.get(placement.slot)
        detail = ""
        if prepared.renderings and choice.variant >= 0:
            detail = prepared.renderings[choice.variant].reason
            if detail and reason is None:
                reason = "not_rendered"
        # Without a prompt (a list of models, say) there is nothing to know, and no first token to wait for.
        is_blind = reason is not None and bool(prepared.prompts)
        self._telemetry.placed(placement, approximate_reason=reason if is_blind else None, model_label=view.model_label)
        self._decisions.add(
            Decision(
                asked=self._asked(request, prepared, view, choice.request_class, choice.now_s, choice.waited_s),
                endpoint=endpoint.name,
                placement=placement,
                approximate=reason,
                approximate_detail=detail,
                candidates=choice.candidates,
                excluded=choice.excluded,
                moved_from=moved_from,
            )
        )
        return Placed(
            reservation_id=placement.reservation_id,
            endpoint=endpoint.name,
            destination=self._destination(endpoint, placement.alternatives),
            rank=endpoint.rank,
            is_first_token_wanted=is_blind,
            is_id_wanted=parsed.kind is Kind.RESPONSES,
            is_streamed=parsed.stream,
        )

    def is_possible(self, choice: Choice) -> bool:
        """Whether its endpoint can still take the request: a pod may have been deleted since, or have begun to
        drain."""
        endpoint, view = choice.endpoint, self._fleet.view(choice.prepared.parsed.model)
        if view is choice.view:
            return True
        eligible = self._eligible.of(self.group(choice.request, choice.prepared, view), view)
        is_same = self._table.at_slot(endpoint.slot) is endpoint
        return is_same and endpoint.slot < len(eligible) and bool(eligible[endpoint.slot])

    def withdraw(self, choice: Choice) -> None:
        """Nobody will use it. Idempotent."""
        self._reservations.finished(choice.placement.reservation_id, now_s=self._clock())

    def _destination(self, endpoint: Endpoint, alternatives: tuple[int, ...]) -> str:
        """The choice and the fallbacks for the gateway's retries: only those that the same rank header suits."""
        addresses = [endpoint.address]
        for slot in alternatives:
            other = self._table.at_slot(slot)
            if other is not None and other.rank == endpoint.rank and other.address not in addresses:
                addresses.append(other.address)
        return ",".join(addresses)

    def refused(self, request: Decide, prepared: Prepared, reason: str, *, waited_s: float = 0.0) -> Refused:
        """What the client is told. Counts it, and keeps it for whoever asks for decisions."""
        parsed = prepared.parsed
        view = self._fleet.view(parsed.model)
        group = self.group(request, prepared, view)
        if reason == "no_endpoints":
            message = "no endpoint of the pool can take the request"
            if group.is_restricted:
                reason, message = "subset_empty", "no endpoint that the gateway allows can take the request"
            refused = Refused(status=503, reason=reason, message=message, retry_after_s=None)
        else:
            message = _BUSY_MESSAGES.get(reason, "the pool cannot take more requests now")
            retry_after_s = self._scheduler.settings.retry_after_s
            refused = Refused(status=429, reason=reason, message=message, retry_after_s=retry_after_s)
        self._telemetry.rejected(reason=reason)
        allowed = self._eligible.of(group, view)
        request_class = self._fleet.class_terms.classes.of(request.headers, parsed.model)
        self._decisions.add_refusal(
            Refusal(
                asked=self._asked(request, prepared, view, request_class, self._clock(), waited_s),
                status=refused.status,
                reason=reason,
                message=message,
                candidates=allowed,
                excluded=_excluded(view, allowed),
            )
        )
        return refused

    def _asked(
        self,
        request: Decide,
        prepared: Prepared,
        view: ModelView,
        request_class: RequestClass,
        time_s: float,
        waited_s: float,
    ) -> Asked:
        parsed = prepared.parsed
        return Asked(
            time_s=time_s,
            request_id=request.headers.get("x-request-id", "")[:REQUEST_ID_CHARS_MAX],
            kind=parsed.kind.value,
            model=view.model_label,
            policy=self._fleet.policy.policy,
            request_class=request_class.name,
            priority=self._fleet.class_terms.classes.shown_priority(request.headers, parsed.model),
            waited_s=waited_s,
        )


def _excluded(view: ModelView, candidates: Bools) -> Mapping[int, str]:
    """Why members of the pool were no candidates, the request's own narrowing included."""
    if candidates is view.candidates:
        return view.excluded
    left_out = np.flatnonzero(view.candidates & ~candidates[: len(view.candidates)]).tolist()
    return {**dict.fromkeys(left_out, "outside the request's subset"), **view.excluded}


def _variants_of_slots(view: ModelView, prepared: Prepared) -> I8:
    """The view's variants as indices into the prepared prompts; the fleet may have changed since they were rendered."""
    if view.variants is prepared.variants or not view.variants:
        return view.variant_of_slot
    rendered = {variant.key: index for index, variant in enumerate(prepared.variants)}
    # One more entry, so that the index -1 of a slot without a variant stays -1.
    new_index = np.array([rendered.get(variant.key, -1) for variant in view.variants] + [-1], dtype=np.int8)
    translated: I8 = new_index[view.variant_of_slot]
    return translated
