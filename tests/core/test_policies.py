"""Policies and the tie break."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab_core.policies.least_request import LeastRequest
from trimtab_core.policies.policy import Policy, Terms
from trimtab_core.policies.product import Product
from trimtab_core.policies.round_robin import RoundRobin
from trimtab_core.tie_break import TieBreak, splitmix64


def terms(p_tokens: list[float], batch: list[int], candidates: list[bool] | None = None) -> Terms:
    return Terms(
        candidates=np.array(candidates if candidates is not None else [True] * len(batch)),
        p_tokens=np.array(p_tokens, dtype=np.float64),
        batch=np.array(batch, dtype=np.float64),
    )


def scores(policy: Policy, given_terms: Terms) -> Any:
    return policy.score(given_terms).tolist()


def test_product_multiplies_uncached_tokens_and_requests() -> None:
    assert scores(Product(), terms([16, 1000, 200], [9, 1, 4])) == [144, 1000, 800]


def test_least_request_counts_requests_only() -> None:
    assert scores(LeastRequest(), terms([16, 1000, 200], [9, 1, 4])) == [9, 1, 4]


def pick(policy: Policy, ties: TieBreak, given_terms: Terms) -> int:
    score = np.where(given_terms.candidates, policy.score(given_terms), np.inf)
    (slot,), _ = ties.best(score, given_terms.batch, 1)
    policy.picked(slot)
    return slot


def test_round_robin_gives_every_candidate_one_request_per_round_the_least_loaded_first() -> None:
    policy, ties = RoundRobin(), TieBreak(3)
    for slot in range(4):
        policy.slot_reset(slot)
    for _ in range(3):
        assert [pick(policy, ties, terms([1] * 4, [7, 1, 9, 3])) for _ in range(4)] == [1, 3, 0, 2]


@given(turns=st.lists(st.lists(st.booleans(), min_size=4, max_size=4).filter(any), max_size=60))
def test_round_robin_never_picks_one_twice_while_another_candidate_has_its_turn(turns: list[list[bool]]) -> None:
    policy, ties = RoundRobin(), TieBreak(3)
    for slot in range(4):
        policy.slot_reset(slot)
    had: set[int] = set()
    for candidates in turns:
        waiting = {slot for slot in range(4) if candidates[slot] and slot not in had}
        slot = pick(policy, ties, terms([1] * 4, [1] * 4, candidates))
        if waiting:
            assert slot in waiting
        else:
            had = set()
        had.add(slot)


def test_a_new_slot_gets_no_flood_to_catch_up() -> None:
    policy, ties = RoundRobin(), TieBreak(3)
    for slot in range(2):
        policy.slot_reset(slot)
    for _ in range(100):
        pick(policy, ties, terms([1] * 2, [1] * 2))
    policy.slot_reset(2)
    assert Counter(pick(policy, ties, terms([1] * 3, [1] * 3)) for _ in range(10)) == {0: 3, 1: 3, 2: 4}


def test_splitmix64_is_the_published_one() -> None:
    state, drawn = 1234567, []
    for _ in range(3):
        state = (state + 0x9E37_79B9_7F4A_7C15) % 2**64
        drawn.append(splitmix64(state))
    assert drawn == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_among_equal_scores_the_fewest_requests_win_and_then_everyone_in_turn_of_chance() -> None:
    ties = TieBreak(9)
    score = np.array([5.0, 5.0, 5.0, 5.0, np.inf])
    batch = np.array([2, 1, 1, 1, 0])
    firsts = Counter(ties.best(score, batch, 1)[0][0] for _ in range(3000))
    assert set(firsts) == {1, 2, 3}
    assert min(firsts.values()) > 800


@pytest.mark.parametrize("seed", [0, 1, 2**64 - 1])
def test_the_same_seed_draws_the_same(seed: int) -> None:
    score, batch = np.zeros(9), np.ones(9, dtype=np.int64)
    one, other = TieBreak(seed), TieBreak(seed)
    assert [one.best(score, batch, 3) for _ in range(20)] == [other.best(score, batch, 3) for _ in range(20)]


def test_replicas_with_other_seeds_do_not_draw_alike() -> None:
    score, batch = np.zeros(64), np.ones(64, dtype=np.int64)
    draws = {tuple(ranked) for seed in range(20) for ranked, _ in [TieBreak(seed).best(score, batch, 3)]}
    assert len(draws) > 15


@given(
    score=st.lists(st.sampled_from([1.0, 2.0, 3.0, float("inf")]), min_size=1, max_size=8),
    data=st.data(),
    count=st.integers(1, 4),
)
def test_the_ranking_is_by_score_and_then_by_requests(score: list[float], data: st.DataObject, count: int) -> None:
    batch = data.draw(st.lists(st.integers(1, 2), min_size=len(score), max_size=len(score)))
    ranked, reason = TieBreak(1).best(np.array(score), np.array(batch), count)
    order = sorted((s, b) for s, b in zip(score, batch, strict=True) if s != float("inf"))
    assert [(score[slot], batch[slot]) for slot in ranked] == order[:count]
    assert len(set(ranked)) == len(ranked)
    equals = [b for s, b in order if s == order[0][0]] if order else []
    alone = equals.count(min(equals)) == 1 if equals else False
    expected = "" if not order else "least score" if len(equals) == 1 else "fewest requests among equals"
    assert reason == (expected if alone or not order else "drawn among equals")
