"""Counters and histograms of one engine rank that outlive its requests: what the metrics page sums up.

The one rule: they only grow, from zero at the start of an engine process. Bucket limits are vLLM's.
"""

from bisect import bisect_left
from collections import Counter

from trimtab_lab.engine_request import FinishedRequest, StepOutcome

TTFT_BUCKETS_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
    640.0, 2560.0,
)  # fmt: skip
TOKEN_TIME_BUCKETS_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
REQUEST_TIME_BUCKETS_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip
STEP_TOKENS_BUCKETS = (1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0)


def tokens_buckets(limit: int) -> tuple[float, ...]:
    """1, 2, 5, 10, ... up to the longest context."""
    steps: list[float] = []
    power = 1
    while True:
        for step in (1, 2, 5):
            if step * power > limit:
                return tuple(steps)
            steps.append(float(step * power))
        power *= 10


class Histogram:
    __slots__ = ("buckets", "counts", "sum")

    def __init__(self, buckets: tuple[float, ...]) -> None:
        self.buckets = buckets
        self.counts = [0] * (len(buckets) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.buckets, value)] += times
        self.sum += value * times


class ServedCounts:
    def __init__(self, *, context_tokens_max: int = 32768) -> None:
        lengths = tokens_buckets(context_tokens_max)
        self.finished: Counter[str] = Counter()
        self.histograms = {
            "vllm:request_prompt_tokens": Histogram(lengths),
            "vllm:request_generation_tokens": Histogram(lengths),
            "vllm:request_params_max_tokens": Histogram(lengths),
            "vllm:request_prefill_kv_computed_tokens": Histogram(lengths),
            "vllm:iteration_tokens_total": Histogram(STEP_TOKENS_BUCKETS),
            "vllm:time_to_first_token_seconds": Histogram(TTFT_BUCKETS_S),
            "vllm:inter_token_latency_seconds": Histogram(TOKEN_TIME_BUCKETS_S),
            "vllm:request_time_per_output_token_seconds": Histogram(TOKEN_TIME_BUCKETS_S),
            "vllm:e2e_request_latency_seconds": Histogram(REQUEST_TIME_BUCKETS_S),
            "vllm:request_queue_time_seconds": Histogram(REQUEST_TIME_BUCKETS_S),
            "vllm:request_inference_time_seconds": Histogram(REQUEST_TIME_BUCKETS_S),
            "vllm:request_prefill_time_seconds": Histogram(REQUEST_TIME_BUCKETS_S),
            "vllm:request_decode_time_seconds": Histogram(REQUEST_TIME_BUCKETS_S),
        }

    def step(self, outcome: StepOutcome) -> None:
        self.histograms["vllm:iteration_tokens_total"].observe(outcome.prefill_tokens + outcome.decode_requests)
        later = sum(not token.is_first for token in outcome.new_tokens)
        if later:
            self.histograms["vllm:inter_token_latency_seconds"].observe(outcome.duration_s, later)

    def request(self, finished: FinishedRequest) -> None:
        self.finished[finished.reason.value] += 1
        if finished.scheduled_s is None or finished.first_token_s is None:
            return  # aborted before anything came out of it
        observe = {
            "vllm:request_prompt_tokens": float(finished.prompt_tokens),
            "vllm:request_generation_tokens": float(finished.output_tokens),
            "vllm:request_params_max_tokens": float(finished.tokens_requested),
            "vllm:request_prefill_kv_computed_tokens": float(finished.prompt_tokens - finished.cached_tokens),
            "vllm:time_to_first_token_seconds": finished.first_token_s - finished.arrived_s,
            "vllm:e2e_request_latency_seconds": finished.finished_s - finished.arrived_s,
            "vllm:request_queue_time_seconds": finished.scheduled_s - finished.arrived_s,
            "vllm:request_inference_time_seconds": finished.finished_s - finished.scheduled_s,
            "vllm:request_prefill_time_seconds": finished.first_token_s - finished.scheduled_s,
            "vllm:request_decode_time_seconds": finished.finished_s - finished.first_token_s,
        }
        for name, value in observe.items():
            self.histograms[name].observe(value)
        if finished.output_tokens > 1:
            per_token_s = (finished.finished_s - finished.first_token_s) / (finished.output_tokens - 1)
            self.histograms["vllm:request_time_per_output_token_seconds"].observe(per_token_s)
