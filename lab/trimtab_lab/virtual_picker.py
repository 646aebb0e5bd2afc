"""One picker in front of a virtual fleet, with all that its policy can say of requests: extra terms, limits, waiting.

The one rule: things happen in order of their times, and the picker knows of an engine only what has come back over the
way to it. A run is a function of its requests, its settings and its seed.

Tokens stand for four bytes each, so that sixteen of them are one chunk of text; nothing here renders or tokenises.
"""

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from trimtab_core.chunks import U64, hash_chunks, root_hash
from trimtab_core.extra_terms import ExtraTerms
from trimtab_core.hotspot import HotspotSettings, HotspotView
from trimtab_core.placement import PlacementRequest, Prompt, Rejection
from trimtab_core.selection import BlockChains, Scheduler
from trimtab_core.settings import SchedulerSettings
from trimtab_core.token_table import TokenTable
from trimtab_lab.engine_model import EngineModel
from trimtab_lab.engine_request import EngineRequest, StepOutcome
from trimtab_lab.kv_events import BlockRemoved, BlockStored, KvEvent

TOKEN_BYTES = 4
VOCABULARY = 1 << 15
CHUNK_SEED = 11
TICK_S = 0.05
"""Between two looks at deadlines and at prefills that nobody saw the end of."""
REPORT_S = 1.0


def token_table() -> TokenTable:
    """Every token is its own number."""
    return TokenTable.from_pieces([number.to_bytes(TOKEN_BYTES, "little") for number in range(VOCABULARY)])


@dataclass(slots=True, kw_only=True, eq=False)
class Asked:
    """A request and what became of it. Times are the client's, who is where the picker is."""

    at_s: float
    request: EngineRequest
    kind: str = ""
    tenant: str = ""
    engine: int | None = None
    waited_s: float = 0.0
    is_refused: bool = False
    first_token_s: float | None = None
    finished_s: float | None = None
    cached_tokens: int = 0
    reservation_id: int = field(default=0, repr=False)

    @property
    def ttft_s(self) -> float:
        """To the first token, as the client sees it."""
        assert self.first_token_s is not None
        return self.first_token_s - self.at_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time of the tokens after the first."""
        count = len(self.request.output) - 1
        if count < 1 or self.finished_s is None or self.first_token_s is None:
            return None
        return (self.finished_s - self.first_token_s) / count


@dataclass(frozen=True, slots=True, kw_only=True)
class VirtualPolicy:
    """What the picker is told."""

    extra: Callable[[Asked], ExtraTerms | None] = lambda _: None
    batch_max: int | None = None
    wait_s: float = 0.0
    """How long a request may wait for a place; 0: it is refused."""
    policy: str = "product"
    priority: Callable[[Asked], int] = lambda _: 0
    """Below 0 it does not wait; what else it does is the line's."""


class FirstInFirstOut:
    """Those who wait, in the order of their coming."""

    def __init__(self) -> None:
        self._waiting: deque[Asked] = deque()

    def add(self, asked: Asked) -> None:
        self._waiting.append(asked)

    def first(self) -> Asked | None:
        return self._waiting[0] if self._waiting else None

    def take(self, asked: Asked) -> None:
        self._waiting.remove(asked)

    def all(self) -> list[Asked]:
        return list(self._waiting)


class VirtualPicker:
    """`round_trips_s`: to each engine and back. `line`: whose turn it is among those who wait. `hotspots`: how the
    detector works, None: not at all. `on_tick` is called every `TICK_S`: it may look, and change the policy."""

    def __init__(
        self,
        engines: Sequence[EngineModel],
        *,
        seed: int,
        policy: VirtualPolicy,
        round_trips_s: Sequence[float] | None = None,
        line: Any = None,
        table: TokenTable | None = None,
        hotspots: HotspotSettings | None = None,
        on_tick: Callable[["VirtualPicker", float], None] = lambda _, __: None,
    ) -> None:
        self.policy = policy
        self._engines = engines
        self._on_tick = on_tick
        self._trips_s = list(round_trips_s or [0.0] * len(engines))
        self._line = line or FirstInFirstOut()
        self._scheduler: Any = Scheduler(rng_seed=seed, settings=SchedulerSettings())
        self._scheduler.watch_hotspots(hotspots)
        table = table or token_table()
        self._chains = [BlockChains(table, CHUNK_SEED) for _ in engines]
        for _ in engines:
            self._scheduler.add_slot()
        self._root = root_hash(CHUNK_SEED)
        self._slots = np.ones(len(engines), dtype=np.bool_)
        self._variants = np.zeros(len(engines), dtype=np.int8)
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = itertools.count()
        self._asked: dict[str, Asked] = {}
        self._open = 0

    def hotspots(self) -> HotspotView:
        """What the detector knows."""
        view: HotspotView = self._scheduler.hotspots()
        return view

    def run(self, requests: Sequence[Asked]) -> None:
        """Serve all of them to the end; what came of each is in it."""
        self._open = len(requests)
        for asked in requests:
            self._at(asked.at_s, partial(self._arrive, asked))
        self._at(TICK_S, self._tick)
        self._at(REPORT_S, self._report)
        while self._open:
            now_s, _, happen = heapq.heappop(self._events)
            happen(now_s)
        self._scheduler.check_invariants()
        if self._scheduler.load().requests.any() or self._scheduler.load().weight_milli.any():
            raise AssertionError("a reservation is left over")

    def _at(self, time_s: float, happen: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (time_s, next(self._order), happen))

    # At the picker.

    def _arrive(self, asked: Asked, now_s: float) -> None:
        if self._line.first() is None and self._place(asked, now_s):
            return
        if self.policy.wait_s and self.policy.priority(asked) >= 0:
            self._line.add(asked)
            self._turns(now_s)
        else:
            self._refuse(asked)

    def _refuse(self, asked: Asked) -> None:
        asked.is_refused = True
        self._open -= 1

    def _place(self, asked: Asked, now_s: float) -> bool:
        text = np.array(asked.request.prompt, dtype="<u4").tobytes()
        prompt = Prompt(chain=hash_chunks(text, self._root, CHUNK_SEED), size_bytes=len(text))
        placed = self._scheduler.place(
            PlacementRequest(
                prompts=((prompt,),),
                variant_of_slot=self._variants,
                exact=self._slots,
                candidates=self._slots,
                tokens_per_byte=1 / TOKEN_BYTES,
                policy=self.policy.policy,
                batch_max=self.policy.batch_max,
                extra=self.policy.extra(asked),
            ),
            now_s,
        )
        if isinstance(placed, Rejection):
            return False
        asked.engine, asked.reservation_id, asked.waited_s = placed.slot, placed.reservation_id, now_s - asked.at_s
        self._asked[asked.request.request_id] = asked
        self._at(now_s + self._trips_s[placed.slot] / 2, partial(self._reach, asked))
        return True

    def _turns(self, now_s: float) -> None:
        while (asked := self._line.first()) is not None and self._place(asked, now_s):
            self._line.take(asked)

    def _tick(self, now_s: float) -> None:
        self._scheduler.advance(now_s)
        self._on_tick(self, now_s)
        for asked in self._line.all():
            if now_s - asked.at_s >= self.policy.wait_s:
                self._line.take(asked)
                self._refuse(asked)
        self._at(now_s + TICK_S, self._tick)

    def _report(self, now_s: float) -> None:
        for slot, engine in enumerate(self._engines):
            stats, settings = engine.stats(), engine.settings
            self._scheduler.report(
                slot,
                requests=stats.running + stats.waiting,
                block_tokens=settings.block_tokens,
                kv_capacity_tokens=(settings.block_count - 1) * settings.block_tokens,
                now_s=now_s,
            )
        self._at(now_s + REPORT_S, self._report)

    # At the engines, and back.

    def _reach(self, asked: Asked, now_s: float) -> None:
        assert asked.engine is not None
        refusal = self._engines[asked.engine].add(asked.request, now_s)
        if refusal is not None:
            raise AssertionError(f"an engine refused: {refusal.value}")
        self._begin(asked.engine, now_s)

    def _begin(self, engine: int, now_s: float) -> None:
        model = self._engines[engine]
        plan = None if model.is_stepping else model.schedule(now_s)
        if plan is not None:
            self._at(now_s + plan.duration_s, partial(self._end, engine))

    def _end(self, engine: int, now_s: float) -> None:
        outcome = self._engines[engine].complete(now_s)
        changes = self._changes(engine, outcome.kv_events)
        self._at(now_s + self._trips_s[engine] / 2, partial(self._hear, engine, outcome, changes))
        self._begin(engine, now_s)

    def _hear(self, engine: int, outcome: StepOutcome, changes: Any, now_s: float) -> None:
        if len(changes.added) or len(changes.removed):
            self._scheduler.kv_apply(engine, changes.added, changes.tokens, changes.removed, now_s)
        for token in outcome.new_tokens:
            if token.is_first:
                asked = self._asked[token.request_id]
                asked.first_token_s, asked.cached_tokens = now_s, token.cached_tokens
                self._scheduler.first_token(asked.reservation_id, now_s)
        for finished in outcome.finished:
            asked = self._asked.pop(finished.request_id)
            asked.finished_s = now_s
            self._scheduler.finish(asked.reservation_id, now_s)
            self._open -= 1
        if outcome.finished:
            self._turns(now_s)

    def _changes(self, engine: int, events: Sequence[KvEvent]) -> Any:
        chains = self._chains[engine]
        for event in events:
            if isinstance(event, BlockStored):
                chains.store(
                    parent=None if event.parent is None else _name(event.parent),
                    blocks=_names(event.block_hashes),
                    tokens=np.array(event.tokens, dtype=np.uint32),
                    block_tokens=event.block_tokens,
                    root=self._root,
                )
            elif isinstance(event, BlockRemoved):
                chains.remove(blocks=_names([event.block_hash]))
            else:
                chains.clear()
        return chains.drain()


def _name(block: bytes) -> int:
    return int.from_bytes(block[:8], "little")


def _names(blocks: Sequence[bytes]) -> U64:
    return np.array([_name(block) for block in blocks], dtype=np.uint64)
