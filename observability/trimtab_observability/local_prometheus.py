"""A real Prometheus on this machine: the `prometheus` command, scraping what it is told to every second.

The one rule: what it answers is given on as it is. It must not know what the queries are for.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp
import yaml

from trimtab.commands import LOOPBACK
from trimtab.probes import free_ports, http_ok
from trimtab.processes import Supervisor

SCRAPE_S: Final = 1
NAME: Final = "prometheus"


class QueryError(Exception):
    """Prometheus refused a query; the message is its own."""


def binary() -> Path | None:
    """Debian's package `prometheus` has it; None where there is none."""
    found = shutil.which("prometheus")
    return None if found is None else Path(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One series of an answer: labels, and (seconds, value) in order."""

    labels: Mapping[str, str]
    points: Sequence[tuple[float, float]]


class LocalPrometheus:
    """One process; it ends with its supervisor."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self.url = url

    async def now(self, expr: str) -> list[Series]:
        """An instant query. Raises QueryError."""
        found = await self._ask("query", {"query": expr})
        if found["resultType"] == "scalar":
            return [Series(labels={}, points=[_point(found["result"])])]
        return [Series(labels=row["metric"], points=[_point(row["value"])]) for row in found["result"]]

    async def between(self, expr: str, *, start_s: float, end_s: float, step_s: float) -> list[Series]:
        """A range query; times are Unix seconds. Raises QueryError."""
        times = {"start": f"{start_s:.3f}", "end": f"{end_s:.3f}", "step": f"{step_s:g}"}
        found = await self._ask("query_range", {"query": expr, **times})
        return [
            Series(labels=row["metric"], points=[_point(point) for point in row["values"]]) for row in found["result"]
        ]

    async def label_values(self, metric: str, label: str) -> list[str]:
        """Values of a label among the series of a selector."""
        return [str(value) for value in await self._ask(f"label/{label}/values", {"match[]": metric})]

    async def targets(self) -> dict[str, str]:
        """URL of each target, and its health: "up" | "down" | "unknown"."""
        found = await self._ask("targets", {})
        return {target["scrapeUrl"]: target["health"] for target in found["activeTargets"]}

    async def rules(self) -> list[dict[str, Any]]:
        """The alert rules with their state: "inactive" | "pending" | "firing"."""
        return [rule for group in (await self._ask("rules", {}))["groups"] for rule in group["rules"]]

    async def _ask(self, path: str, parameters: dict[str, str]) -> Any:
        async with self._session.get(f"{self.url}/api/v1/{path}", params=parameters) as response:
            answer = json.loads(await response.text())
        if answer["status"] != "success":
            raise QueryError(f"{parameters.get('query', path)}: {answer['error']}")
        return answer["data"]


async def started(
    supervisor: Supervisor,
    session: aiohttp.ClientSession,
    *,
    command: Path,
    jobs: Mapping[str, Sequence[str]],
    rule_files: Sequence[Path],
) -> LocalPrometheus:
    """A Prometheus that scrapes these addresses (by job) and evaluates these rules, both every second."""
    (port,) = free_ports(1)
    folder = supervisor.log_dir / NAME
    folder.mkdir()
    config = {
        "global": {"scrape_interval": f"{SCRAPE_S}s", "scrape_timeout": f"{SCRAPE_S}s", "evaluation_interval": "1s"},
        "rule_files": [str(path) for path in rule_files],
        "scrape_configs": [
            {"job_name": job, "static_configs": [{"targets": list(targets)}]} for job, targets in jobs.items()
        ],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    url = f"http://{LOOPBACK}:{port}"
    argv: list[str | Path] = [
        command,
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={LOOPBACK}:{port}",
        "--log.level=warn",
    ]
    await supervisor.start(NAME, argv, ready=http_ok(f"{url}/-/ready"))
    return LocalPrometheus(session, url)


def _point(pair: Sequence[Any]) -> tuple[float, float]:
    return float(pair[0]), float(pair[1])
