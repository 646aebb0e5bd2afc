"""Faults that users of other routers reported, as far as the core decides them. Each test is one of them."""

from collections import Counter
from typing import Any

import numpy as np

from trimtab_core.block_chains import BlockChains
from trimtab_core.chunks import hash_chunks, root_hash
from trimtab_core.scheduler import (
    Placement,
    PlacementRequest,
    Prompt,
    Rejection,
    Scheduler,
    SchedulerSettings,
)
from trimtab_core.token_table import TokenTable

SEED = 11
NONE: Any = np.zeros(0, dtype=np.uint64)
BYTES = TokenTable.from_pieces([bytes([n]) * 4 for n in range(256)])  # 16 tokens are a chunk, and a block


def pool(slots: int, *, seed: int = 1, **changed: Any) -> Scheduler:
    scheduler = Scheduler(rng_seed=seed, settings=SchedulerSettings(**changed))
    for _ in range(slots):
        scheduler.add_slot()
    return scheduler


def prompt(text: bytes, root: int = 0) -> Prompt:
    return Prompt(chain=hash_chunks(text, root, SEED), size_bytes=len(text))


def request(scheduler: Scheduler, *prompts: Prompt, exact: bool = True, **changed: Any) -> PlacementRequest:
    slots = scheduler.slot_count
    return PlacementRequest(
        **{
            "prompts": tuple((each,) for each in prompts),
            "variant_of_slot": np.zeros(slots, dtype=np.int8),
            "exact": np.full(slots, exact),
            "candidates": np.ones(slots, dtype=np.bool_),
            "tokens_per_byte": 0.25,
            "batch": max(len(prompts), 1),
            **changed,
        }
    )


def place(scheduler: Scheduler, *prompts: Prompt, now_s: float = 0.0, **changed: Any) -> Placement:
    placement = scheduler.place(request(scheduler, *prompts, **changed), now_s)
    scheduler.check_invariants()
    assert not isinstance(placement, Rejection)
    return placement


def hold(scheduler: Scheduler, slot: int, text: bytes, root: int = 0, now_s: float = 0.0) -> list[int]:
    """The slot's engine tells that it holds this text; a chunk is a block of 16 tokens."""
    chain = hash_chunks(text, root, SEED)
    tokens = (np.arange(len(chain), dtype=np.uint32) + 1) * 16
    seen = scheduler.kv_apply(slot, chain, tokens, NONE, now_s)
    return [int(reservation_id) for reservation_id in seen]


def report(scheduler: Scheduler, slot: int, requests: int, block_tokens: int = 16) -> None:
    scheduler.report(slot, requests=requests, block_tokens=block_tokens, kv_capacity_tokens=0, now_s=0.0)


def text(letter: str, chunks: int = 16) -> bytes:
    return letter.encode() * 64 * chunks


def test_fault_1_a_burst_between_two_polls_does_not_flood_one_endpoint() -> None:
    scheduler = pool(4)
    for slot, busy in enumerate((3, 0, 3, 3)):
        report(scheduler, slot, busy)
    picks = Counter(place(scheduler, prompt(text(chr(97 + n)))).slot for n in range(24))
    assert picks[1] > max(picks[0], picks[2], picks[3])  # it had less to do
    assert picks[1] <= 10  # and its polled zero was not believed for long


def test_fault_2_replicas_that_see_each_others_choices_do_not_herd() -> None:
    replicas = [pool(4, seed=seed) for seed in (1, 2, 3)]
    picks = Counter[int]()
    for n in range(24):
        me = n % 3
        placement = place(replicas[me], prompt(text(chr(97 + n))))
        picks[placement.slot] += 1
        for other, replica in enumerate(replicas):
            if other != me:
                replica.peer_reserve(
                    1000 + me,
                    placement.reservation_id,
                    placement.slot,
                    placement.p_own_tokens,
                    1,
                    placement.sample_hashes,
                    placement.sample_tokens,
                    0.0,
                )
    assert set(picks.values()) == {6}


def test_fault_3_a_choice_is_in_the_load_before_the_next_one_is_made() -> None:
    scheduler = pool(3)
    first, second, third = (place(scheduler, prompt(text(letter))) for letter in "abc")
    assert {first.slot, second.slot, third.slot} == {0, 1, 2}
    assert scheduler.load().requests.tolist() == [1, 1, 1]
    assert scheduler.load().queued_tokens.tolist() == [256, 256, 256]


def test_fault_4_siblings_follow_the_first_before_any_event_comes() -> None:
    scheduler = pool(8)
    head = text("s", 200)
    first = place(scheduler, prompt(head + text("x", 2)))
    sibling = place(scheduler, prompt(head + text("y", 2)))
    assert sibling.hit_tokens[first.slot] == 3200
    assert sum(sibling.hit_tokens) == 3200  # nobody else has it
    scheduler.first_token(first.reservation_id, 0.5)
    scheduler.first_token(sibling.reservation_id, 0.5)
    assert place(scheduler, prompt(head + text("z", 2)), now_s=0.6).slot == first.slot


def test_fault_4_siblings_on_another_replica_follow_the_samples() -> None:
    here, there = pool(8, seed=1), pool(8, seed=2)
    head = text("s", 200)
    first = place(here, prompt(head + text("x", 2)))
    assert len(first.sample_hashes) == 12  # one for each kilobyte
    there.peer_reserve(7, 1, first.slot, first.p_own_tokens, 1, first.sample_hashes, first.sample_tokens, 0.0)
    sibling = place(there, prompt(head + text("y", 2)))
    assert sibling.hit_tokens[first.slot] == 192 * 16  # up to the last sample they share


def test_fault_4_what_was_only_speculated_goes_when_the_client_leaves_before_the_first_token() -> None:
    scheduler = pool(2)
    first = place(scheduler, prompt(text("s")))
    scheduler.finish(first.reservation_id, 0.1)
    assert not place(scheduler, prompt(text("s")), now_s=0.1).hit_tokens.any()


def test_fault_5_no_report_zeroes_live_counters() -> None:
    scheduler = pool(1)
    place(scheduler, prompt(text("a")), prompt(text("b")))
    for reported in (0, 1, 5, 0):
        report(scheduler, 0, reported)
        assert scheduler.load().requests.tolist() == [2]
        assert scheduler.load().external.tolist() == [max(0, reported - 2)]


def test_fault_5_a_double_release_takes_nothing_twice_and_a_cancelled_request_leaves_nothing() -> None:
    scheduler = pool(1)
    placements = [place(scheduler, prompt(text(letter))) for letter in "abc"]
    for placement in placements[:2]:
        assert scheduler.finish(placement.reservation_id, 1.0)
        assert not scheduler.finish(placement.reservation_id, 1.0)
        assert not scheduler.first_token(placement.reservation_id, 1.0)
        assert not scheduler.move(placement.reservation_id, 0, 1.0)
        scheduler.check_invariants()
    assert scheduler.load().requests.tolist() == [1]
    scheduler.finish(placements[2].reservation_id, 2.0)
    assert scheduler.load().requests.tolist() == [0]
    assert scheduler.load().queued_tokens.tolist() == [0]
    assert scheduler.open_reservations() == []


def test_fault_5_a_peers_double_release_takes_nothing_twice() -> None:
    scheduler = pool(1)
    for of in (1, 2):
        scheduler.peer_reserve(7, of, 0, 100, 1, NONE, NONE.astype(np.uint32), 0.0)
        scheduler.peer_reserve(7, of, 0, 100, 1, NONE, NONE.astype(np.uint32), 0.0)
    assert scheduler.load().requests.tolist() == [2]
    for _ in range(2):
        scheduler.peer_finish(7, 1, 1.0)
        scheduler.peer_first_token(7, 1, 1.0)
    scheduler.peer_reserve(7, 1, 0, 100, 1, NONE, NONE.astype(np.uint32), 1.0)  # a late copy
    assert scheduler.load().requests.tolist() == [1]
    scheduler.peer_drop(7, 2.0)
    scheduler.peer_drop(7, 2.0)
    assert scheduler.load().requests.tolist() == [0]
    assert scheduler.load().queued_tokens.tolist() == [0]


def test_fault_6_the_release_of_a_request_never_hits_the_next_endpoint_under_its_number() -> None:
    scheduler = pool(1)
    old = place(scheduler, prompt(text("a")))
    scheduler.remove_slot(0)
    assert scheduler.add_slot() == 0  # it flaps
    new = place(scheduler, prompt(text("b")))
    assert scheduler.load().requests.tolist() == [1]
    assert [record.reservation_id for record in scheduler.open_reservations()] == [new.reservation_id]
    assert scheduler.first_token(old.reservation_id, 1.0)
    assert scheduler.finish(old.reservation_id, 1.0)
    assert scheduler.load().requests.tolist() == [1]
    assert scheduler.load().queued_tokens.tolist() == [256]
    scheduler.check_invariants()


def test_fault_7_no_age_ends_a_reservation() -> None:
    scheduler = pool(1)
    long = place(scheduler, prompt(text("a")))
    scheduler.peer_reserve(7, 1, 0, 100, 2, NONE, NONE.astype(np.uint32), 0.0)
    for day in range(1, 30):
        scheduler.advance(86_400.0 * day)
    assert scheduler.load().requests.tolist() == [3]
    assert scheduler.finish(long.reservation_id, 1e9)


def test_fault_8_ties_do_not_go_to_the_first_endpoint() -> None:
    firsts = Counter(place(pool(4, seed=seed), prompt(text("a"))).slot for seed in range(400))
    assert set(firsts) == {0, 1, 2, 3}
    assert max(firsts.values()) < 160


def test_fault_9_a_full_hit_does_not_win_at_any_load() -> None:
    scheduler = pool(2)
    popular = text("p", 20)
    hold(scheduler, 0, popular)
    picks: Counter[int] = Counter()
    for n in range(200):
        placement = place(scheduler, prompt(popular + b"tail"), now_s=float(n))  # 321 tokens, 320 of them held
        picks[placement.slot] += 1
        assert placement.p_tokens.min() >= 16
        scheduler.first_token(placement.reservation_id, n + 0.5)  # prefilled, but it decodes for ever
    assert picks[1] > 5


def test_fault_9_an_idle_endpoint_does_not_win_with_any_prompt() -> None:
    scheduler = pool(2)
    held = text("p", 200)
    hold(scheduler, 0, held)
    report(scheduler, 0, 3)
    assert place(scheduler, prompt(held + text("q", 2))).slot == 0


def test_fault_10_the_index_forgets_what_engines_forget() -> None:
    scheduler = pool(2)
    for n in range(50):
        chain = hash_chunks(f"{n:04}".encode() * 640, 0, SEED)
        tokens = np.full(len(chain), 16, dtype=np.uint32)
        scheduler.kv_apply(0, chain, tokens, NONE, 0.0)
        scheduler.kv_apply(1, chain, tokens + np.uint32(n % 2), NONE, 0.0)
        assert scheduler.index_size() == (40, 80)
        scheduler.kv_apply(0, NONE, NONE.astype(np.uint32), chain, 0.0)
        scheduler.kv_apply(1, NONE, NONE.astype(np.uint32), chain, 0.0)
        assert scheduler.index_size() == (0, 0)
    scheduler.check_invariants()


def test_fault_10_what_is_learned_stays_within_the_engines_capacity() -> None:
    scheduler = pool(1, kv_capacity_tokens=1000)
    for n in range(50):
        placement = place(scheduler, prompt(f"{n:04}".encode() * 320), now_s=float(n), exact=False)
        scheduler.first_token(placement.reservation_id, n + 0.1)
        scheduler.finish(placement.reservation_id, n + 0.2)
        scheduler.advance(n + 0.9)
        assert scheduler.learned_export(0)[1].sum() <= 1000
    assert place(scheduler, prompt(b"0049" * 320), now_s=100.0, exact=False).hit_tokens[0] > 200
    assert place(scheduler, prompt(b"0000" * 320), now_s=100.0, exact=False).hit_tokens[0] == 0


def test_fault_10_speculation_is_bounded_and_gone_after_its_grace() -> None:
    scheduler = pool(1, speculative_chunks_max=100)
    for n in range(50):
        placement = place(scheduler, prompt(f"{n:04}".encode() * 640))
        assert scheduler.speculative_chunks() <= 100
    scheduler.first_token(placement.reservation_id, 1.0)
    scheduler.finish(placement.reservation_id, 1.0)
    assert scheduler.speculative_chunks() == 80
    scheduler.advance(3.0)
    assert scheduler.speculative_chunks() == 40  # of the one before, whose first token is not there


def test_fault_11_an_engine_that_restarts_owns_nothing_and_its_load_stays() -> None:
    scheduler = pool(2)
    hold(scheduler, 0, text("a"))
    hold(scheduler, 1, text("a"))
    open_there = place(scheduler, prompt(text("b")))
    scheduler.kv_clear(0)
    placement = place(scheduler, prompt(text("a") + text("c", 1)))
    assert placement.hit_tokens.tolist() == [0, 256]
    assert scheduler.load().requests.sum() == 2
    assert scheduler.finish(open_there.reservation_id, 1.0)


def test_fault_11_a_sidecar_that_restarts_loses_nothing() -> None:
    chains = BlockChains(BYTES, SEED)
    tokens = np.repeat(np.arange(8, dtype=np.uint32), 16)
    names = np.arange(1, 9, dtype=np.uint64)
    chains.store(parent=None, blocks=names[:4], tokens=tokens[:64], block_tokens=16, root=0)
    again = BlockChains.load(BYTES, SEED, chains.dump())
    again.store(parent=4, blocks=names[4:], tokens=tokens[64:], block_tokens=16, root=0)  # goes on where it was
    again.remove(blocks=names[7:])
    scheduler = pool(1)
    scheduler.kv_replace(0, *again.chunks(), 0.0)
    whole = b"".join(bytes([n]) * 64 for n in range(8))
    assert place(scheduler, prompt(whole + text("z", 1))).hit_tokens[0] == 7 * 16


def test_fault_12_after_lost_events_nothing_is_claimed_until_it_is_seen_again() -> None:
    chains = BlockChains(BYTES, SEED)
    tokens = np.repeat(np.arange(4, dtype=np.uint32), 16)
    names = np.arange(1, 5, dtype=np.uint64)
    chains.store(parent=None, blocks=names, tokens=tokens, block_tokens=16, root=0)
    chains.drain()
    chains.unpublish()
    changes = chains.drain()
    assert changes.cleared
    assert len(changes.added) == 0
    chains.store(parent=2, blocks=names[2:3], tokens=tokens[32:48], block_tokens=16, root=0)
    assert len(chains.drain().added) == 3  # block 3 and, with it, its ancestors; block 4 may be gone


def test_fault_12_a_late_replay_does_not_resurrect_evicted_blocks() -> None:
    chains = BlockChains(BYTES, SEED)
    tokens = np.repeat(np.arange(3, dtype=np.uint32), 16)
    names = np.arange(1, 4, dtype=np.uint64)
    chains.store(parent=None, blocks=names, tokens=tokens, block_tokens=16, root=0)
    chains.remove(blocks=names[::-1])
    chains.store(parent=2, blocks=names[2:], tokens=tokens[32:], block_tokens=16, root=0)  # out of a replay
    assert chains.chunk_count == 0
    assert chains.dropped_unknown_parent == 1


def test_fault_12_a_snapshot_replaces_whatever_the_index_believed() -> None:
    scheduler = pool(1)
    hold(scheduler, 0, text("a"))
    chain = hash_chunks(text("b"), 0, SEED)
    scheduler.kv_replace(0, chain, np.full(16, 16, dtype=np.uint32), 0.0)
    assert set(scheduler.kv_export(0)[0].tolist()) == set(chain.tolist())
    assert scheduler.index_size() == (16, 16)


def test_fault_13_a_cleared_cache_is_told_as_cleared() -> None:
    chains = BlockChains(BYTES, SEED)
    chains.store(
        parent=None,
        blocks=np.array([1], dtype=np.uint64),
        tokens=np.zeros(16, dtype=np.uint32),
        block_tokens=16,
        root=0,
    )
    chains.drain()
    chains.clear()
    changes = chains.drain()
    assert changes.cleared
    assert (chains.block_count, chains.chunk_count, chains.unconfirmed_count) == (0, 0, 0)
    chains.store(
        parent=1,
        blocks=np.array([2], dtype=np.uint64),
        tokens=np.zeros(16, dtype=np.uint32),
        block_tokens=16,
        root=0,
    )
    assert chains.block_count == 0  # nothing can be built on what is gone


def test_fault_14_a_block_stored_twice_and_removed_once_is_still_there() -> None:
    chains = BlockChains(BYTES, SEED)
    block = np.array([1], dtype=np.uint64)
    tokens = np.zeros(16, dtype=np.uint32)
    for medium in ("GPU", "GPU", "CPU"):
        chains.store(parent=None, blocks=block, tokens=tokens, block_tokens=16, root=0, medium=medium)
    for medium in ("GPU", "GPU"):
        assert chains.chunk_count == 1
        chains.remove(blocks=block, medium=medium)
    chains.remove(blocks=block, medium="GPU")  # one too many takes nothing from another medium
    assert chains.chunk_count == 1
    chains.remove(blocks=block, medium="CPU")
    assert chains.chunk_count == 0


def test_fault_16_a_deleted_endpoint_leaves_nothing_behind() -> None:
    scheduler = pool(2)
    hold(scheduler, 0, text("a"))
    hold(scheduler, 1, text("a"))
    for slot in (0, 0, 1, 1):
        candidates = np.arange(2) == slot
        for exact in (True, False):
            placement = place(scheduler, prompt(text("b") + text("c")), exact=exact, candidates=candidates)
            scheduler.first_token(placement.reservation_id, 0.0)
    report(scheduler, 0, 50)
    scheduler.remove_slot(0)
    scheduler.check_invariants()
    assert scheduler.index_size() == (16, 16)
    assert isinstance(scheduler.place(request(scheduler, candidates=np.array([True, False])), 0.0), Rejection)
    assert scheduler.add_slot() == 0
    placement = place(scheduler, prompt(text("b") + text("c")), exact=False)
    assert placement.hit_tokens[0] == 0
    assert placement.batch[0] == 1
    assert placement.hit_tokens[1] > 0


def test_fault_19_lora_and_salt_are_never_dropped() -> None:
    scheduler = pool(1)
    plain, lora, salted = root_hash(SEED), root_hash(SEED, "adapter"), root_hash(SEED, None, "s")
    hold(scheduler, 0, text("a"), lora)
    for root, hit in ((plain, 0), (salted, 0), (lora, 256)):
        placement = place(scheduler, prompt(text("a") + text("q", 1), root))
        assert placement.hit_tokens[0] == hit
        scheduler.finish(placement.reservation_id, 0.0)
