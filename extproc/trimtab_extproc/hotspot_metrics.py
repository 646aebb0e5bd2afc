"""What the hotspot detector knows, for Prometheus.

The one rule: no label names a class, for there are as many as prompts; who wants to know which one it is finds it in
the log, in `/state` and in the alarms of the shared state.
"""

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from trimtab_core.hotspot import HotspotView

LABELS = ("pool", "pool_namespace")


class HotspotCollector(Collector):
    """Asks at every scrape. `written`: alarms that went to the shared state."""

    def __init__(self, pool: tuple[str, str], view: Callable[[], HotspotView], written: Callable[[], int]) -> None:
        self._pool = pool
        self._view = view
        self._written = written

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        view = self._view()
        acted_on = sum(hotspot.is_acted_on for hotspot in view.hotspots)
        for name, text, value in (
            ("trimtab_hotspot_classes", "Prefix classes with a hotspot alarm now.", len(view.hotspots)),
            ("trimtab_hotspot_acted_on_classes", "Those of them whose holders are left out.", acted_on),
            ("trimtab_hotspot_window_arrivals", "Requests in the detector's window.", view.arrivals),
            ("trimtab_hotspot_window_prefixes", "Prefixes that it counts.", view.prefixes),
        ):
            gauge = GaugeMetricFamily(name, text, labels=LABELS)
            gauge.add_metric(self._pool, value)
            yield gauge
        for name, text, value in (
            ("trimtab_hotspot_raised", "Hotspot alarms raised.", view.raised),
            ("trimtab_hotspot_acted_on", "Hotspot alarms that were acted on.", view.acted),
            ("trimtab_hotspot_alarms_written", "Alarms told to the operator.", self._written()),
        ):
            counter = CounterMetricFamily(name, text, labels=LABELS)
            counter.add_metric(self._pool, value)
            yield counter
