"""What the process counts about itself, for Prometheus.

The one rule: labels are few and their values come from closed sets or from the pool's own lists, never from a client:
`pool`, `pool_namespace`, `model_server` (an endpoint's name), `model_name` (a name that an endpoint lists, else
"unknown"), `reason`. It only counts; nothing decides by it.

Bounds: `MODEL_LABELS_MAX` model names; more count as "other".
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Gauge, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from trimtab_core.placement import Placement
from trimtab_extproc.tallies import TallyCollector

MODEL_LABELS_MAX = 64

_DECISION_BUCKETS = (
    0.00005,
    0.0001,
    0.00025,
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    1.0,
)
_SCHEDULER_BUCKETS = (0.00002, 0.00005, 0.0001, 0.00015, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1)
_FIRST_TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_RATIO_BUCKETS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
_TOKEN_BUCKETS = (16, 64, 256, 1024, 4096, 16384, 65536, 262144, 1048576)
_BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
REFUSALS = (
    *("no_endpoints", "subset_empty", "endpoints_full", "too_many_open", "wait_over", "wait_queue_full"),
    "sheddable",
)
CONFIRMATIONS = ("kept", "moved", "unsettled", "refused", "late", "unknown")
WAIT_ENDS = ("placed", "refused", "wait_over", "wait_queue_full", "left")
FIRST_TOKEN_SIGHTS = ("response", "kv_events", "prefill_rate")
"""How a first token is known: in the response's body, by the KV events, or not seen at all and taken as there."""
POLICIES = ("product", "round_robin", "least_request")


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointGauges:
    """What is shown of one endpoint at a scrape."""

    name: str
    requests: int
    external: int
    queued_tokens: float
    prefill_rate: float
    product: float
    """P x B that a request would find whose whole prompt is in the endpoint's cache."""
    is_candidate: bool
    is_exact: bool
    state: str
    reported_requests: int | None
    """Running and waiting, as the engine's last heartbeat said; None without one."""
    kv_usage: float | None
    weight: float
    """Requests there, each with the weight of its class."""
    round_trip_s: float | None
    """None: not known, or the policy does not ask for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetGauges:
    """What is shown of the whole at a scrape."""

    endpoints: tuple[EndpointGauges, ...]
    index_chunks: int
    index_pairs: int
    open_reservations: int
    oldest_reservation_s: float
    policy: str
    is_connected: bool
    is_ready: bool
    unsynced_endpoints: int
    ignored_endpoints: int


class Telemetry:
    """The counters of one process."""

    def __init__(self, *, pool: str, pool_namespace: str, implementation: str, front: str = "") -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._pool = (pool, pool_namespace)
        names = ("pool", "pool_namespace")

        tallies = TallyCollector(names, self._pool)
        self.registry.register(tallies)
        counter, histogram = tallies.tally, tallies.spread

        self._decisions = counter("trimtab_decisions", "Requests placed, by what decided.", "reason")
        self._approximate = counter(
            "trimtab_approximate_decisions", "Placements without an exact view of the prefix, by why.", "reason"
        )
        self._rejected = counter("trimtab_rejected", "Requests refused, by why.", "reason", REFUSALS)
        self._protocol_errors = counter("trimtab_protocol_errors", "Streams that broke the protocol.")
        self._failures = counter("trimtab_failures", "Streams ended by a fault of our own.")
        self._not_ready = counter("trimtab_not_ready", "Streams ended because the pool was not known yet.")
        self._moved = counter("trimtab_moved_requests", "Requests that another endpoint served than the one chosen.")
        self._unknown_served = counter(
            "trimtab_unknown_served_requests", "Requests served by an address that the pool does not know."
        )
        self._prompt_tokens = counter("trimtab_prompt_tokens", "Prompt tokens placed.", "model_name")
        self._hit_tokens = counter(
            "trimtab_predicted_hit_tokens", "Prompt tokens expected in the chosen endpoint's cache.", "model_name"
        )
        self._measured_prompt_tokens = counter(
            "trimtab_measured_prompt_tokens", "Prompt tokens, of the responses whose usage was seen.", "model_name"
        )
        self._measured_hit_tokens = counter(
            "trimtab_measured_hit_tokens", "Cached prompt tokens that engines reported in the usage.", "model_name"
        )
        self._measured_predicted_tokens = counter(
            "trimtab_measured_predicted_hit_tokens", "What was predicted for those same responses.", "model_name"
        )
        self._decision_seconds = histogram(
            "trimtab_decision_seconds", "From the complete request to the choice, hashing included.", _DECISION_BUCKETS
        )
        self._scheduler_seconds = histogram(
            "trimtab_scheduler_seconds",
            "Match, score and reserve, and telling it: the choice from the hashed prompt on.",
            _SCHEDULER_BUCKETS,
        )
        self._hop_seconds = histogram(
            "trimtab_hop_seconds",
            "From the last byte of the request to the answer, as it is sent.",
            _DECISION_BUCKETS,
        )
        self._predicted_hit_ratio = histogram(
            "trimtab_predicted_hit_ratio", "Share of a prompt expected in the chosen endpoint's cache.", _RATIO_BUCKETS
        )
        self._measured_hit_ratio = histogram(
            "trimtab_measured_hit_ratio",
            "Share of a prompt that the engine found there, as its usage said.",
            _RATIO_BUCKETS,
        )
        self._first_token_seconds = histogram(
            "trimtab_first_token_seconds",
            "From the choice to the first token, where that was seen.",
            _FIRST_TOKEN_BUCKETS,
        )
        self._first_tokens = counter(
            "trimtab_first_tokens", "First tokens, by how they were known.", "seen_by", FIRST_TOKEN_SIGHTS
        )
        self._kept_away = counter(
            "trimtab_hotspot_moved_requests", "Requests kept from the holders of their prefix, a hotspot."
        )
        self._waits = counter(
            "trimtab_waits", "Requests that waited for a place, by how that ended.", "outcome", WAIT_ENDS
        )
        self._wait_seconds = histogram("trimtab_wait_seconds", "How long they waited.", _FIRST_TOKEN_BUCKETS)
        self._confirmations = counter(
            "trimtab_confirmations",
            "Choices held back until those of other pickers at the same moment were known, by what came of it.",
            "result",
            CONFIRMATIONS,
        )
        self._confirmation_seconds = histogram(
            "trimtab_confirmation_seconds", "How long they were held back.", _DECISION_BUCKETS
        )
        self._p_tokens = histogram("trimtab_chosen_p_tokens", "P of the chosen endpoint.", _TOKEN_BUCKETS)
        self._batch = histogram("trimtab_chosen_batch", "B of the chosen endpoint.", _BATCH_BUCKETS)
        self._loop_lag_seconds = histogram(
            "trimtab_event_loop_lag_seconds", "How late the process's own timer was.", _DECISION_BUCKETS
        )
        self._in_flight_count = 0
        in_flight = Gauge("trimtab_exchanges_in_flight", "HTTP exchanges in progress.", names, registry=self.registry)
        in_flight.labels(*self._pool).set_function(lambda: self._in_flight_count)
        information = Gauge("trimtab_core", "The core in use.", (*names, "implementation"), registry=self.registry)
        information.labels(*self._pool, implementation).set(1)
        server = Gauge("trimtab_front", "The gRPC server in use.", (*names, "implementation"), registry=self.registry)
        server.labels(*self._pool, front).set(1)
        self._models: set[str] = set()

    def watch(self, gauges: Callable[[], FleetGauges]) -> None:
        """Ask for these at every scrape."""
        self.registry.register(_FleetCollector(self._pool, gauges))

    def watch_counts(self, counts: Callable[[], Mapping[str, float]]) -> None:
        """Ask for these, which others count, at every scrape."""
        self.registry.register(_StateCollector(self._pool, counts))

    def watch_log_lag(self, log_lag_s: Callable[[], float]) -> None:
        """Ask for this at every scrape."""
        text = "How far this replica is behind the logs of the shared state."
        gauge = Gauge("trimtab_log_lag_seconds", text, ("pool", "pool_namespace"), registry=self.registry)
        gauge.labels(*self._pool).set_function(log_lag_s)

    def watch_waiting(self, count: Callable[[], int]) -> None:
        """Ask for this at every scrape."""
        text = "Requests that wait in this picker for a place."
        gauge = Gauge("trimtab_waiting_requests", text, ("pool", "pool_namespace"), registry=self.registry)
        gauge.labels(*self._pool).set_function(count)

    def watch_replicas(self, count: Callable[[], int]) -> None:
        """Ask for this at every scrape."""
        text = "Pickers of the pool that this one knows of, itself included."
        gauge = Gauge("trimtab_replicas", text, ("pool", "pool_namespace"), registry=self.registry)
        gauge.labels(*self._pool).set_function(count)

    def expose(self) -> bytes:
        """All of it in Prometheus's text format."""
        return generate_latest(self.registry)

    # Events.

    def ticked(self, *, late_s: float) -> None:
        self._loop_lag_seconds.observe(late_s)

    def exchange_opened(self) -> None:
        self._in_flight_count += 1

    def exchange_closed(self) -> None:
        self._in_flight_count -= 1

    def decided(self, *, seconds: float, scheduler_seconds: float) -> None:
        self._decision_seconds.observe(seconds)
        self._scheduler_seconds.observe(scheduler_seconds)

    def answered(self, *, seconds: float) -> None:
        self._hop_seconds.observe(seconds)

    def placed(self, placement: Placement, *, approximate_reason: str | None, model_label: str) -> None:
        self._decisions.add(placement.reason)
        if placement.hotspot is not None:
            self._kept_away.add()
        if approximate_reason is not None:
            self._approximate.add(approximate_reason)
        slot = placement.slot
        model = self._model(model_label)
        self._prompt_tokens.add(model, placement.prompt_tokens)
        hit_tokens = float(placement.hit_tokens[slot])
        self._hit_tokens.add(model, hit_tokens)
        if placement.prompt_tokens:
            self._predicted_hit_ratio.observe(min(1.0, hit_tokens / placement.prompt_tokens))
        self._p_tokens.observe(float(placement.p_tokens[slot]))
        self._batch.observe(float(placement.batch[slot]))

    def rejected(self, *, reason: str) -> None:
        self._rejected.add(reason)

    def waited(self, *, seconds: float, outcome: str) -> None:
        self._waits.add(outcome)
        self._wait_seconds.observe(seconds)

    def confirmed(self, *, seconds: float, result: str) -> None:
        self._confirmations.add(result)
        self._confirmation_seconds.observe(seconds)

    def protocol_error(self) -> None:
        self._protocol_errors.add()

    def failure(self) -> None:
        self._failures.add()

    def not_ready(self) -> None:
        self._not_ready.add()

    def moved(self, *, is_known: bool) -> None:
        (self._moved if is_known else self._unknown_served).add()

    def first_token(self, *, seconds: float, seen_by: str) -> None:
        self._first_tokens.add(seen_by)
        self._first_token_seconds.observe(seconds)

    def first_token_assumed(self) -> None:
        self._first_tokens.add("prefill_rate")

    def used(self, *, model_label: str, predicted_tokens: int, prompt_tokens: int, cached_tokens: int) -> None:
        model = self._model(model_label)
        self._measured_prompt_tokens.add(model, prompt_tokens)
        self._measured_hit_tokens.add(model, cached_tokens)
        self._measured_predicted_tokens.add(model, min(predicted_tokens, prompt_tokens))
        if prompt_tokens:
            self._measured_hit_ratio.observe(min(1.0, cached_tokens / prompt_tokens))

    def _model(self, label: str) -> str:
        if label not in self._models:
            if len(self._models) >= MODEL_LABELS_MAX:
                return "other"
            self._models.add(label)
        return label


class _StateCollector(Collector):
    """What the follower and the publisher of the shared state count."""

    def __init__(self, pool: tuple[str, str], counts: Callable[[], Mapping[str, float]]) -> None:
        self._pool = pool
        self._counts = counts

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(
            "trimtab_state_events", "What happened to the shared state.", labels=("pool", "pool_namespace", "event")
        )
        for event, count in self._counts().items():
            family.add_metric((*self._pool, event), count)
        yield family


class _FleetCollector(Collector):
    """Turns the fleet's gauges into metrics at a scrape, so that nothing is kept up to date in between."""

    def __init__(self, pool: tuple[str, str], gauges: Callable[[], FleetGauges]) -> None:
        self._pool = pool
        self._gauges = gauges

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        fleet = self._gauges()
        for name, text, value in (
            ("trimtab_index_chunks", "Distinct chunks in the index.", fleet.index_chunks),
            ("trimtab_index_pairs", "Pairs of an endpoint and a chunk it holds.", fleet.index_pairs),
            ("trimtab_open_reservations", "Reservations of this replica.", fleet.open_reservations),
            ("trimtab_oldest_reservation_seconds", "Age of the oldest of them; 0: none.", fleet.oldest_reservation_s),
            ("trimtab_state_connected", "1 while the shared state is current.", int(fleet.is_connected)),
            ("trimtab_ready", "1 once the pool is known.", int(fleet.is_ready)),
            ("trimtab_unsynced_endpoints", "Endpoints whose chunks wait for a snapshot.", fleet.unsynced_endpoints),
            ("trimtab_ignored_endpoints", "Mentions of endpoints beyond the table's bound.", fleet.ignored_endpoints),
        ):
            family = GaugeMetricFamily(name, text, labels=("pool", "pool_namespace"))
            family.add_metric(self._pool, value)
            yield family
        family = GaugeMetricFamily(
            "trimtab_policy",
            "1 for the policy by which this replica chooses.",
            labels=("pool", "pool_namespace", "policy"),
        )
        for policy in dict.fromkeys((*POLICIES, fleet.policy)):
            family.add_metric((*self._pool, policy), policy == fleet.policy)
        yield family
        family = GaugeMetricFamily(
            "trimtab_endpoint_state",
            "1 for the state of the endpoint, as its sidecar and the operator tell it.",
            labels=("pool", "pool_namespace", "model_server", "state"),
        )
        for endpoint in fleet.endpoints:
            family.add_metric((*self._pool, endpoint.name, endpoint.state), 1)
        yield family
        read: tuple[tuple[str, str, Callable[[EndpointGauges], float | None]], ...] = (
            ("trimtab_endpoint_requests", "Requests on the endpoint.", lambda e: e.requests + e.external),
            ("trimtab_endpoint_weight", "The same, each with the weight of its class.", lambda e: e.weight),
            ("trimtab_endpoint_external_requests", "Those of them that came past us.", lambda e: e.external),
            ("trimtab_endpoint_queued_tokens", "Uncached prompt tokens on their way.", lambda e: e.queued_tokens),
            ("trimtab_endpoint_prefill_rate", "Tokens per second of prefill.", lambda e: e.prefill_rate),
            ("trimtab_endpoint_round_trip_seconds", "The way to it, where it counts.", lambda e: e.round_trip_s),
            ("trimtab_endpoint_product", "P x B for a prompt that it holds whole.", lambda e: e.product),
            ("trimtab_endpoint_candidate", "1 if it may be chosen.", lambda e: int(e.is_candidate)),
            ("trimtab_endpoint_exact", "1 if its cache is known chunk by chunk.", lambda e: int(e.is_exact)),
            (
                "trimtab_endpoint_reported_requests",
                "Running and waiting, as the engine says.",
                lambda e: e.reported_requests,
            ),
            ("trimtab_endpoint_kv_usage", "Share of the KV cache that requests hold.", lambda e: e.kv_usage),
        )
        for name, text, value_of in read:
            family = GaugeMetricFamily(name, text, labels=("pool", "pool_namespace", "model_server"))
            for endpoint in fleet.endpoints:
                shown = value_of(endpoint)
                if shown is not None:
                    family.add_metric((*self._pool, endpoint.name), shown)
            yield family
