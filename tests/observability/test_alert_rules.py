"""The alert rules, as promtool judges them, and their entries in the runbook."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from alert_cases import CASES, IDENTITY, POOL, Case, endpoints, gauge, latency, pickers
from prometheus_commands import promtool

ROOT = Path(__file__).parents[2]
RULES = ROOT / "charts" / "trimtab" / "rules" / "trimtab.yaml"
RUNBOOK = ROOT / "docs" / "runbook.md"


def rules() -> dict[str, dict[str, Any]]:
    """By the alert's name."""
    document = yaml.safe_load(RULES.read_text())
    return {rule["alert"]: rule for group in document["groups"] for rule in group["rules"]}


def judged(folder: Path, test: dict[str, Any]) -> None:
    file = folder / "test.yaml"
    file.write_text(yaml.safe_dump({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": [test]}))
    found = subprocess.run([promtool(), "test", "rules", str(file)], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr


def world(series: list[tuple[str, str]], case: Case, alerts: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series],
        "alert_rule_test": [
            {"eval_time": f"{case.at_minutes}m", "alertname": case.alert, "exp_alerts": alerts},
        ],
    }


@pytest.mark.parametrize("case", CASES, ids=[f"{n}-{case.alert}" for n, case in enumerate(CASES)])
def test_an_alert_fires_in_its_world_and_says_what_is_wrong(case: Case, tmp_path: Path) -> None:
    alert = {
        "exp_labels": {**case.labels, "severity": case.severity},
        "exp_annotations": {
            "summary": case.summary,
            "runbook_url": f"docs/runbook.md#{case.alert.lower()}",
        },
    }
    judged(tmp_path, world(case.fires, case, [alert]))


@pytest.mark.parametrize("case", CASES, ids=[f"{n}-{case.alert}" for n, case in enumerate(CASES)])
def test_it_does_not_in_the_other(case: Case, tmp_path: Path) -> None:
    judged(tmp_path, world(case.quiet, case, []))


def test_promtool_finds_no_fault_with_the_rules() -> None:
    found = subprocess.run([promtool(), "check", "rules", str(RULES)], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr


def test_every_alert_has_its_cases() -> None:
    assert set(rules()) == {case.alert for case in CASES}


def test_every_alert_has_an_entry_in_the_runbook_and_every_entry_an_alert() -> None:
    text = RUNBOOK.read_text()
    entries = dict(re.findall(r"^## (Trimtab\w+)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL))
    assert set(entries) == set(rules())
    for name, entry in entries.items():
        for part in ("**Symptom.**", "**Look at.**", "**Do.**"):
            assert part in entry, f"{name} lacks {part}"


@pytest.mark.parametrize("name", rules())
def test_an_alert_leads_to_its_entry(name: str) -> None:
    rule = rules()[name]
    assert rule["annotations"]["runbook_url"] == f"docs/runbook.md#{name.lower()}"
    assert rule["labels"]["severity"] in ("critical", "warning", "info")
    labels = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
    # The operator's alerts are of no pool.
    assert labels <= ({"namespace"} if "operator_leader" in rule["expr"] else {*IDENTITY, "instance"})


OF_POOLS = [case for case in CASES if case.labels.items() >= IDENTITY.items()]
FROM_PROMETHEUS = 'namespace="models", container="trimtab", endpoint="metrics", '


@pytest.mark.parametrize("case", OF_POOLS, ids=[f"{n}-{case.alert}" for n, case in enumerate(OF_POOLS)])
def test_another_pool_that_is_well_neither_hides_it_nor_joins_it(case: Case, tmp_path: Path) -> None:
    # Of the same name in another namespace, and another one in the same.
    others = [
        (name.replace(POOL, other), values)
        for other in ('pool_namespace="elsewhere", pool="chat"', 'pool_namespace="models", pool="other"')
        for name, values in case.quiet
    ]
    alert = {
        "exp_labels": {**case.labels, "severity": case.severity},
        "exp_annotations": {"summary": case.summary, "runbook_url": f"docs/runbook.md#{case.alert.lower()}"},
    }
    judged(tmp_path, world([*case.fires, *others], case, [alert]))


@pytest.mark.parametrize("case", OF_POOLS, ids=[f"{n}-{case.alert}" for n, case in enumerate(OF_POOLS)])
def test_labels_that_prometheus_operator_sets_change_nothing(case: Case, tmp_path: Path) -> None:
    labelled = [(name.replace("{", "{" + FROM_PROMETHEUS, 1), values) for name, values in case.fires]
    test = world(labelled, case, [])
    del test["alert_rule_test"]
    grouped = f'sum by (alertname, pool, pool_namespace) (ALERTS{{alertname="{case.alert}", alertstate="firing"}})'
    labels = f'{{alertname="{case.alert}", pool="chat", pool_namespace="models"}}'
    test["promql_expr_test"] = [
        {"expr": grouped, "eval_time": f"{case.at_minutes}m", "exp_samples": [{"labels": labels, "value": 1}]}
    ]
    judged(tmp_path, test)


def test_a_pool_that_nobody_uses_lets_none_fire(tmp_path: Path) -> None:
    """From its first minute: all is there, and nothing has happened."""
    idle = [
        gauge("trimtab_operator_leader", 1, 'instance="o"'),
        gauge("trimtab_operator_crd_differs", 0, 'instance="o"'),
        gauge("trimtab_operator_reconcile_errors_total", 0),
        gauge("trimtab_operator_pool_pickers", 2, f'{POOL}, state="ready"'),
        gauge("trimtab_operator_pool_pickers", 2, f'{POOL}, state="wanted"'),
        *[
            gauge(f"trimtab_operator_pool_{name}", value)
            for name, value in (
                ("store_connected", 1), ("fallback_active", 0), ("policies_refused", 0), ("apply_problems", 0),
            )
        ],
        *pickers("trimtab_ready", 1, 1),
        *pickers("trimtab_state_connected", 1, 1),
        *[
            series
            for name in (
                "log_lag_seconds", "unsynced_endpoints", "hotspot_classes", "open_reservations", "exchanges_in_flight",
                "failures_total", "protocol_errors_total", "scheduler_seconds_count",
            )
            for series in pickers(f"trimtab_{name}", 0, 0)
        ],
        gauge("trimtab_scheduler_seconds_bucket", 0, f'{POOL}, instance="picker-1", le="0.001"'),
        *latency("trimtab_event_loop_lag_seconds", "0.05", 3000, 3000),
        gauge("trimtab_rejected_total", 0, f'{POOL}, reason="no_endpoints"'),
        *endpoints("trimtab_endpoint_candidate", 1, 1),
        *endpoints("trimtab_endpoint_state", 1, 1, more=', state="serving"'),
        *[
            series
            for name in (
                "endpoint_requests", "endpoint_reported_requests", "sidecar_is_approximate",
                "sidecar_cache_hit_tokens_total", "sidecar_cache_query_tokens_total",
            )
            for series in endpoints(f"trimtab_{name}", 0, 0)
        ],
        *endpoints("trimtab_sidecar_engine_up", 1, 1),
        *endpoints("trimtab_sidecar_state_connected", 1, 1),
    ]  # fmt: skip
    test = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in idle],
        "alert_rule_test": [
            {"eval_time": f"{minutes}m", "alertname": name, "exp_alerts": []}
            for minutes in (1, 5, 20, 60)
            for name in rules()
        ],
    }
    judged(tmp_path, test)
