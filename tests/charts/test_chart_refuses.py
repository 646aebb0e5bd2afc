"""Values that make no sense are refused before anything reaches a cluster, by words that name them."""

import json
from typing import Any

import pytest
import yaml
from helm import CHART, Helm

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a typing mistake": ({"image": {"tga": "1"}}, "tga"),
    "a typing mistake at the top": ({"operatr": {}}, "operatr"),
    "a digest that is none": ({"image": {"digest": "abc"}}, "/image/digest"),
    "a tag with its repository": ({"image": {"tag": "trimtab:1"}}, "/image/tag"),
    "no replica": ({"operator": {"replicas": 0}}, "/operator/replicas"),
    "a text for a number": ({"webhook": {"replicas": "2"}}, "/webhook/replicas"),
    "a text for yes": ({"webhook": {"enabled": "yes"}}, "/webhook/enabled"),
    "an unknown level": ({"operator": {"logLevel": "verbose"}}, "/operator/logLevel"),
    "an unknown mode of the store": ({"store": {"mode": "redis"}}, "/store/mode"),
    "a namespace's name": ({"watchNamespaces": ["Models"]}, "/watchNamespaces/0"),
    "a namespace twice": ({"watchNamespaces": ["a", "a"]}, "/watchNamespaces"),
    "an amount of memory": ({"operator": {"resources": {"limits": {"memory": "1 GB"}}}}, "/operator/resources/limits"),
    "a kind of resources": ({"operator": {"resources": {"limit": {}}}}, "limit"),
    "an effect": ({"webhook": {"tolerations": [{"effect": "No"}]}}, "/webhook/tolerations/0/effect"),
    "a label's value": ({"commonLabels": {"team": "a b"}}, "/commonLabels/team"),
    "an annotation that is a number": ({"commonAnnotations": {"a": 1}}, "/commonAnnotations/a"),
    "a URL of another protocol": (
        {"store": {"mode": "external", "external": {"url": "http://x"}}},
        "/store/external/url",
    ),
    "a host with a scheme": ({"store": {"mode": "external", "external": {"hosts": ["redis://x"]}}}, "/hosts/0"),
    "a port": ({"webhook": {"ports": {"https": 0}}}, "/webhook/ports/https"),
    "a time": ({"monitoring": {"podMonitor": {"interval": "15"}}}, "/podMonitor/interval"),
    "a CRD's mode": ({"crds": {"inferencePool": True}}, "/crds/inferencePool"),
    "a flag that is none": ({"operator": {"extraArgs": ["bind=0.0.0.0"]}}, "/operator/extraArgs/0"),
    "a certificate's mode": ({"webhook": {"certificate": {"mode": "selfSigned"}}}, "/webhook/certificate/mode"),
    "a store that is nowhere": ({"store": {"mode": "external"}}, "say where the store is"),
    "a store in two places": (
        {"store": {"mode": "external", "external": {"url": "redis://a", "hosts": ["b"]}}},
        "only one of these may be given: store.external.url, store.external.hosts",
    ),
    "a store that is not asked for": (
        {"store": {"external": {"url": "redis://a"}}},
        "set store.mode=external",
    ),
    "several servers that are no cluster": (
        {"store": {"mode": "external", "external": {"hosts": ["a", "b"]}}},
        "store.external.topology must be sentinel or cluster",
    ),
    "sentinels of nothing": (
        {"store": {"mode": "external", "external": {"hosts": ["a"], "topology": "sentinel"}}},
        "store.external.sentinel.service is missing",
    ),
    "a database in a cluster": (
        {"store": {"mode": "external", "external": {"hosts": ["a"], "topology": "cluster", "database": 1}}},
        "a cluster has only database 0",
    ),
    "an authority without TLS": (
        {"store": {"mode": "external", "external": {"hosts": ["a"], "tls": {"caSecret": "ca"}}}},
        "without store.external.tls.enabled",
    ),
    "a login that the URL has": (
        {"store": {"mode": "external", "external": {"existingSecret": "url", "auth": {"existingSecret": "login"}}}},
        "store.external.auth counts only with store.external.hosts",
    ),
    "TLS that the URL has not": (
        {"store": {"mode": "external", "external": {"url": "redis://a", "tls": {"enabled": True}}}},
        "store.external.url is one without TLS",
    ),
    "one port for two": ({"webhook": {"ports": {"https": 8080}}}, "are both 8080"),
    "rights for everybody": (
        {"webhook": {"serviceAccount": {"create": False}}},
        "webhook.serviceAccount: with create=false, say its name",
    ),
    "a budget that stops each drain": (
        {"operator": {"podDisruptionBudget": {"maxUnavailable": 0}}},
        "/operator/podDisruptionBudget/maxUnavailable",
    ),
    "such a share": (
        {"webhook": {"podDisruptionBudget": {"maxUnavailable": "0%"}}},
        "/webhook/podDisruptionBudget/maxUnavailable",
    ),
    "two passwords": (
        {"store": {"valkey": {"auth": {"password": "a", "existingSecret": "b"}}}},
        "store.valkey.auth.password, store.valkey.auth.existingSecret",
    ),
    "a certificate that nobody trusts": (
        {"webhook": {"certificate": {"mode": "existingSecret", "existingSecret": "tls"}}},
        "webhook.certificate.caBundle",
    ),
    "an authority that others put in": (
        {
            "webhook": {
                "certificate": {"caBundle": "-----BEGIN CERTIFICATE-----\nA\n-----END CERTIFICATE-----"},
            }
        },
        "which puts it in by itself",
    ),
}


@pytest.mark.parametrize(("values", "words"), REFUSED.values(), ids=REFUSED.keys())
def test_nonsense_is_refused_by_name(helm: Helm, values: dict[str, Any], words: str) -> None:
    said = helm.refusal(values)
    assert words in said, said


def test_an_older_kubernetes_is_refused(helm: Helm) -> None:
    ran = helm.run("template", "trimtab", CHART, "--kube-version", "1.28.9")
    assert ran.returncode != 0
    assert "1.29" in ran.stderr


def test_the_schema_knows_the_values_of_the_chart_and_no_others() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())

    def compare(node: dict[str, Any], value: Any, path: str) -> None:
        if "$ref" in node:
            node = schema["definitions"][node["$ref"].rpartition("/")[2]]
        properties = node.get("properties")
        if properties is None or not isinstance(value, dict) or not value:
            return
        if path != ".global":
            # A chart around this one may put there what it likes.
            assert node["additionalProperties"] is False, path
        if set(value) != {"requests", "limits"}:
            assert properties.keys() == value.keys(), path
        for name, inner in value.items():
            compare(properties[name], inner, f"{path}.{name}")

    compare(schema, values, "")
