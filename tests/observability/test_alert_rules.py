"""The alert rules, as promtool judges them, and their entries in the runbook."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from alert_cases import CASES, IDENTITY, Case
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
    assert labels <= {*IDENTITY, "instance"}
