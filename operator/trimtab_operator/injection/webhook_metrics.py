"""What the webhook counts.

The one rule: labels are outcomes, reasons and pools that exist; never what a pod brings along.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from trimtab_operator.injection.admission import Answer


class WebhookMetrics:
    """On a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._answers = Counter(
            "trimtab_webhook_requests_total", "Admission requests answered", ["outcome"], registry=self.registry
        )
        self._skips = Counter(
            "trimtab_webhook_skips_total", "Pods left as they are, by reason", ["reason"], registry=self.registry
        )
        self._injected = Counter(
            "trimtab_webhook_injected_total",
            "Pods that the sidecar was put into",
            ["pool", "pool_namespace"],
            registry=self.registry,
        )
        self._seconds = Histogram(
            "trimtab_webhook_seconds",
            "From the request's last byte to the answer",
            buckets=(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0),
            registry=self.registry,
        )
        self.ready = Gauge(
            "trimtab_webhook_ready", "1: pools are known and a certificate is served", registry=self.registry
        )
        self.pools = Gauge("trimtab_webhook_pools", "Pools known", registry=self.registry)
        self.expires = Gauge(
            "trimtab_webhook_certificate_expiry_timestamp_seconds",
            "When the served certificate ends",
            registry=self.registry,
        )
        for outcome in ("injected", "unchanged", "skipped", "error"):
            self._answers.labels(outcome)

    def count(self, answer: Answer) -> None:
        self._answers.labels(answer.outcome).inc()
        if answer.reason:
            self._skips.labels(answer.reason).inc()
        if answer.outcome == "injected" and answer.pool is not None:
            self._injected.labels(answer.pool.name, answer.pool.namespace).inc()

    def count_error(self) -> None:
        self._answers.labels("error").inc()

    @contextmanager
    def timed(self) -> Iterator[None]:
        begin_s = time.perf_counter()
        try:
            yield
        finally:
            self._seconds.observe(time.perf_counter() - begin_s)
