"""Engines side by side in virtual time."""

import pytest

from trimtab_lab.engine_model import EngineModel
from trimtab_lab.engine_request import EngineRequest, StepOutcome
from trimtab_lab.engine_settings import EngineSettings
from trimtab_lab.step_time import StepTime
from trimtab_lab.virtual_fleet import Arrival, FleetError, run_fleet

PRICE = StepTime(base_s=1.0, prefill_token_s=0.1, decode_request_s=0, prefill_attention_s=0, decode_attention_s=0)


class InTurn:
    def __init__(self, count: int) -> None:
        self.count = count
        self.seen: list[tuple[float, int]] = []
        self.routed_s: list[float] = []

    def route(self, request: EngineRequest, now_s: float) -> int:
        self.routed_s.append(now_s)
        assert all(ended_s <= now_s for ended_s, _ in self.seen), "the router sees nothing of the future"
        return (len(self.routed_s) - 1) % self.count

    def on_step(self, engine: int, outcome: StepOutcome) -> None:
        self.seen.append((outcome.ended_s, engine))


def engines(count: int) -> list[EngineModel]:
    settings = EngineSettings(block_count=64, block_tokens=4, context_tokens_max=64)
    return [EngineModel(settings, PRICE) for _ in range(count)]


def arrival(at_s: float, name: str, tokens: int = 10, output: int = 2) -> Arrival:
    request = EngineRequest(request_id=name, prompt=list(range(tokens)), output=[900] * output)
    return Arrival(at_s=at_s, request=request)


def test_engines_work_side_by_side_and_requests_wait_for_the_step_under_way() -> None:
    router = InTurn(2)
    served = run_fleet(engines(2), [arrival(0, "a"), arrival(0.5, "b"), arrival(0.6, "c")], router)
    times = {entry.finished.request_id: (entry.engine, entry.finished.first_token_s) for entry in served}
    # a: 0 + 2.0. b: its own engine, 0.5 + 2.0. c: waits for a's step until 2.0; hits 8 of 10 tokens; 1 + 0.2.
    assert times["a"] == (0, pytest.approx(2.0))
    assert times["b"] == (1, pytest.approx(2.5))
    assert times["c"] == (0, pytest.approx(3.2))
    assert {entry.finished.request_id: entry.finished.cached_tokens for entry in served} == {"a": 0, "b": 0, "c": 8}
    assert [ended_s for ended_s, _ in router.seen] == sorted(ended_s for ended_s, _ in router.seen)
    [only] = [entry for entry in served if entry.finished.request_id == "b"]
    assert (only.ttft_s, only.tpot_s) == (pytest.approx(2.0), pytest.approx(1.0))


def test_an_idle_fleet_starts_again_at_the_next_arrival() -> None:
    served = run_fleet(engines(1), [arrival(0, "a", output=1), arrival(100, "b", output=1)], InTurn(1))
    assert served[1].ttft_s == pytest.approx(1.2)
    assert served[1].tpot_s is None


def test_a_run_repeats() -> None:
    load = [arrival(number * 0.3, str(number), tokens=5 + number % 7, output=1 + number % 5) for number in range(80)]
    assert run_fleet(engines(3), load, InTurn(3)) == run_fleet(engines(3), load, InTurn(3))


def test_a_router_that_invents_engines_and_requests_that_do_not_fit_are_errors() -> None:
    with pytest.raises(FleetError, match="no engine 1"):
        run_fleet(engines(1), [arrival(0, "a"), arrival(1, "b")], InTurn(2))
    with pytest.raises(FleetError, match="too_long"):
        run_fleet(engines(1), [arrival(0, "a", tokens=70)], InTurn(1))


class TakesItsTime(InTurn):
    """Names the engine of every second request half a second after it came."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.held: list[tuple[float, EngineRequest, int]] = []

    def route(self, request: EngineRequest, now_s: float) -> int | None:  # type: ignore[override]
        engine = super().route(request, now_s)
        if len(self.routed_s) % 2:
            return engine
        self.held.append((now_s + 0.5, request, engine))
        return None

    def next_s(self) -> float | None:
        return self.held[0][0] if self.held else None

    def decided(self, now_s: float) -> list[tuple[EngineRequest, int]]:
        assert all(ended_s <= now_s for ended_s, _ in self.seen)
        due = [(request, engine) for at_s, request, engine in self.held if at_s <= now_s]
        self.held = self.held[len(due) :]
        return due


def test_a_router_may_name_the_engine_later_and_the_engine_starts_then() -> None:
    load = [arrival(0, "a"), arrival(0.1, "b"), arrival(7.0, "c"), arrival(7.0, "d")]
    served = run_fleet(engines(4), load, TakesItsTime(4))
    first_s = {entry.finished.request_id: entry.finished.first_token_s for entry in served}
    assert first_s == {
        "a": pytest.approx(2.0),
        "b": pytest.approx(2.6),
        "c": pytest.approx(9.0),
        "d": pytest.approx(9.5),
    }
