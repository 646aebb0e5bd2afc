"""Asks Prometheus what a dashboard asks it, for one pool.

The one rule: the queries are the file's own; only Grafana's variables are replaced, as Grafana would.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from trimtab_observability.local_prometheus import LocalPrometheus, Series

RATE_INTERVAL: Final = "15s"
"""Four scrapes is Grafana's least; on a busy machine some come late."""


def targets(dashboard: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """(panel, target) of every query."""
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            yield panel, target


def filled(expr: str, *, namespace: str, pool: str) -> str:
    """The expression for one pool."""
    values = {"$__rate_interval": RATE_INTERVAL, "$namespace": namespace, "$pool": pool}
    for name, value in values.items():
        expr = expr.replace(name, value)
    return expr


async def answers(
    prometheus: LocalPrometheus,
    dashboard: Mapping[str, Any],
    *,
    namespace: str,
    pool: str,
    start_s: float,
    end_s: float,
) -> dict[int, Sequence[Sequence[Series]]]:
    """What every panel would show over that time; panels of the moment, at its end."""
    step_s = max(1.0, (end_s - start_s) / 300)

    async def one(target: Mapping[str, Any]) -> list[Series]:
        expr = filled(target["expr"], namespace=namespace, pool=pool)
        if target.get("instant"):
            return await prometheus.now(expr)
        return await prometheus.between(expr, start_s=start_s, end_s=end_s, step_s=step_s)

    return {
        panel["id"]: await asyncio.gather(*(one(target) for target in panel["targets"]))
        for panel in dashboard["panels"]
        if panel.get("targets")
    }
