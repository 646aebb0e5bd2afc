"""What docs/install.md shows is what the chart takes and does."""

import re
from typing import Any

import yaml
from helm import CHART, ROOT, Helm, named, pod_specs

from trimtab_operator.children.envoy import DEFAULT_RESOURCES as ENVOY
from trimtab_operator.injection.quality import REQUESTS as SIDECAR

PAGE = (ROOT / "docs" / "install.md").read_text()


def examples() -> list[dict[str, Any]]:
    """The indented blocks that are values of the chart."""
    known = set(yaml.safe_load((CHART / "values.yaml").read_text()))
    found = []
    for block in re.findall(r"(?:^ {4,}.*\n)+", PAGE, flags=re.MULTILINE):
        try:
            body = yaml.safe_load(block)
        except yaml.YAMLError:
            continue
        if isinstance(body, dict) and set(body) <= known:
            found.append(body)
    return found


def test_the_values_that_it_shows_are_taken(helm4: Helm) -> None:
    assert len(examples()) >= 4
    for values in examples():
        assert helm4.objects(values)


def test_the_amounts_of_memory_that_it_shows_are_those_of_the_chart(helm4: Helm) -> None:
    rows = re.findall(r"^\| `(pools: .*?)`.*?\| (\d+) MiB \| (\d+) MiB \|", PAGE, flags=re.MULTILINE)
    assert len(rows) == 3
    for sizing, data, pod in rows:
        objects = helm4.objects({"store": {"valkey": {"sizing": yaml.safe_load(f"{{{sizing}}}")}}})
        assert f"maxmemory {data}mb\n" in named(objects, "ConfigMap", "trimtab-valkey")["data"]["valkey.conf"]
        assert pod_specs(objects)["trimtab-valkey"]["containers"][0]["resources"]["limits"]["memory"] == f"{pod}Mi"


def test_the_files_that_it_names_are_there() -> None:
    for path in re.findall(r"(?:manifests|charts|docs|bench)/[\w./-]*\w", PAGE):
        assert (ROOT / path).exists(), path
    for path in re.findall(r"\]\(([\w./-]+)(?:#[\w-]+)?\)", PAGE):
        assert (ROOT / "docs" / path).exists(), path


def test_what_it_says_is_asked_for_is_what_chart_and_operator_ask_for(helm4: Helm) -> None:
    specs = pod_specs(helm4.objects({}))
    asked = {
        name: specs[f"trimtab-{pod}"]["containers"][0]["resources"]
        for name, pod in (("operator", "operator"), ("webhook", "webhook"), ("store", "valkey"))
    }
    asked |= {"Envoys of a pool": ENVOY, "sidecar, one in each engine's pod": {"requests": SIDECAR}}
    for name, amounts in asked.items():
        (row,) = re.findall(rf"^\| {name}\b.*\|$", PAGE, flags=re.MULTILINE)
        requests = amounts["requests"]
        cpu = "1 CPU" if requests["cpu"] == "1" else requests["cpu"]
        assert f"{cpu}, {requests['memory']}" in row.replace("**", "")
        limit = amounts.get("limits", {}).get("memory")
        assert limit is None or name == "store" or limit in row
