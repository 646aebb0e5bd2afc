"""The scheduler by example: what its numbers mean, and what ends a prefill."""

from typing import Any

import numpy as np
import pytest

from trimtab_core.chunks import hash_chunks
from trimtab_core.errors import InvariantError, UnknownSlot
from trimtab_core.scheduler import (
    Placement,
    PlacementRequest,
    Prompt,
    Rejection,
    Scheduler,
    SchedulerSettings,
)

SEED = 3
NO_CHUNKS: Any = np.zeros(0, dtype=np.uint64)
NO_TOKENS: Any = np.zeros(0, dtype=np.uint32)


def pool(slots: int, **changed: Any) -> Scheduler:
    scheduler = Scheduler(rng_seed=1, settings=SchedulerSettings(**changed))
    for slot in range(slots):
        assert scheduler.add_slot() == slot
    return scheduler


def text(*runs: tuple[str, int]) -> bytes:
    """Runs of a letter, in chunks."""
    return b"".join(letter.encode() * 64 * chunks for letter, chunks in runs)


def prompt(of: bytes, tokens: int | None = None) -> Prompt:
    return Prompt(chain=hash_chunks(of, 0, SEED), size_bytes=len(of), tokens=tokens)


def request(slots: int, *prompts: Prompt | tuple[Prompt, ...], **changed: Any) -> PlacementRequest:
    return PlacementRequest(
        **{
            "prompts": tuple(each if isinstance(each, tuple) else (each,) for each in prompts),
            "variant_of_slot": np.zeros(slots, dtype=np.int8),
            "exact": np.ones(slots, dtype=np.bool_),
            "candidates": np.ones(slots, dtype=np.bool_),
            "tokens_per_byte": 0.25,
            **changed,
        }
    )


def place(scheduler: Scheduler, asked: PlacementRequest, now_s: float = 0.0) -> Placement:
    placement = scheduler.place(asked, now_s)
    scheduler.check_invariants()
    assert not isinstance(placement, Rejection)
    return placement


def hold(scheduler: Scheduler, slot: int, of: bytes, now_s: float = 0.0, tokens_per_chunk: int = 16) -> list[int]:
    chain = hash_chunks(of, 0, SEED)
    tokens = (np.arange(len(chain), dtype=np.uint32) + 1) * tokens_per_chunk
    seen = scheduler.kv_apply(slot, chain, tokens, NO_CHUNKS, now_s)
    scheduler.check_invariants()
    return [int(reservation_id) for reservation_id in seen]


def report(scheduler: Scheduler, slot: int, *, requests: int = 0, block_tokens: int = 16, capacity: int = 0) -> None:
    scheduler.report(slot, requests=requests, block_tokens=block_tokens, kv_capacity_tokens=capacity, now_s=0.0)


# The numbers of a decision


def test_the_same_96_tokens_sent_twice_hit_64_of_them_with_blocks_of_32() -> None:
    scheduler = pool(1)
    report(scheduler, 0, block_tokens=32)
    hold(scheduler, 0, text(("a", 6)))
    placement = place(scheduler, request(1, prompt(text(("a", 6)))))
    assert (placement.prompt_tokens, placement.hit_tokens[0], placement.p_own_tokens) == (96, 64, 32)


def test_the_prompts_length_is_one_number_built_on_the_deepest_hit_of_any_endpoint() -> None:
    scheduler = pool(3)
    hold(scheduler, 0, text(("a", 4)), tokens_per_chunk=16)
    hold(scheduler, 1, text(("a", 8)), tokens_per_chunk=32)  # this text has more tokens than the pool's average
    placement = place(scheduler, request(3, prompt(text(("a", 8), ("b", 2)))))
    assert placement.prompt_tokens == 8 * 32 + 2 * 16
    assert placement.hit_tokens.tolist() == [64, 256, 0]
    assert placement.p_tokens.tolist() == [224, 32, 288]
    assert placement.slot == 1


def test_a_known_length_is_not_estimated() -> None:
    scheduler = pool(1)
    hold(scheduler, 0, text(("a", 8)))
    placement = place(scheduler, request(1, prompt(text(("a", 8), ("b", 2)), tokens=150)))
    assert (placement.prompt_tokens, placement.hit_tokens[0]) == (150, 128)


def test_a_client_that_claims_fewer_tokens_than_it_hits_is_cut_to_them() -> None:
    scheduler = pool(1)
    hold(scheduler, 0, text(("a", 8)))
    placement = place(scheduler, request(1, prompt(text(("a", 8)), tokens=20)))
    assert (placement.prompt_tokens, placement.hit_tokens[0], placement.p_own_tokens) == (20, 16, 4)


def test_the_score_is_p_times_b_with_one_block_and_one_request_as_floors() -> None:
    scheduler = pool(3)
    report(scheduler, 1, requests=2)
    report(scheduler, 2, block_tokens=64)
    placement = place(scheduler, request(3, prompt(b"short")))
    assert placement.prompt_tokens == 2
    assert placement.p_tokens.tolist() == [16, 16, 64]
    assert placement.batch.tolist() == [1, 3, 1]
    assert placement.score.tolist() == [16, 48, 64]
    assert (placement.slot, placement.alternatives) == (0, (1, 2))
    assert placement.reason == "product: least score"


def test_several_prompts_reserve_the_sum_of_their_p_and_all_their_requests() -> None:
    scheduler = pool(1)
    hold(scheduler, 0, text(("a", 4)))
    both = request(1, prompt(text(("a", 4), ("b", 4))), prompt(text(("c", 2))), batch=6)
    placement = place(scheduler, both)
    assert placement.prompt_tokens == 128 + 32
    assert placement.hit_tokens[0] == 64
    assert placement.p_own_tokens == 96
    assert scheduler.load().requests.tolist() == [6]
    assert scheduler.load().queued_tokens.tolist() == [96]


def test_endpoints_with_other_cards_are_matched_by_their_own_rendering() -> None:
    scheduler = pool(3)
    mine, theirs = text(("a", 8)), text(("z", 1), ("a", 8))
    hold(scheduler, 0, mine)
    hold(scheduler, 1, theirs)
    hold(scheduler, 2, mine)
    asked = request(3, (prompt(mine), prompt(theirs)), variant_of_slot=np.array([0, 1, -1], dtype=np.int8))
    placement = place(scheduler, asked)
    assert placement.prompt_tokens == 144  # the deepest hit is the other rendering's
    assert placement.hit_tokens.tolist() == [128, 128, 0]


def test_without_any_text_the_load_decides() -> None:
    scheduler = pool(2)
    report(scheduler, 0, requests=1)
    placement = place(scheduler, request(2))
    assert (placement.slot, placement.prompt_tokens, placement.p_own_tokens) == (1, 0, 0)
    assert placement.p_tokens.tolist() == [16, 16]


def test_a_text_of_which_no_candidate_knows_the_card_still_has_a_length() -> None:
    scheduler = pool(1)
    asked = request(1, prompt(text(("a", 4))), variant_of_slot=np.array([-1], dtype=np.int8))
    placement = place(scheduler, asked)
    assert (placement.prompt_tokens, placement.p_own_tokens) == (64, 64)
    assert len(placement.sample_hashes) == 0


def test_where_the_engine_skips_its_cache_every_hit_is_zero() -> None:
    scheduler = pool(1)
    hold(scheduler, 0, text(("a", 8)))
    placement = place(scheduler, request(1, prompt(text(("a", 8), ("b", 1))), cache_reads=False))
    assert (placement.prompt_tokens, placement.hit_tokens[0], placement.p_own_tokens) == (144, 0, 144)


def test_arrays_shorter_than_the_pool_leave_the_rest_out() -> None:
    scheduler = pool(4)
    placement = place(scheduler, request(2, prompt(text(("a", 1)))))
    assert placement.slot in (0, 1)
    assert np.isinf(placement.score[2:]).all()
    assert len(placement.alternatives) == 1


def test_policies_choose_by_their_own_measure() -> None:
    scheduler = pool(2)
    hold(scheduler, 0, text(("a", 100)))
    report(scheduler, 0, requests=5)
    asked = {"candidates": np.ones(2, dtype=np.bool_)}
    long = prompt(text(("a", 100), ("b", 1)))
    assert place(scheduler, request(2, long, policy="product", **asked)).slot == 0
    assert place(scheduler, request(2, long, policy="least_request", **asked)).slot == 1
    turns = [place(scheduler, request(2, long, policy="round_robin", **asked)).slot for _ in range(4)]
    assert turns == [1, 0, 1, 0]


# Refusals


def test_no_candidate_is_a_refusal_and_reserves_nothing() -> None:
    scheduler = pool(1, retry_after_s=3.0)
    for asked in (request(0), request(1, candidates=np.zeros(1, dtype=np.bool_))):
        assert scheduler.place(asked, 0.0) == Rejection(reason="no_endpoints", retry_after_s=3.0)
    assert scheduler.load().requests.tolist() == [0]


def test_endpoints_at_their_limit_refuse_but_an_idle_one_takes_any_batch() -> None:
    scheduler = pool(1)
    first = place(scheduler, request(1, batch=8, batch_max=4))
    assert scheduler.place(request(1, batch_max=4), 0.0) == Rejection(reason="endpoints_full", retry_after_s=1.0)
    scheduler.finish(first.reservation_id, 0.0)
    place(scheduler, request(1, batch=4, batch_max=4))


def test_open_reservations_are_bounded() -> None:
    scheduler = pool(1, reservations_max=2)
    first = place(scheduler, request(1))
    place(scheduler, request(1))
    assert scheduler.place(request(1), 0.0) == Rejection(reason="too_many_open", retry_after_s=1.0)
    scheduler.finish(first.reservation_id, 0.0)
    place(scheduler, request(1))
    for of in range(5):
        scheduler.peer_reserve(7, of, 0, 1, 1, NO_CHUNKS, NO_TOKENS, 0.0)
    assert scheduler.load().requests.tolist() == [4]


def test_a_slot_that_is_not_in_use_is_a_mistake_of_the_caller() -> None:
    scheduler = pool(1)
    scheduler.remove_slot(0)
    for slot in (-1, 0, 1):
        for call in (
            lambda slot=slot: scheduler.remove_slot(slot),
            lambda slot=slot: scheduler.kv_clear(slot),
            lambda slot=slot: scheduler.kv_export(slot),
            lambda slot=slot: report(scheduler, slot),
            lambda slot=slot: hold(scheduler, slot, b""),
        ):
            with pytest.raises(UnknownSlot):
                call()


# What ends a prefill


def test_the_prompts_last_whole_block_in_the_kv_log_is_its_first_token() -> None:
    scheduler = pool(1)
    whole = text(("a", 4), ("b", 6))
    hold(scheduler, 0, text(("a", 4)))
    placement = place(scheduler, request(1, prompt(whole)), now_s=1.0)
    assert hold(scheduler, 0, whole[: 64 * 8], now_s=1.1) == []
    assert scheduler.load().queued_tokens.tolist() == [96]
    assert hold(scheduler, 0, whole[: 64 * 9], now_s=1.2) == [placement.reservation_id]
    assert scheduler.load().queued_tokens.tolist() == [0]
    assert not scheduler.first_token(placement.reservation_id, 1.3)
    assert hold(scheduler, 0, whole, now_s=1.4) == []
    assert scheduler.load().requests.tolist() == [1]


def test_a_snapshot_can_bring_the_first_token_too() -> None:
    scheduler = pool(1)
    placement = place(scheduler, request(1, prompt(text(("a", 8)))))
    chain = hash_chunks(text(("a", 8)), 0, SEED)
    seen = scheduler.kv_replace(0, chain, np.full(8, 16, dtype=np.uint32), 1.0)
    assert seen.tolist() == [placement.reservation_id]


def test_all_prompts_of_a_request_must_be_prefilled() -> None:
    scheduler = pool(1)
    placement = place(scheduler, request(1, prompt(text(("a", 8))), prompt(text(("b", 8))), batch=2))
    assert hold(scheduler, 0, text(("a", 8))) == []
    assert hold(scheduler, 0, text(("b", 8))) == [placement.reservation_id]


def test_another_slots_events_are_no_signal() -> None:
    scheduler = pool(2)
    placement = place(scheduler, request(2, prompt(text(("a", 8)))))
    assert hold(scheduler, 1 - placement.slot, text(("a", 8))) == []
    assert hold(scheduler, placement.slot, text(("a", 8))) == [placement.reservation_id]


def test_a_full_hit_expects_no_event_and_fades_by_the_model() -> None:
    scheduler = pool(1)
    hold(scheduler, 0, text(("a", 100)))
    placement = place(scheduler, request(1, prompt(text(("a", 100)))), now_s=10.0)
    assert scheduler.advance(10.001).tolist() == []
    assert scheduler.advance(10.003).tolist() == [placement.reservation_id]  # 16 tokens at 8000 a second
    assert scheduler.load().queued_tokens.tolist() == [0]


def test_with_an_event_to_come_the_model_is_only_a_late_safety() -> None:
    scheduler = pool(1)
    placement = place(scheduler, request(1, prompt(text(("a", 100)))), now_s=10.0)  # 0.2 s
    assert scheduler.advance(11.7).tolist() == []
    assert scheduler.advance(11.9).tolist() == [placement.reservation_id]
    assert hold(scheduler, 0, text(("a", 100)), now_s=12.0) == []


def test_a_moved_request_is_awaited_where_it_went() -> None:
    scheduler = pool(2)
    placement = place(scheduler, request(2, prompt(text(("a", 40)))))
    other = 1 - placement.slot
    assert scheduler.move(placement.reservation_id, other, 0.1)
    assert scheduler.load().requests[other] == 1
    assert scheduler.load().queued_tokens.tolist() == [640 * (slot == other) for slot in range(2)]
    sibling = place(scheduler, request(2, prompt(text(("a", 40), ("b", 1)))), now_s=0.2)
    assert sibling.hit_tokens[other] == 640
    assert sibling.hit_tokens[placement.slot] == 0
    scheduler.finish(sibling.reservation_id, 0.3)
    assert hold(scheduler, placement.slot, text(("a", 40))) == []
    assert placement.reservation_id in hold(scheduler, other, text(("a", 40)))


def test_a_request_that_went_where_nobody_knows_weighs_on_nobody_and_can_come_back() -> None:
    scheduler = pool(1)
    placement = place(scheduler, request(1, prompt(text(("a", 4)))))
    assert scheduler.move(placement.reservation_id, -1, 0.1)
    assert (scheduler.load().requests.tolist(), scheduler.open_reservations()) == ([0], [])
    assert scheduler.move(placement.reservation_id, 0, 0.2)
    assert scheduler.load().requests.tolist() == [1]
    assert scheduler.load().queued_tokens.tolist() == [64]
    assert scheduler.finish(placement.reservation_id, 0.3)
    assert scheduler.load().requests.tolist() == [0]


# Speculation and what is learned


def test_speculation_lasts_for_the_grace_after_the_first_token_even_past_the_end() -> None:
    scheduler = pool(1)
    asked = request(1, prompt(text(("a", 8), ("b", 1))))
    placement = place(scheduler, request(1, prompt(text(("a", 8)))), now_s=0.0)
    scheduler.first_token(placement.reservation_id, 1.0)
    scheduler.finish(placement.reservation_id, 1.5)
    for now_s, hit in ((2.9, 128), (3.0, 0)):
        seen = place(scheduler, asked, now_s=now_s)
        scheduler.finish(seen.reservation_id, now_s)
        assert seen.hit_tokens[0] == hit


def test_what_the_index_has_shown_is_claimed_no_more_so_that_an_eviction_is_believed_at_once() -> None:
    scheduler = pool(1)
    asked = request(1, prompt(text(("a", 8), ("b", 1))))
    placement = place(scheduler, request(1, prompt(text(("a", 8)))))
    assert place(scheduler, asked, now_s=0.1).hit_tokens[0] == 128
    hold(scheduler, 0, text(("a", 6)), 0.2)  # blocks come one after the other
    assert place(scheduler, asked, now_s=0.3).hit_tokens[0] == 128
    assert placement.reservation_id in hold(scheduler, 0, text(("a", 8)), 0.4)
    scheduler.kv_apply(0, NO_CHUNKS, NO_TOKENS, hash_chunks(text(("a", 8)), 0, SEED)[5:], 0.5)
    for reservation_id in (2, 3):
        scheduler.finish(reservation_id, 0.5)
    assert place(scheduler, asked, now_s=0.5).hit_tokens[0] == 80


def test_what_a_peer_claims_ends_with_its_last_sample_in_the_index() -> None:
    here, there = pool(1), pool(1)
    asked = request(1, prompt(text(("a", 40), ("b", 1))))
    sent = place(here, request(1, prompt(text(("a", 40)))))
    there.peer_reserve(5, 1, 0, 640, 1, sent.sample_hashes, sent.sample_tokens, 0.0)
    assert place(there, asked).hit_tokens[0] == 36 * 16
    there.finish(1, 0.0)
    hold(there, 0, text(("a", 40)), 0.1)
    assert there.speculative_chunks() == 0
    there.peer_reserve(6, 1, 0, 640, 1, sent.sample_hashes, sent.sample_tokens, 0.2)  # older than the events
    assert there.speculative_chunks() == 0
    there.kv_clear(0)
    assert place(there, asked, now_s=0.3).hit_tokens[0] == 0


def test_a_claim_that_no_event_will_confirm_ends_with_the_first_token() -> None:
    scheduler = pool(1)
    hold(scheduler, 0, text(("a", 8)))
    place(scheduler, request(1, prompt(text(("a", 8), ("b", 1)))))  # its last block may be cut elsewhere
    assert scheduler.speculative_chunks() == 1
    scheduler.first_token(1, 1.0)
    assert scheduler.speculative_chunks() == 0


def test_a_claim_that_moves_to_where_all_of_it_is_cached_is_over() -> None:
    scheduler = pool(2)
    first = place(scheduler, request(2, prompt(text(("a", 8)))))
    other = 1 - first.slot
    hold(scheduler, other, text(("a", 8)))
    scheduler.move(first.reservation_id, other, 0.1)
    assert scheduler.speculative_chunks() == 0
    assert scheduler.finish(first.reservation_id, 0.2)


def test_published_samples_are_at_every_16th_chunk_or_4th_where_little_is_new() -> None:
    scheduler = pool(1)
    hold(scheduler, 0, text(("a", 10)))
    long = text(("a", 10), ("b", 64))
    placement = place(scheduler, request(1, prompt(long)))
    chain = hash_chunks(long, 0, SEED).tolist()
    assert placement.sample_hashes.tolist() == [chain[k] for k in (15, 31, 47, 63)]
    assert placement.sample_tokens.tolist() == [16 * (k + 1) for k in (15, 31, 47, 63)]
    scheduler.finish(placement.reservation_id, 0.0)
    short = text(("a", 10), ("b", 63))
    placement = place(scheduler, request(1, prompt(short)))
    assert len(placement.sample_hashes) == 16  # positions 11, 15, ... 71
    assert placement.sample_tokens[0] == 12 * 16


def test_claims_count_in_whole_blocks() -> None:
    scheduler = pool(1)
    report(scheduler, 0, block_tokens=48)
    place(scheduler, request(1, prompt(text(("a", 8)))))
    placement = place(scheduler, request(1, prompt(text(("a", 8), ("b", 1)))))
    assert placement.hit_tokens[0] == 96  # of 128 tokens


def test_the_lease_tells_others_what_is_open() -> None:
    scheduler = pool(1)
    asked = request(1, prompt(text(("a", 16))), batch=2)
    placement = place(scheduler, asked)
    (record,) = scheduler.open_reservations()
    assert (record.reservation_id, record.slot, record.p_tokens, record.batch) == (1, 0, 256, 2)
    assert record.sample_hashes.tolist() == placement.sample_hashes.tolist()
    scheduler.first_token(1, 1.0)
    (record,) = scheduler.open_reservations()
    assert (record.p_tokens, len(record.sample_hashes)) == (0, 3)  # nobody knows yet whether the 16th is in a block
    scheduler.advance(3.0)
    (record,) = scheduler.open_reservations()
    assert (record.batch, len(record.sample_hashes)) == (2, 0)


def test_a_replica_that_joins_late_counts_what_a_lease_tells() -> None:
    there, here = pool(1), pool(1)
    place(there, request(1, prompt(text(("a", 16)))))
    place(there, request(1, prompt(text(("b", 16)))))
    there.first_token(1, 1.0)
    for _ in range(2):  # a lease is read again and again
        for record in there.open_reservations():
            here.peer_reserve(
                9,
                record.reservation_id,
                record.slot,
                record.p_tokens,
                record.batch,
                record.sample_hashes,
                record.sample_tokens,
                1.5,
            )
    assert here.load().requests.tolist() == there.load().requests.tolist() == [2]
    assert here.load().queued_tokens.tolist() == there.load().queued_tokens.tolist() == [256]
    here.check_invariants()


def test_approximate_slots_are_matched_by_what_was_sent_there_and_keep_it() -> None:
    scheduler = pool(1)
    asked = request(1, prompt(text(("a", 8), ("b", 1))), exact=np.zeros(1, dtype=np.bool_))
    hold(scheduler, 0, text(("a", 8)))  # their engine's events are not believed
    first = place(scheduler, asked)
    assert first.hit_tokens[0] == 0
    scheduler.first_token(first.reservation_id, 1.0)
    scheduler.finish(first.reservation_id, 1.0)
    scheduler.advance(100.0)
    assert place(scheduler, asked, now_s=100.0).hit_tokens[0] == 128
    scheduler.kv_clear(0)  # the engine restarted
    assert len(scheduler.learned_export(0)[0]) == 0


def test_a_request_that_left_before_its_first_token_teaches_nothing() -> None:
    scheduler = pool(1)
    asked = request(1, prompt(text(("a", 8))), exact=np.zeros(1, dtype=np.bool_))
    scheduler.finish(place(scheduler, asked).reservation_id, 0.1)
    assert place(scheduler, asked, now_s=0.2).hit_tokens[0] == 0


def test_peers_teach_too() -> None:
    here, there = pool(1), pool(1)
    asked = request(1, prompt(text(("a", 32))), exact=np.zeros(1, dtype=np.bool_))
    place(there, request(1, exact=np.zeros(1, dtype=np.bool_)))  # so it knows that the slot is approximate
    sent = place(here, asked)
    there.peer_reserve(5, 1, 0, 512, 1, sent.sample_hashes, sent.sample_tokens, 0.0)
    there.peer_first_token(5, 1, 1.0)
    there.peer_finish(5, 1, 2.0)
    there.advance(100.0)
    follow = request(1, prompt(text(("a", 32), ("b", 1))), exact=np.zeros(1, dtype=np.bool_))
    assert place(there, follow, now_s=100.0).hit_tokens[0] == 512


def test_requests_of_a_replica_that_is_gone_are_external_while_the_engine_may_have_them() -> None:
    scheduler = pool(1)
    report = {"requests": 4, "block_tokens": 16, "kv_capacity_tokens": 0}
    for of in range(3):
        scheduler.peer_reserve(5, of, 0, 0, 1, NO_CHUNKS, NO_TOKENS, 0.0)
    place(scheduler, request(1))
    scheduler.report(0, now_s=1.0, **report)
    assert scheduler.load().external.tolist() == [0]
    scheduler.peer_drop(5, 1.5)
    assert (scheduler.load().requests.tolist(), scheduler.load().external.tolist()) == ([1], [3])
    scheduler.report(0, now_s=2.0, **{**report, "requests": 2})
    assert (scheduler.load().requests.tolist(), scheduler.load().external.tolist()) == ([1], [1])
    scheduler.check_invariants()


def test_an_id_that_comes_again_takes_nothing_over_from_its_earlier_life() -> None:
    scheduler = pool(2)
    chain = prompt(text(("a", 32))).chain
    counts = np.arange(16, 16 * 33, 16, dtype=np.uint32)
    scheduler.peer_reserve(5, 1, 1, 0, 1, chain, counts, 0.0)
    scheduler.peer_drop(5, 0.5)
    scheduler.peer_reserve(5, 1, 0, 64, 1, NO_CHUNKS, NO_TOKENS, 1.0)
    scheduler.check_invariants()
    assert place(scheduler, request(2, prompt(text(("a", 32)))), now_s=1.0).hit_tokens.tolist() == [0, 0]


# Slots


def test_numbers_of_removed_slots_are_given_out_again_lowest_first() -> None:
    scheduler = pool(4)
    for slot in (2, 0):
        scheduler.remove_slot(slot)
    assert (scheduler.add_slot(), scheduler.add_slot(), scheduler.add_slot()) == (0, 2, 4)
    assert scheduler.slot_count == 5
    assert len(scheduler.load().requests) == 5


def test_an_endpoint_that_flaps_a_thousand_times_leaks_nothing() -> None:
    scheduler = pool(1)
    kept = []
    for n in range(1000):
        hold_chain = hash_chunks(f"{n:04}".encode() * 64, 0, SEED)
        scheduler.kv_apply(0, hold_chain, np.full(4, 16, dtype=np.uint32), NO_CHUNKS, float(n))
        placement = scheduler.place(request(1, prompt(text(("a", 3)))), float(n))
        assert not isinstance(placement, Rejection)
        kept.append(placement.reservation_id)
        scheduler.remove_slot(0)
        scheduler.add_slot()
    scheduler.check_invariants()
    assert (scheduler.load().requests.tolist(), scheduler.index_size()) == ([0], (0, 0))
    assert all(scheduler.finish(reservation_id, 1e4) for reservation_id in kept)
    scheduler.check_invariants()
    assert scheduler.load().requests.tolist() == [0]


@pytest.mark.parametrize("core", ["reference"], indirect=True)  # the native one has no door to break in by
def test_a_broken_invariant_is_raised() -> None:
    scheduler = pool(1)
    place(scheduler, request(1))
    scheduler._bookings.load.requests[0] += 1
    with pytest.raises(InvariantError):
        scheduler.check_invariants()
