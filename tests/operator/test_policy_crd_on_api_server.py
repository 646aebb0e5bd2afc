"""The SchedulingPolicy CRD on a real API server: what it takes, refuses, fills in, and what is shown of it."""

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from api_calls import ApiCalls
from control_plane import binaries
from hypothesis import HealthCheck, given, settings
from policy_cases import BAD, GOOD, TARGET
from test_policy import like

from trimtab_operator.api.generate import POLICY_CRD, POOL_CRD
from trimtab_operator.api.policy import PolicyError, PolicySpec, spec_schema
from trimtab_operator.api.policy_status import (
    Condition,
    EndpointCounts,
    InjectionCounts,
    ModelCards,
    PickerCounts,
    PolicyStatus,
)

ROOT = Path(__file__).resolve().parents[2]
Body = dict[str, Any]
STATUS = PolicyStatus(
    observed_generation=1,
    pool="chat",
    active_policy="RoundRobin",
    active_since="2026-01-02T03:04:05Z",
    endpoints=EndpointCounts(ready=3, total=4),
    injected=InjectionCounts(pods=3, not_injected=1),
    pickers=PickerCounts(ready=2, total=2, shown="2/2", version="v0.1.0"),
    model_cards=ModelCards(exact=2, approximate=1, reason="no model card yet"),
    conditions=[
        Condition(
            type="Accepted",
            status="True",
            reason="InForce",
            message="",
            last_transition_time="2026-01-02T03:04:05Z",
            observed_generation=1,
        )
    ],
)


class Site:
    """One namespace of a server that has the CRD."""

    def __init__(self, api: ApiCalls, kube_config: Path) -> None:
        self.api = api
        self.namespace = api.new_namespace("policies")
        self.path = f"/apis/trimtab.dev/v1alpha1/namespaces/{self.namespace}/schedulingpolicies"
        self._kube_config = kube_config

    def body(self, spec: Any, name: str = "new", **parts: Any) -> Body:
        about = {"name": name, "namespace": self.namespace}
        kind = {"apiVersion": "trimtab.dev/v1alpha1", "kind": "SchedulingPolicy"}
        return {**kind, "metadata": about, "spec": spec, **parts}

    def apply(self, spec: Any, name: str) -> Body:
        return self.api.apply(f"{self.path}/{name}", self.body(spec, name))

    def kubectl(self, *words: str, text: str | None = None) -> str:
        command = [str(binaries() / "kubectl"), "--kubeconfig", str(self._kube_config), "-n", self.namespace, *words]
        environment = os.environ | {"HOME": "/nonexistent"}  # it keeps no cache of what the server serves
        ran = subprocess.run(
            command, input=text, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment
        )
        return ran.stdout


@pytest.fixture(scope="module")
def site(kube_config: Path) -> Iterator[Site]:
    with ApiCalls(kube_config) as api:
        api.serve(yaml.safe_load((ROOT / POLICY_CRD).read_text()))
        yield Site(api, kube_config)


@pytest.mark.parametrize("name", [POLICY_CRD, POOL_CRD])
def test_the_files_are_applied_as_often_and_by_as_many_as_one_likes(site: Site, name: str) -> None:
    """A second manager would be in conflict with the first where the server keeps something else than what is asked."""
    for manager in ("kubectl", "kubectl", "helm"):
        said = site.kubectl("apply", "--server-side", "--field-manager", manager, "-f", str(ROOT / name))
        assert said.rstrip().endswith("serverside-applied")
        assert "Warning" not in said


def test_a_target_alone_gets_every_default(site: Site) -> None:
    kept = site.apply(TARGET, "defaults")["spec"]
    assert PolicySpec.of(kept) == PolicySpec.default("chat")

    def filled(schema: Body, value: Body, path: str) -> Iterator[str]:
        for name, field in schema["properties"].items():
            if field.get("nullable"):
                assert name not in value, path
            else:
                assert name in value, f"{path}.{name}"
                yield f"{path}.{name}"
                if "properties" in field:
                    yield from filled(field, value[name], f"{path}.{name}")

    assert "spec.standalone.resources.limits" in set(filled(spec_schema(), kept, "spec"))


@pytest.mark.parametrize("spec", GOOD.values(), ids=GOOD)
def test_a_good_policy_is_taken_and_read_back_as_it_was_meant(site: Site, spec: Body) -> None:
    status, answer = site.api.dry_run(site.path, site.body(spec))
    assert status == 201, answer
    assert PolicySpec.of(answer["spec"]) == PolicySpec.of(spec)


@pytest.mark.parametrize(("spec", "field"), BAD.values(), ids=BAD)
def test_a_bad_policy_is_refused_and_the_field_named(site: Site, spec: Body, field: str) -> None:
    status, answer = site.api.dry_run(site.path, site.body(spec))
    assert status in (400, 422)
    causes = answer.get("details", {}).get("causes", ())
    fields = {cause["field"] for cause in causes} | set(re.findall(r'unknown field "(.*?)"', answer["message"]))
    assert field in fields


def test_rules_are_told_in_the_operators_own_words(site: Site) -> None:
    for spec, field in BAD.values():
        _, answer = site.api.dry_run(site.path, site.body(spec))
        told = [c["message"] for c in answer.get("details", {}).get("causes", ()) if " expected " in c["message"]]
        assert all(text.startswith("Invalid value: expected ") for text in told), told
        if told:
            with pytest.raises(PolicyError, match=re.escape(f"{field}: {told[0].removeprefix('Invalid value: ')}")):
                PolicySpec.of(spec)


def test_an_unknown_field_is_pruned_where_validation_is_not_strict(site: Site) -> None:
    spec = TARGET | {"piker": {}, "picker": {"replica": 3}}
    status, answer = site.api.call("POST", site.path, site.body(spec), dryRun="All", fieldValidation="Ignore")
    assert status == 201
    assert PolicySpec.of(answer["spec"]) == PolicySpec.default("chat")


def test_null_for_a_field_with_a_default_is_the_default(site: Site) -> None:
    spec = TARGET | {"mode": None, "picker": {"replicas": None, "tolerations": None}, "standalone": None}
    status, answer = site.api.dry_run(site.path, site.body(spec))
    assert status == 201
    assert PolicySpec.of(answer["spec"]) == PolicySpec.default("chat")


def has_null(value: Any) -> bool:
    if isinstance(value, dict):
        return any(has_null(inner) for inner in value.values())
    if isinstance(value, list):
        return any(has_null(inner) for inner in value)
    return value is None or isinstance(value, float)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(spec=like(spec_schema()))
def test_the_api_server_and_the_operator_take_the_same_policies(site: Site, spec: Any) -> None:
    if has_null(spec):  # the server takes nulls away, and makes 2 of 2.0
        return
    status, answer = site.api.dry_run(site.path, site.body(spec))
    if status == 201:
        assert PolicySpec.of(answer["spec"]) == PolicySpec.of(spec)
        return
    assert status in (400, 422), answer
    with pytest.raises(PolicyError):
        PolicySpec.of(spec)


def test_the_status_is_a_resource_of_its_own(site: Site) -> None:
    kept = site.apply(TARGET, "own")
    assert "status" not in site.api.apply(f"{site.path}/own", site.body(TARGET, "own", status=STATUS.body()))
    body = {**kept, "spec": {"targetRef": {"name": "other"}}, "status": STATUS.body()}
    body["metadata"] = {"name": "own", "namespace": site.namespace}
    body["metadata"]["resourceVersion"] = site.api.call("GET", f"{site.path}/own")[1]["metadata"]["resourceVersion"]
    status, answer = site.api.call("PUT", f"{site.path}/own/status", body, fieldValidation="Strict")
    assert status == 200, answer
    assert answer["status"] == STATUS.body()
    assert answer["spec"]["targetRef"]["name"] == "chat"
    assert answer["metadata"]["generation"] == kept["metadata"]["generation"]


def test_writers_of_conditions_do_not_take_each_other_s_away(site: Site) -> None:
    site.apply(TARGET, "shared")
    path = f"{site.path}/shared/status"
    for manager, type_ in (("trimtab", "Accepted"), ("another", "Checked")):
        condition = {**STATUS.body()["conditions"][0], "type": type_}
        body = site.body(TARGET, "shared", status={"conditions": [condition]})
        del body["spec"]
        status, answer = site.api.call(
            "PATCH", path, body, content_type="application/apply-patch+yaml", fieldManager=manager, force="true"
        )
        assert status == 200, answer
    assert [c["type"] for c in answer["status"]["conditions"]] == ["Accepted", "Checked"]


@pytest.mark.parametrize(
    ("status", "field"),
    [
        ({"activePolicy": "product"}, "status.activePolicy"),
        ({"endpoints": {"ready": -1}}, "status.endpoints.ready"),
        ({"endpoints": {"read": 1}}, "status.endpoints.read"),
        ({"activeSince": "now"}, "status.activeSince"),
        ({"conditions": [{"type": "Accepted"}]}, "status.conditions[0].reason"),
        ({"conditions": [STATUS.body()["conditions"][0]] * 2}, "status.conditions[1]"),
    ],
)
def test_a_bad_status_is_refused(site: Site, status: Body, field: str) -> None:
    kept = site.apply(TARGET, "bad-status")
    body = {**kept, "status": status}
    code, answer = site.api.dry_run(f"{site.path}/bad-status/status", body, "PUT")
    assert code in (400, 422)
    assert field in answer["message"]


def test_kubectl_shows_how_the_pool_is_placed(site: Site) -> None:
    site.apply(TARGET | {"mode": "Auto"}, "shown")
    body = site.body(TARGET, "shown", status=STATUS.body())
    del body["spec"]
    site.api.apply(f"{site.path}/shown/status", body)
    head, row = site.kubectl("get", "schedpol", "shown").splitlines()
    assert head.split() == ["NAME", "POOL", "MODE", "ACTIVE", "READY", "ENDPOINTS", "ACCEPTED", "AGE"]
    assert row.split()[:-1] == ["shown", "chat", "Auto", "RoundRobin", "3", "4", "True"]
    head, row = site.kubectl("get", "trimtab", "-o", "wide", "--field-selector", "metadata.name=shown").splitlines()
    assert head.split()[7:] == ["SINCE", "PICKERS", "VERSION", "REASON", "AGE"]
    assert row.split()[8:11] == ["2/2", "v0.1.0", "InForce"]


def test_kubectl_shows_a_policy_that_has_no_status_yet(site: Site) -> None:
    site.apply(TARGET, "fresh")
    _, row = site.kubectl("get", "schedulingpolicy", "fresh").splitlines()
    assert row.split()[:3] == ["fresh", "chat", "Auto"]


def test_kubectl_explains_every_field(site: Site) -> None:
    said = site.kubectl("explain", "schedulingpolicy.spec.picker.streamSecondsMax")
    assert " ".join(spec_schema()["properties"]["picker"]["properties"]["streamSecondsMax"]["description"].split()) in (
        " ".join(said.split())
    )


def test_kubectl_names_a_misspelt_field(site: Site) -> None:
    said = site.kubectl("create", "-f", "-", text=json.dumps(site.body(TARGET | {"picker": {"replica": 3}}, "typo")))
    assert 'unknown field "spec.picker.replica"' in said
