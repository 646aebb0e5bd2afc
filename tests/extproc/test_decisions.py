"""What a picker keeps of its last decisions, and of requests that it refused."""

import asyncio
from typing import Any

import pytest
from picker_rig import PickerRig, chat

from trimtab.explain import as_table
from trimtab_extproc.decisions import DECISIONS_MAX
from trimtab_state import Policy
from trimtab_state.request_class import Overflow

A, B = "10.0.0.1:8000", "10.0.0.2:8000"


@pytest.fixture
def rig() -> PickerRig:
    return PickerRig()


def last(rig: PickerRig, count: int = 1) -> list[dict[str, Any]]:
    return rig.decisions.to_json(now_s=rig.now_s, count=count)


async def test_a_request_that_is_refused_at_the_limit_is_kept_with_the_reason(rig: PickerRig) -> None:
    rig.announce(A, B, policy=Policy(batch_limit=1))
    rig.beat(B, state="draining")
    await rig.place(chat(headers={"x-request-id": "placed"}))
    rig.now_s += 1
    await rig.ask(chat(headers={"x-request-id": "late"}))
    refused, placed = last(rig, 2)
    assert (refused["request_id"], placed["request_id"]) == ("late", "placed")
    assert refused["refused"]["status"] == 429
    assert refused["refused"]["reason"] == "endpoints_full"
    assert refused["endpoint"] is None
    assert {row["endpoint"]: row["verdict"] for row in refused["endpoints"]} == {
        A: "no candidate: at its limit",
        B: "no candidate: draining",
    }
    assert rig.decisions.to_json(now_s=rig.now_s, count=5, request_id="late") == [refused]


@pytest.mark.parametrize(("subset", "reason"), [(None, "no_endpoints"), (("10.9.9.9",), "subset_empty")])
async def test_a_request_that_nobody_can_take_says_why_each_could_not(
    subset: tuple[str, ...] | None, reason: str, rig: PickerRig
) -> None:
    rig.announce(A, B)
    rig.beat(A, state="asleep")
    if subset is None:
        rig.beat(B, state="unreachable")
    await rig.ask(chat(subset=subset))
    (refused,) = last(rig)
    assert (refused["refused"]["status"], refused["refused"]["reason"]) == (503, reason)
    verdicts = {row["endpoint"]: row["verdict"] for row in refused["endpoints"]}
    outside = "unreachable" if subset is None else "outside the request's subset"
    assert verdicts == {A: "no candidate: asleep", B: f"no candidate: {outside}"}


async def test_a_wait_in_vain_is_kept_with_its_length(rig: PickerRig) -> None:
    rig.announce(A, policy=Policy(batch_limit=1, overflow=Overflow(wait_s=5.0)))
    await rig.place(chat())
    waits = asyncio.ensure_future(rig.ask(chat(headers={"x-request-id": "patient"})))
    await asyncio.sleep(0)
    rig.now_s += 6
    rig.picker.waiting.advance(rig.now_s)
    await waits
    (refused,) = last(rig)
    assert (refused["refused"]["reason"], refused["waited_s"]) == ("wait_over", 6.0)
    assert "waited 6.00 s for a place in vain, request patient" in as_table(refused)


async def test_a_storm_of_refusals_hides_no_decision_and_takes_no_more_room(rig: PickerRig) -> None:
    rig.announce(A, policy=Policy(batch_limit=1))
    await rig.place(chat(headers={"x-request-id": "placed"}))
    rig.now_s += 1
    for _ in range(DECISIONS_MAX + 10):
        await rig.ask(chat())
    kept = last(rig, 10 * DECISIONS_MAX)
    assert len(kept) == DECISIONS_MAX + 1
    assert kept[-1]["request_id"] == "placed"


async def test_round_robin_shows_turns_and_no_score(rig: PickerRig) -> None:
    rig.announce(A, B, policy=Policy(policy="round_robin"))
    first = await rig.place(chat())
    (decision,) = last(rig)
    rows = {row["endpoint"]: row for row in decision["endpoints"]}
    other = B if first.endpoint == A else A
    assert {row["score"] for row in rows.values()} == {None}
    assert rows[other]["verdict"] == "its turn comes later in this round"
    assert rows[other]["turn"] == "open"
    second = await rig.place(chat())
    (decision,) = last(rig)
    rows = {row["endpoint"]: row for row in decision["endpoints"]}
    assert second.endpoint == other
    assert (rows[first.endpoint]["turn"], rows[first.endpoint]["verdict"]) == ("had", "had its turn in this round")
    heading, *lines = as_table(decision).splitlines()[1:]
    assert heading.endswith("turn")
    assert {line.split("  <--")[0].split()[5] for line in lines} == {"open", "had"}


async def test_least_request_is_told_by_its_requests_alone(rig: PickerRig) -> None:
    rig.announce(A, B, policy=Policy(policy="least_request"))
    first = await rig.place(chat())
    await rig.place(chat())
    (decision,) = last(rig)
    rows = {row["endpoint"]: row for row in decision["endpoints"]}
    assert rows[first.endpoint]["verdict"] == "lost: more requests"
    assert (rows[first.endpoint]["score"], rows[first.endpoint]["turn"]) == (2.0, None)
    assert as_table(decision).splitlines()[1].endswith("score = B")
