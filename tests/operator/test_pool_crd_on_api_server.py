"""Our InferencePool CRD and the standard's on one real API server: the same objects are taken, refused and filled in.

The standard's is served under another group, which is all that differs; both get every object.
"""

import copy
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from api_calls import ApiCalls
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from official_crd import official_pool_crd

ROOT = Path(__file__).resolve().parents[2]
CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
OURS, STANDARD = "inference.networking.k8s.io", "standard.example.com"
GONE = object()
"""In place of a value: the field is left out."""

Body = dict[str, Any]


def changed(body: Body, path: str, value: Any) -> Body:
    """A copy with one field set; numbers in the path are places in lists."""
    result = copy.deepcopy(body)
    *way, last = [int(part) if part.isdigit() else part for part in path.split("/")]
    at: Any = result
    for part in way:
        at = at[part]
    if value is GONE:
        del at[last]
    else:
        at[last] = value
    return result


SPEC: Body = {
    "selector": {"matchLabels": {"app": "vllm"}},
    "targetPorts": [{"number": 8000}, {"number": 8001}],
    "endpointPickerRef": {"name": "trimtab-chat", "port": {"number": 9002}},
}
CONDITION: Body = {
    "type": "Accepted",
    "status": "True",
    "reason": "Accepted",
    "message": "",
    "lastTransitionTime": "2026-01-02T03:04:05Z",
}
STATUS: Body = {
    "parents": [
        {
            "parentRef": {"name": "gateway"},
            "controllerName": "trimtab.dev/operator",
            "conditions": [CONDITION, {**CONDITION, "type": "ResolvedRefs", "observedGeneration": 3}],
        }
    ]
}
REF = "endpointPickerRef"
LABELS = "selector/matchLabels"

GOOD_SPECS: list[tuple[str, Any]] = [
    ("appProtocol", "http"),
    ("appProtocol", "kubernetes.io/h2c"),
    ("appProtocol", None),
    (f"{REF}/name", "x" * 253),
    (f"{REF}/name", "No name that the core group would take!"),
    (f"{REF}/group", ""),
    (f"{REF}/group", "a.b-c.example"),
    (f"{REF}/group", "x" * 253),
    (f"{REF}/group", None),
    (f"{REF}/kind", "Service"),
    (f"{REF}/kind", "x" * 63),
    (f"{REF}/kind", "Pod-Group9"),
    (f"{REF}/port/number", 1),
    (f"{REF}/port/number", 65535),
    (f"{REF}/failureMode", "FailOpen"),
    (f"{REF}/failureMode", "FailClose"),
    (REF, {"name": "p", "kind": "Deployment"}),
    (REF, {"name": "p", "kind": "Deployment", "port": {"number": 7}}),
    (LABELS, {f"l{n}": "v" for n in range(64)}),
    (LABELS, {"no key/that a label may have": "v"}),
    (f"{LABELS}/app", ""),
    (f"{LABELS}/app", "x" * 63),
    (f"{LABELS}/app", "My.name-1_2"),
    ("targetPorts", [{"number": 1}]),
    ("targetPorts", [{"number": n} for n in range(65528, 65536)]),
]
BAD_SPECS: list[tuple[str, Any]] = [
    ("appProtocol", "grpc"),
    ("appProtocol", "HTTP"),
    ("appProtocol", ""),
    ("appProtocol", 1),
    (REF, GONE),
    (REF, None),
    (REF, {}),
    (REF, "trimtab-chat"),
    (f"{REF}/name", GONE),
    (f"{REF}/name", ""),
    (f"{REF}/name", "x" * 254),
    (f"{REF}/name", 7),
    (f"{REF}/group", "A.example"),
    (f"{REF}/group", "-a"),
    (f"{REF}/group", "a..b"),
    (f"{REF}/group", "x" * 254),
    (f"{REF}/kind", ""),
    (f"{REF}/kind", "9Service"),
    (f"{REF}/kind", "Service-"),
    (f"{REF}/kind", "x" * 64),
    (f"{REF}/port", GONE),
    (f"{REF}/port", {}),
    (f"{REF}/port/number", 0),
    (f"{REF}/port/number", -1),
    (f"{REF}/port/number", 65536),
    (f"{REF}/port/number", "9002"),
    (f"{REF}/port/number", 1.5),
    (f"{REF}/port/name", "grpc"),
    (f"{REF}/failureMode", "failOpen"),
    (f"{REF}/failureMode", ""),
    (f"{REF}/namespace", "other"),
    (REF, {"name": "p", "kind": "Service"}),
    ("selector", GONE),
    ("selector", {}),
    ("selector", []),
    ("selector/matchExpressions", []),
    (LABELS, {}),
    (LABELS, {f"l{n}": "v" for n in range(65)}),
    (f"{LABELS}/app", "x" * 64),
    (f"{LABELS}/app", "-x"),
    (f"{LABELS}/app", "a b"),
    (f"{LABELS}/app", 1),
    (f"{LABELS}/app", None),
    ("targetPorts", GONE),
    ("targetPorts", []),
    ("targetPorts", {"number": 8000}),
    ("targetPorts", [8000]),
    ("targetPorts", [{}]),
    ("targetPorts", [{"number": n} for n in range(1, 10)]),
    ("targetPorts", [{"number": 8000}, {"number": 8000}]),
    ("targetPorts/1/number", 0),
    ("targetPorts/1/number", 65536),
    ("targetPorts/1/number", "8001"),
    ("targetPorts/1/protocol", "TCP"),
    ("extensionRef", {"name": "p"}),
]
PARENT = "parents/0"
REFERENCE = f"{PARENT}/parentRef"
CONDITIONS = f"{PARENT}/conditions"
GOOD_STATUSES: list[tuple[str, Any]] = [
    ("parents", []),
    ("parents", GONE),
    ("parents", [{"parentRef": {"name": f"g{n}"}} for n in range(32)]),
    ("parents", [{"parentRef": {"name": "same"}}, {"parentRef": {"name": "same"}}]),
    (REFERENCE, {"group": "", "kind": "Service", "name": "trimtab-chat-envoy", "namespace": "x" * 63}),
    (f"{REFERENCE}/name", "x" * 253),
    (f"{REFERENCE}/group", "x" * 253),
    (f"{REFERENCE}/kind", "x" * 63),
    (f"{PARENT}/controllerName", GONE),
    (f"{PARENT}/controllerName", "a/b/c~d%20!$&'()*+,;=:"),
    (f"{PARENT}/controllerName", "a/" + "b" * 251),
    (CONDITIONS, []),
    (CONDITIONS, GONE),
    (CONDITIONS, [{**CONDITION, "type": f"T{n}"} for n in range(8)]),
    (f"{CONDITIONS}/0/type", "example.com/Accepted"),
    (f"{CONDITIONS}/0/type", "x" * 316),
    (f"{CONDITIONS}/0/status", "Unknown"),
    (f"{CONDITIONS}/0/reason", "A1_,:_b"),
    (f"{CONDITIONS}/0/reason", "x" * 1024),
    (f"{CONDITIONS}/0/message", "x" * 32768),
    (f"{CONDITIONS}/0/observedGeneration", 0),
    (f"{CONDITIONS}/0/observedGeneration", 2**63 - 1),
    (f"{CONDITIONS}/0/lastTransitionTime", "2026-01-02T03:04:05.678+01:00"),
]
BAD_STATUSES: list[tuple[str, Any]] = [
    ("parents", {}),
    ("parents", [{"parentRef": {"name": f"g{n}"}} for n in range(33)]),
    (REFERENCE, GONE),
    (REFERENCE, {}),
    (f"{REFERENCE}/name", ""),
    (f"{REFERENCE}/name", "x" * 254),
    (f"{REFERENCE}/group", "Upper"),
    (f"{REFERENCE}/group", "x" * 254),
    (f"{REFERENCE}/kind", ""),
    (f"{REFERENCE}/kind", "1st"),
    (f"{REFERENCE}/kind", "x" * 64),
    (f"{REFERENCE}/namespace", ""),
    (f"{REFERENCE}/namespace", "a.b"),
    (f"{REFERENCE}/namespace", "x" * 64),
    (f"{REFERENCE}/port", 1),
    (f"{PARENT}/controllerName", ""),
    (f"{PARENT}/controllerName", "nopath"),
    (f"{PARENT}/controllerName", "Upper.example/path"),
    (f"{PARENT}/controllerName", "a/" + "b" * 252),
    (CONDITIONS, [{**CONDITION, "type": f"T{n}"} for n in range(9)]),
    (CONDITIONS, [CONDITION, CONDITION]),
    (f"{CONDITIONS}/0/type", GONE),
    (f"{CONDITIONS}/0/type", ""),
    (f"{CONDITIONS}/0/type", "a b"),
    (f"{CONDITIONS}/0/type", "x" * 317),
    (f"{CONDITIONS}/0/status", GONE),
    (f"{CONDITIONS}/0/status", "true"),
    (f"{CONDITIONS}/0/status", True),
    (f"{CONDITIONS}/0/reason", GONE),
    (f"{CONDITIONS}/0/reason", ""),
    (f"{CONDITIONS}/0/reason", "1st"),
    (f"{CONDITIONS}/0/reason", "ends:"),
    (f"{CONDITIONS}/0/reason", "x" * 1025),
    (f"{CONDITIONS}/0/message", GONE),
    (f"{CONDITIONS}/0/message", "x" * 32769),
    (f"{CONDITIONS}/0/observedGeneration", -1),
    (f"{CONDITIONS}/0/observedGeneration", "1"),
    (f"{CONDITIONS}/0/lastTransitionTime", GONE),
    (f"{CONDITIONS}/0/lastTransitionTime", "yesterday"),
    (f"{CONDITIONS}/0/severity", "bad"),
]


class BothServed:
    """Both CRDs, and what the server says of an object under each."""

    def __init__(self, api: ApiCalls) -> None:
        self._api = api
        self._namespace = api.new_namespace("pools")
        self._versions: dict[str, str] = {}
        standard = official_pool_crd()
        standard.pop("status", None)
        standard["metadata"]["name"] = f"inferencepools.{STANDARD}"
        standard["spec"]["group"] = STANDARD
        # Names are served once per server: what is not the schema gets others.
        standard["spec"]["names"]["shortNames"] = ["stdpool"]
        ours = yaml.safe_load((ROOT / f"crds/{OURS}_inferencepools.yaml").read_text())
        for crd in (ours, standard):
            api.serve(crd)

    def create(self, spec: Any) -> Iterator[tuple[int, Any]]:
        """(HTTP status, what is kept or what is wrong), for ours and for the standard's."""
        for group in (OURS, STANDARD):
            body = self._body(group, "new", spec=spec) if spec is not GONE else self._body(group, "new")
            yield self._verdict(self._api.dry_run(self._path(group), body), "spec")

    def write_status(self, status: Any) -> Iterator[tuple[int, Any]]:
        for group in (OURS, STANDARD):
            body = self._body(group, "kept", spec=SPEC, status=status)
            body["metadata"]["resourceVersion"] = self._versions[group]
            verdict = self._api.dry_run(f"{self._path(group)}/kept/status", body, "PUT")
            yield self._verdict(verdict, "status")

    def keep_one(self) -> None:
        for group in (OURS, STANDARD):
            kept = self._api.apply(f"{self._path(group)}/kept", self._body(group, "kept", spec=SPEC))
            self._versions[group] = kept["metadata"]["resourceVersion"]

    def remove(self) -> None:
        """The standard's; ours may be others' too."""
        self._api.call("DELETE", f"{self._path(OURS)}/kept")
        self._api.call("DELETE", f"{CRDS}/inferencepools.{STANDARD}")

    def _path(self, group: str) -> str:
        return f"/apis/{group}/v1/namespaces/{self._namespace}/inferencepools"

    def _body(self, group: str, name: str, **parts: Any) -> Body:
        about = {"name": name, "namespace": self._namespace}
        return {"apiVersion": f"{group}/v1", "kind": "InferencePool", "metadata": about, **parts}

    @staticmethod
    def _verdict(answer: tuple[int, Body], part: str) -> tuple[int, Any]:
        status, body = answer
        if status < 300:
            return status, body.get(part)
        # In no order of their own.
        causes = sorted(str(cause) for cause in body.get("details", {}).get("causes", ()))
        return status, causes or body["message"].replace(STANDARD, OURS)


@pytest.fixture(scope="module")
def both(kube_config: Path) -> Iterator[BothServed]:
    with ApiCalls(kube_config) as api:
        served = BothServed(api)
        served.keep_one()
        yield served
        served.remove()


def ids(cases: list[tuple[str, Any]]) -> list[str]:
    return [f"{path}={'left out' if value is GONE else str(value)[:24]}" for path, value in cases]


@pytest.mark.parametrize(("path", "value"), GOOD_SPECS, ids=ids(GOOD_SPECS))
def test_both_take_a_good_pool_and_fill_it_in_alike(both: BothServed, path: str, value: Any) -> None:
    ours, standard = both.create(changed(SPEC, path, value))
    assert ours[0] == 201
    assert ours == standard


@pytest.mark.parametrize(("path", "value"), BAD_SPECS, ids=ids(BAD_SPECS))
def test_both_refuse_a_bad_pool_in_the_same_words(both: BothServed, path: str, value: Any) -> None:
    ours, standard = both.create(changed(SPEC, path, value))
    assert ours[0] in (400, 422)
    assert ours == standard


@pytest.mark.parametrize("spec", [GONE, None, {}, [], "x"])
def test_both_refuse_a_pool_without_a_spec(both: BothServed, spec: Any) -> None:
    ours, standard = both.create(spec)
    assert ours[0] in (400, 422)
    assert ours == standard


@pytest.mark.parametrize(("path", "value"), GOOD_STATUSES, ids=ids(GOOD_STATUSES))
def test_both_take_a_good_status_and_fill_it_in_alike(both: BothServed, path: str, value: Any) -> None:
    ours, standard = both.write_status(changed(STATUS, path, value))
    assert ours[0] == 200
    assert ours == standard


@pytest.mark.parametrize(("path", "value"), BAD_STATUSES, ids=ids(BAD_STATUSES))
def test_both_refuse_a_bad_status_in_the_same_words(both: BothServed, path: str, value: Any) -> None:
    ours, standard = both.write_status(changed(STATUS, path, value))
    assert ours[0] in (400, 422)
    assert ours == standard


def test_defaults_are_the_standards(both: BothServed) -> None:
    (_, spec), _ = both.create(SPEC)
    assert spec["appProtocol"] == "http"
    assert spec[REF] == {
        "group": "",
        "kind": "Service",
        "name": "trimtab-chat",
        "port": {"number": 9002},
        "failureMode": "FailClose",
    }
    (_, status), _ = both.write_status(STATUS)
    assert status["parents"][0]["parentRef"] == {
        "group": "gateway.networking.k8s.io",
        "kind": "Gateway",
        "name": "gateway",
    }


def mixtures(cases: list[tuple[str, Any]]) -> st.SearchStrategy[list[tuple[str, Any]]]:
    values = [value for _, value in cases]
    values += [0, 1, 65535, 65536, "", "a", "A.b/c", [], {}, True, None, 2**31, 2**63, -1.0, "x" * 64, "é"]
    paths = sorted({path for path, _ in cases})
    one = st.sampled_from(cases) | st.tuples(st.sampled_from(paths), st.sampled_from(values))
    return st.lists(one, min_size=1, max_size=4)


def mixed(body: Body, changes: list[tuple[str, Any]]) -> Body:
    """The changes in turn; those for which there is no place any more are passed over."""
    for path, value in changes:
        try:
            body = changed(body, path, value)
        except (KeyError, IndexError, TypeError):
            continue
    return body


SHORT = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@SHORT
@given(changes=mixtures(GOOD_SPECS + BAD_SPECS))
def test_both_say_the_same_of_any_pool(both: BothServed, changes: list[tuple[str, Any]]) -> None:
    ours, standard = both.create(mixed(SPEC, changes))
    assert ours == standard


@SHORT
@given(changes=mixtures(GOOD_STATUSES + BAD_STATUSES))
def test_both_say_the_same_of_any_status(both: BothServed, changes: list[tuple[str, Any]]) -> None:
    ours, standard = both.write_status(mixed(STATUS, changes))
    assert ours == standard


BOUNDS = {"enum", "pattern", "maxLength", "minLength", "minimum", "maxItems", "maxProperties", "format"}


def test_every_rule_of_the_schema_has_a_case() -> None:
    """Each field that has a bound, a pattern or an enumeration is changed by some case, or is in one."""
    text = str(list(itertools.chain(GOOD_SPECS, BAD_SPECS, GOOD_STATUSES, BAD_STATUSES)))
    crd = yaml.safe_load((ROOT / f"crds/{OURS}_inferencepools.yaml").read_text())

    def bounded(schema: Body, name: str) -> Iterator[str]:
        if schema.keys() & BOUNDS:
            yield name
        for inner_name, inner in schema.get("properties", {}).items():
            yield from bounded(inner, inner_name)
        for keyword in ("items", "additionalProperties"):
            if keyword in schema:
                yield from bounded(schema[keyword], name)

    schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]
    names = {*bounded(schema["spec"], "spec"), *bounded(schema["status"], "status")}
    assert {name for name in names if name not in text} == set()
