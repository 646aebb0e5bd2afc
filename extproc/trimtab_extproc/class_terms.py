"""The extra terms of each class of requests: from the policy, the round trips, and what experts cost on each endpoint.

The one rule: they are made once and kept until something that they are made of changes, so that a decision only looks
them up. A pool whose policy asks for none has none, and pays nothing.

An endpoint whose round trip is not known is taken to be as far as the middle one of the others: taken as near, it would
draw what the network is worst for.
"""

import statistics
from collections.abc import Iterable, Mapping

import numpy as np

from trimtab_core.extra_terms import F64, ExtraTerms
from trimtab_extproc.endpoint_table import Endpoint, EndpointTable
from trimtab_extproc.request_classes import RequestClasses
from trimtab_state import ControlDocument, EndpointSpec, Heartbeat, Policy
from trimtab_state.request_class import EXPERTS_MAX, RequestClass

MILLI = 1_000.0
NO_COSTS: Mapping[int, int] = {}


class ClassTerms:
    """Of one pool. All calls from one event loop."""

    def __init__(self, table: EndpointTable) -> None:
        self._table = table
        self._policy = Policy()
        self.classes = RequestClasses(self._policy)
        self._specs: dict[str, EndpointSpec] = {}
        self._costs: dict[str, Mapping[int, int]] = {}
        """What sidecars said, by endpoint."""
        self._measured_s: Mapping[str, float] = {}
        """Round trips, by address."""
        self._terms: dict[str, ExtraTerms] = {}
        self._factor_of: dict[str, dict[str, float]] = {}
        """Expert factors by endpoint and class: costs of one endpoint change more often than anything else."""
        self._round_trips: F64 | None = None
        self._is_plain = True

    def of(self, request_class: RequestClass) -> ExtraTerms | None:
        """The terms of a request of that class; None: none."""
        if self._is_plain:
            return None
        terms = self._terms.get(request_class.name)
        if terms is None:
            if not self._terms:
                self._round_trips = self._trips()
            terms = self._terms[request_class.name] = ExtraTerms(
                weight_milli=request_class.weight_milli,
                expert_factor=self._factors(request_class),
                rtt_s=self._round_trips,
                log_above_tokens=float(self._policy.log_above_tokens),
            )
        return terms

    def round_trip_s(self, endpoint: Endpoint) -> float | None:
        """What is known of the way to an endpoint; None: nothing, or it is not asked for."""
        if self._policy.network == "off":
            return None
        spec = self._specs.get(endpoint.name)
        if spec is not None and spec.rtt_s is not None:
            return spec.rtt_s
        return self._measured_s.get(endpoint.address) if self._policy.network == "measured" else None

    @property
    def addresses(self) -> frozenset[str]:
        """The endpoints whose round trips are to be measured."""
        if self._policy.network != "measured":
            return frozenset()
        return frozenset(spec.address for spec in self._specs.values() if spec.rtt_s is None)

    # What changes them.

    def on_control(self, document: ControlDocument) -> None:
        """Another policy, or other members."""
        if document.policy != self._policy:
            self._policy = document.policy
            self.classes = RequestClasses(document.policy)
            self._is_plain = not (
                document.policy.classes or document.policy.log_above_tokens or document.policy.network != "off"
            )
            self._factor_of.clear()
        before = self._specs
        self._specs = {spec.name: spec for spec in document.endpoints}
        for name in [name for name in self._factor_of if self._specs.get(name) != before.get(name)]:
            del self._factor_of[name]
        self.forget()

    def on_heartbeat(self, heartbeat: Heartbeat) -> None:
        """What experts cost there."""
        if heartbeat.expert_costs != self._costs.get(heartbeat.endpoint, NO_COSTS):
            self._costs[heartbeat.endpoint] = heartbeat.expert_costs
            self._factor_of.pop(heartbeat.endpoint, None)
            self.forget()

    def on_heartbeat_gone(self, endpoint: str) -> None:
        """Nobody says any more what experts cost there."""
        if self._costs.pop(endpoint, None):
            self._factor_of.pop(endpoint, None)
            self.forget()

    def on_round_trips(self, measured_s: Mapping[str, float]) -> None:
        """What was measured, by address."""
        self._measured_s = measured_s
        self.forget()

    def forget(self) -> None:
        """Make them anew: slots may be others'."""
        self._terms.clear()

    # How they are made.

    def _members(self) -> list[Endpoint]:
        return [endpoint for name in self._specs if (endpoint := self._table.named(name)) is not None]

    def _trips(self) -> F64 | None:
        members = self._members()
        known = {e.slot: trip_s for e in members if (trip_s := self.round_trip_s(e)) is not None}
        if not known:
            return None
        trips = np.full(_slot_count(members), statistics.median(known.values()), dtype=np.float64)
        for slot, trip_s in known.items():
            trips[slot] = trip_s
        return trips

    def _factors(self, request_class: RequestClass) -> F64 | None:
        if not request_class.experts:
            return None
        members = self._members()
        factors = np.ones(_slot_count(members), dtype=np.float64)
        share: F64 | None = None
        for endpoint in members:
            of_classes = self._factor_of.setdefault(endpoint.name, {})
            factor = of_classes.get(request_class.name)
            if factor is None:
                share = _probabilities(request_class) if share is None else share
                factor = of_classes[request_class.name] = _expected_cost(share, self._costs_of(endpoint))
            factors[endpoint.slot] = factor
        return factors

    def _costs_of(self, endpoint: Endpoint) -> Mapping[int, int]:
        """By the policy where it names the endpoint, else by its sidecar."""
        spec = self._specs[endpoint.name]
        names = {endpoint.name, spec.address, spec.pod}
        for entry in self._policy.expert_costs:
            if not names.isdisjoint(entry.endpoints):
                return {expert: run.cost_milli for run in entry.costs for expert in range(run.first, run.last + 1)}
        return self._costs.get(endpoint.name, NO_COSTS)


def _expected_cost(share: F64, costs: Mapping[int, int]) -> float:
    """Of a token: the costs as likely as their experts are. What is not named costs 1, as all of it does where no
    expert is likelier than none."""
    experts = np.fromiter(costs.keys(), dtype=np.int64, count=len(costs))
    beyond = np.fromiter(costs.values(), dtype=np.float64, count=len(costs)) / MILLI - 1.0
    return 1.0 + float((share[experts] * beyond).sum())


def _probabilities(request_class: RequestClass) -> F64:
    """How likely each expert is to be picked; they add up to 1, or to 0 if nothing is known."""
    share = np.zeros(EXPERTS_MAX, dtype=np.float64)
    for run in request_class.experts:
        if run.last >= run.first:
            share[run.first : run.last + 1] += run.share / (run.last - run.first + 1)
    total = float(share.sum())
    return share / total if total > 0 else share


def _slot_count(members: Iterable[Endpoint]) -> int:
    return 1 + max((endpoint.slot for endpoint in members), default=-1)
