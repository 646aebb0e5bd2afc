"""Engines' metrics, of several releases, are read into the same few numbers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sidecar_captures import metrics_text

from trimtab_sidecar.engine_metrics import EngineMetrics, RankMetrics, parse_metrics
from trimtab_sidecar.kv_sources import RANKS_MAX
from trimtab_sidecar.scrape_pace import ScrapePace
from trimtab_state.documents import Heartbeat, decode_heartbeat, encode


def test_a_captured_dump_of_an_idle_engine_is_read() -> None:
    metrics = parse_metrics(metrics_text("metrics_before"))
    assert metrics.process_start_s == pytest.approx(1_795_984_926.9)
    rank = metrics.rank(0)
    assert (rank.running, rank.waiting, rank.kv_usage) == (0, 0, 0.0)
    assert (rank.block_tokens, rank.kv_capacity_tokens) == (32, 2_048)
    assert (rank.is_asleep, rank.is_cache_discarded) == (False, False)


def test_a_captured_dump_of_a_busy_engine_is_read() -> None:
    rank = parse_metrics(metrics_text("metrics_during_queued")).rank(0)
    assert (rank.running, rank.waiting) == (2, 2)
    assert rank.kv_usage == pytest.approx(0.5397, abs=1e-4)
    assert (rank.prompt_tokens_total, rank.generation_tokens_total) == (5_676, 963)
    assert (rank.cache_query_tokens_total, rank.cache_hit_tokens_total) == (5_676, 0)


def test_the_older_name_of_the_cache_usage_is_read() -> None:
    assert parse_metrics('vllm:gpu_cache_usage_perc{model_name="m"} 0.25\n').rank(0).kv_usage == 0.25


def test_ranks_are_told_apart_and_served_names_summed() -> None:
    metrics = parse_metrics(
        'vllm:num_requests_running{engine="0",model_name="m"} 1.0\n'
        'vllm:num_requests_running{engine="0",model_name="adapter"} 2.0\n'
        'vllm:num_requests_running{engine="1",model_name="m"} 5.0\n'
        'vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="100"} 1.0\n'
    )
    assert [metrics.rank(0).running, metrics.rank(1).running] == [3, 5]
    # The geometry is the same for all ranks, and some releases tell it once.
    assert [metrics.rank(n).kv_capacity_tokens for n in (0, 1)] == [1_600, 1_600]
    assert metrics.rank(7) == RankMetrics()


def test_an_engine_alone_behind_its_port_may_call_itself_any_rank() -> None:
    assert parse_metrics('vllm:num_requests_running{engine="3"} 4.0\n').rank(0).running == 4


def test_a_geometry_that_is_not_settled_yet_is_none() -> None:
    rank = parse_metrics('vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="None"} 1.0\n').rank(0)
    assert (rank.block_tokens, rank.kv_capacity_tokens) == (16, None)


@pytest.mark.parametrize(
    ("states", "asleep", "discarded"),
    [("100", False, False), ("010", True, True), ("001", True, True), ("000", True, False)],
)
def test_sleep_and_what_it_does_to_the_cache_are_read(states: str, asleep: bool, discarded: bool) -> None:
    names = ("awake", "weights_offloaded", "discard_all")
    text = "".join(
        f'vllm:engine_sleep_state{{engine="0",sleep_state="{name}"}} {value}.0\n'
        for name, value in zip(names, states, strict=True)
    )
    rank = parse_metrics(text).rank(0)
    assert (rank.is_asleep, rank.is_cache_discarded) == (asleep, discarded)


def test_sglang_is_read() -> None:
    rank = parse_metrics(
        'sglang:num_running_reqs{model_name="m",tp_rank="0"} 3.0\n'
        'sglang:num_queue_reqs{model_name="m"} 4.0\n'
        'sglang:token_usage{model_name="m"} 0.5\n'
        "sglang:page_size 64.0\n"
        'sglang:max_total_num_tokens{model_name="m"} 64000.0\n'
    ).rank(0)
    assert (rank.running, rank.waiting, rank.kv_usage) == (3, 4, 0.5)
    assert (rank.block_tokens, rank.kv_capacity_tokens) == (64, 64_000)


@pytest.mark.parametrize(
    "line",
    ['vllm:num_requests_running{engine="0"} x', "vllm:num_requests_running{ 1", "vllm:num_requests_running NaN",
     'vllm:num_requests_running{engine="9999999999"} +Inf', "vllm:num_requests_running -1.0"],
)  # fmt: skip
def test_nonsense_is_not_there(line: str) -> None:
    assert parse_metrics(line).rank(0).running == 0


def test_text_of_another_process_says_nothing() -> None:
    assert parse_metrics("go_goroutines 7\n") == EngineMetrics()


@given(st.text(max_size=80))
def test_no_text_brings_the_reader_down(text: str) -> None:
    parse_metrics(f"vllm:num_requests_running{text}\nvllm:cache_config_info{{{text}}} 1.0")


def test_an_engine_is_looked_at_more_rarely_while_nothing_changes() -> None:
    pace = ScrapePace(busy_s=1.0, idle_s=3.0)
    assert pace.next(changed=True, busy=False) == 1.0
    idle = [pace.next(changed=False, busy=False) for _ in range(4)]
    assert idle == [1.5, 2.25, 3.0, 3.0]
    assert pace.next(changed=False, busy=True) == 1.0
    assert pace.next(changed=True, busy=False) == 1.0


def test_numbers_that_no_engine_can_mean_fit_in_a_heartbeat_or_are_none() -> None:
    nines = "9" * 15
    rank = parse_metrics(
        f'vllm:cache_config_info{{block_size="{nines}",num_gpu_blocks="{nines}"}} 1.0\n'
        "vllm:num_requests_running 9e17\n"
        "vllm:num_requests_running 9e17\n"
    ).rank(0)
    assert (rank.block_tokens, rank.kv_capacity_tokens) == (None, None)
    beat = Heartbeat(endpoint="e", epoch="e", running=rank.running)
    assert decode_heartbeat(encode(beat)) == beat


def test_the_ranks_that_a_dump_claims_are_bounded() -> None:
    dump = "".join(f'vllm:num_requests_running{{engine="{rank}"}} 1\n' for rank in range(2 * RANKS_MAX))
    assert len(parse_metrics(dump).ranks) == RANKS_MAX


def test_labels_that_are_none_are_passed_over_in_one_go() -> None:
    # Were each of its letters a place to start anew, this one line would take hours.
    noise = "a" * 5_000_000
    metrics = parse_metrics(f'vllm:num_requests_running{{{noise},engine="1",b="{noise}}} 2\n')
    assert metrics.ranks[1].running == 2


def test_what_experts_cost_is_read_by_rank_in_steps_that_noise_does_not_cross() -> None:
    name = "trimtab:expert_cost_ratio"
    text = "\n".join(
        [
            f'{name}{{engine="0",expert="3"}} 1.512',
            f'{name}{{engine="0",expert="4"}} 1.01',
            f'{name}{{expert="9"}} 0.01',
        ]
        + [f'{name}{{engine="1",expert="3"}} 2.0', f'{name}{{engine="1",expert="5"}} 101']
        + [f'{name}{{expert="{wrong}"}} 2.0' for wrong in ("1024", "-1", "x", "")]
        + [f'{name}{{expert="7"}} {wrong}' for wrong in ("0", "-2", "NaN", "+Inf")]
    )
    metrics = parse_metrics(text + "\n")
    assert metrics.rank(0).expert_costs == {3: 1_500, 9: 50}
    assert metrics.rank(1).expert_costs == {3: 2_000}
