"""The files in `crds/` and their reference pages: what they say, and that they follow from their definitions."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from official_crd import descriptions, digest, official_pool_crd, structure

from trimtab_operator.api.api_struct import ApiStruct
from trimtab_operator.api.generate import POLICY_CRD, POOL_CRD, files
from trimtab_operator.api.open_api import structural
from trimtab_operator.api.policy import PolicySpec
from trimtab_operator.api.policy_crd import REVISION, SCHEMA_REVISION, policy_crd, revision_problem

ROOT = Path(__file__).resolve().parents[2]
OFFICIAL_DIGEST = "db95cc1279f434eb30da453ec9ac0a487267a418fc8383b17612b6fab426cbc2"
"""Of the standard's file, for where it is not at hand."""
SCHEMA_DIGESTS = {1: "817d46847739dbf992e6dd1a8595f5aaab1058ff42b7c176672f3e7026231c48"}
"""Of our schema, by its revision."""
SHARED_WORDS_MAX = 7


def pool_crd() -> dict[str, Any]:
    body: dict[str, Any] = yaml.safe_load((ROOT / POOL_CRD).read_text())
    return body


def schemas(schema: dict[str, Any], path: str) -> dict[str, dict[str, Any]]:
    """Each schema below this one, by path."""
    found = {path: schema}
    for name, inner in schema.get("properties", {}).items():
        found |= schemas(inner, f"{path}.{name}")
    for keyword, suffix in (("items", "[]"), ("additionalProperties", "[*]")):
        if keyword in schema:
            found |= schemas(schema[keyword], path + suffix)
    return found


def root_schema(crd: dict[str, Any]) -> dict[str, Any]:
    schema: dict[str, Any] = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return schema


@pytest.mark.parametrize("name", files(ROOT))
def test_what_is_committed_is_what_the_definitions_give(name: str) -> None:
    assert (ROOT / name).read_text() == files(ROOT)[name], "run `make generate`"


def test_the_pool_is_the_standards_by_its_digest() -> None:
    assert digest(pool_crd()) == OFFICIAL_DIGEST


def test_the_pool_is_the_standards_but_for_the_words() -> None:
    official = official_pool_crd()
    assert structure(pool_crd()) == structure(official)
    assert digest(official) == OFFICIAL_DIGEST


def test_the_pools_words_are_our_own() -> None:
    def runs(texts: dict[str, str]) -> set[tuple[str, ...]]:
        words = [text.lower().split() for text in texts.values()]
        size = SHARED_WORDS_MAX + 1
        return {tuple(text[at : at + size]) for text in words for at in range(len(text) - size + 1)}

    shared = runs(descriptions(pool_crd())) & runs(descriptions(official_pool_crd()))
    assert not shared


@pytest.mark.parametrize("crd", [pool_crd(), policy_crd()], ids=["InferencePool", "SchedulingPolicy"])
def test_every_field_is_described(crd: dict[str, Any]) -> None:
    bare = [path for path, schema in schemas(root_schema(crd), "").items() if not schema.get("description")]
    assert bare == [".metadata"]


def test_every_field_of_a_policy_but_its_target_has_a_default_or_may_be_null() -> None:
    found = schemas(root_schema(policy_crd())["properties"]["spec"], "spec")
    without = [
        path
        for path, schema in found.items()
        if "default" not in schema and not schema.get("nullable") and not path.endswith("]") and "[]" not in path
    ]
    assert without == ["spec", "spec.targetRef", "spec.targetRef.name"]


def test_every_list_says_how_it_is_merged() -> None:
    for path, schema in schemas(root_schema(policy_crd()), "").items():
        assert schema.get("type") != "array" or "x-kubernetes-list-type" in schema, path


def test_the_words_of_an_enumeration_are_in_the_order_in_which_they_are_declared() -> None:
    picker = structural(PolicySpec)["properties"]["picker"]
    assert picker["properties"]["logLevel"]["enum"] == ["debug", "info", "warning", "error"]


def test_a_schema_that_changes_gets_a_new_revision() -> None:
    schema = structure(policy_crd())["spec"]
    assert digest(schema) == SCHEMA_DIGESTS[SCHEMA_REVISION], (
        "if this revision has been released, raise SCHEMA_REVISION; then note the digest here"
    )


def test_a_crd_of_this_revision_or_a_newer_one_is_no_problem() -> None:
    for revision in (SCHEMA_REVISION, SCHEMA_REVISION + 1):
        assert revision_problem({REVISION: str(revision)}) is None


@pytest.mark.parametrize("annotations", [{}, {REVISION: str(SCHEMA_REVISION - 1)}, {REVISION: "x"}, {REVISION: "-3"}])
def test_an_older_crd_is_a_problem_with_a_remedy(annotations: dict[str, str]) -> None:
    problem = revision_problem(annotations)
    assert problem is not None
    assert "schedulingpolicies.trimtab.dev has revision 0" in problem
    assert "kubectl apply --server-side -f crds/" in problem


def test_a_crd_that_is_missing_is_a_problem() -> None:
    assert "there is no CustomResourceDefinition" in (revision_problem(None) or "")


def test_a_type_that_a_structural_schema_cannot_express_is_refused() -> None:
    class Odd(ApiStruct, frozen=True, kw_only=True):
        value: int | str = 0

    with pytest.raises(TypeError, match="no union but with null"):
        structural(Odd)


def test_a_field_without_a_description_is_refused() -> None:
    class Silent(ApiStruct, frozen=True, kw_only=True):
        value: int = 0

    with pytest.raises(TypeError, match="value has no description"):
        structural(Silent)


def test_the_reference_names_every_field() -> None:
    page = (ROOT / "docs/reference-schedulingpolicy.md").read_text()
    for path in schemas(root_schema(policy_crd())["properties"]["spec"], "spec"):
        name = path.rsplit(".", 1)[-1].removesuffix("[]").removesuffix("[*]")
        assert f"`{name}`" in page or name == "spec", path


def test_the_generated_crd_is_the_one_of_the_definitions() -> None:
    assert json.dumps(yaml.safe_load((ROOT / POLICY_CRD).read_text())) == json.dumps(policy_crd())
