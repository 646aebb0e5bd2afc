"""Values that look like something else to YAML, values that were taken away, and names at the edge of what is one."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from helm import CHART, KUBE_VERSION, Helm, Object, named, of_kind, pod_specs

SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())
DEFAULTS: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
EVERYTHING: dict[str, Any] = {
    "monitoring": {name: {"enabled": True} for name in ("podMonitor", "serviceMonitor", "rules", "dashboards")},
    "networkPolicy": {"enabled": True},
}
# Each text in it is a number, a truth or nothing, where it is not quoted.
NUMBERS: dict[str, Any] = {
    "nameOverride": "1",
    "commonLabels": {"team": "1", "app.kubernetes.io/part-of": "2"},
    "commonAnnotations": {"a": "1"},
    "global": {"imagePullSecrets": ["3", "true"]},
    "image": {"repository": "1", "tag": "2"},
    "installSecret": "4",
    "clusterDomain": "5",
    "watchNamespaces": ["6", "null", "0x10"],
    "operator": {
        "podLabels": {"team": "9", "app.kubernetes.io/part-of": "0x1"},
        "nodeSelector": {"a": "1"},
        "priorityClassName": "7",
        "serviceAccount": {"name": "8"},
    },
    "webhook": {
        "serviceAccount": {"name": "9"},
        "certificate": {"mode": "certManager", "existingSecret": "10", "certManager": {"issuerRef": {"name": "11"}}},
    },
    "store": {
        "mode": "external",
        "external": {
            "hosts": ["1"],
            "topology": "sentinel",
            "auth": {"username": "1", "existingSecret": "2", "existingSecretKey": "3"},
            "sentinel": {"service": "1", "username": "2", "existingSecret": "3", "existingSecretKey": "4"},
            "tls": {"enabled": True, "caSecret": "5", "caSecretKey": "6"},
        },
    },
    "test": {"serviceAccountName": "1"},
    "networkPolicy": {"enabled": True, "monitoring": []},
    "monitoring": {
        name: {"enabled": True, "namespace": "1", "labels": {"team": "3"}}
        for name in ("podMonitor", "serviceMonitor", "rules", "dashboards")
    },
}
TEXTS = {
    "name", "namespace", "serviceAccountName", "priorityClassName", "secretName", "image", "key", "imagePullPolicy",
    "runbook_url", "summary",
}  # fmt: skip
MAPS = {"labels", "annotations", "matchLabels", "nodeSelector"}
LISTS = {"args", "command", "matchNames", "values", "resourceNames", "dnsNames"}


class Strict(yaml.CSafeLoader):
    """Refuses a key that stands twice, as kubectl's strict validation and kustomize do."""


def _mapping(loader: Strict, node: yaml.MappingNode) -> dict[Any, Any]:
    keys = [key.value for key, _ in node.value]
    assert len(keys) == len(set(keys)), f"twice in line {node.start_mark.line}: {sorted(keys)}"
    return loader.construct_mapping(node, deep=True)


Strict.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def strictly(text: str) -> list[Object]:
    return [body for body in yaml.load_all(text, Loader=Strict) if body]


def no_texts(node: Any, path: str, parent: str = "") -> Iterator[str]:
    """Where something that has to be a text is none."""
    if isinstance(node, list):
        for item in node:
            if parent in LISTS and not isinstance(item, str):
                yield f"{path}: {item!r}"
            yield from no_texts(item, path, parent)
    elif isinstance(node, dict):
        for key, value in node.items():
            here = f"{path}.{key}"
            if (parent in MAPS or key in TEXTS) and not isinstance(value, str):
                yield f"{here}: {value!r}"
            yield from no_texts(value, here, key)


def faults(text: str) -> list[str]:
    objects = [body for body in strictly(text) if body["kind"] != "CustomResourceDefinition"]
    assert len(objects) > 10
    found = [fault for body in objects for fault in no_texts(body, f"{body['kind']} {body['metadata']['name']}")]
    # What Go prints for a value that is not there.
    return found + [line for line in text.splitlines() if "<nil>" in line or "%!s(" in line or "<no value" in line]


def test_texts_that_look_like_numbers_stay_texts(helm: Helm) -> None:
    assert faults(helm.text(NUMBERS, release="on.y-trim1", namespace="123")) == []
    inside = {
        **NUMBERS,
        "store": {"valkey": {"auth": {"existingSecret": "1", "existingSecretKey": "2"}, "program": "3"}},
    }
    assert faults(helm.text(inside, release="x1", namespace="1e3")) == []


def optional(node: dict[str, Any], value: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Values that may be taken away, as `--set NAME=null` does and an older release's values do with --reuse-values."""
    if "$ref" in node:
        node = SCHEMA["definitions"][node["$ref"].rpartition("/")[2]]
    for name, inner in value.items() if "properties" in node else ():
        if name not in node.get("required", ()):
            yield (*path, name)
        elif isinstance(inner, dict):
            yield from optional(node["properties"][name], inner, (*path, name))


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"webhook": {"certificate": {"mode": "certManager"}}},
        {"store": {"mode": "external", "external": {"hosts": ["a"], "tls": {"enabled": True}}}},
        {"store": {"mode": "external", "external": {"url": "redis://a"}}},
    ],
    ids=["defaults", "cert-manager", "hosts", "url"],
)
def test_without_any_of_the_values_that_may_be_missing_it_still_renders(helm: Helm, more: dict[str, Any]) -> None:
    values = json.loads(json.dumps(EVERYTHING))
    gone = list(optional(SCHEMA, DEFAULTS))
    assert ("operator", "podSecurityContext") in gone
    for path in gone:
        place = values
        for name in path[:-1]:
            place = place.setdefault(name, {})
        place[path[-1]] = None

    def put(into: dict[str, Any], what: dict[str, Any]) -> None:
        for name, value in what.items():
            if isinstance(value, dict):
                put(into.setdefault(name, {}), value)
            else:
                into[name] = value

    put(values, more)
    assert faults(helm.text(values)) == []


@pytest.mark.parametrize("path", ["operator.replicas", "store.valkey.sizing", "pools.standalone", "image"])
def test_a_value_that_may_not_be_missing_is_named(helm4: Helm, path: str) -> None:
    ran = helm4.run("template", "trimtab", CHART, "--kube-version", KUBE_VERSION, "--set", f"{path}=null")
    assert ran.returncode != 0
    assert f"missing property '{path.rpartition('.')[2]}'" in ran.stderr


def test_a_releases_name_may_have_dots_and_be_as_long_as_helm_lets_it(helm4: Helm) -> None:
    for release in ("a.b", "serving-v1.2", "x" * 53):
        names = [o["metadata"]["name"] for o in of_kind(helm4.objects(release=release), "Service")]
        assert len(set(names)) == 3
        assert all("." not in name and len(name) <= 63 for name in names)


def test_a_name_that_no_service_may_have_is_refused(helm: Helm) -> None:
    ran = helm.run("template", "1st", CHART, "--kube-version", KUBE_VERSION)
    assert ran.returncode != 0
    assert "begins with a digit" in ran.stderr
    assert named(helm.objects({"fullnameOverride": "first"}, release="1st"), "Service", "first-operator")


@pytest.mark.parametrize("value", ["commonLabels", "operator.podLabels", "webhook.podLabels", "store.valkey.podLabels"])
@pytest.mark.parametrize("label", ["name", "instance", "component", "managed-by"])
def test_labels_by_which_objects_are_found_cannot_be_changed(helm4: Helm, value: str, label: str) -> None:
    values: Any = {f"app.kubernetes.io/{label}": "x"}
    for name in reversed(value.split(".")):
        values = {name: values}
    said = helm4.refusal(values)
    assert f"{value}: app.kubernetes.io/{label}" in said


def test_a_label_of_ones_own_beats_the_charts_and_the_nearer_one_the_farther(helm4: Helm) -> None:
    values = {
        "commonLabels": {"app.kubernetes.io/part-of": "all", "team": "all"},
        "operator": {"podLabels": {"team": "own"}},
    }
    text = helm4.text(values)
    labels = named(strictly(text), "Deployment", "trimtab-operator")["spec"]["template"]["metadata"]["labels"]
    assert labels["app.kubernetes.io/part-of"] == "all"
    assert labels["team"] == "own"


def test_names_in_the_rights_are_each_put_in_once(helm4: Helm) -> None:
    values = {"installSecret": "x", "webhook": {"certificate": {"existingSecret": "my-trimtab-install"}}}
    objects = helm4.objects(values, namespace="trimtab-install")
    names = {
        name
        for body in objects
        if "rules" in body and body["metadata"]["name"].startswith("trimtab-operator")
        for rule in body["rules"]
        for name in rule.get("resourceNames", ())
    }
    assert names >= {"x", "my-trimtab-install", "trimtab-injection-trimtab-install"}
    (configuration,) = of_kind(objects, "MutatingWebhookConfiguration")
    assert configuration["metadata"]["name"] in names


def test_images_of_others_need_a_tag_or_a_digest(helm4: Helm) -> None:
    for path, values in (
        ("pools.envoyImage", {"pools": {"envoyImage": {"tag": ""}}}),
        ("store.valkey.image", {"store": {"valkey": {"image": {"tag": ""}}}}),
    ):
        assert f"{path} has neither tag nor digest" in helm4.refusal(values)


def test_a_network_policy_may_let_no_namespace_at_the_store(helm4: Helm) -> None:
    text = helm4.text({"networkPolicy": {"enabled": True, "pools": []}})
    policy = named(strictly(text), "NetworkPolicy", "trimtab-valkey")["spec"]
    assert len(policy["ingress"][0]["from"]) == 2


def test_a_password_that_the_operator_reads_at_each_login_restarts_nothing(helm4: Helm) -> None:
    def template(password: str) -> Any:
        values = {"store": {"mode": "external", "external": {"hosts": ["a"], "auth": {"password": password}}}}
        return named(helm4.objects(values), "Deployment", "trimtab-operator")["spec"]["template"]

    assert template("a") == template("b")
    assert pod_specs(helm4.objects())
