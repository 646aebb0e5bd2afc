"""What becomes of requests for which every endpoint is at its limit."""

import asyncio
from typing import Any

import msgspec
import numpy as np
import pytest
from picker_rig import DIGEST, PickerRig, chat

from trimtab_extproc.events import Placed, Refused
from trimtab_extproc.picker import Undecided
from trimtab_extproc.replies import Decide
from trimtab_extproc.waiting_room import TURNS_MAX
from trimtab_state import Policy, ServedModel
from trimtab_state.request_class import Objective, Overflow, RequestClass

A, B = "10.0.0.1:8000", "10.0.0.2:8000"
FULL = 2
"""Requests that fit both endpoints together."""


def waiting(limit: int = 1, **overflow: Any) -> Policy:
    return Policy(batch_limit=limit, overflow=Overflow(**({"wait_s": 5.0} | overflow)))


@pytest.fixture
def rig() -> PickerRig:
    rig = PickerRig()
    rig.announce(A, B, policy=waiting())
    return rig


def ask(tenant: str = "", **fields: Any) -> Decide:
    headers = {"x-gateway-inference-fairness-id": tenant} if tenant else {}
    return chat(headers=headers, **fields)


async def turn() -> None:
    """Everybody who can go on does."""
    for _ in range(5):
        await asyncio.sleep(0)


def start(rig: PickerRig, request: Decide) -> "asyncio.Task[Placed | Refused]":
    return asyncio.get_running_loop().create_task(rig.picker.pick(request))


async def filled(rig: PickerRig) -> list[Placed]:
    return [await rig.place(ask()) for _ in range(FULL)]


async def test_without_a_wait_a_full_pool_refuses_at_once(rig: PickerRig) -> None:
    rig.announce(A, B, policy=Policy(batch_limit=1))
    await filled(rig)
    refused = rig.picker.pick_now(ask())
    assert isinstance(refused, Refused)
    assert (refused.status, refused.reason, refused.retry_after_s) == (429, "endpoints_full", 1.0)
    assert rig.count("trimtab_rejected_total", reason="endpoints_full") == 1


async def test_an_endpoint_at_its_limit_is_passed_over_for_the_next_best(rig: PickerRig) -> None:
    first, second = await filled(rig)
    assert {first.endpoint, second.endpoint} == {A, B}


async def test_a_request_waits_until_an_endpoint_becomes_free(rig: PickerRig) -> None:
    first, _ = await filled(rig)
    assert isinstance(rig.picker.pick_now(ask()), Undecided)
    asked = start(rig, ask())
    await turn()
    assert not asked.done()
    rig.now_s += 1.5
    rig.finish(first)
    await turn()
    placed = asked.result()
    assert isinstance(placed, Placed)
    assert placed.endpoint == first.endpoint
    assert rig.requests() == {A: 1, B: 1}
    assert rig.last()["waited_s"] == 1.5
    assert rig.count("trimtab_waits_total", outcome="placed") == 1
    assert rig.count("trimtab_rejected_total") == 0
    assert rig.count("trimtab_decision_seconds_count") == FULL + 1, "a try in vain is no decision"


async def test_at_its_deadline_it_is_told_to_come_again(rig: PickerRig) -> None:
    await filled(rig)
    asked = start(rig, ask())
    await turn()
    rig.now_s += 4.99
    rig.picker.waiting.advance(rig.now_s)
    await turn()
    assert not asked.done()
    rig.now_s += 0.01
    rig.picker.waiting.advance(rig.now_s)
    refused = await asked
    assert isinstance(refused, Refused)
    assert (refused.status, refused.reason, refused.retry_after_s) == (429, "wait_over", 1.0)
    assert rig.count("trimtab_rejected_total", reason="wait_over") == 1


async def test_nobody_who_comes_later_overtakes(rig: PickerRig) -> None:
    first, _ = await filled(rig)
    early = start(rig, ask())
    await turn()
    rig.finish(first)
    # The place is free, and the one who waits has not had its turn yet.
    assert isinstance(rig.picker.pick_now(ask()), Undecided)
    late = start(rig, ask())
    await turn()
    assert early.done()
    assert not late.done()
    late.cancel()
    await turn()


async def test_turns_go_round_by_tenant(rig: PickerRig) -> None:
    placed = await filled(rig)
    greedy = [start(rig, ask("greedy")) for _ in range(5)]
    await turn()
    quiet = start(rig, ask("quiet"))
    await turn()
    for each in placed:
        rig.finish(each)
    await turn()
    assert greedy[0].done()
    assert quiet.done()
    assert not greedy[1].done()
    for task in greedy:
        task.cancel()
    await turn()


async def test_the_highest_priority_has_the_next_place_and_the_lowest_does_not_wait(rig: PickerRig) -> None:
    urgent = RequestClass(name="urgent", priority=7, objectives=("now",))
    spare = RequestClass(name="spare", priority=-1, objectives=("whenever",))
    rig.announce(A, B, policy=msgspec.structs.replace(waiting(), classes=(urgent, spare)))
    first, _ = await filled(rig)
    objective = "x-gateway-inference-objective"
    patient = start(rig, ask())
    await turn()
    hurried = start(rig, chat(headers={objective: "now"}))
    shed = start(rig, chat(headers={objective: "whenever"}))
    await turn()
    refused = shed.result()
    assert isinstance(refused, Refused)
    assert (refused.status, refused.reason) == (429, "sheddable")
    rig.finish(first)
    await turn()
    assert hurried.done()
    assert not patient.done()
    patient.cancel()
    await turn()


async def test_objectives_of_the_cluster_order_those_who_wait_and_one_nobody_knows_is_ordinary(rig: PickerRig) -> None:
    told = (Objective(name="crawl", priority=-5), Objective(name="gold", priority=10), Objective(name="tin"))
    rig.announce(A, B, policy=msgspec.structs.replace(waiting(), objectives=told))
    placed = await filled(rig)
    objective = "x-gateway-inference-objective"
    ordinary = start(rig, ask())
    await turn()
    later = {name: start(rig, chat(headers={objective: name})) for name in ("gold", "tin", "invented", "crawl")}
    await turn()
    refused = later.pop("crawl").result()
    assert isinstance(refused, Refused)
    assert (refused.status, refused.reason) == (429, "sheddable")
    assert rig.count("trimtab_rejected_total", reason="sheddable") == 1
    rig.finish(placed[0])
    await turn()
    assert later["gold"].done()
    assert not ordinary.done()
    rig.finish(placed[1])
    await turn()
    assert ordinary.done(), "0 is what an objective that nobody knows has too, and those wait in order"
    assert not later["tin"].done()
    assert not later["invented"].done()
    for task in later.values():
        task.cancel()
    await turn()


async def test_an_objective_that_changes_counts_for_whoever_comes_next(rig: PickerRig) -> None:
    await filled(rig)
    objective = {"x-gateway-inference-objective": "crawl"}
    waits = start(rig, chat(headers=objective))
    await turn()
    assert not waits.done()
    told = (Objective(name="crawl", priority=-5),)
    rig.announce(A, B, policy=msgspec.structs.replace(waiting(), objectives=told))
    assert isinstance(await rig.ask(chat(headers=objective)), Refused)
    assert not waits.done()
    waits.cancel()
    await turn()


async def test_the_policy_names_the_tenants_header(rig: PickerRig) -> None:
    rig.announce(A, B, policy=waiting(tenant_header="X-Team"))
    placed = await filled(rig)
    names = ["one", "one", "two"]
    tasks = [start(rig, chat(headers={"x-team": name, "x-gateway-inference-fairness-id": "same"})) for name in names]
    await turn()
    for each in placed:
        rig.finish(each)
    await turn()
    assert [task.done() for task in tasks] == [True, False, True]
    tasks[1].cancel()
    await turn()


async def test_a_client_that_leaves_leaves_the_queue(rig: PickerRig) -> None:
    first, _ = await filled(rig)
    gone, stays = start(rig, ask()), start(rig, ask())
    await turn()
    gone.cancel()
    await turn()
    assert len(rig.picker.waiting) == 1
    assert rig.count("trimtab_waits_total", outcome="left") == 1
    rig.finish(first)
    await turn()
    assert isinstance(stays.result(), Placed)


async def test_one_that_leaves_in_the_moment_of_its_turn_gives_its_place_back(rig: PickerRig) -> None:
    first, _ = await filled(rig)
    leaves, next_one = start(rig, ask()), start(rig, ask())
    await turn()
    rig.finish(first)
    rig.picker.waiting.advance(rig.now_s)  # it is placed now, and does not know it yet
    assert sum(rig.requests().values()) == FULL
    leaves.cancel()
    await turn()
    assert leaves.cancelled()
    assert isinstance(next_one.result(), Placed)
    assert sum(rig.requests().values()) == FULL
    assert [entry[0] for entry in rig.log.entries].count("reserve") == FULL + 2
    assert [entry[0] for entry in rig.log.entries].count("finished") == 2


async def test_a_full_queue_refuses_and_a_quiet_tenant_still_gets_in(rig: PickerRig) -> None:
    rig.announce(A, B, policy=waiting(waiting_max=2))
    await filled(rig)
    greedy = [start(rig, ask("greedy")) for _ in range(3)]
    await turn()
    assert [task.done() for task in greedy] == [False, False, True]
    refused = greedy[2].result()
    assert isinstance(refused, Refused)
    assert refused.reason == "wait_queue_full"
    quiet = start(rig, ask("quiet"))
    await turn()
    assert [task.done() for task in greedy] == [False, True, True]
    assert not quiet.done()
    for task in (greedy[0], quiet):
        task.cancel()
    await turn()
    assert len(rig.picker.waiting) == 0


async def test_a_place_that_another_replica_leaves_is_noticed_with_time(rig: PickerRig) -> None:
    hashes, tokens = np.zeros(0, dtype=np.uint64), np.zeros(0, dtype=np.uint32)
    for number, name in enumerate((A, B)):
        rig.fleet.on_peer_reserve(9, number + 1, name, 0, 1, hashes, tokens, 1000)
    asked = start(rig, ask())
    await turn()
    assert not asked.done()
    rig.fleet.on_peer_finished(9, 1)
    rig.picker.waiting.advance(rig.now_s)
    assert isinstance(await asked, Placed)


async def test_a_request_for_other_endpoints_does_not_wait_behind_those_that_are_full(rig: PickerRig) -> None:
    rig.beat(B, models={})
    rig.announce(A, B, policy=waiting(), is_beating=False)
    here, there = ask(subset=(A,)), ask(subset=(B,))
    await rig.place(here)
    asked = start(rig, here)
    await turn()
    assert not asked.done()
    assert isinstance(rig.picker.pick_now(there), Placed)
    asked.cancel()
    await turn()


async def test_a_policy_that_changes_is_followed_at_once(rig: PickerRig) -> None:
    await filled(rig)
    asked = start(rig, ask())
    await turn()
    rig.announce(A, B, policy=waiting(limit=2))
    rig.picker.waiting.advance(rig.now_s)
    assert isinstance(await asked, Placed)


async def test_where_the_pool_has_no_endpoints_left_those_who_wait_are_told(rig: PickerRig) -> None:
    await filled(rig)
    asked = start(rig, ask())
    await turn()
    rig.announce(policy=waiting())
    rig.picker.waiting.advance(rig.now_s)
    refused = await asked
    assert isinstance(refused, Refused)
    assert refused.status == 503


async def test_one_that_has_left_before_its_turn_gets_no_place_that_nobody_would_give_back(rig: PickerRig) -> None:
    first, _ = await filled(rig)
    leaves = start(rig, ask())
    await turn()
    # As when a gateway's connection breaks: both end in one step, and the turn comes before the coroutine runs.
    rig.finish(first)
    leaves.cancel()
    await turn()
    assert leaves.cancelled()
    assert sum(rig.requests().values()) == FULL - 1
    assert len(rig.picker.waiting) == 0
    assert rig.count("trimtab_waits_total", outcome="left") == 1
    assert rig.count("trimtab_waits_total") == 1


async def test_a_deadline_of_one_that_has_just_left_is_nobodys_failure(rig: PickerRig) -> None:
    await filled(rig)
    leaves, stays = start(rig, ask()), start(rig, ask())
    await turn()
    leaves.cancel()
    rig.now_s += 6.0
    rig.picker.waiting.advance(rig.now_s)
    await turn()
    assert leaves.cancelled()
    refused = stays.result()
    assert isinstance(refused, Refused)
    assert refused.reason == "wait_over"
    assert rig.count("trimtab_waits_total", outcome="left") == 1


async def test_one_that_has_just_left_can_give_way(rig: PickerRig) -> None:
    rig.announce(A, B, policy=waiting(waiting_max=2))
    await filled(rig)
    greedy = [start(rig, ask("greedy")) for _ in range(2)]
    await turn()
    quiet = start(rig, ask("quiet"))
    greedy[1].cancel()  # the quiet one is heard first
    await turn()
    assert greedy[1].cancelled()
    assert not quiet.done()
    for task in (greedy[0], quiet):
        task.cancel()
    await turn()
    assert len(rig.picker.waiting) == 0


def two_models(rig: PickerRig, policy: Policy) -> None:
    rig.announce(A, B, policy=policy)
    for name in (A, B):
        rig.beat(name, models={"m": ServedModel(card=DIGEST), "k": ServedModel(card=DIGEST, lora=True)})


async def test_priority_counts_between_models_that_the_same_endpoints_serve(rig: PickerRig) -> None:
    gold = RequestClass(name="gold", priority=5, models=("k",))
    two_models(rig, msgspec.structs.replace(waiting(), classes=(gold,)))
    first, _ = await filled(rig)
    patient, hurried = start(rig, ask()), start(rig, ask(model="k"))
    await turn()
    rig.finish(first)
    await turn()
    assert (patient.done(), hurried.done()) == (False, True)
    patient.cancel()
    await turn()


async def test_tenants_have_one_round_of_turns_whatever_models_they_ask_for(rig: PickerRig) -> None:
    two_models(rig, waiting())
    placed = await filled(rig)
    tasks = [start(rig, ask("greedy")) for _ in range(3)]
    tasks += [start(rig, ask("greedy", model="k")) for _ in range(3)]
    quiet = start(rig, ask("quiet", model="k"))
    await turn()
    for each in placed:
        rig.finish(each)
        await turn()
    assert quiet.done()
    assert sum(task.done() for task in tasks) == 1
    for task in tasks:
        task.cancel()
    await turn()


async def test_a_request_for_another_model_does_not_overtake_those_who_wait_for_the_same_endpoints(
    rig: PickerRig,
) -> None:
    two_models(rig, waiting())
    first, _ = await filled(rig)
    early = start(rig, ask())
    await turn()
    rig.finish(first)
    assert isinstance(rig.picker.pick_now(ask(model="k")), Undecided)
    late = start(rig, ask(model="k"))
    await turn()
    assert (early.done(), late.done()) == (True, False)
    late.cancel()
    await turn()


async def test_groups_that_share_an_endpoint_have_its_places_in_turn(rig: PickerRig) -> None:
    first = await rig.place(ask(subset=(A,)))
    await rig.place(ask(subset=(B,)))
    many = [start(rig, ask(subset=(A,))) for _ in range(3)]
    await turn()
    other = start(rig, ask())
    await turn()
    for _ in range(2):
        rig.finish(first)
        await turn()
        newest = next(iter(rig.reservations.for_lease()[::-1]))
        first = msgspec.structs.replace(first, reservation_id=newest.reservation_id)
    assert other.done()
    for task in many:
        task.cancel()
    await turn()


@pytest.mark.parametrize("tenants", [("",), ("a", "b", "c")])
async def test_a_large_request_does_not_stop_the_small_ones_behind_it_and_still_has_its_turn(
    rig: PickerRig, tenants: tuple[str, ...]
) -> None:
    rig.announce(A, B, policy=waiting(limit=4, wait_s=60.0))
    first = [await rig.place(ask()) for _ in range(8)]
    large = start(rig, ask(tenants[0], n=4))
    await turn()
    small = [start(rig, ask(tenant)) for _ in range(20) for tenant in tenants]
    await turn()
    # One of each endpoint ends in turn, whatever is there; the other endpoint's places go on to the small ones.
    on_endpoint = {name: [each for each in first if each.endpoint == name] for name in (A, B)}
    handed = 0
    for number in range(12):
        here = on_endpoint[(A, B)[number % 2]]
        if here:
            rig.finish(here.pop(0))
        await turn()
        for told in [task.result() for task in small if task.done()]:
            assert isinstance(told, Placed)
            on_endpoint[told.endpoint].append(told)
            handed += 1
        small = [task for task in small if not task.done()]
        if large.done():
            break
        assert max(rig.requests().values()) >= 3, "one endpoint alone is kept for it"
    assert isinstance(large.result(), Placed)
    assert handed >= 3
    for task in small:
        task.cancel()
    await turn()


async def test_a_request_larger_than_the_limit_goes_to_an_endpoint_that_is_idle(rig: PickerRig) -> None:
    first, second = await filled(rig)
    large, small = start(rig, ask(n=9)), start(rig, ask())
    await turn()
    rig.finish(first)
    rig.finish(second)
    await turn()
    assert isinstance(large.result(), Placed)
    assert isinstance(small.result(), Placed)
    assert rig.count("trimtab_waits_total", outcome="placed") == 2


async def test_where_waiting_was_switched_off_nobody_is_sent_to_the_queue(rig: PickerRig) -> None:
    first, _ = await filled(rig)
    asked = start(rig, ask())
    await turn()
    rig.finish(first)
    rig.announce(A, B, policy=Policy(batch_limit=1))
    now = rig.picker.pick_now(ask())
    assert isinstance(now, Placed)
    await turn()
    refused = asked.result()
    assert isinstance(refused, Refused)
    assert refused.reason == "endpoints_full"


async def test_an_endpoint_at_its_limit_is_explained_without_numbers_that_nobody_worked_out(rig: PickerRig) -> None:
    first = await rig.place(ask())
    second = await rig.place(ask())
    last = rig.last()
    rows = {row["endpoint"]: row for row in last["endpoints"]}
    assert last["candidate_count"] == 1
    assert rows[second.endpoint]["verdict"].startswith("won")
    full = rows[first.endpoint]
    assert full["verdict"] == "no candidate: at its limit"
    assert full["batch"] is full["p_tokens"] is full["score"] is None
    assert not full.get("terms")


async def test_an_endpoint_that_is_kept_for_a_larger_request_is_explained(rig: PickerRig) -> None:
    rig.announce(A, B, policy=waiting(limit=2))
    placed = [await rig.place(ask()) for _ in range(4)]
    large, small = start(rig, ask(n=2)), start(rig, ask())
    await turn()
    rig.finish(placed[0])
    rig.finish(next(each for each in placed[1:] if each.endpoint != placed[0].endpoint))
    await turn()
    told = small.result()
    assert isinstance(told, Placed)
    (kept,) = [row for row in rig.last()["endpoints"] if row["endpoint"] != told.endpoint]
    assert kept["verdict"] == "no candidate: kept free for a larger request"
    large.cancel()
    await turn()


async def test_one_that_does_not_wait_is_not_refused_for_the_sake_of_others_whose_endpoint_alone_is_full(
    rig: PickerRig,
) -> None:
    spare = RequestClass(name="spare", priority=-1, objectives=("whenever",))
    rig.announce(A, B, policy=msgspec.structs.replace(waiting(), classes=(spare,)))
    await rig.place(ask(subset=(A,)))
    asked = start(rig, ask(subset=(A,)))
    await turn()
    assert not asked.done()
    placed = rig.picker.pick_now(chat(headers={"x-gateway-inference-objective": "whenever"}))
    assert isinstance(placed, Placed)
    assert placed.endpoint == B
    asked.cancel()
    await turn()


async def test_where_waiting_is_switched_off_nothing_is_kept_for_larger_requests(rig: PickerRig) -> None:
    rig.announce(A, policy=waiting(limit=2))
    first = await rig.place(ask())
    await rig.place(ask())
    large, small = start(rig, ask(n=2)), start(rig, ask())
    await turn()
    rig.finish(first)
    await turn()
    assert not small.done()
    rig.announce(A, policy=Policy(batch_limit=2))
    rig.picker.waiting.advance(rig.now_s)
    refused, placed = await large, await small
    assert isinstance(refused, Refused)
    assert refused.status == 429
    assert isinstance(placed, Placed)


async def test_what_is_kept_for_a_large_request_is_not_kept_from_a_higher_priority(rig: PickerRig) -> None:
    urgent = RequestClass(name="urgent", priority=7, objectives=("now",))
    rig.announce(A, policy=msgspec.structs.replace(waiting(limit=2), classes=(urgent,)))
    placed = [await rig.place(ask()) for _ in range(2)]
    large, small = start(rig, ask(n=2)), start(rig, ask())
    await turn()
    rig.finish(placed[0])
    await turn()
    assert not small.done()
    hurried = start(rig, chat(headers={"x-gateway-inference-objective": "now"}))
    await turn()
    told = hurried.result()
    assert isinstance(told, Placed)
    rig.finish(told)
    rig.finish(placed[1])
    await turn()
    assert (large.done(), small.done()) == (True, False)
    small.cancel()
    await turn()


async def test_where_room_for_thousands_comes_at_once_others_are_served_between(rig: PickerRig) -> None:
    placed = await filled(rig)
    tasks = [start(rig, ask(tenant=str(number % 7))) for number in range(3 * TURNS_MAX)]
    await turn()
    rig.announce(A, B, policy=waiting(limit=10_000))
    rig.picker.waiting.advance(rig.now_s)
    assert len(rig.picker.waiting) == 2 * TURNS_MAX
    late = start(rig, ask())  # there is room, and it comes after those who waited
    await asyncio.sleep(0)
    assert not late.done()
    for task in [*tasks, late]:
        told = await task
        assert isinstance(told, Placed)
        rig.finish(told)
    for one in placed:
        rig.finish(one)
