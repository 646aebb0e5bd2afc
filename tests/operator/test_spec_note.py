"""The last good policy, as it is noted on the pickers' Deployment."""

import logging

import pytest
from child_objects import ACCESS, install, pool_body

from trimtab_operator.api.policy import PolicySpec
from trimtab_operator.api.pool import Pool
from trimtab_operator.children.desired import desired
from trimtab_operator.children.names import picker_name
from trimtab_operator.kube import Object
from trimtab_operator.spec_note import NOTE_BYTES_MAX, SPEC_NOTE, note_of, note_spec, spec_in

POOL = Pool.of(pool_body("chat"))


def spec(value: str) -> PolicySpec:
    annotations = {f"a.example/{number}": value for number in range(32)}
    return PolicySpec.of({"targetRef": {"name": "chat"}, "standalone": {"serviceAnnotations": annotations}})


def children(asked: PolicySpec) -> list[Object]:
    return list(desired(POOL, asked, install(), ACCESS))


def test_what_was_noted_is_found_again() -> None:
    asked = spec("x" * 4096)
    made = children(asked)
    note_spec(made, POOL.key, asked)
    noted = [body["metadata"]["name"] for body in made if SPEC_NOTE in body["metadata"].get("annotations", {})]
    assert noted == [picker_name("chat")]
    assert spec_in(made, POOL.key) == asked


def test_a_note_that_the_api_server_would_refuse_is_left_out_and_that_is_told(caplog: pytest.LogCaptureFixture) -> None:
    asked = spec("\x01" * 4096)
    assert note_of(asked) is None
    made = children(asked)
    with caplog.at_level(logging.WARNING):
        note_spec(made, POOL.key, asked)
    assert spec_in(made, POOL.key) is None
    assert f"over {NOTE_BYTES_MAX} bytes" in caplog.text


def test_a_note_that_somebody_damaged_is_none() -> None:
    name = picker_name("chat")
    for note in ("{", "[]", '{"targetRef": 7}', ""):
        assert spec_in([{"metadata": {"name": name, "annotations": {SPEC_NOTE: note}}}], POOL.key) is None
