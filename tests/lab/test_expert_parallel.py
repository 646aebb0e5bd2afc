"""An emulated engine whose experts are on several devices."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab_lab.engine_model import EngineModel
from trimtab_lab.engine_request import EngineRequest
from trimtab_lab.expert_parallel import ExpertParallel

SPREAD = ExpertParallel((0, 1, 0, 1), (1.0, 1.0))
PACKED = ExpertParallel((0, 0, 1, 1), (1.0, 1.0))
HOT = (1.0, 1.0, 0.0, 0.0)
"""A mix that uses the first two experts alone."""


def test_even_tokens_on_ordinary_devices_are_not_slowed_down() -> None:
    for engine in (SPREAD, PACKED):
        assert engine.slowdown([(100, None), (1, (1.0, 1.0, 1.0, 1.0))]) == pytest.approx(1.0)


def test_a_step_waits_for_the_device_on_which_its_tokens_come_together() -> None:
    assert SPREAD.slowdown([(100, HOT)]) == pytest.approx(1.0)
    assert PACKED.slowdown([(100, HOT)]) == pytest.approx(2.0)
    assert PACKED.slowdown([(100, HOT), (100, None)]) == pytest.approx(1.5)


def test_a_slow_device_slows_down_what_it_has_to_do() -> None:
    slow = ExpertParallel((0, 1), (1.0, 0.5))
    assert slow.slowdown([(10, None)]) == pytest.approx(2.0)
    assert slow.slowdown([(10, (1.0, 0.0))]) == pytest.approx(2.0)
    assert slow.slowdown([(10, (0.0, 1.0))]) == pytest.approx(4.0)


def test_costs_tell_where_tokens_come_together() -> None:
    mix = (3.0, 3.0, 1.0, 1.0)
    assert PACKED.costs(mix) == pytest.approx((1.5, 1.5, 0.5, 0.5))
    assert SPREAD.costs(mix) == pytest.approx((1.0, 1.0, 1.0, 1.0))


MIX = st.lists(st.floats(0, 5), min_size=4, max_size=4).filter(lambda mix: sum(mix) > 0.1)


@given(mix=MIX.map(tuple))
def test_a_mixs_own_expected_cost_is_never_more_than_what_it_is_slowed_down_by(mix: tuple[float, ...]) -> None:
    """The sum of p times cost is a mean over devices, and the step waits for the slowest."""
    for engine in (SPREAD, PACKED, ExpertParallel((0, 1, 1, 2), (1.0, 0.5, 2.0))):
        expected = sum(p * cost for p, cost in zip(mix, engine.costs(mix), strict=True)) / sum(mix)
        assert expected <= engine.slowdown([(7, mix)]) * (1 + 1e-9)


@pytest.mark.parametrize("devices", [(), (0, 2), (1, 1)])
def test_devices_without_experts_are_refused(devices: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="device"):
        ExpertParallel(devices, (1.0, 1.0))


def test_an_engine_takes_longer_for_prompts_whose_experts_are_together() -> None:
    def duration_s(experts: ExpertParallel | None) -> float:
        engine = EngineModel(experts=experts)
        engine.add(EngineRequest(request_id="a", prompt=range(1000), output=[1], experts=HOT), 0.0)
        outcome = engine.step(0.0)
        assert outcome is not None
        return outcome.duration_s - engine.step_time.base_s

    assert duration_s(SPREAD) == pytest.approx(duration_s(None))
    assert duration_s(PACKED) == pytest.approx(2 * duration_s(None))
