"""Times of scheduling decisions, read back from the pickers' metrics.

Its one rule: a histogram knows the bucket of a time, not the time; samples are spread evenly within their bucket, as
Prometheus's `histogram_quantile` assumes, and add up over all pickers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from prometheus_client.parser import text_string_to_metric_families

METRIC = "trimtab_decision_seconds"


def decision_times(pages: Iterable[str]) -> list[float]:
    """One time in seconds for each decision that the metrics pages count."""
    times: list[float] = []
    for page in pages:
        buckets = sorted(
            (float(sample.labels["le"]), int(sample.value))
            for family in text_string_to_metric_families(page)
            if family.name == METRIC
            for sample in family.samples
            if sample.name.endswith("_bucket")
        )
        lower_s, counted = 0.0, 0
        for upper_s, cumulative in buckets:
            # Beyond the last bound nothing is known but that it was passed.
            top_s = lower_s if math.isinf(upper_s) else upper_s
            count = cumulative - counted
            times.extend(lower_s + (top_s - lower_s) * (number + 0.5) / count for number in range(count))
            lower_s, counted = top_s, cumulative
    return times
