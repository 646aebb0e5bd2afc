"""The `/metrics` page of an emulated engine, under vLLM's names, in Prometheus' text format.

The one rule: a metric that is here is called, labelled and counted as vLLM 0.32 does it; but for the costs of experts,
for which no engine has a metric yet. Written by hand since a page is scraped several times a second on a small machine.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from trimtab_lab.engine_request import EngineStats
from trimtab_lab.engine_settings import EngineSettings
from trimtab_lab.served_counts import ServedCounts

CONTENT_TYPE = "text/plain; version=1.0.0; charset=utf-8"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMetrics:
    """What one data-parallel rank shows."""

    rank: int
    stats: EngineStats
    counts: ServedCounts
    is_asleep: bool


def metrics_page(
    ranks: Sequence[RankMetrics],
    *,
    model_name: str,
    settings: EngineSettings,
    process_start_s: float,
    cpu_s: float,
    rejected: Mapping[str, int],
    lora_names: Sequence[str],
    lora_running: Sequence[str],
    lora_waiting: Sequence[str],
    expert_costs: Mapping[int, float],
    now_s: float,
) -> str:
    page = _Page()
    page.family("process_start_time_seconds", "gauge", "Start time of the process since unix epoch in seconds.")
    page.sample("process_start_time_seconds", {}, process_start_s)
    page.family("process_cpu_seconds_total", "counter", "Total user and system CPU time spent in seconds.")
    page.sample("process_cpu_seconds_total", {}, cpu_s)

    def each(name: str, kind: str, text: str, values: Iterable[tuple[int, Mapping[str, str], float]]) -> None:
        page.family(name, kind, text)
        for rank, labels, value in values:
            page.sample(name, {"engine": str(rank), **labels, "model_name": model_name}, value)

    def plain(name: str, kind: str, text: str, value: str) -> None:
        each(name, kind, text, [(r.rank, {}, float(getattr(r.stats, value))) for r in ranks])

    plain("vllm:num_requests_running", "gauge", "Number of requests in model execution batches.", "running")
    plain("vllm:num_requests_waiting", "gauge", "Number of requests waiting to be processed.", "waiting")
    each(
        "vllm:num_requests_waiting_by_reason",
        "gauge",
        "Number of waiting requests by reason.",
        [
            sample
            for r in ranks
            for sample in (
                (r.rank, {"reason": "capacity"}, float(r.stats.waiting)),
                (r.rank, {"reason": "deferred"}, 0.0),
            )
        ],
    )
    each(
        "vllm:engine_sleep_state",
        "gauge",
        "Engine sleep state; awake = 0 means engine is sleeping; awake = 1 means engine is awake.",
        [
            (r.rank, {"sleep_state": state}, float(on))
            for r in ranks
            for state, on in (
                ("awake", not r.is_asleep),
                ("weights_offloaded", r.is_asleep),
                ("discard_all", False),
            )
        ],
    )
    plain("vllm:kv_cache_usage_perc", "gauge", "KV-cache usage. 1 means 100 percent usage.", "kv_usage")
    plain(
        "vllm:prefix_cache_queries_total",
        "counter",
        "Prefix cache queries, in terms of number of queried tokens.",
        "cache_queries_tokens",
    )
    plain(
        "vllm:prefix_cache_hits_total",
        "counter",
        "Prefix cache hits, in terms of number of cached tokens.",
        "cache_hits_tokens",
    )
    plain("vllm:num_preemptions_total", "counter", "Cumulative number of preemption from the engine.", "preemptions")
    plain("vllm:prompt_tokens_total", "counter", "Number of prefill tokens processed.", "prompt_tokens")
    each(
        "vllm:prompt_tokens_by_source_total",
        "counter",
        "Number of prompt tokens by source.",
        [
            (r.rank, {"source": source}, float(value))
            for r in ranks
            for source, value in (
                ("local_compute", r.stats.prompt_tokens - r.stats.prompt_tokens_cached),
                ("local_cache_hit", r.stats.prompt_tokens_cached),
                ("external_kv_transfer", 0),
            )
        ],
    )
    plain(
        "vllm:prompt_tokens_cached_total",
        "counter",
        "Number of cached prompt tokens (local + external).",
        "prompt_tokens_cached",
    )
    plain("vllm:generation_tokens_total", "counter", "Number of generation tokens processed.", "output_tokens")
    each(
        "vllm:request_success_total",
        "counter",
        "Count of successfully processed requests.",
        [
            (r.rank, {"finished_reason": reason}, float(r.counts.finished[reason]))
            for r in ranks
            for reason in ("stop", "length", "abort", "error", "repetition")
        ],
    )
    page.family("vllm:admission_rejections_total", "counter", "Number of admission attempts rejected by a queue limit.")
    for reason in ("max_num_queued_reqs", "max_num_queued_tokens"):
        page.sample(
            "vllm:admission_rejections_total",
            {"model_name": model_name, "reason": reason},
            float(rejected.get(reason, 0)),
        )
    for name in ranks[0].counts.histograms:
        page.family(name, "histogram", name.removeprefix("vllm:").replace("_", " ").capitalize() + ".")
        for r in ranks:
            page.histogram(name, {"engine": str(r.rank), "model_name": model_name}, r.counts)
    if lora_names:
        page.family("vllm:lora_requests_info", "gauge", "Running stats on lora requests.")
        labels = {
            "max_lora": str(len(lora_names)),
            "running_lora_adapters": ",".join(lora_running),
            "waiting_lora_adapters": ",".join(lora_waiting),
        }
        page.sample("vllm:lora_requests_info", labels, now_s)
    if expert_costs:
        each(
            "trimtab:expert_cost_ratio",
            "gauge",
            "Time of a token through an expert, in parts of what it takes where experts are even.",
            [(r.rank, {"expert": str(expert)}, cost) for r in ranks for expert, cost in expert_costs.items()],
        )
    page.family("vllm:cache_config_info", "gauge", "Information of the LLMEngine CacheConfig")
    for r in ranks:
        page.sample("vllm:cache_config_info", _cache_config(r.rank, settings), 1.0)
    return page.text()


def _cache_config(rank: int, settings: EngineSettings) -> dict[str, str]:
    concurrency = (settings.block_count - 1) * settings.block_tokens / settings.context_tokens_max
    return {
        "_block_size_resolved": "True",
        "block_size": str(settings.block_tokens),
        "cache_dtype": "auto",
        "effective_attention_block_size": str(settings.block_tokens),
        "enable_prefix_caching": str(settings.prefix_caching),
        "engine": str(rank),
        "gpu_memory_utilization": "0.92",
        "hash_block_size": "None",
        "is_attention_free": "False",
        "kv_cache_max_concurrency": str(concurrency),
        "kv_cache_size_tokens": str(settings.block_count * settings.block_tokens),
        "num_cpu_blocks": "None",
        "num_gpu_blocks": str(settings.block_count),
        "num_gpu_blocks_override": str(settings.block_count),
        "prefix_caching_hash_algo": "sha256",
        "sliding_window": "None",
        "user_specified_block_size": "True",
    }


class _Page:
    __slots__ = ("_lines",)

    def __init__(self) -> None:
        self._lines: list[str] = []

    def family(self, name: str, kind: str, text: str) -> None:
        self._lines.append(f"# HELP {name} {text}\n# TYPE {name} {kind}")

    def sample(self, name: str, labels: Mapping[str, str], value: float) -> None:
        inside = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels.items())
        self._lines.append(f"{name}{{{inside}}} {value!r}" if inside else f"{name} {value!r}")

    def histogram(self, name: str, labels: Mapping[str, str], counts: ServedCounts) -> None:
        histogram = counts.histograms[name]
        inside = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels.items())
        total = 0
        for limit, count in zip((*map(repr, histogram.buckets), "+Inf"), histogram.counts, strict=True):
            total += count
            self._lines.append(f'{name}_bucket{{{inside},le="{limit}"}} {float(total)!r}')
        self._lines.append(f"{name}_count{{{inside}}} {float(total)!r}\n{name}_sum{{{inside}}} {histogram.sum!r}")

    def text(self) -> str:
        return "\n".join(self._lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
