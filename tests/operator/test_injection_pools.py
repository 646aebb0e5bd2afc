"""Which policy counts for a pod: the one that the operator would take."""

import base64
import itertools
import json
from typing import Any

import pytest
from injection_pods import INSTALL, LABELS, engine, patched, pod

from trimtab_operator.injection.admission import Admission
from trimtab_operator.injection.marks import LEFT_ALONE_NOTE
from trimtab_operator.injection.outcome import Skip
from trimtab_operator.injection.pod_bounds import NOTES_BYTES_MAX, REVIEW_BYTES_MAX
from trimtab_operator.injection.pool_book import Match, PoolBook
from trimtab_operator.kube import Object

GOOD: Object = {"inject": True}
BAD: Object = {"inject": "perhaps"}


def pool_body(name: str = "chat") -> Object:
    spec = {"selector": {"matchLabels": LABELS}, "targetPorts": [{"number": 8000}]}
    return {"metadata": {"namespace": "ns", "name": name, "uid": name}, "spec": spec}


def policy(name: str, day: int, sidecar: Object, *, target: str = "chat", installation: str = "") -> Object:
    return {
        "metadata": {"namespace": "ns", "name": name, "creationTimestamp": f"2026-01-{day:02}T00:00:00Z"},
        "spec": {"targetRef": {"name": target}, "sidecar": sidecar},
        "status": {"installation": installation} if installation else {},
    }


def book_of(*policies: Object) -> PoolBook:
    book = PoolBook(INSTALL.namespace)
    book.put_pool(pool_body())
    for body in policies:
        book.put_policy(body)
    return book


def outcome(book: PoolBook) -> str:
    """The image of the policy in force, or the reason why there is none."""
    found = book.match("ns", LABELS)
    return found.reason if isinstance(found, Skip) else found.spec.sidecar.image


def test_a_policy_that_makes_no_sense_any_more_leaves_the_one_before_in_force() -> None:
    book = book_of(policy("a", 1, {**GOOD, "image": "a"}))
    book.put_policy(policy("a", 1, BAD))
    assert outcome(book) == "a"
    # Whatever comes after it.
    book.put_policy(policy("b", 2, {**GOOD, "image": "b"}))
    assert outcome(book) == "a"
    book.put_policy(policy("a", 1, {**GOOD, "image": "mended"}))
    assert outcome(book) == "mended"


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_a_process_that_finds_the_oldest_policy_bad_takes_none_in_its_place(order: tuple[int, ...]) -> None:
    bodies = [policy("z", 1, BAD), policy("b", 2, GOOD), policy("c", 3, GOOD)]
    assert outcome(book_of(*(bodies[at] for at in order))) == "policy_not_understood"


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_a_younger_policy_that_is_bad_changes_nothing(order: tuple[int, ...]) -> None:
    bodies = [policy("z", 1, {**GOOD, "image": "z"}), policy("b", 2, BAD), policy("c", 3, GOOD)]
    assert outcome(book_of(*(bodies[at] for at in order))) == "z"


def test_when_the_oldest_goes_what_it_said_holds_while_the_next_makes_no_sense() -> None:
    book = book_of(policy("a", 1, {**GOOD, "image": "a"}), policy("b", 2, BAD))
    book.drop_policy("ns", "a")
    assert outcome(book) == "a"
    book.drop_policy("ns", "b")
    assert outcome(book) == "not_asked"
    book.put_policy(policy("b", 2, BAD))
    assert outcome(book) == "policy_not_understood"


def test_a_policy_that_goes_to_another_pool_leaves_this_one_to_the_next() -> None:
    book = book_of(policy("a", 1, {**GOOD, "image": "a"}), policy("b", 2, {**GOOD, "image": "b"}))
    book.put_policy(policy("a", 1, GOOD, target="other"))
    assert outcome(book) == "b"


def test_a_pool_that_is_made_again_remembers_nothing() -> None:
    book = book_of(policy("a", 1, GOOD))
    book.put_policy(policy("a", 1, BAD))
    book.drop_pool("ns", "chat")
    book.put_pool(pool_body())
    assert outcome(book) == "policy_not_understood"


@pytest.mark.parametrize("spec", [None, 7, {}, {"targetRef": "chat"}, {"targetRef": {"name": 7}}])
def test_a_policy_without_a_pool_counts_for_none(spec: Any) -> None:
    book = book_of({**policy("a", 1, GOOD), "spec": spec}, policy("b", 2, {**GOOD, "image": "b"}))
    assert outcome(book) == "b"


@pytest.mark.parametrize("order", [1, -1])
def test_of_two_pools_that_ask_the_older_keeps_injection(order: int) -> None:
    book = PoolBook(INSTALL.namespace)
    for name, day in [("chat", 2), ("all", 3)][::order]:
        body = pool_body(name)
        body["metadata"]["creationTimestamp"] = f"2026-01-{day:02}T00:00:00Z"
        book.put_pool(body)
    # The age of the policies decides nothing.
    book.put_policy(policy("a", 1, {**GOOD, "image": "younger"}, target="all"))
    book.put_policy(policy("b", 2, {**GOOD, "image": "older"}))
    assert outcome(book) == "older"
    book.put_policy(policy("b", 2, {"inject": False}))
    assert outcome(book) == "younger"


def test_a_pool_that_another_installation_runs_is_left_to_its_webhook() -> None:
    book = book_of(policy("a", 1, GOOD, installation="trimtab-blue"))
    assert outcome(book) == "other_installation"
    book.put_policy(policy("a", 1, GOOD, installation=INSTALL.namespace))
    assert isinstance(book.match("ns", LABELS), Match)


def review(body: Object) -> bytes:
    request = {"uid": "u", "namespace": "ns", "operation": "CREATE", "kind": {"kind": "Pod"}, "object": body}
    return json.dumps({"request": request}).encode()


def test_who_creates_a_pod_is_told_of_the_policy() -> None:
    answer = Admission(book_of(policy("a", 1, BAD)), INSTALL).answer(review(pod(engine())))
    assert answer.reason == "policy_not_understood"
    assert answer.pod == "ns/engine-"
    assert "SchedulingPolicy a of pool chat" in answer.body["response"]["warnings"][0]


def test_a_pod_near_the_stores_bound_is_left_as_it_is() -> None:
    answer = Admission(book_of(policy("a", 1, GOOD)), INSTALL).answer(review(pod(engine("x" * REVIEW_BYTES_MAX))))
    assert (answer.outcome, answer.reason) == ("skipped", "too_large")
    assert answer.body["response"]["allowed"] is True


def test_a_pod_whose_engine_cannot_be_told_carries_the_reason_until_it_can() -> None:
    def answered(body: Object, name: str) -> tuple[str, Object]:
        sidecar = {**GOOD, "engineContainer": name}
        answer = Admission(book_of(policy("a", 1, sidecar)), INSTALL).answer(review(body))
        patch = answer.body["response"].get("patch")
        return answer.outcome, body if patch is None else patched(body, json.loads(base64.b64decode(patch)))

    before = pod(engine("--model", "m"))
    outcome_, after = answered(before, "nosuch")
    assert outcome_ == "skipped"
    assert after["spec"] == before["spec"]
    assert after["metadata"]["annotations"][LEFT_ALONE_NOTE].startswith("no container is named nosuch, as in")
    assert answered(after, "nosuch") == ("skipped", after)
    outcome_, mended = answered(after, "vllm")
    assert outcome_ == "injected"
    assert LEFT_ALONE_NOTE not in mended["metadata"]["annotations"]


def test_a_pod_without_room_for_the_reason_is_left_as_it_is() -> None:
    body = pod(engine("--model", "m"))
    body["metadata"]["annotations"] = {"note": "x" * (NOTES_BYTES_MAX - 10)}
    sidecar = {**GOOD, "engineContainer": "nosuch"}
    answer = Admission(book_of(policy("a", 1, sidecar)), INSTALL).answer(review(body))
    assert answer.reason == "no_engine"
    assert "patch" not in answer.body["response"]
