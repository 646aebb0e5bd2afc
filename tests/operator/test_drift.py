"""Comparing what was asked with what is there, without a server."""

import copy
from typing import Any

import pytest
from child_objects import named, objects
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab_operator.drift import differences, must_be_made_again

DEPLOYMENT = named(objects(), "Deployment", "trimtab-chat")


def changed(path: list[str | int], value: Any) -> Any:
    live = copy.deepcopy(DEPLOYMENT)
    at: Any = live
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = value
    return live


def test_nothing_differs_from_itself() -> None:
    assert all(differences(body, copy.deepcopy(body)) == [] for body in objects())


POD = ["spec", "template", "spec"]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["spec", "replicas"], 7),
        ([*POD, "containers", 0, "image"], "other"),
        ([*POD, "containers", 0, "args"], ["--pool-name=other"]),
        ([*POD, "containers", 0, "args"], None),
        ([*POD, "containers", 0, "env"], []),
        ([*POD, "containers", 0, "resources", "limits", "memory"], "1Mi"),
        ([*POD, "containers"], []),
        ([*POD, "automountServiceAccountToken"], True),
        (["metadata", "labels"], {}),
        (["metadata", "ownerReferences"], []),
        (["spec"], None),
    ],
)
def test_a_field_of_ours_that_was_changed_is_a_difference(path: list[str | int], value: Any) -> None:
    assert differences(DEPLOYMENT, changed(path, value))


def test_what_others_add_is_no_difference() -> None:
    live = copy.deepcopy(DEPLOYMENT)
    live["status"] = {"replicas": 2}
    live["metadata"]["labels"]["theirs"] = "x"
    live["metadata"]["managedFields"] = [{}]
    pod = live["spec"]["template"]["spec"]
    pod["dnsPolicy"] = "ClusterFirst"
    pod["containers"].insert(0, {"name": "mesh", "image": "theirs"})
    pod["containers"][1]["env"].insert(0, {"name": "THEIRS", "value": "1"})
    pod["containers"][1]["terminationMessagePath"] = "/dev/termination-log"
    assert differences(DEPLOYMENT, live) == []


@pytest.mark.parametrize(
    ("asked", "written"),
    [
        ("0.5", "500m"),
        ("1000m", "1"),
        ("1024Mi", "1Gi"),
        ("1e9", "1G"),
        ("1.5Gi", "1536Mi"),
        ("128974848", "128974848"),
    ],
)
def test_an_amount_in_the_servers_spelling_is_the_same_amount(asked: str, written: str) -> None:
    wanted = {"resources": {"limits": {"cpu": asked}}}
    assert differences(wanted, {"resources": {"limits": {"cpu": written}}}) == []
    assert differences(wanted, {"resources": {"limits": {"cpu": f"{written}1" if written[-1].isdigit() else "3"}}})


def test_only_amounts_are_compared_as_amounts() -> None:
    assert differences({"labels": {"cpu": "1000m"}}, {"labels": {"cpu": "1"}})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text("ab", max_size=2),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("nameport"), inner, max_size=3),
    max_leaves=12,
)


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(["name", "port", "spec"]), JSON), st.dictionaries(st.text(max_size=3), JSON))
def test_no_object_whatever_it_holds_breaks_the_comparison(wanted: Any, live: Any) -> None:
    differences(wanted, live)
    assert differences({"metadata": wanted}, {"metadata": copy.deepcopy(wanted), "kind": live}) == []


def test_fields_that_the_server_will_not_change_are_known() -> None:
    service = named(objects(), "Service", "trimtab-chat")
    with_address = {**service, "spec": {**service["spec"], "clusterIP": "10.0.0.7"}}
    envoy = named(objects(), "Service", "trimtab-chat-envoy")
    headless = {**envoy, "spec": {**envoy["spec"], "clusterIP": "None"}}
    assert must_be_made_again(service, with_address) == "spec.clusterIP"
    assert must_be_made_again(envoy, headless) == "spec.clusterIP"
    assert must_be_made_again(service, copy.deepcopy(service)) is None
    assert must_be_made_again(envoy, {**envoy, "spec": {**envoy["spec"], "clusterIP": "10.0.0.7"}}) is None
    selector = changed(["spec", "selector", "matchLabels"], {"app": "x"})
    assert must_be_made_again(DEPLOYMENT, selector) == "spec.selector"
    config = named(objects(), "ConfigMap", "trimtab-chat-envoy")
    assert must_be_made_again(config, {**config, "immutable": True}) == "immutable"
