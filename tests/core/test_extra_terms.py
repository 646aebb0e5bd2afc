"""Extra terms: the class of a request and the network inside the terms of each slot."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from native_core import native, needs_native

from trimtab_core.chunks import hash_chunks
from trimtab_core.extra_terms import ExtraTerms, smoothed
from trimtab_core.placement import Placement, PlacementRequest, Prompt
from trimtab_core.scheduler import Scheduler
from trimtab_core.settings import SchedulerSettings

NO_CHUNKS: Any = np.zeros(0, dtype=np.uint64)
NO_TOKENS: Any = np.zeros(0, dtype=np.uint32)
RATE = SchedulerSettings().prefill_rate

CORES = [pytest.param(Scheduler, id="reference"), pytest.param(native("Scheduler"), id="native", marks=needs_native)]


@pytest.fixture(params=CORES)
def pool(request: pytest.FixtureRequest) -> Any:
    """Two empty slots."""
    scheduler = request.param(rng_seed=3, settings=SchedulerSettings())
    for _ in range(2):
        scheduler.add_slot()
    return scheduler


def ask(tokens: int = 640, *, extra: ExtraTerms | None = None, slots: int = 2, **fields: Any) -> PlacementRequest:
    prompt = Prompt(chain=hash_chunks(b"x" * 4 * tokens, 0, 1), size_bytes=4 * tokens, tokens=tokens)
    return PlacementRequest(
        prompts=((prompt,),),
        variant_of_slot=np.zeros(slots, dtype=np.int8),
        exact=np.ones(slots, dtype=np.bool_),
        candidates=np.ones(slots, dtype=np.bool_),
        tokens_per_byte=0.25,
        extra=extra,
        **fields,
    )


def place(pool: Any, request: PlacementRequest) -> Placement:
    placement: Placement = pool.place(request, 0.0)
    assert hasattr(placement, "slot"), placement
    return placement


def load(pool: Any, slot: int, *, batch: int, weight_milli: int = 1000, of: int = 1) -> None:
    """Requests of another replica, already prefilled."""
    pool.peer_reserve(7, of, slot, 0, batch, NO_CHUNKS, NO_TOKENS, 0.0, weight_milli)


def test_without_extra_terms_nothing_differs(pool: Any) -> None:
    load(pool, 0, batch=2)
    placement = place(pool, ask())
    assert placement.p_tokens.tolist() == placement.p_linear_tokens.tolist() == [640, 640]
    assert placement.weighted_batch.tolist() == placement.batch.tolist() == [3, 1]
    assert placement.expert_factor.tolist() == [1, 1]
    assert placement.network_tokens.tolist() == [0, 0]


def test_a_slot_that_serves_heavy_requests_looks_fuller_to_everybody(pool: Any) -> None:
    load(pool, 0, batch=2, weight_milli=4_000)
    load(pool, 1, batch=3, of=2)
    placement = place(pool, ask())
    assert placement.slot == 1
    assert placement.weighted_batch.tolist() == [9, 4]
    assert placement.batch.tolist() == [3, 4]


def test_a_requests_own_weight_weighs_on_those_after_it_only(pool: Any) -> None:
    first = place(pool, ask(extra=ExtraTerms(weight_milli=5_000)))
    assert first.weighted_batch.tolist() == [1, 1]
    assert pool.load().weight_milli[first.slot] == 5_000
    assert pool.load().requests[first.slot] == 1
    second = place(pool, ask())
    assert second.slot != first.slot
    assert second.weighted_batch[first.slot] == 6


def test_a_weight_counts_for_each_engine_request_of_a_batch_and_goes_with_it(pool: Any) -> None:
    placed = place(pool, ask(batch=3, extra=ExtraTerms(weight_milli=2_500)))
    assert pool.load().weight_milli.tolist().count(7_500) == 1
    (record,) = pool.open_reservations()
    assert record.weight_milli == 2_500
    pool.move(placed.reservation_id, 1 - placed.slot, 0.0)
    assert pool.load().weight_milli[1 - placed.slot] == 7_500
    pool.finish(placed.reservation_id, 0.0)
    assert pool.load().weight_milli.tolist() == [0, 0]
    pool.check_invariants()


def test_requests_that_came_past_us_are_ordinary(pool: Any) -> None:
    pool.report(0, requests=4, block_tokens=16, kv_capacity_tokens=0, now_s=0.0)
    assert place(pool, ask()).weighted_batch.tolist() == [5, 1]


def test_the_limit_of_an_endpoint_counts_requests_whatever_they_weigh(pool: Any) -> None:
    load(pool, 0, batch=2, weight_milli=100_000)
    load(pool, 1, batch=3, of=2)
    assert place(pool, ask(batch_max=3)).slot == 0


def test_least_request_goes_by_weight_too(pool: Any) -> None:
    load(pool, 0, batch=1, weight_milli=3_000)
    load(pool, 1, batch=2, of=2)
    assert place(pool, ask(policy="least_request")).score.tolist() == [4, 3]


def test_experts_that_are_slow_on_a_slot_make_its_tokens_more(pool: Any) -> None:
    placement = place(pool, ask(extra=ExtraTerms(expert_factor=np.array([1.5, 1.25]))))
    assert placement.slot == 1
    assert placement.p_tokens.tolist() == [960, 800]
    assert placement.p_own_tokens == 640, "what is booked are tokens, however slow"


def test_a_round_trip_counts_as_what_the_slot_would_prefill_meanwhile(pool: Any) -> None:
    placement = place(pool, ask(extra=ExtraTerms(rtt_s=np.array([0.1, 0.02]))))
    assert placement.slot == 1
    assert placement.network_tokens.tolist() == [0.1 * RATE, 0.02 * RATE]
    assert placement.p_tokens.tolist() == [640 + 0.1 * RATE, 640 + 0.02 * RATE]


def test_a_round_trip_is_the_same_whichever_experts_are_asked(pool: Any) -> None:
    extra = ExtraTerms(rtt_s=np.array([0.1, 0.1]), expert_factor=np.array([2.0, 1.0]))
    assert place(pool, ask(extra=extra)).p_tokens.tolist() == [1280 + 0.1 * RATE, 640 + 0.1 * RATE]


def test_a_slot_beyond_the_arrays_has_no_round_trip_and_balanced_experts(pool: Any) -> None:
    extra = ExtraTerms(rtt_s=np.array([0.1]), expert_factor=np.array([2.0]))
    placement = place(pool, ask(extra=extra))
    assert (placement.network_tokens[1], placement.expert_factor[1]) == (0, 1)


def test_above_the_threshold_fewer_requests_outweigh_more_tokens(pool: Any) -> None:
    pool.peer_reserve(7, 1, 0, 900_000, 2, NO_CHUNKS, NO_TOKENS, 0.0)
    load(pool, 1, batch=9, of=2)
    plain = place(pool, ask(200_000))
    pool.finish(plain.reservation_id, 0.0)
    smooth = place(pool, ask(200_000, extra=ExtraTerms(log_above_tokens=50_000.0)))
    assert (plain.slot, smooth.slot) == (1, 0)
    assert smooth.p_linear_tokens.tolist() == plain.p_tokens.tolist() == [1_100_000, 200_000]
    assert smooth.p_tokens[1] == 50_000 + 50_000 * math.log1p(3)


@given(
    above=st.floats(1, 1e6),
    values=st.lists(st.floats(1, 1e9), min_size=2, max_size=40),
)
def test_smoothing_is_exact_below_the_threshold_continuous_at_it_and_turns_no_order(
    above: float, values: list[float]
) -> None:
    around = [above, math.nextafter(above, 0), math.nextafter(above, math.inf), above * (1 + 1e-9)]
    rising = np.array(sorted([*values, *around]))
    smooth = smoothed(rising, above)
    below = rising <= above
    assert smooth[below].tolist() == rising[below].tolist()
    assert all(one <= other for one, other in itertools.pairwise(smooth.tolist()))
    assert (smooth <= rising).all()
    (just_above,) = smoothed(np.array([above * (1 + 1e-9)]), above)
    assert just_above == pytest.approx(above * (1 + 1e-9), rel=1e-12)
