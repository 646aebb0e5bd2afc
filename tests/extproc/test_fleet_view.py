"""What the shared state tells, and what a replica makes of it."""

import numpy as np
import pytest
from picker_rig import CARD, DIGEST, PickerRig, chat

from trimtab_extproc import fleet_view
from trimtab_extproc.fleet_view import FORGET_AFTER_S
from trimtab_state import Policy, ServedModel

A, B = "10.0.0.1:8000", "10.0.0.2:8000"
NONE = (np.empty(0, dtype=np.uint64), np.empty(0, dtype=np.uint32))


@pytest.fixture
def rig() -> PickerRig:
    return PickerRig()


def test_a_missing_control_document_says_nothing_about_endpoints(rig: PickerRig) -> None:
    rig.announce(A, B)
    rig.fleet.on_control(None)
    assert rig.fleet.view("m").candidates.sum() == 2
    assert rig.fleet.is_ready


def test_readiness_needs_the_members_and_one_sight_of_the_whole_state(rig: PickerRig) -> None:
    rig.fleet.on_connected(True)
    assert not rig.fleet.is_ready
    other = PickerRig()
    other.announce(A)
    assert other.fleet.is_ready
    other.fleet.on_connected(False)
    assert other.fleet.is_ready


def test_the_policy_is_the_documents_and_good_without_one(rig: PickerRig) -> None:
    assert rig.fleet.policy.policy == "product"
    rig.announce(A, policy=Policy(policy="round_robin", batch_limit=3))
    assert (rig.fleet.policy.policy, rig.fleet.policy.batch_limit) == ("round_robin", 3)


def test_a_view_is_kept_until_something_that_it_shows_changes(rig: PickerRig) -> None:
    rig.announce(A, B)
    view = rig.fleet.view("m")
    rig.beat(A, running=5)
    assert rig.fleet.view("m") is view
    rig.beat(A, state="asleep")
    assert rig.fleet.view("m") is not view
    for change in (
        lambda: rig.beat(A, models={}),
        lambda: rig.beat(A, approximate="hybrid"),
        lambda: rig.fleet.on_heartbeat_gone(A),
        lambda: rig.fleet.on_card("new", CARD.encode()),
        lambda: rig.announce(A),
    ):
        view = rig.fleet.view("m")
        change()
        assert rig.fleet.view("m") is not view


def test_views_are_bounded(rig: PickerRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_view, "VIEWS_MAX", 3)
    rig.announce(A)
    rig.beat(A, models={f"model-{index}": ServedModel() for index in range(10)})
    for index in range(10):
        assert rig.fleet.view(f"model-{index}").candidates.sum() == 1
    assert len(rig.fleet._views) <= 3


def test_names_that_clients_invent_share_one_view_and_are_not_kept(rig: PickerRig) -> None:
    rig.announce(A)
    known = rig.fleet.view("m")
    invented = {id(rig.fleet.view("x" * 1_000_000 + str(index))) for index in range(2 * fleet_view.VIEWS_MAX)}
    assert len(invented) == 1
    assert set(rig.fleet._views) == {"m", None}
    assert rig.fleet.view("m") is known


def test_a_heartbeat_that_is_gone_leaves_a_candidate_by_load(rig: PickerRig) -> None:
    rig.announce(A)
    assert rig.fleet.view("m").exact.tolist() == [True]
    rig.fleet.on_heartbeat_gone(A)
    rig.fleet.on_heartbeat_gone(A)
    view = rig.fleet.view("m")
    assert (view.candidates.tolist(), view.exact.tolist()) == ([True], [False])


def test_a_heartbeat_tells_of_requests_that_came_past_us(rig: PickerRig) -> None:
    rig.announce(A)
    rig.beat(A, running=3, waiting=2)
    assert rig.scheduler.load().external.tolist() == [5]


def test_a_heartbeat_alone_makes_no_candidate(rig: PickerRig) -> None:
    rig.announce(A)
    rig.beat(B)
    assert rig.table.named(B) is not None
    assert rig.fleet.view("m").candidates.sum() == 1


def test_a_card_that_cannot_be_read_is_none(rig: PickerRig) -> None:
    rig.announce(A)
    rig.fleet.on_card("broken", b"\xc1")
    rig.beat(A, models={"m": ServedModel(card="broken")})
    assert rig.fleet.view("m").approximate_reasons == {0: "no_card"}


def test_cards_are_bounded_and_the_oldest_goes(rig: PickerRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_view, "CARDS_MAX", 2)
    rig.announce(A)
    rig.fleet.on_card("b", CARD.encode())
    assert rig.fleet.view("m").exact.all()
    rig.fleet.on_card("c", CARD.encode())
    assert not rig.fleet.view("m").exact.any()
    rig.fleet.on_card(DIGEST, CARD.encode())
    assert rig.fleet.view("m").exact.all()


def test_chunks_follow_changes_snapshots_and_clears(rig: PickerRig) -> None:
    rig.announce(A)
    slot = rig.fleet.view("m").candidates.argmax()
    hashes, tokens = np.array([3, 5], dtype=np.uint64), np.array([16, 32], dtype=np.uint32)

    def held() -> list[int]:
        return rig.scheduler.kv_export(int(slot))[0].tolist()

    rig.fleet.on_kv_changes(A, hashes, tokens, NONE[0])
    assert held() == [3, 5]
    rig.fleet.on_kv_unsynced(A)
    assert rig.fleet.is_unsynced(A)
    rig.fleet.on_kv_replace(A, hashes[:1], tokens[:1])
    assert held() == [3]
    assert not rig.fleet.is_unsynced(A)
    rig.fleet.on_kv_clear(A)
    assert held() == []


def test_peers_reservations_count_move_and_end(rig: PickerRig) -> None:
    rig.announce(A, B)
    rig.fleet.on_peer_reserve(9, 1, A, 500, 2, *NONE)
    rig.fleet.on_peer_reserve(9, 2, A, 500, 1, *NONE)
    rig.fleet.on_peer_reserve(9, 2, A, 500, 1, *NONE)
    assert rig.requests() == {A: 3, B: 0}
    rig.fleet.on_peer_first_token(9, 1)
    rig.fleet.on_peer_moved(9, 1, B)
    assert rig.requests() == {A: 1, B: 2}
    rig.fleet.on_peer_finished(9, 1)
    rig.fleet.on_peer_finished(9, 1)
    assert rig.requests() == {A: 1, B: 0}
    rig.fleet.on_peer_gone(9)
    assert rig.requests() == {A: 0, B: 0}
    rig.scheduler.check_invariants()


def test_endpoints_that_nobody_names_are_forgotten_after_a_while_and_others_never(rig: PickerRig) -> None:
    rig.announce(A)
    rig.fleet.on_kv_changes(B, *NONE, NONE[0])
    rig.fleet.sweep(rig.now_s)
    rig.fleet.sweep(rig.now_s + FORGET_AFTER_S - 1)
    assert rig.table.named(B) is not None
    rig.beat(B)
    rig.fleet.sweep(rig.now_s + FORGET_AFTER_S + 1)
    assert rig.table.named(B) is not None
    rig.fleet.on_heartbeat_gone(B)
    rig.fleet.sweep(rig.now_s + FORGET_AFTER_S + 2)
    rig.fleet.sweep(rig.now_s + 2 * FORGET_AFTER_S + 2)
    assert rig.table.named(B) is None
    assert rig.table.named(A) is not None
    rig.fleet.on_peer_reserve(9, 1, B, 500, 2, *NONE)
    assert rig.requests() == {A: 0, B: 2}


def test_requests_that_a_silent_sidecar_counted_are_not_held_against_its_endpoint_for_ever(rig: PickerRig) -> None:
    rig.announce(A, B)
    rig.beat(A, running=7)
    slot = rig.table.named(A).slot
    assert rig.scheduler.load().external[slot] == 7
    rig.fleet.on_heartbeat_gone(A)
    assert rig.scheduler.load().external[slot] == 0


async def test_what_was_learned_of_an_engine_is_void_when_another_process_takes_its_place(rig: PickerRig) -> None:
    rig.announce(A, is_beating=False)
    rig.beat(A, epoch="1", models={})
    text = "a long story " * 200
    first = await rig.place(chat(text))
    rig.reservations.first_token(first.reservation_id, now_s=rig.now_s)
    rig.finish(first)
    rig.now_s += 60
    rig.scheduler.advance(rig.now_s)
    assert rig.last()["endpoints"][0]["hit_tokens"] == 0
    await rig.place(chat(text))
    assert rig.last()["endpoints"][0]["hit_tokens"] > 0
    rig.now_s += 60
    rig.scheduler.advance(rig.now_s)
    rig.now_s += 5  # beyond the grace of its speculative chunks
    rig.beat(A, epoch="2", models={})
    await rig.place(chat(text + " and another"))
    assert rig.last()["endpoints"][0]["hit_tokens"] == 0


def test_the_chunks_of_a_new_engine_stay_when_its_first_heartbeat_comes_after_its_snapshot(rig: PickerRig) -> None:
    rig.announce(A)
    rig.beat(A, epoch="1")
    hashes, tokens = np.array([7, 8], dtype=np.uint64), np.array([16, 32], dtype=np.uint32)
    rig.fleet.on_kv_replace(A, hashes, tokens)
    rig.beat(A, epoch="2")
    assert rig.scheduler.kv_export(rig.table.named(A).slot)[0].tolist() == [7, 8]


async def test_an_endpoint_that_tells_of_absurdly_many_requests_is_full_and_not_the_best_of_all(rig: PickerRig) -> None:
    rig.announce(A, B)
    rig.beat(A, running=2**53, waiting=2**53)
    assert [(await rig.place()).endpoint for _ in range(3)] == [B] * 3
    full = next(row for row in rig.last()["endpoints"] if row["endpoint"] == A)
    assert full["weighted_batch"] == full["batch"] > 1_000_000


async def test_a_peer_that_tells_of_absurdly_large_requests_makes_its_endpoint_full(rig: PickerRig) -> None:
    rig.announce(A, B)
    nothing = (np.zeros(0, dtype=np.uint64), np.zeros(0, dtype=np.uint32))
    for number in range(1, 3_000):
        rig.fleet.on_peer_reserve(9, number, A, 0, 2**32 - 1, *nothing, 1_000_000)
    assert (await rig.place()).endpoint == B
