"""The dashboards as files: generated, alike in what they share, and about metrics that are labelled as ours are."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from trimtab_observability.asking import targets
from trimtab_observability.generate import FOLDER, PAGES, files

ROOT = Path(__file__).parents[2]
DASHBOARDS = {name: json.loads(text) for name, text in files().items()}
ON_ENDPOINTS = re.compile(r"trimtab_(?:endpoint|sidecar)_\w+")


def panels(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def test_the_files_are_those_of_the_definitions() -> None:
    found = {str(path.relative_to(ROOT)): path.read_text() for path in (ROOT / FOLDER).glob("*")}
    assert found == files(), "run `make generate`"


def test_what_is_generated_does_not_change_from_one_time_to_the_next() -> None:
    assert files() == files()


@pytest.mark.parametrize("name", DASHBOARDS)
def test_a_dashboard_fits_grafanas_grid_without_gaps_or_overlaps(name: str) -> None:
    taken: dict[tuple[int, int], int] = {}
    for panel in DASHBOARDS[name]["panels"]:
        place = panel["gridPos"]
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert (x, y) not in taken, f"{panel['title']} lies on panel {taken[x, y]}"
                taken[x, y] = panel["id"]
    assert {x for x, _ in taken} == set(range(24))
    for y in range(max(y for _, y in taken) + 1):
        assert sum(row == y for _, row in taken) == 24, f"line {y} is not full"


@pytest.mark.parametrize("name", DASHBOARDS)
def test_every_panel_has_a_number_and_a_title_of_its_own_and_says_what_it_shows(name: str) -> None:
    dashboard = DASHBOARDS[name]
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    assert dashboard["schemaVersion"] >= 36
    by_row: list[str] = []
    for panel in panels(dashboard):
        assert panel["description"].endswith((".", "`.")), panel["title"]
        by_row.append(f"{panel['type']} {panel['title']}")
    assert len(set(by_row)) == len(by_row)


@pytest.mark.parametrize("name", DASHBOARDS)
def test_every_query_asks_the_chosen_source_for_the_chosen_pools(name: str) -> None:
    for panel, target in targets(DASHBOARDS[name]):
        assert target["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        selectors = re.findall(r"(trimtab_\w+)(\{[^}]*\})?", target["expr"])
        for metric, labels in selectors:
            is_of_all = metric in WITHOUT_POOL
            assert is_of_all or 'pool_namespace=~"$namespace"' in labels, f"{panel['title']}: {metric}"


WITHOUT_POOL = {
    "trimtab_operator_leader",
    "trimtab_operator_queue_depth",
    "trimtab_operator_reconcile_seconds_bucket",
    "trimtab_operator_webhook_certificate_expiry_timestamp_seconds",
    "trimtab_webhook_ready",
    "trimtab_webhook_requests_total",
    "trimtab_webhook_seconds_bucket",
    "trimtab_webhook_skips_total",
}


@pytest.mark.parametrize("name", DASHBOARDS)
def test_gauges_that_every_replica_shows_are_not_added_up(name: str) -> None:
    for panel, target in targets(DASHBOARDS[name]):
        for found in re.finditer(
            r"(\w+)(?: by \([^)]*\))? \((?:\w+_over_time\()?(trimtab_endpoint_\w+)", target["expr"]
        ):
            assert found[1] == "max", f"{panel['title']}: {found[0]}"


def test_every_dashboard_has_a_picture_in_the_docs() -> None:
    text = (ROOT / "docs" / "dashboards.md").read_text()
    for page in PAGES:
        picture = f"dashboards/{page.uid}.png"
        assert f"({picture})" in text
        assert (ROOT / "docs" / picture).stat().st_size > 10_000
