"""Turns that come alone are taken at once; those that come thick are spaced."""

from hypothesis import given
from hypothesis import strategies as st

from trimtab_state.pace import Pace


def waits(pace: Pace, times_s: list[float]) -> list[float]:
    return [round(pace.wait_s(now_s), 6) for now_s in times_s]


def test_what_comes_alone_does_not_wait() -> None:
    assert waits(Pace(0.01, 2), [1.0, 1.02, 5.0]) == [0.0, 0.0, 0.0]


def test_a_burst_is_taken_at_once_and_then_turns_are_spaced() -> None:
    assert waits(Pace(0.01, 2), [1.0, 1.0, 1.0]) == [0.0, 0.0, 0.01]


def test_a_steady_stream_has_a_turn_in_every_period() -> None:
    pace, now_s, begun_s = Pace(0.01, 4), 1.0, []
    for _ in range(100):
        now_s += pace.wait_s(now_s)
        begun_s.append(now_s)
    assert round(begun_s[-1] - begun_s[3], 6) == 0.96


@given(st.lists(st.floats(0, 0.05), min_size=1, max_size=60), st.integers(1, 5))
def test_no_more_turns_begin_in_any_time_than_it_allows(gaps_s: list[float], burst: int) -> None:
    pace, now_s, begun_s = Pace(0.01, burst), 1.0, []
    for gap_s in gaps_s:
        now_s += gap_s
        now_s += pace.wait_s(now_s)
        begun_s.append(now_s)
    for first, begin_s in enumerate(begun_s):
        for count, end_s in enumerate(begun_s[first:], 1):
            assert count <= burst + (end_s - begin_s) / 0.01 + 1e-6
