"""What the process counts about itself, for Prometheus.

The one rule: labels are few and their values come from closed sets or from the pool's own lists, never from a client:
`pool`, `pool_namespace`, `model_server` (an endpoint's name), `model_name` (a name that an endpoint lists, else
"unknown"), `reason`. It only counts; nothing decides by it.

Bounds: `MODEL_LABELS_MAX` model names; more count as "other".
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Gauge, generate_latest
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
_TOKEN_BUCKETS = (16, 64, 256, 1024, 4096, 16384, 65536, 262144, 1048576)
_BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointGauges:
    """What is shown of one endpoint at a scrape."""

    name: str
    requests: int
    external: int
    queued_tokens: float
    prefill_rate: float
    is_candidate: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetGauges:
    """What is shown of the whole at a scrape."""

    endpoints: tuple[EndpointGauges, ...]
    index_chunks: int
    index_pairs: int
    open_reservations: int
    is_connected: bool
    is_ready: bool
    unsynced_endpoints: int
    ignored_endpoints: int


class Telemetry:
    """The counters of one process."""

    def __init__(self, *, pool: str, pool_namespace: str, implementation: str, front: str = "") -> None:
        self.registry = CollectorRegistry()
        self._pool = (pool, pool_namespace)
        names = ("pool", "pool_namespace")

        tallies = TallyCollector(names, self._pool)
        self.registry.register(tallies)
        counter, histogram = tallies.tally, tallies.spread

        self._decisions = counter("trimtab_decisions", "Requests placed, by what decided.", "reason")
        self._approximate = counter(
            "trimtab_approximate_decisions", "Placements without an exact view of the prefix, by why.", "reason"
        )
        self._rejected = counter("trimtab_rejected", "Requests refused, by why.", "reason")
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
        self._hop_seconds = histogram(
            "trimtab_hop_seconds",
            "From the last byte of the request to the answer, as it is sent.",
            _DECISION_BUCKETS,
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

    def decided(self, *, seconds: float) -> None:
        self._decision_seconds.observe(seconds)

    def answered(self, *, seconds: float) -> None:
        self._hop_seconds.observe(seconds)

    def placed(self, placement: Placement, *, approximate_reason: str | None, model_label: str) -> None:
        self._decisions.add(placement.reason)
        if approximate_reason is not None:
            self._approximate.add(approximate_reason)
        slot = placement.slot
        model = self._model(model_label)
        self._prompt_tokens.add(model, placement.prompt_tokens)
        self._hit_tokens.add(model, float(placement.hit_tokens[slot]))
        self._p_tokens.observe(float(placement.p_tokens[slot]))
        self._batch.observe(float(placement.batch[slot]))

    def rejected(self, *, reason: str) -> None:
        self._rejected.add(reason)

    def protocol_error(self) -> None:
        self._protocol_errors.add()

    def failure(self) -> None:
        self._failures.add()

    def not_ready(self) -> None:
        self._not_ready.add()

    def moved(self, *, is_known: bool) -> None:
        (self._moved if is_known else self._unknown_served).add()

    def used(self, *, model_label: str, predicted_tokens: int, prompt_tokens: int, cached_tokens: int) -> None:
        model = self._model(model_label)
        self._measured_prompt_tokens.add(model, prompt_tokens)
        self._measured_hit_tokens.add(model, cached_tokens)
        self._measured_predicted_tokens.add(model, min(predicted_tokens, prompt_tokens))

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
            ("trimtab_state_connected", "1 while the shared state is current.", int(fleet.is_connected)),
            ("trimtab_ready", "1 once the pool is known.", int(fleet.is_ready)),
            ("trimtab_unsynced_endpoints", "Endpoints whose chunks wait for a snapshot.", fleet.unsynced_endpoints),
            ("trimtab_ignored_endpoints", "Mentions of endpoints beyond the table's bound.", fleet.ignored_endpoints),
        ):
            family = GaugeMetricFamily(name, text, labels=("pool", "pool_namespace"))
            family.add_metric(self._pool, value)
            yield family
        read: tuple[tuple[str, str, Callable[[EndpointGauges], float]], ...] = (
            ("trimtab_endpoint_requests", "Requests on the endpoint.", lambda e: e.requests + e.external),
            ("trimtab_endpoint_external_requests", "Those of them that came past us.", lambda e: e.external),
            ("trimtab_endpoint_queued_tokens", "Uncached prompt tokens on their way.", lambda e: e.queued_tokens),
            ("trimtab_endpoint_prefill_rate", "Tokens per second of prefill.", lambda e: e.prefill_rate),
            ("trimtab_endpoint_candidate", "1 if it may be chosen.", lambda e: int(e.is_candidate)),
        )
        for name, text, value_of in read:
            family = GaugeMetricFamily(name, text, labels=("pool", "pool_namespace", "model_server"))
            for endpoint in fleet.endpoints:
                family.add_metric((*self._pool, endpoint.name), value_of(endpoint))
            yield family
