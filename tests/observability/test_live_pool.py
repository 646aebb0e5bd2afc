"""Dashboards and alerts against a real Prometheus that watches real parts at work."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from trimtab.commands import POOL_NAME, POOL_NAMESPACE
from trimtab_observability.asking import answers, filled, targets
from trimtab_observability.drawing import draw
from trimtab_observability.generate import files
from trimtab_observability.live_pool import RULES, LivePool
from trimtab_observability.local_prometheus import Series
from trimtab_operator.kube import POLICIES

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.stack, pytest.mark.timeout(240)]

DASHBOARDS = {Path(name).stem: json.loads(text) for name, text in files().items()}
SHOWN_S = 60.0
"""From the start of the load until every panel has something to show: some rates need a second of something rare."""
SEEN_S = 60.0
"""From a fault until Prometheus has seen it; the longest way is a heartbeat's time to live."""
POLL_S = 0.25


def is_shown(answer: list[Series]) -> bool:
    """Whether a panel would draw anything: Grafana draws no NaN."""
    return any(value == value for series in answer for _, value in series.points)


async def within(seconds: float, condition: Callable[[], Awaitable[bool]]) -> bool:
    """Ask until it is so; False if that does not come in time."""
    try:
        async with asyncio.timeout(seconds):
            while not await condition():  # noqa: ASYNC110 (Prometheus tells nobody)
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        return False
    return True


def expressions() -> dict[str, str]:
    """By alert."""
    groups = [group for file in RULES.glob("*.yaml") for group in yaml.safe_load(file.read_text())["groups"]]
    return {rule["alert"]: rule["expr"] for group in groups for rule in group["rules"]}


@pytest.mark.parametrize("name", DASHBOARDS)
async def test_no_panel_is_empty(name: str, pool: LivePool) -> None:
    empty: dict[str, str] = {
        f"{panel['title']}, {target['refId']}": filled(target["expr"], namespace=POOL_NAMESPACE, pool=POOL_NAME)
        for panel, target in targets(DASHBOARDS[name])
    }
    assert len(empty) > 10

    async def all_shown() -> bool:
        for query, expr in list(empty.items()):
            if is_shown(await pool.prometheus.now(expr)):
                del empty[query]
        return not empty

    assert await within(SHOWN_S, all_shown), "\n".join(f"{query}: {expr}" for query, expr in empty.items())


@pytest.mark.parametrize("name", DASHBOARDS)
async def test_every_variable_finds_the_pool(name: str, pool: LivePool) -> None:
    values = {"namespace": POOL_NAMESPACE, "pool": POOL_NAME}
    asked: list[dict[str, Any]] = [v for v in DASHBOARDS[name]["templating"]["list"] if v["type"] == "query"]
    assert asked
    for variable in asked:
        found = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"])
        assert found is not None
        selector = filled(found[1], namespace=POOL_NAMESPACE, pool=POOL_NAME)
        assert await pool.prometheus.label_values(selector, found[2]) == [values[variable["name"]]]


async def test_no_label_of_ours_is_one_that_prometheus_or_its_operator_sets(pool: LivePool) -> None:
    theirs = {"endpoint", "pod", "namespace", "service", "container", "node"}
    found = await pool.prometheus.now('{__name__=~"trimtab_.*"}')
    assert {series.labels["job"] for series in found} == {"pickers", "sidecars", "operator", "webhook"}
    for series in found:
        # What clashes comes as exported_...
        clashing = {label for label in series.labels if label in theirs or label.startswith("exported_")}
        assert not clashing, series.labels


async def test_every_metric_of_a_rule_is_one_that_the_parts_have(pool: LivePool) -> None:
    # Counted only once something has gone wrong.
    rare = {"trimtab_operator_reconcile_errors_total"}
    unknown = {metric for expr in expressions().values() for metric in re.findall(r"\btrimtab_\w+", expr)} - rare

    async def all_known() -> bool:
        unknown.difference_update(await pool.prometheus.label_values('{__name__=~"trimtab_.+"}', "__name__"))
        return not unknown

    # Some are there from the first request on.
    assert await within(SHOWN_S, all_known), unknown


async def test_prometheus_takes_the_rules_and_a_pool_that_is_well_lets_none_fire(pool: LivePool) -> None:
    rules = {rule["name"]: rule for rule in await pool.prometheus.rules()}
    assert set(rules) == set(expressions())
    assert {rule["health"] for rule in rules.values()} == {"ok"}
    # Latencies say more of the machine than of the pool, and what fires needs minutes.
    of_the_machine = {"TrimtabSchedulerSlow", "TrimtabPickerOverloaded", "TrimtabLogLag"}
    assert {name for name, rule in rules.items() if rule["state"] == "firing"} <= of_the_machine


async def test_no_reservation_is_open_beyond_the_exchanges(pool: LivePool) -> None:
    beyond = "trimtab_open_reservations - on (instance) trimtab_exchanges_in_flight > 0"
    assert await pool.prometheus.now(f"max_over_time(({beyond})[1m:1s])") == []


@pytest.mark.parametrize("name", DASHBOARDS)
async def test_a_dashboard_can_be_drawn(name: str, pool: LivePool, tmp_path: Path) -> None:
    now_s = time.time()
    found = await answers(
        pool.prometheus,
        DASHBOARDS[name],
        namespace=POOL_NAMESPACE,
        pool=POOL_NAME,
        start_s=now_s - 15,
        end_s=now_s,
    )
    draw(DASHBOARDS[name], found, tmp_path / "picture.png", caption="")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


async def test_a_sidecar_that_dies_is_missed(pool: LivePool) -> None:
    missing = expressions()["TrimtabSidecarMissing"]
    assert await pool.prometheus.now(missing) == []
    pool.stack.kill("sidecar-1")

    async def is_missed() -> bool:
        return [series.points[0][1] for series in await pool.prometheus.now(missing)] == [1.0]

    assert await within(SEEN_S, is_missed)
    await pool.stack.restart("sidecar-1")

    async def is_back() -> bool:
        return not await pool.prometheus.now(missing)

    assert await within(SEEN_S, is_back)


async def test_a_policy_that_has_no_effect_is_told_of(pool: LivePool) -> None:
    refused = expressions()["TrimtabPolicyNotInForce"]
    assert await pool.prometheus.now(refused) == []
    second = {"apiVersion": POLICIES.api_version, "kind": POLICIES.kind, "spec": {"targetRef": {"name": POOL_NAME}}}
    metadata = {"name": "second", "namespace": POOL_NAMESPACE}
    await pool.kube.apply({**second, "metadata": metadata}, manager="user")

    async def is_told() -> bool:
        return [series.points[0][1] for series in await pool.prometheus.now(refused)] == [1.0]

    assert await within(SEEN_S, is_told)
    await pool.kube.delete(POLICIES, POOL_NAMESPACE, "second")

    async def is_over() -> bool:
        return not await pool.prometheus.now(refused)

    assert await within(SEEN_S, is_over)


async def test_a_store_that_dies_is_noticed_by_the_rule_and_routing_goes_on(pool: LivePool) -> None:
    unreachable = expressions()["TrimtabStoreUnreachable"]
    assert await pool.prometheus.now(unreachable) == []
    pool.stack.kill("valkey")

    async def is_noticed() -> bool:
        return [series.labels for series in await pool.prometheus.now(unreachable)] == [
            {"pool": POOL_NAME, "pool_namespace": POOL_NAMESPACE}
        ]

    assert await within(SEEN_S, is_noticed)

    async def is_pending() -> bool:
        rules = {rule["name"]: rule["state"] for rule in await pool.prometheus.rules()}
        return rules["TrimtabStoreUnreachable"] in ("pending", "firing")

    assert await within(SEEN_S, is_pending)

    async def is_routed() -> bool:
        (placed,) = await pool.prometheus.now("sum(increase(trimtab_decisions_total[5s]))")
        return placed.points[0][1] > 0

    assert await within(SEEN_S, is_routed)
    await pool.stack.restart("valkey")

    async def is_over() -> bool:
        return not await pool.prometheus.now(unreachable)

    assert await within(SEEN_S, is_over)
