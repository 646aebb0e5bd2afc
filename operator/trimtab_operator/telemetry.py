"""The operator's metrics.

The one rule: names `trimtab_operator_*`, labels `pool`, `pool_namespace` and what comes from closed sets, and a pool's
series go with it.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from trimtab_operator.api.pool import PoolKey
from trimtab_operator.report.pool_facts import PoolFacts
from trimtab_operator.report.rollout import replicas
from trimtab_state.documents import PolicyName

POOL: Final = ("pool_namespace", "pool")
MODES: Final[tuple[PolicyName, ...]] = ("product", "round_robin", "least_request")
LOOK_BUCKETS_S: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 15.0)


class Telemetry:
    """One per process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._looks = Histogram(
            "trimtab_operator_reconcile_seconds",
            "How long one look at a pool took.",
            registry=self.registry,
            buckets=LOOK_BUCKETS_S,
        )
        self._errors = self._counter("reconcile_errors", "Looks at a pool that failed and are repeated.", POOL)
        self._switches = self._gauge(
            "policy_switches", "Times the pool's policy became another one, since start.", POOL
        )
        self._mode = self._gauge("pool_policy", "1 for the policy by which the pool is placed.", (*POOL, "policy"))
        self._fallback = self._gauge("pool_fallback_active", "1 while hotspot alarms keep it in round robin.", POOL)
        self._endpoints = self._gauge("pool_endpoints", "Endpoints of the pool.", (*POOL, "state"))
        self._pickers = self._gauge("pool_pickers", "Pickers of the pool: ready, and wanted.", (*POOL, "state"))
        self._sidecars = self._gauge("pool_sidecars", "Pods with the sidecar, and without.", (*POOL, "state"))
        self._heard = self._gauge("pool_endpoints_known", "Endpoints by how their cache is known.", (*POOL, "how"))
        self._store = self._gauge("pool_store_connected", "1: the store could be read for this pool.", POOL)
        self._refused = self._gauge(
            "pool_policies_refused", "Policies for the pool that cannot be used, or are not the oldest.", POOL
        )
        self._problems = self._gauge("pool_apply_problems", "Children refused or somebody else's.", POOL)

    def watch(self, *, depth: Callable[[], float], age_s: Callable[[], float], leads: Callable[[], float]) -> None:
        """What is asked when somebody scrapes."""
        self._gauge("queue_depth", "Pools that wait to be looked at.").set_function(depth)
        self._gauge("queue_age_seconds", "How long the pool that waits longest is overdue.").set_function(age_s)
        self._gauge("leader", "1: this replica works.").set_function(leads)

    def watch_cluster(
        self,
        *,
        refusals: Callable[[], Mapping[int, int]],
        watches: Callable[[], int],
        lists: Callable[[], int],
        crd_differs: Callable[[], float],
    ) -> None:
        """What is asked of the way to the API server when somebody scrapes. `refusals`: by HTTP status."""
        self.registry.register(_ClusterCollector(refusals, watches, lists))
        self._gauge(
            "crd_differs", "1: the cluster's SchedulingPolicy CRD is of another release than the operator."
        ).set_function(crd_differs)

    def watch_certificate(self, expires_s: Callable[[], float]) -> None:
        self._gauge(
            "webhook_certificate_expiry_timestamp_seconds", "When the webhook's certificate ends; 0: there is none."
        ).set_function(expires_s)

    def worked(self, key: PoolKey, *, seconds: float, error: str | None) -> None:
        """One look at a pool, and the name of what it failed with."""
        self._looks.observe(seconds)
        if error is not None:
            self._errors.labels(key.namespace, key.name).inc()

    def saw(self, facts: PoolFacts, *, switches: int, policies_refused: int) -> None:
        """One pool as it was found."""
        pool = (facts.pool.key.namespace, facts.pool.key.name)
        self._switches.labels(*pool).set(switches)
        self._refused.labels(*pool).set(policies_refused)
        if facts.told is not None:
            for name in MODES:
                self._mode.labels(*pool, name).set(facts.told.policy == name)
            self._fallback.labels(*pool).set(facts.told.fallback == "active")
        if facts.members is not None:
            self._endpoints.labels(*pool, "ready").set(facts.members.ready)
            self._endpoints.labels(*pool, "total").set(facts.members.total)
            self._sidecars.labels(*pool, "injected").set(facts.members.pods_injected)
            self._sidecars.labels(*pool, "missing").set(facts.members.pods_not_injected)
        ready, wanted = replicas(facts.picker)
        self._pickers.labels(*pool, "ready").set(ready)
        self._pickers.labels(*pool, "wanted").set(wanted)
        if facts.fleet is not None:
            self._store.labels(*pool).set(not facts.fleet.store_error)
            self._heard.labels(*pool, "exact").set(facts.fleet.exact)
            self._heard.labels(*pool, "approximate").set(facts.fleet.guessed)
            self._heard.labels(*pool, "silent").set(len(facts.fleet.silent))
        self._problems.labels(*pool).set(len(facts.foreign) + len(facts.apply_errors))

    def forgotten(self, key: PoolKey) -> None:
        """Nothing is left of the pool."""
        pool = {"pool_namespace": key.namespace, "pool": key.name}
        for metric in (
            self._errors, self._switches, self._mode, self._fallback, self._endpoints, self._pickers, self._sidecars,
            self._heard, self._store, self._problems, self._refused,
        ):  # fmt: skip
            metric.remove_by_labels(pool)

    def _gauge(self, name: str, text: str, labels: tuple[str, ...] = ()) -> Gauge:
        return Gauge(f"trimtab_operator_{name}", text, labels, registry=self.registry)

    def _counter(self, name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
        return Counter(f"trimtab_operator_{name}", text, labels, registry=self.registry)


class _ClusterCollector(Collector):
    """What others count."""

    def __init__(
        self, refusals: Callable[[], Mapping[int, int]], watches: Callable[[], int], lists: Callable[[], int]
    ) -> None:
        self._refusals = refusals
        self._watches = watches
        self._lists = lists

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        refused = CounterMetricFamily(
            "trimtab_operator_kube_errors",
            "Calls that the API server refused, by HTTP status; 0: it was not reached.",
            labels=("code",),
        )
        for status, count in sorted(self._refusals().items()):
            refused.add_metric((str(status),), count)
        yield refused
        for name, text, value in (
            ("watches_started", "Watches begun, of all kinds: they end every five minutes at most.", self._watches()),
            ("watches_lost", "Times a kind was listed from the start: at first, and where changes were lost.",
             self._lists()),
        ):  # fmt: skip
            family = CounterMetricFamily(f"trimtab_operator_{name}", text)
            family.add_metric((), value)
            yield family
