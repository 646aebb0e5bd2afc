"""Reading a SchedulingPolicy: defaults, and what is said of one that is wrong."""

import json
import re
from decimal import Decimal
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_cases import BAD, GOOD, TARGET, resources, spec

from trimtab_operator.api.faults import faults
from trimtab_operator.api.open_api import readable
from trimtab_operator.api.policy import PolicyError, PolicySpec, spec_schema
from trimtab_operator.api.policy_status import Condition, EndpointCounts, PolicyStatus
from trimtab_operator.api.quantity import amount


def problem(body: Any) -> PolicyError:
    with pytest.raises(PolicyError) as caught:
        PolicySpec.of(body)
    return caught.value


@pytest.mark.parametrize("body", GOOD.values(), ids=GOOD)
def test_a_good_policy_is_read(body: dict[str, Any]) -> None:
    assert PolicySpec.of(body).target_ref.name == body["targetRef"]["name"]


def test_a_policy_with_a_target_alone_is_the_default_of_its_pool() -> None:
    assert PolicySpec.of(TARGET) == PolicySpec.default("chat")


@pytest.mark.parametrize(("body", "field"), BAD.values(), ids=BAD)
def test_a_bad_policy_is_refused_with_the_field_what_was_expected_and_a_remedy(
    body: dict[str, Any], field: str
) -> None:
    (text,) = problem(body).faults
    said, rest = text.split(": ", 1)
    assert re.sub(r"\[([a-z].*?)\]", r".\1", said) == field
    assert rest.startswith("expected ")
    assert ", got " in rest or ";" in rest
    assert str(problem(body)) == text


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (spec(picker={"replicas": 0}), "spec.picker.replicas: expected a whole number from 1 to 64, got 0; correct it,"
         " or leave it out for 2"),
        (spec(picker={"replicas": "3"}), 'spec.picker.replicas: expected a whole number from 1 to 64, got "3"; write it'
         " without quotes"),
        (spec(picker={"replica": 3}), "spec.picker.replica: expected no such field; did you mean replicas?"),
        (spec(pickerz=1, mode="auto"), "spec.pickerz: expected no such field; did you mean picker? | spec.mode:"
         ' expected one of Auto, Product, RoundRobin, LeastRequest, got "auto"; did you mean Auto?'),
        ({}, "spec.targetRef: expected an object, got nothing; it must be given"),
        (None, "spec: expected an object, got null; correct it"),
        (resources(limits={"cpu": 0.5}), "spec.picker.resources.limits[cpu]: expected an amount such as 500m, 2 or 4Gi,"
         " got 0.5; write it in quotes"),
        (spec(batchLimit="x" * 100), "spec.batchLimit: expected a whole number from 1 to 100000, got"
         f' "{"x" * 59}...; write it without quotes'),
    ],
)  # fmt: skip
def test_the_words_of_a_refusal(body: Any, text: str) -> None:
    assert str(problem(body)) == text


def test_a_refusal_of_many_fields_names_the_first_three() -> None:
    error = problem(spec(mode=1, batchLimit=0, fallback=2, picker=3, sidecar=4))
    assert len(error.faults) == 5
    assert str(error).startswith("spec.mode: ")
    assert str(error).endswith(" | and 2 more")


def test_amounts_are_texts_whatever_they_were() -> None:
    read = PolicySpec.of(resources(requests={"cpu": 1, "memory": "512Mi"}))
    assert read.picker.resources.requests == {"cpu": "1", "memory": "512Mi"}


def test_tolerations_stay_as_a_pod_wants_them() -> None:
    tolerations = [{"key": "gpu", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 30}]
    assert PolicySpec.of(spec(picker={"tolerations": tolerations})).picker.tolerations == tolerations


@pytest.mark.parametrize(
    ("text", "value"),
    [("500m", "0.5"), ("2", "2"), ("1.5Gi", "1610612736"), (".5", "0.5"), ("5.", "5"), ("1e3", "1000"), ("1E", "1e18"),
     ("1E2", "100"), ("3u", "0.000003"), ("+1k", "1000"), ("2e-3", "0.002"), ("1Ei", str(2**60))],
)  # fmt: skip
def test_amounts_are_read_exactly(text: str, value: str) -> None:
    assert amount(text) == Decimal(value)


@pytest.mark.parametrize("text", ["", "x", "1 Gi", "-1", "1K", "1ki", "1e", "1\n", "١"])
def test_what_is_no_amount_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no quantity"):
        amount(text)


def test_a_status_leaves_out_what_is_not_known() -> None:
    condition = Condition(type="Accepted", status="True", reason="Accepted", message="", last_transition_time="t")
    status = PolicyStatus(pool="chat", endpoints=EndpointCounts(ready=1, total=2), conditions=[condition])
    assert status.body() == {
        "pool": "chat",
        "endpoints": {"ready": 1, "total": 2},
        "conditions": [
            {"type": "Accepted", "status": "True", "reason": "Accepted", "message": "", "lastTransitionTime": "t"}
        ],
    }


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 2**40) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def like(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Values that fit a schema, and now and then one that does not."""
    if "enum" in schema:
        fits: st.SearchStrategy[Any] = st.sampled_from(schema["enum"])
    elif "x-kubernetes-int-or-string" in schema:
        fits = st.sampled_from([0, 1, "1", "500m", "4Gi", "x", "1e3", -1])
    elif schema["type"] == "integer":
        low, high = schema.get("minimum", -5), schema.get("maximum", 5)
        fits = st.integers(low - 1, high + 1)
    elif schema["type"] == "boolean":
        fits = st.booleans()
    elif schema["type"] == "string":
        fits = st.sampled_from(["", "a", "a.b", "A", "a b", "a/b", "x" * 400])
    elif schema["type"] == "array":
        fits = st.lists(like(schema["items"]), max_size=3)
    elif "additionalProperties" in schema:
        fits = st.dictionaries(
            st.sampled_from(["cpu", "memory", "a/b", "A b", "x"]), like(schema["additionalProperties"]), max_size=3
        )
    else:
        required = {name: like(schema["properties"][name]) for name in schema.get("required", ())}
        others = {name: like(inner) for name, inner in schema["properties"].items() if name not in required}
        fits = st.fixed_dictionaries(required, optional=others)
    return st.one_of(*[fits] * 9, VALUES)


@settings(max_examples=300, deadline=None)
@given(like(spec_schema()))
def test_a_policy_has_faults_just_where_it_cannot_be_read(body: Any) -> None:
    schema = spec_schema()
    found = list(faults(body, schema, "spec"))
    if found:
        assert all(text.startswith("spec") and ": expected " in text for text in found)
        with pytest.raises(PolicyError):
            PolicySpec.of(body)
        return
    read = msgspec.convert(readable(body, schema), PolicySpec)
    assert json.loads(msgspec.json.encode(read))["targetRef"]["name"] == body["targetRef"]["name"]
