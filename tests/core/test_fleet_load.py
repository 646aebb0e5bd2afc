"""Fleet load: external requests, the fading of queued tokens, the observed rate."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab_core.fleet_load import PREFILL_RATE_MAX, PREFILL_RATE_MIN, FleetLoad
from trimtab_core.reservation import OWN, Reservation
from trimtab_core.settings import SchedulerSettings

RATE = 8000


def fleet(slots: int = 1) -> FleetLoad:
    load = FleetLoad(SchedulerSettings(prefill_rate=RATE))
    for slot in range(slots):
        load.reset_slot(slot)
    return load


def reserve(
    load: FleetLoad, of: int, p_tokens: int, now_s: float, *, slot: int = 0, peer: int = OWN, signal: bool = False
) -> Reservation:
    reservation = Reservation(key=(peer, of), slot=slot, p_tokens=p_tokens, batch=1, expects_signal=signal)
    load.open(reservation, now_s)
    return reservation


def faded(load: FleetLoad, now_s: float) -> list[int]:
    ids = [reservation.key[1] for reservation in load.advance(now_s)]
    load.check_invariants()
    return ids


def report(load: FleetLoad, requests: int) -> int:
    load.report(0, requests=requests, block_tokens=16, kv_capacity_tokens=0)
    return int(load.external[0])


def test_what_the_engine_counts_beyond_our_own_is_external() -> None:
    load = fleet()
    reserve(load, 1, 100, 0.0)
    assert report(load, 4) == 3
    assert report(load, 1) == 0
    assert report(load, 0) == 0


def test_a_request_that_ended_between_the_engines_count_and_ours_is_not_external() -> None:
    load = fleet()
    ours = [reserve(load, n, 100, 0.0) for n in range(5)]
    assert report(load, 5) == 0
    for reservation in ours:
        load.close(reservation, 1.0)
    assert report(load, 5) == 0  # counted before they ended
    assert report(load, 2) == 2  # these were here all along, or came past us: nothing of ours was


@given(
    steps=st.lists(st.one_of(st.just("open"), st.just("close"), st.integers(0, 8)), max_size=60),
    foreign=st.integers(0, 3),
)
def test_ours_never_show_as_external_however_late_the_engines_count_is(steps: list[str | int], foreign: int) -> None:
    """The engine's count is any of those that were true since the previous report."""
    load = fleet()
    open_now: list[Reservation] = []
    counts = [0]
    for n, step in enumerate(steps):
        if step == "open":
            open_now.append(reserve(load, n, 10, 0.0))
        elif step == "close" and open_now:
            load.close(open_now.pop(0), 0.0)
        elif isinstance(step, int):
            assert report(load, counts[step % len(counts)] + foreign) <= foreign
            assert report(load, len(open_now) + foreign) == foreign  # at rest it is exact
            counts = []
        counts.append(len(open_now))


def test_prefills_fade_one_after_the_other_at_the_slots_rate() -> None:
    load = fleet()
    for of in (1, 2, 3):
        reserve(load, of, RATE, 0.0)
    assert faded(load, 0.99) == []
    assert load.queued_tokens[0] == 3 * RATE
    assert faded(load, 1.0) == [1]
    assert load.queued_tokens[0] == 2 * RATE
    assert faded(load, 1.99) == []
    assert faded(load, 10.0) == [2, 3]
    assert load.queued_tokens[0] == 0


def test_an_idle_slot_saves_up_no_prefill() -> None:
    load = fleet()
    reserve(load, 1, RATE, 0.0)
    assert faded(load, 5.0) == [1]
    reserve(load, 2, RATE, 10.0)
    assert faded(load, 10.5) == []
    assert faded(load, 11.0) == [2]


def test_slots_fade_side_by_side() -> None:
    load = fleet(2)
    reserve(load, 1, RATE, 0.0, slot=0)
    reserve(load, 2, RATE, 0.0, slot=1)
    assert faded(load, 1.0) == [1, 2]


def test_with_a_signal_to_come_the_model_waits_four_times_as_long_and_a_second() -> None:
    load = fleet()
    reserve(load, 1, RATE, 0.0, signal=True)
    reserve(load, 2, RATE, 0.0)
    assert faded(load, 1.99) == []
    assert faded(load, 2.0) == [2]  # the first one's time is over by then, though its P stays
    assert load.queued_tokens[0] == RATE
    assert faded(load, 4.99) == []
    assert faded(load, 5.0) == [1]


def test_peers_take_their_time_in_the_model_but_end_when_their_replica_says_so() -> None:
    load = fleet()
    theirs = reserve(load, 1, RATE, 0.0, peer=77)
    reserve(load, 2, RATE, 0.0)
    assert faded(load, 1.5) == []
    assert faded(load, 2.0) == [2]
    assert faded(load, 1e6) == []
    assert load.queued_tokens[0] == RATE
    load.first_token(theirs, 1e6, teaches=False)
    assert load.queued_tokens[0] == 0


def test_an_early_first_token_lets_the_next_one_begin() -> None:
    load = fleet()
    first = reserve(load, 1, 4 * RATE, 0.0)
    reserve(load, 2, RATE, 0.0)
    load.first_token(first, 1.0, teaches=False)
    assert faded(load, 1.99) == []
    assert faded(load, 2.0) == [2]


def test_a_prefill_that_is_given_up_frees_the_slot_from_then_on() -> None:
    load = fleet()
    first = reserve(load, 1, 10 * RATE, 0.0)
    second = reserve(load, 2, 10 * RATE, 0.0)
    reserve(load, 3, RATE, 0.0)
    load.close(second, 2.0)  # had not begun: costs nothing
    load.close(first, 3.0)
    assert faded(load, 3.99) == []
    assert faded(load, 4.0) == [3]


def test_a_request_that_leaves_the_queue_before_its_turn_delays_nobody() -> None:
    load = fleet()
    reserve(load, 1, 2 * RATE, 0.0)
    load.close(reserve(load, 2, RATE, 0.0), 1.0)
    assert faded(load, 1.99) == []
    assert faded(load, 2.0) == [1]


def test_a_moved_reservation_queues_anew_where_it_comes_to() -> None:
    load = fleet(2)
    moved = reserve(load, 1, RATE, 0.0, slot=0)
    load.close(moved, 0.5)
    moved.slot = 1
    load.open(moved, 0.5)
    assert load.queued_tokens.tolist() == [0, RATE]
    assert load.requests.tolist() == [0, 1]
    assert faded(load, 1.49) == []
    assert faded(load, 1.5) == [1]


def test_seen_first_tokens_teach_the_rate_and_modelled_ones_do_not() -> None:
    load = fleet()
    now_s = 0.0
    for of in range(60):
        reservation = reserve(load, of, 1000, now_s)
        now_s += 0.5
        load.first_token(reservation, now_s, teaches=True)
        load.close(reservation, now_s)
        now_s += 3.0  # idle time is no prefill time
    assert load.prefill_rate[0] == pytest.approx(2000, rel=0.02)
    rate = float(load.prefill_rate[0])
    reserve(load, 1000, 5000, now_s)
    assert faded(load, now_s + 1000) == [1000]
    assert load.prefill_rate[0] == rate


def test_prompts_prefilled_together_add_up_to_the_true_rate() -> None:
    load = fleet()
    for round_ in range(60):
        together = [reserve(load, 10 * round_ + n, 500, float(round_)) for n in range(4)]
        for reservation in together:
            load.first_token(reservation, round_ + 0.5, teaches=True)
            load.close(reservation, round_ + 0.5)
    assert load.prefill_rate[0] == pytest.approx(4000, rel=0.02)


def test_less_than_a_block_teaches_nothing() -> None:
    load = fleet()
    load.first_token(reserve(load, 1, 15, 0.0), 60.0, teaches=True)
    assert load.prefill_rate[0] == RATE


def test_the_rate_stays_within_its_bounds() -> None:
    load = fleet(2)
    for n in range(200):
        load.first_token(reserve(load, n, 10**6, 0.0, slot=0), 0.0, teaches=True)
        load.first_token(reserve(load, 1000 + n, 16, 1e6 * n, slot=1), 1e6 * (n + 1), teaches=True)
    assert load.prefill_rate.tolist() == [PREFILL_RATE_MAX, PREFILL_RATE_MIN]


def test_a_report_that_knows_neither_block_size_nor_capacity_leaves_the_defaults() -> None:
    load = fleet()
    load.report(0, requests=0, block_tokens=32, kv_capacity_tokens=1000)
    assert (load.block_tokens[0], load.kv_capacity_tokens[0]) == (32, 1000)
    load.report(0, requests=0, block_tokens=0, kv_capacity_tokens=0)
    assert (load.block_tokens[0], load.kv_capacity_tokens[0]) == (16, 500_000)


@given(
    p_tokens=st.lists(st.integers(0, 50_000), min_size=1, max_size=12),
    look_s=st.lists(st.floats(0.0, 3.0), min_size=1, max_size=12),
)
def test_fading_does_not_depend_on_how_often_one_looks(p_tokens: list[int], look_s: list[float]) -> None:
    often, once = fleet(), fleet()
    for of, tokens in enumerate(p_tokens):
        reserve(often, of, tokens, 0.0)
        reserve(once, of, tokens, 0.0)
    now_s, seen = 0.0, []
    for passed_s in look_s:
        now_s += passed_s
        seen += faded(often, now_s)
    assert seen == faded(once, now_s)
    assert often.queued_tokens[0] == once.queued_tokens[0]
