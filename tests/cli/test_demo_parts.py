"""The demo's plan, its reading of the pickers' histograms, and what it warns of."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trimtab.decision_times import decision_times
from trimtab.demo import PLOT_SUFFIXES, Arm, document, warnings
from trimtab.demo_plan import ARM_S, LENGTH_DIVISOR, emulated_plan, real_plan
from trimtab.errors import UsageError
from trimtab.machine_load import CpuTimes, busy_share
from trimtab_core.selection import CORE_NAME
from trimtab_lab.replay import RequestResult
from trimtab_lab.report import plot, summarise

PAGE = """\
# TYPE trimtab_decision_seconds histogram
trimtab_decision_seconds_bucket{le="0.001",pool="p"} 2.0
trimtab_decision_seconds_bucket{le="0.002",pool="p"} 2.0
trimtab_decision_seconds_bucket{le="0.004",pool="p"} 3.0
trimtab_decision_seconds_bucket{le="+Inf",pool="p"} 4.0
trimtab_decision_seconds_count{pool="p"} 4.0
trimtab_decision_seconds_sum{pool="p"} 9.0
# TYPE trimtab_hop_seconds histogram
trimtab_hop_seconds_bucket{le="+Inf",pool="p"} 7.0
"""


def result(**changed: object) -> RequestResult:
    fields = {
        "index": 0,
        "due_s": 0.0,
        "late_s": 0.0,
        "ttft_s": 0.1,
        "tpot_s": 0.01,
        "total_s": 1.0,
        "prompt_tokens": 10,
        "cached_tokens": 5,
        "output_tokens": 3,
        "endpoint": "pod 1",
        "decision_s": None,
        "status": 200,
    }
    return RequestResult(**(fields | changed))  # type: ignore[arg-type]


def arm(*results: RequestResult, busy: float | None = 0.5, unchosen: int = 0) -> Arm:
    return Arm(policy="trimtab", results=list(results), summary=summarise(results), busy_share=busy, unchosen=unchosen)


def test_decision_times_are_spread_within_their_bucket() -> None:
    # Beyond the last bound nothing is known but that it was passed.
    assert decision_times([PAGE]) == pytest.approx([0.00025, 0.00075, 0.003, 0.004])
    assert len(decision_times([PAGE, PAGE])) == 8
    assert decision_times([]) == []


def test_the_plan_is_the_same_every_time_and_fits_into_one_replay() -> None:
    plan = emulated_plan(trace=None, rate_per_s=4.0, endpoints=4)
    assert plan == emulated_plan(trace=None, rate_per_s=4.0, endpoints=4)
    assert plan.length_s <= ARM_S
    assert len(plan.sendings) == pytest.approx(4.0 * ARM_S, rel=0.1)
    assert plan.sessions < len(plan.sendings) / 3
    flags = dict(zip(plan.engine_flags[::2], plan.engine_flags[1::2], strict=True))
    assert flags["--prompt-divisor"] == str(LENGTH_DIVISOR)
    assert int(flags["--num-gpu-blocks"]) * int(flags["--block-size"]) > int(flags["--max-model-len"])


@pytest.mark.parametrize("context_tokens", [1024, 4096, 8192])
def test_prompts_for_real_engines_fit_into_their_context(context_tokens: int) -> None:
    plan = real_plan(
        trace=None, rate_per_s=2.0, endpoints=2, context_tokens=context_tokens, engine_flags=("--block-size", "32")
    )
    longest = max(plan.sendings, key=lambda sending: len(sending.body))
    # The made-up text has more than two bytes a token, so this is well on the safe side of the truth.
    assert len(longest.body) / 10 < context_tokens
    assert all(json.loads(sending.body)["max_tokens"] <= 24 for sending in plan.sendings)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("not json\n", "line 1"),
        ('{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1]}\n', "line 1"),
        ('{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1]}\n', "1 requests are too few"),
        ("", "0 requests are too few"),
    ],
)
def test_a_file_that_is_no_trace_is_refused_with_the_flag(content: str, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(content)
    with pytest.raises(UsageError, match=rf"(?s)--trace .*{expected}"):
        emulated_plan(trace=path, rate_per_s=None, endpoints=1)


@pytest.mark.parametrize("suffix", PLOT_SUFFIXES)
def test_a_plot_can_have_every_suffix_that_is_taken(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"plot{suffix}"
    plot({"trimtab": [result()]}, path)
    assert path.stat().st_size > 1000


def test_the_figures_say_which_core_they_are_of() -> None:
    plan = emulated_plan(trace=None, rate_per_s=1.0, endpoints=1)
    assert document(plan, [arm(result())])["run"]["core"] == CORE_NAME


def test_what_makes_figures_doubtful_is_said() -> None:
    assert warnings([arm(result())]) == []
    assert warnings([arm(result(), busy=None)]) == []
    [busy] = warnings([arm(result(), busy=0.97)])
    assert "97% busy" in busy
    [late] = warnings([arm(result(late_s=1.5))])
    assert "1.50 s late" in late
    [unchosen] = warnings([arm(result(), unchosen=7)])
    assert "7 requests went on by round robin" in unchosen
    [failed] = warnings([arm(result(), result(error="HTTP 503: full"))])
    assert "1 requests failed, the first one with: HTTP 503: full" in failed


def test_the_share_of_busy_cpu_is_of_what_passed_in_between() -> None:
    assert busy_share(CpuTimes(busy=100, total=1000), CpuTimes(busy=160, total=1200)) == pytest.approx(0.3)
    assert busy_share(None, CpuTimes(busy=1, total=2)) is None
    assert busy_share(CpuTimes(busy=1, total=2), CpuTimes(busy=1, total=2)) is None
