"""An LLM engine without a model: continuous batching, chunked prefill, a prefix cache, preemption; time is explicit.

The one rule: whatever happens follows from the requests, the settings and the times passed in. No clock, no randomness,
no I/O, so the same model runs in virtual time (a fleet simulated in seconds) and in real time (the emulator).

A step has two halves. `schedule(now_s)` fixes what is computed and for how long, and makes the blocks of this step
visible to the prefix cache at once, as vLLM does; `complete(now_s)` hands out its tokens and KV events when it is over.
`step(now_s)` does both. Requests may be added or aborted in between. Running requests go first, in the order they were
admitted; then waiting ones, first come first served, while tokens and blocks are left. When a running request cannot
get a block, the request admitted last loses all of its blocks and goes back to the head of the queue.
"""

from collections import deque
from dataclasses import dataclass, field
from hashlib import sha256

from trimtab_lab.block_cache import BlockCache, LiveChain
from trimtab_lab.engine_request import (
    EngineRequest,
    EngineStats,
    FinishedRequest,
    FinishReason,
    NewToken,
    Refusal,
    StepOutcome,
    StepPlan,
)
from trimtab_lab.engine_settings import EngineSettings
from trimtab_lab.expert_parallel import ExpertParallel
from trimtab_lab.step_time import StepTime
from trimtab_lab.token_chain import TokenChain


@dataclass(slots=True, eq=False)
class _Live:
    """A request inside the engine."""

    request: EngineRequest
    chain: TokenChain
    arrived_s: float
    blocks: list[int] = field(default_factory=list)
    stored_blocks: int = 0
    computed_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    scheduled_s: float | None = None
    first_token_s: float | None = None
    is_running: bool = False


@dataclass(frozen=True, slots=True)
class _Scheduled:
    plan: StepPlan
    work: tuple[tuple[_Live, int], ...]


class EngineModel:
    """One engine (or one data-parallel rank of one)."""

    def __init__(
        self,
        settings: EngineSettings | None = None,
        step_time: StepTime | None = None,
        experts: ExpertParallel | None = None,
    ) -> None:
        """`experts`: of a mixture-of-experts model; None: a dense one."""
        self.settings = settings or EngineSettings()
        self.step_time = step_time or StepTime()
        self.experts = experts
        self.epoch = 0
        self._root = sha256(self.settings.hash_seed.encode()).digest()
        self._start_empty()

    def _start_empty(self) -> None:
        settings = self.settings
        self._cache = BlockCache(
            block_count=settings.block_count, block_tokens=settings.block_tokens, caching=settings.prefix_caching
        )
        self._live: dict[str, _Live] = {}
        self._running: list[_Live] = []
        self._waiting: deque[_Live] = deque()
        self._in_step: _Scheduled | None = None
        self._cache_queries_tokens = 0
        self._cache_hits_tokens = 0
        self._preemptions = 0
        self._prompt_tokens = 0
        self._prompt_tokens_cached = 0
        self._output_tokens = 0

    # -- requests

    def add(self, request: EngineRequest, now_s: float) -> Refusal | None:
        """Queue a request. None: it is in; otherwise why not."""
        settings = self.settings
        if request.request_id in self._live:
            return Refusal.DUPLICATE
        if not request.prompt or not (request.output or request.prefill_only):
            raise ValueError("a request needs at least one prompt token and one output token")
        if len(request.prompt) + len(request.output) > settings.context_tokens_max:
            return Refusal.TOO_LONG
        if settings.queued_requests_max is not None and len(self._waiting) >= settings.queued_requests_max:
            return Refusal.QUEUE_FULL
        chain = TokenChain(
            request.prompt,
            block_tokens=settings.block_tokens,
            root=self._root,
            lora=request.lora,
            cache_salt=request.cache_salt,
        )
        live = _Live(request=request, chain=chain, arrived_s=now_s)
        self._live[request.request_id] = live
        self._waiting.append(live)
        return None

    def abort(self, request_id: str, now_s: float) -> FinishedRequest | None:
        """End a request now; its blocks are free at once. None: no such request."""
        live = self._live.get(request_id)
        if live is None:
            return None
        if live.is_running:
            self._running.remove(live)
        else:
            self._waiting.remove(live)
        return self._finish(live, FinishReason.ABORT, now_s)

    # -- steps

    @property
    def has_work(self) -> bool:
        """Whether another step would compute something."""
        return bool(self._running or self._waiting)

    @property
    def is_stepping(self) -> bool:
        return self._in_step is not None

    def step(self, now_s: float) -> StepOutcome | None:
        """One whole step from `now_s` on; its outcome belongs to `ended_s`. None: nothing to do."""
        plan = self.schedule(now_s)
        return None if plan is None else self.complete(plan.started_s + plan.duration_s)

    def schedule(self, now_s: float) -> StepPlan | None:
        """Begin a step. None: nothing to compute."""
        if self._in_step is not None:
            raise RuntimeError("the step before this one is not complete")
        if not self.has_work:
            return None
        work: list[tuple[_Live, int]] = []
        budget = self.settings.batched_tokens_max
        preempted: list[_Live] = []
        budget = self._schedule_running(work, budget, preempted)
        if not preempted:
            self._schedule_waiting(work, budget, now_s)
        prefill_chunks: list[tuple[int, int]] = []
        decode_contexts: list[int] = []
        for live, tokens in work:
            if live.output_tokens and tokens == 1:
                decode_contexts.append(live.computed_tokens)
            else:
                prefill_chunks.append((tokens, live.computed_tokens))
            live.computed_tokens += tokens
        duration_s = self.step_time.duration_s(prefill_chunks=prefill_chunks, decode_contexts=decode_contexts)
        if self.experts is not None:
            slowdown = self.experts.slowdown((tokens, live.request.experts) for live, tokens in work)
            duration_s = self.step_time.base_s + (duration_s - self.step_time.base_s) * slowdown
        plan = StepPlan(
            started_s=now_s,
            duration_s=duration_s,
            prefill_tokens=sum(tokens for tokens, _ in prefill_chunks),
            decode_requests=len(decode_contexts),
            preempted=tuple(live.request.request_id for live in preempted),
        )
        self._in_step = _Scheduled(plan, tuple(work))
        return plan

    def complete(self, now_s: float) -> StepOutcome:
        """End the step that `schedule` began: tokens, finished requests, KV events."""
        if self._in_step is None:
            raise RuntimeError("no step was scheduled")
        plan, work = self._in_step.plan, self._in_step.work
        self._in_step = None
        new_tokens: list[NewToken] = []
        ended: list[_Live] = []
        for live, _ in work:
            if not live.is_running or live.computed_tokens < len(live.chain):
                continue  # aborted meanwhile, or its prompt is not computed yet
            is_first = live.first_token_s is None
            if is_first:
                live.first_token_s = now_s
                self._prompt_tokens += len(live.request.prompt)
                self._prompt_tokens_cached += live.cached_tokens
            if not live.request.prefill_only:
                token = live.request.output[live.output_tokens]
                live.output_tokens += 1
                live.chain.append(token)
                self._output_tokens += 1
                new_tokens.append(
                    NewToken(
                        request_id=live.request.request_id,
                        token=token,
                        is_first=is_first,
                        cached_tokens=live.cached_tokens,
                    )
                )
            if live.request.prefill_only or live.output_tokens == len(live.request.output):
                ended.append(live)
        if ended:
            gone = set(map(id, ended))
            self._running = [live for live in self._running if id(live) not in gone]
        finished = tuple(self._finish(live, live.request.finish_reason, now_s) for live in ended)
        return StepOutcome(
            started_s=plan.started_s,
            duration_s=plan.duration_s,
            ended_s=now_s,
            prefill_tokens=plan.prefill_tokens,
            decode_requests=plan.decode_requests,
            preempted=plan.preempted,
            new_tokens=tuple(new_tokens),
            finished=finished,
            kv_events=self._cache.take_events(),
        )

    # -- the cache as a whole

    def reset_prefix_cache(self, *, preempt_running: bool = False) -> bool:
        """Empty the cache. False, and nothing done, while requests hold blocks, unless they may be preempted.

        The event waits for the next step that has work.
        """
        if preempt_running:
            while self._running:
                self._preempt(self._running.pop())
        return self._cache.reset()

    def restart(self) -> tuple[str, ...]:
        """A new process in the old one's place: nothing cached, nothing queued, counters at zero, no event says so.

        Ids of the requests that died with it.
        """
        lost = tuple(self._live)
        self.epoch += 1
        self._start_empty()
        return lost

    # -- views

    def stats(self) -> EngineStats:
        return EngineStats(
            running=len(self._running),
            waiting=len(self._waiting),
            kv_usage=self._cache.usage,
            cache_queries_tokens=self._cache_queries_tokens,
            cache_hits_tokens=self._cache_hits_tokens,
            preemptions=self._preemptions,
            prompt_tokens=self._prompt_tokens,
            prompt_tokens_cached=self._prompt_tokens_cached,
            output_tokens=self._output_tokens,
        )

    def request_ids(self) -> tuple[str, ...]:
        """Requests inside, running and waiting."""
        return tuple(self._live)

    def lora_requests(self) -> list[tuple[str, bool]]:
        """(adapter, is running) of each request for a LoRA adapter."""
        return [(live.request.lora.name, live.is_running) for live in self._live.values() if live.request.lora]

    def cached_copies(self) -> dict[bytes, int]:
        return self._cache.copies()

    def live_chains(self) -> list[LiveChain]:
        return self._cache.live_chains()

    def check_invariants(self) -> None:
        """Raise on a bug: unbalanced books, a request in two places, computed tokens without blocks."""
        if {id(live) for live in self._live.values()} != {id(live) for live in (*self._running, *self._waiting)}:
            raise AssertionError("requests and queues disagree")
        if len(self._running) + len(self._waiting) != len(self._live):
            raise AssertionError("a request is queued twice")
        if len(self._running) > self.settings.requests_max:
            raise AssertionError("too many requests running")
        for live in self._waiting:
            if live.blocks or live.computed_tokens or live.is_running:
                raise AssertionError("a waiting request holds blocks")
        for live in self._running:
            if not live.computed_tokens <= len(live.blocks) * self.settings.block_tokens:
                raise AssertionError("computed tokens without blocks")
            if live.stored_blocks > live.computed_tokens // self.settings.block_tokens:
                raise AssertionError("blocks were stored before they were computed")
        self._cache.check_invariants([live.blocks for live in self._live.values()])

    # -- scheduling

    def _schedule_running(self, work: list[tuple[_Live, int]], budget: int, preempted: list[_Live]) -> int:
        index = 0
        while index < len(self._running) and budget > 0:
            live = self._running[index]
            tokens = min(len(live.chain) - live.computed_tokens, budget)
            while not self._grow(live, tokens):
                victim = self._running.pop()
                self._preempt(victim)
                preempted.append(victim)
                if victim is live:
                    return budget
            work.append((live, tokens))
            budget -= tokens
            index += 1
        return budget

    def _schedule_waiting(self, work: list[tuple[_Live, int]], budget: int, now_s: float) -> None:
        while self._waiting and budget > 0 and len(self._running) < self.settings.requests_max:
            live = self._waiting[0]
            hit: list[int] = []
            reads_cache = self.settings.prefix_caching and live.request.reads_cache
            if reads_cache:
                # The last token is always computed, since the next one is sampled from it.
                hit = self._cache.longest_hit(live.chain.hashes, len(live.chain) - 1)
            hit_tokens = len(hit) * self.settings.block_tokens
            tokens = min(len(live.chain) - hit_tokens, budget)
            if not self._admit(live, hit, tokens):
                return
            if reads_cache and not live.preemptions:
                self._cache_queries_tokens += len(live.chain)
                self._cache_hits_tokens += hit_tokens
            if live.scheduled_s is None:
                live.scheduled_s = max(now_s, live.arrived_s)
                live.cached_tokens = hit_tokens
            live.is_running = True
            self._waiting.popleft()
            self._running.append(live)
            work.append((live, tokens))
            budget -= tokens

    def _admit(self, live: _Live, hit: list[int], tokens: int) -> bool:
        """Take the hit and blocks for the first chunk, if the whole of the request would fit now."""
        cache, size = self._cache, self.settings.block_tokens
        wanted = -(-len(live.chain) // size) - len(hit)
        if wanted + sum(map(cache.is_free, hit)) > cache.free_count:
            return False
        cache.touch(hit)
        live.blocks = hit
        live.stored_blocks = len(hit)
        live.computed_tokens = len(hit) * size
        if not self._grow(live, tokens):
            raise AssertionError("the whole request fits, so its first chunk must")
        return True

    def _grow(self, live: _Live, tokens: int) -> bool:
        """Blocks for `tokens` more; whole blocks of this step are reusable from here on. False: out of blocks."""
        cache, size = self._cache, self.settings.block_tokens
        end_tokens = live.computed_tokens + tokens
        missing = -(-end_tokens // size) - len(live.blocks)
        if missing > cache.free_count:
            return False
        if missing > 0:
            live.blocks += cache.allocate(missing)
        whole = end_tokens // size
        cache.store(live.chain, live.blocks, live.stored_blocks, whole)
        live.stored_blocks = max(live.stored_blocks, whole)
        return True

    def _preempt(self, live: _Live) -> None:
        self._give_back(live)
        live.preemptions += 1
        self._preemptions += 1
        live.is_running = False
        self._waiting.appendleft(live)

    def _give_back(self, live: _Live) -> None:
        self._cache.release(reversed(live.blocks))
        live.blocks = []
        live.stored_blocks = 0
        live.computed_tokens = 0

    def _finish(self, live: _Live, reason: FinishReason, now_s: float) -> FinishedRequest:
        self._give_back(live)
        live.is_running = False
        del self._live[live.request.request_id]
        return FinishedRequest(
            request_id=live.request.request_id,
            reason=reason,
            prompt_tokens=len(live.request.prompt),
            output_tokens=live.output_tokens,
            cached_tokens=live.cached_tokens,
            arrived_s=live.arrived_s,
            scheduled_s=live.scheduled_s,
            first_token_s=live.first_token_s,
            finished_s=now_s,
            preemptions=live.preemptions,
            tokens_requested=len(live.request.output),
        )
