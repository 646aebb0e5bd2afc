"""What an engine says of itself in Prometheus text: load, cache geometry, sleep, identity. Pure.

The one rule: only the handful of series that are named here are looked at; a dump of some 50 KB is searched, not
parsed. Releases and engines that lack a series leave the field at None, and the caller does without.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from trimtab_sidecar.kv_sources import RANKS_MAX
from trimtab_state.documents import BLOCK_TOKENS_MAX, COUNT_MAX
from trimtab_state.request_class import COST_MILLI_MAX, EXPERTS_MAX

METRICS_BYTES_MAX = 4 * 1024 * 1024
"""A larger dump is not read to its end."""

RUNNING = ("vllm:num_requests_running", "sglang:num_running_reqs")
WAITING = ("vllm:num_requests_waiting", "sglang:num_queue_reqs")
KV_USAGE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage")
PROMPT_TOKENS = ("vllm:prompt_tokens_total", "sglang:prompt_tokens_total")
GENERATION_TOKENS = ("vllm:generation_tokens_total", "sglang:generation_tokens_total")
CACHE_QUERIES = ("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total")
CACHE_HITS = ("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total", "sglang:cached_tokens_total")
PAGE_TOKENS = ("sglang:page_size",)
CAPACITY_TOKENS = ("sglang:max_total_num_tokens",)
CACHE_INFO = ("vllm:cache_config_info",)
SLEEP = ("vllm:engine_sleep_state",)
EXPERT_COST = ("trimtab:expert_cost_ratio",)
"""Time of a token through one expert, in parts of what it takes where all experts are even. No engine has it of itself
yet; whoever measures it can put it on the engine's page."""
COST_STEP_MILLI = 50
"""Costs are told in steps, so that what is measured anew all the time is not another one each time."""
PROCESS_START = ("process_start_time_seconds",)
WANTED = (
    *RUNNING, *WAITING, *KV_USAGE, *PROMPT_TOKENS, *GENERATION_TOKENS, *CACHE_QUERIES, *CACHE_HITS, *PAGE_TOKENS,
    *CAPACITY_TOKENS, *CACHE_INFO, *SLEEP, *EXPERT_COST, *PROCESS_START,
)  # fmt: skip
_line = re.compile(rf"^({'|'.join(map(re.escape, WANTED))})(?:{{(.*)}})? ([^ \n]+)", re.MULTILINE)
# Possessive, and begun at the edge of a word: text that is no label is passed over once, not once for each letter.
_label = re.compile(r'(?<!\w)([a-zA-Z_]\w*+)="((?:[^"\\]|\\.)*+)"')
RANK_LABELS = ("engine", "dp_rank")
"""Labels by which vLLM and SGLang tell data-parallel ranks apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMetrics:
    """One data-parallel rank. Counts are summed over the names that one engine serves under."""

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    """Share of the KV cache that requests hold, 0 to 1; a full prefix cache counts as free."""
    block_tokens: int | None = None
    kv_capacity_tokens: int | None = None
    is_asleep: bool | None = None
    """None: the engine does not say."""
    is_cache_discarded: bool = False
    """It sleeps so deeply that its KV cache is gone; engines send no event that says so."""
    prompt_tokens_total: int = 0
    generation_tokens_total: int = 0
    cache_query_tokens_total: int = 0
    cache_hit_tokens_total: int = 0
    expert_costs: Mapping[int, int] = field(default_factory=dict)
    """Of the experts that do not cost 1, in thousandths."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMetrics:
    ranks: Mapping[int, RankMetrics] = field(default_factory=dict)
    """By rank number; an engine without ranks is rank 0."""
    process_start_s: float | None = None
    """Names the process; another one means that the engine was restarted."""

    def rank(self, number: int) -> RankMetrics:
        """The metrics of a rank. An engine that is alone behind its port may label itself as any rank."""
        found = self.ranks.get(number)
        if found is None and len(self.ranks) == 1:
            found = next(iter(self.ranks.values()))
        return found or RankMetrics()


def parse_metrics(text: str) -> EngineMetrics:
    """The series that matter, from Prometheus text. Never raises: what cannot be read is not there."""
    sums: dict[int, dict[str, float]] = {}
    geometry: dict[int, tuple[int | None, int | None]] = {}
    asleep: dict[int, bool] = {}
    discarded: set[int] = set()
    experts: dict[int, dict[int, int]] = {}
    seen: set[int] = set()
    process_start_s: float | None = None
    for name, labels, value in series(text):
        rank = _rank(labels)
        if rank not in seen:
            if len(seen) >= RANKS_MAX:
                continue  # more than an engine can have
            seen.add(rank)
        if name in PROCESS_START:
            process_start_s = value
        elif name in CACHE_INFO:
            geometry[rank] = _geometry(labels)
        elif name in EXPERT_COST:
            expert, cost_milli = _decimal(labels, "expert"), _steps(value)
            if expert is not None and expert < EXPERTS_MAX and cost_milli is not None:
                experts.setdefault(rank, {})[expert] = cost_milli
        elif name in SLEEP:
            if labels.get("sleep_state") == "awake":
                asleep[rank] = value == 0.0
            elif value:
                discarded.add(rank)
        else:
            rank_sums = sums.setdefault(rank, {})
            rank_sums[name] = rank_sums.get(name, 0.0) + value
    ranks = {}
    for rank in sorted({*sums, *geometry, *asleep, *experts}):
        found = sums.get(rank, {})
        block_tokens, capacity_tokens = geometry.get(rank, geometry.get(0, (None, None)))
        ranks[rank] = RankMetrics(
            running=_count(found, RUNNING) or 0,
            waiting=_count(found, WAITING) or 0,
            kv_usage=min(max(_first(found, KV_USAGE) or 0.0, 0.0), 1.0),
            block_tokens=_up_to(BLOCK_TOKENS_MAX, block_tokens or _count(found, PAGE_TOKENS)),
            kv_capacity_tokens=_up_to(COUNT_MAX, capacity_tokens or _count(found, CAPACITY_TOKENS)),
            is_asleep=asleep.get(rank),
            is_cache_discarded=rank in discarded and asleep.get(rank, True),
            prompt_tokens_total=_count(found, PROMPT_TOKENS) or 0,
            generation_tokens_total=_count(found, GENERATION_TOKENS) or 0,
            cache_query_tokens_total=_count(found, CACHE_QUERIES) or 0,
            cache_hit_tokens_total=_count(found, CACHE_HITS) or 0,
            expert_costs=experts.get(rank, {}),
        )
    return EngineMetrics(ranks=ranks, process_start_s=process_start_s)


def series(text: str) -> Iterator[tuple[str, dict[str, str], float]]:
    """(name, labels, value) of the wanted series, finite values only."""
    for match in _line.finditer(text):
        try:
            value = float(match[3])
        except ValueError:
            continue
        if abs(value) < 1e18:
            yield match[1], {key: _unescape(raw) for key, raw in _label.findall(match[2] or "")}, value


def _rank(labels: Mapping[str, str]) -> int:
    for label in RANK_LABELS:
        value = labels.get(label, "")
        if value.isdecimal() and len(value) < 6:
            return int(value)
    return 0


def _geometry(labels: Mapping[str, str]) -> tuple[int | None, int | None]:
    """(tokens per block, tokens of the whole cache) from vLLM's configuration labels; "None" where not settled yet."""
    block, blocks, tokens = (_decimal(labels, key) for key in ("block_size", "num_gpu_blocks", "kv_cache_size_tokens"))
    return block, tokens or (block * blocks if block and blocks else None)


def _decimal(labels: Mapping[str, str], key: str) -> int | None:
    value = labels.get(key, "")
    return int(value) if value.isdecimal() and len(value) < 16 else None


def _steps(cost: float) -> int | None:
    """A cost in thousandths, rounded; None: it is 1, or nothing that a cost can be."""
    if not 0 < cost <= COST_MILLI_MAX / 1000:
        return None
    cost_milli = max(round(cost * 1000 / COST_STEP_MILLI) * COST_STEP_MILLI, COST_STEP_MILLI)
    return None if cost_milli == 1000 else cost_milli


def _first(found: Mapping[str, float], names: tuple[str, ...]) -> float | None:
    return next((found[name] for name in names if name in found), None)


def _count(found: Mapping[str, float], names: tuple[str, ...]) -> int | None:
    value = _first(found, names)
    return None if value is None else min(max(int(value), 0), COUNT_MAX)


def _up_to(most: int, value: int | None) -> int | None:
    """The value; None for one that no engine can mean."""
    return value if value is None or value <= most else None


def _unescape(value: str) -> str:
    if "\\" not in value:
        return value
    return re.sub(r"\\(.)", lambda match: {"n": "\n"}.get(match[1], match[1]), value)
