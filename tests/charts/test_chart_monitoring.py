"""Monitors, rules and dashboards: that they find what is to be found, and come through the templates unharmed."""

import json
import re
from typing import Any

import yaml
from helm import CHART, NAMESPACE, Helm, Object, of_kind, pod_specs

from trimtab_operator.children.labels import INSTALL, MANAGED_BY
from trimtab_operator.children.workload import scrape_annotations
from trimtab_operator.injection.marks import METRICS_PORT_NAME
from trimtab_operator.install import MANAGER

ON: dict[str, Any] = {
    "podMonitor": {"enabled": True},
    "rules": {"enabled": True},
    "dashboards": {"enabled": True},
}


def monitors(objects: list[Object], kind: str = "PodMonitor") -> dict[str, Object]:
    return {o["metadata"]["name"].removeprefix("trimtab-"): o["spec"] for o in of_kind(objects, kind)}


def test_nothing_of_it_is_there_unless_asked_for(helm4: Helm) -> None:
    kinds = {o["kind"] for o in helm4.objects()}
    assert kinds & {"PodMonitor", "ServiceMonitor", "PrometheusRule"} == set()


def test_every_process_is_scraped_once(helm4: Helm) -> None:
    objects = helm4.objects({"monitoring": ON})
    found = monitors(objects)
    assert found.keys() == {"operator", "webhook", "pickers", "envoys", "sidecars"}
    for name in ("operator", "webhook"):
        spec = found[name]
        labels = [o["spec"]["template"]["metadata"]["labels"] for o in of_kind(objects, "Deployment")]
        chosen = [each for each in labels if spec["selector"]["matchLabels"].items() <= each.items()]
        assert [each["app.kubernetes.io/component"] for each in chosen] == [name]
        assert spec["namespaceSelector"] == {"matchNames": [NAMESPACE]}
        ports = pod_specs(objects)[f"trimtab-{name}"]["containers"][0]["ports"]
        assert spec["podMetricsEndpoints"][0]["port"] in [port["name"] for port in ports]
    both = {"podMonitor": {"enabled": True}, "serviceMonitor": {"enabled": True}}
    objects = helm4.objects({"monitoring": both})
    assert monitors(objects).keys() == {"pickers", "envoys", "sidecars"}
    services = monitors(objects, "ServiceMonitor")
    assert services.keys() == {"operator", "webhook"}
    for name, spec in services.items():
        (service,) = [o for o in of_kind(objects, "Service") if o["metadata"]["name"] == f"trimtab-{name}"]
        assert spec["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
        assert spec["endpoints"][0]["port"] in [port["name"] for port in service["spec"]["ports"]]


def test_the_monitors_of_pools_find_what_the_operator_makes(helm4: Helm) -> None:
    found = monitors(helm4.objects({"monitoring": ON}))
    assert found["pickers"]["selector"]["matchLabels"] == {
        MANAGED_BY: MANAGER,
        INSTALL: NAMESPACE,
        "app.kubernetes.io/component": "picker",
    }
    assert found["sidecars"]["podMetricsEndpoints"][0]["port"] == METRICS_PORT_NAME
    (own,) = found["sidecars"]["podMetricsEndpoints"][0]["relabelings"]
    assert own == {
        "action": "keep",
        "sourceLabels": [f"__meta_kubernetes_pod_annotation_{re.sub('[./]', '_', INSTALL)}"],
        "regex": f"({NAMESPACE})?",
    }
    assert found["envoys"]["podMetricsEndpoints"][0]["path"] == "/stats/prometheus"
    for name in ("pickers", "envoys", "sidecars"):
        assert found[name]["namespaceSelector"] == {"any": True}
    some = monitors(helm4.objects({"monitoring": ON, "watchNamespaces": ["models"]}))
    assert some["pickers"]["namespaceSelector"] == {"matchNames": ["models"]}


def test_the_rules_are_those_of_the_files(helm: Helm) -> None:
    (rule,) = of_kind(helm.objects({"monitoring": ON}), "PrometheusRule")
    expected = [
        g for path in sorted((CHART / "rules").glob("*.yaml")) for g in yaml.safe_load(path.read_text())["groups"]
    ]
    assert rule["spec"]["groups"] == expected
    assert expected


def test_rules_can_be_left_out_labelled_and_led_to_their_runbook(helm4: Helm) -> None:
    def alerts(more: dict[str, Any]) -> dict[str, Object]:
        (rule,) = of_kind(helm4.objects({"monitoring": {"rules": {"enabled": True, **more}}}), "PrometheusRule")
        return {each["alert"]: each for group in rule["spec"]["groups"] for each in group["rules"] if "alert" in each}

    plain = alerts({})
    first = next(iter(plain))
    base = "https://git.example.com/trimtab/blob/main/"
    changed = alerts({"disabled": [first], "alertLabels": {"team": "serving"}, "runbookBaseUrl": base})
    assert plain.keys() - changed.keys() == {first}
    for name, alert in changed.items():
        assert alert["labels"] == {**plain[name]["labels"], "team": "serving"}
        assert alert["annotations"]["runbook_url"] == base + plain[name]["annotations"]["runbook_url"]
        assert alert["expr"] == plain[name]["expr"]


def test_the_dashboards_are_those_of_the_files(helm: Helm) -> None:
    maps = [
        o for o in of_kind(helm.objects({"monitoring": ON}), "ConfigMap") if o["metadata"]["name"] != "trimtab-valkey"
    ]
    files = {path.name: json.loads(path.read_text()) for path in (CHART / "dashboards").glob("*.json")}
    rendered = {name: json.loads(text) for o in maps for name, text in o["data"].items()}
    assert rendered == files
    assert len(maps) == len(files) >= 3
    for body in maps:
        assert body["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert body["metadata"]["namespace"] == NAMESPACE
    elsewhere = {"dashboards": {"enabled": True, "namespace": "monitoring", "annotations": {"grafana_folder": "LLM"}}}
    (first, *_) = [
        o
        for o in of_kind(helm.objects({"monitoring": elsewhere}), "ConfigMap")
        if o["metadata"]["name"].startswith("trimtab-dashboard-")
    ]
    assert first["metadata"]["namespace"] == "monitoring"
    assert first["metadata"]["annotations"] == {"grafana_folder": "LLM"}


def test_a_prometheus_that_goes_by_annotations_finds_operator_and_webhook(helm4: Helm) -> None:
    values = {
        "webhook": {"ports": {"metrics": 18080}},
        "operator": {"podAnnotations": {"prometheus.io/scrape": "false"}},
    }
    objects = helm4.objects(values)
    notes = {o["metadata"]["name"]: o["spec"]["template"]["metadata"] for o in of_kind(objects, "Deployment")}
    found = notes["trimtab-webhook"]["annotations"]
    (port,) = [p for p in pod_specs(objects)["trimtab-webhook"]["containers"][0]["ports"] if p["name"] == "metrics"]
    assert found == scrape_annotations(port["containerPort"], "/metrics")
    # Unless somebody does not want that.
    assert notes["trimtab-operator"]["annotations"]["prometheus.io/scrape"] == "false"
    assert notes["trimtab-operator"]["annotations"]["prometheus.io/port"] == "8080"
