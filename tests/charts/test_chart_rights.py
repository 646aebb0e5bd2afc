"""What operator and webhook may do where the chart installs them: what the shipped manifest says, and no more."""

import json
from typing import Any

import yaml
from helm import NAMESPACE, ROOT, Helm, Object, named, of_kind

MANIFEST = ROOT / "manifests" / "operator-rbac.yaml"
SHIPPED: list[Object] = [body for body in yaml.safe_load_all(MANIFEST.read_text()) if body]
Rule = tuple[str, ...]


def granted(objects: list[Object], account: str) -> dict[str, set[str]]:
    """Rules by where they hold: the cluster (`*`), or a namespace."""
    roles = {(o["kind"], o["metadata"].get("namespace"), o["metadata"]["name"]): o for o in objects if "rules" in o}
    found: dict[str, set[str]] = {}
    for binding in objects:
        if not binding["kind"].endswith("Binding"):
            continue
        subject = {"kind": "ServiceAccount", "name": account, "namespace": NAMESPACE}
        if binding["subjects"] != [subject]:
            continue
        where = binding["metadata"].get("namespace")
        kind = binding["roleRef"]["kind"]
        role = roles[kind, None if kind == "ClusterRole" else where, binding["roleRef"]["name"]]
        rules = {
            json.dumps({key: sorted(value) for key, value in rule.items()}, sort_keys=True) for rule in role["rules"]
        }
        found.setdefault(where or "*", set()).update(rules)
    return found


def makes_webhooks(rule: str) -> bool:
    return "mutatingwebhookconfigurations" in rule and '"create"' in rule


def test_the_rights_are_those_of_the_manifest_without_making_webhooks(helm: Helm) -> None:
    objects = helm.objects()
    for account in ("trimtab-operator", "trimtab-webhook"):
        expected = granted(SHIPPED, account)
        # The chart makes the configuration; the operator puts its CA into that one.
        expected["*"] = {rule for rule in expected["*"] if not makes_webhooks(rule)}
        assert granted(objects, account) == expected
        assert set(expected) == {"*", NAMESPACE}


def test_nothing_is_bound_to_anybody_else(helm4: Helm) -> None:
    accounts = {s["name"] for o in helm4.objects() if o["kind"].endswith("Binding") for s in o["subjects"]}
    assert accounts == {"trimtab-operator", "trimtab-webhook"}


def test_in_some_namespaces_the_pools_rights_hold_there_and_nowhere_else(helm4: Helm) -> None:
    everywhere = granted(helm4.objects(), "trimtab-operator")
    some = granted(helm4.objects({"watchNamespaces": ["a", "b"]}), "trimtab-operator")
    assert some["a"] == some["b"]
    assert some["a"] | some["*"] == everywhere["*"]
    assert some["a"] & some["*"] == set()
    assert some[NAMESPACE] == everywhere[NAMESPACE]
    webhook = granted(helm4.objects({"watchNamespaces": ["a", "b"]}), "trimtab-webhook")
    assert set(webhook) == {"a", "b", NAMESPACE}


def test_names_that_were_changed_are_changed_in_the_rights(helm4: Helm) -> None:
    values: dict[str, Any] = {"installSecret": "other", "webhook": {"certificate": {"existingSecret": "tls"}}}
    (role,) = [o for o in of_kind(helm4.objects(values), "Role") if o["metadata"]["name"] == "trimtab-operator"]
    names = {name for rule in role["rules"] for name in rule.get("resourceNames", ())}
    # The Lease has one name in every installation.
    assert names == {"trimtab-operator", "other", "tls"}
    elsewhere = helm4.objects(namespace="models-system")
    cluster = named(elsewhere, "ClusterRole", "trimtab-operator-cluster-models-system")
    assert "trimtab-injection-models-system" in json.dumps(cluster)
    assert "trimtab-injection-trimtab-system" not in json.dumps(elsewhere)


def test_a_certificate_that_others_keep_needs_no_right_on_webhooks(helm4: Helm) -> None:
    for values in ({"certificate": {"mode": "certManager"}}, {"enabled": False}):
        rights = granted(helm4.objects({"webhook": values}), "trimtab-operator")
        assert not [rule for rules in rights.values() for rule in rules if "mutatingwebhookconfigurations" in rule]


def test_without_roles_and_accounts_there_are_none(helm4: Helm) -> None:
    accounts = {"serviceAccount": {"create": False, "name": "mine"}}
    objects = helm4.objects({"rbac": {"create": False}, "operator": accounts, "webhook": accounts})
    assert not [o for o in objects if o["kind"] == "ServiceAccount" or "Role" in o["kind"]]
    for deployment in of_kind(objects, "Deployment"):
        expected = "default" if deployment["metadata"]["name"] == "trimtab-valkey" else "mine"
        assert deployment["spec"]["template"]["spec"]["serviceAccountName"] == expected
