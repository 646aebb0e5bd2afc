"""Counters and histograms that cost an addition each.

The one rule: they are plain numbers of one thread, turned into metrics when somebody asks. (The metrics library's own
lock and look up a child at each step, which for a small request adds up to a tenth of its cost.)
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class Tally:
    """A counter by the value of one label; with `label` None just one number, under the value "".

    `values` are shown from the start, with 0: Prometheus does not see the first step of a series that begins with 1.
    """

    __slots__ = ("counts", "label", "name", "text")

    def __init__(self, name: str, text: str, label: str | None = None, values: Sequence[str] = ()) -> None:
        self.name = name
        self.text = text
        self.label = label
        self.counts: dict[str, float] = dict.fromkeys(values, 0.0) if label else {"": 0.0}

    def add(self, value: str = "", amount: float = 1.0) -> None:
        """Counts."""
        self.counts[value] = self.counts.get(value, 0.0) + amount

    def metric(self, names: Sequence[str], values: Sequence[str]) -> Metric:
        """As it is now; `names` and `values` are the labels that all metrics have."""
        labels = [*names, self.label] if self.label else names
        family = CounterMetricFamily(self.name, self.text, labels=labels)
        for value, count in self.counts.items():
            family.add_metric([*values, value] if self.label else values, count)
        return family


class Spread:
    """A histogram. `bounds` are the buckets' upper ones, ascending."""

    __slots__ = ("bounds", "counts", "name", "sum", "text")

    def __init__(self, name: str, text: str, bounds: Sequence[float]) -> None:
        self.name = name
        self.text = text
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Counts."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def metric(self, names: Sequence[str], values: Sequence[str]) -> Metric:
        """As it is now."""
        family = HistogramMetricFamily(self.name, self.text, labels=names)
        buckets, total = [], 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            total += count
            buckets.append((str(floatToGoString(bound)), total))  # type: ignore[no-untyped-call]
        family.add_metric(values, buckets, self.sum)
        return family


class TallyCollector(Collector):
    """All of them at a scrape."""

    def __init__(self, names: Sequence[str], values: Sequence[str]) -> None:
        self._names = names
        self._values = values
        self._members: list[Tally | Spread] = []

    def tally(self, name: str, text: str, label: str | None = None, values: Sequence[str] = ()) -> Tally:
        """A new counter."""
        made = Tally(name, text, label, values)
        self._members.append(made)
        return made

    def spread(self, name: str, text: str, bounds: Sequence[float]) -> Spread:
        """A new histogram."""
        made = Spread(name, text, bounds)
        self._members.append(made)
        return made

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        for member in self._members:
            yield member.metric(self._names, self._values)
