"""Several replicas of the picker in front of a virtual fleet: a scheduler each, and words that take their time.

The one rule: a scheduler hears exactly what the shared state would carry to it (KV changes of the engines, reports, the
load operations of its peers), in the order in which each writer wrote it, and nothing before its time has come. One
replica is the same with nobody to talk to.

A placement with much to prefill is confirmed, as the picker does it: it is written into the log at once, and its
request goes to the engine when its replica has read what stands there before it. Where that is a peer's placement on
the same engine, it is placed again.
"""

import heapq
import itertools
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from trimtab_core.chunks import U64
from trimtab_core.hotspot import HotspotSettings, HotspotView
from trimtab_core.placement import PlacementRequest, Prompt, Rejection
from trimtab_core.selection import BlockChains, Scheduler
from trimtab_core.settings import SchedulerSettings
from trimtab_core.token_table import TokenTable
from trimtab_lab.engine_model import EngineModel
from trimtab_lab.engine_request import EngineRequest, StepOutcome
from trimtab_lab.kv_events import BlockRemoved, BlockStored, KvEvent
from trimtab_lab.virtual_words import Words

TICK_S = 0.05
"""Between two calls of `advance`."""
REPORT_S = 1.0
"""Between two reports of an engine, as its sidecar's heartbeats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delays:
    """Seconds that an operation takes to a peer, and a KV change or a report to a replica; drawn for each."""

    load_s: Callable[[random.Random], float]
    kv_s: Callable[[random.Random], float]
    confirm_s: Callable[[random.Random], float] | None = None
    """From writing a placement down to knowing what stands before it; None: none is confirmed."""
    confirm_s_max: float = math.inf
    """The most that a request waits for that, whatever it knows then."""
    round_trip_s: float = 0.0
    """What the replicas take it to be."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Replica:
    scheduler: Any
    incarnation: int
    reservations: dict[str, int] = field(default_factory=dict)
    """By request id, while open."""
    heard: list[tuple[int, float]] = field(default_factory=list)
    """Its peers' placements, as they came: the slot, and when that came into the log."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Unconfirmed:
    """A placement that its request waits for. `heard`: how many placements of peers it was made with."""

    request: EngineRequest
    asked: PlacementRequest
    replica: _Replica
    placed: Any
    heard: int
    since_s: float
    logged_s: float = 0.0
    choices: int = 1


class ReplicatedRouter:
    """A `LateRouter`. Each request comes at a replica drawn at random; `prompts` gives the text of each as the picker
    has it, and `seed` draws replicas, delays and ties."""

    def __init__(
        self,
        engines: list[EngineModel],
        prompts: Mapping[str, Prompt],
        table: TokenTable,
        *,
        replicas: int,
        delays: Delays,
        seed: int,
        chunk_seed: int,
        root: int,
        tokens_per_byte: float,
        hotspots: HotspotSettings | None = None,
        confirm_tokens: int = 0,
        confirm_round_trips: int = 0,
        choices_max: int = 1,
    ) -> None:
        """`confirm_tokens`, and `confirm_round_trips` of time: what there must be to prefill for a placement to be
        confirmed; `choices_max`: for one request."""
        self.policy = "product"
        """How requests are placed from now on."""
        self._engines = engines
        self._prompts = prompts
        self._delays = delays
        self._rng = random.Random(seed)
        self._root = root
        self._tokens_per_byte = tokens_per_byte
        self._hotspots = hotspots
        self._chains = [BlockChains(table, chunk_seed) for _ in engines]
        self._replicas = [self._started(seed + number, number) for number in range(replicas)]
        self._home: dict[str, _Replica] = {}
        self._next_incarnation = replicas
        self._words = Words()
        self._confirm_tokens = confirm_tokens
        self._confirm_prefill_s = confirm_round_trips * delays.round_trip_s
        self._choices_max = choices_max
        self._unconfirmed: list[tuple[float, int, _Unconfirmed]] = []
        self._order = itertools.count()
        self._next_tick_s = self._next_report_s = 0.0
        self._slots = np.ones(len(engines), dtype=np.bool_)
        self._variants = np.zeros(len(engines), dtype=np.int8)

    def _started(self, seed: int, incarnation: int) -> _Replica:
        scheduler = Scheduler(rng_seed=seed, settings=SchedulerSettings())
        for _ in self._engines:
            scheduler.add_slot()
        scheduler.watch_hotspots(self._hotspots)
        return _Replica(scheduler=scheduler, incarnation=incarnation)

    # What happens to the fleet

    def route(self, request: EngineRequest, now_s: float) -> int | None:
        self.advance(now_s)
        replica = self._rng.choice(self._replicas)
        asked = PlacementRequest(
            prompts=((self._prompts[request.request_id],),),
            variant_of_slot=self._variants,
            exact=self._slots,
            candidates=self._slots,
            tokens_per_byte=self._tokens_per_byte,
            policy=self.policy,
        )
        placed = _placed(replica, asked, now_s)
        self._home[request.request_id] = replica
        confirm_s = self._delays.confirm_s
        if confirm_s is None or not self._is_worth_confirming(replica, placed):
            self._booked(replica, request, placed, now_s)
            return int(placed.slot)
        unconfirmed = _Unconfirmed(
            request=request, asked=asked, replica=replica, placed=placed, heard=len(replica.heard), since_s=now_s
        )
        self._write_down(unconfirmed, confirm_s(self._rng), now_s)
        return None

    def next_s(self) -> float | None:
        return self._unconfirmed[0][0] if self._unconfirmed else None

    def decided(self, now_s: float) -> list[tuple[EngineRequest, int]]:
        self.advance(now_s)
        decided = []
        while self._unconfirmed and self._unconfirmed[0][0] <= now_s:
            _, _, unconfirmed = heapq.heappop(self._unconfirmed)
            if self._is_confirmed(unconfirmed, now_s):
                decided.append((unconfirmed.request, int(unconfirmed.placed.slot)))
        return decided

    def on_step(self, engine: int, outcome: StepOutcome) -> None:
        now_s = outcome.ended_s
        self.advance(now_s)
        self._publish(engine, outcome.kv_events, now_s)
        for token in outcome.new_tokens:
            if token.is_first:
                self._first_token(token.request_id, now_s)
        for finished in outcome.finished:
            replica = self._home.pop(finished.request_id)
            reservation_id = replica.reservations.pop(finished.request_id, None)
            if reservation_id is not None and replica.scheduler.finish(reservation_id, now_s):
                self._tell(replica, now_s, "peer_finish", reservation_id)

    def advance(self, now_s: float) -> None:
        """Whatever was due by now arrives."""
        while True:
            next_s = min(self._next_tick_s, self._next_report_s)
            if self._words.arrive_by(min(now_s, next_s)):
                continue
            if next_s > now_s:
                return
            if next_s == self._next_report_s:
                self._report(next_s)
                self._next_report_s += REPORT_S
            else:
                for replica in self._replicas:
                    self._seen(replica, replica.scheduler.advance(next_s), next_s)
                self._next_tick_s += TICK_S

    def hotspots(self) -> list[HotspotView]:
        """What each replica's detector knows."""
        return [replica.scheduler.hotspots() for replica in self._replicas]

    def restart(self, number: int, now_s: float) -> None:
        """A replica ends without a word to those that it serves, and another takes its place: with what the snapshots
        and leases tell, and without what only the old one knew. Its peers drop the old one's reservations."""
        self.advance(now_s)
        old = self._replicas[number]
        new = self._started(self._rng.getrandbits(32), self._next_incarnation)
        self._next_incarnation += 1
        for slot, chains in enumerate(self._chains):
            hashes, tokens = chains.chunks()
            new.scheduler.kv_replace(slot, hashes, tokens, now_s)
        for peer in self._replicas:
            if peer is not old:
                for record in peer.scheduler.open_reservations():
                    load = (record.slot, record.p_tokens, record.batch, record.sample_hashes, record.sample_tokens)
                    weight_milli = record.weight_milli
                    new.scheduler.peer_reserve(peer.incarnation, record.reservation_id, *load, now_s, weight_milli)

                def arrive(at_s: float, _: float, to: _Replica = peer) -> None:
                    to.scheduler.peer_drop(old.incarnation, at_s)

                due_s = now_s + self._delays.load_s(self._rng)
                self._words.send(old, peer, logged_s=due_s, due_s=due_s, arrive=arrive)
        old.reservations.clear()
        self._replicas[number] = new

    def check(self, now_s: float) -> None:
        """After all has arrived: every replica knows the same, nothing is open, and the index is the engines' caches.
        Raises AssertionError."""
        self.advance(now_s)
        for replica in self._replicas:
            replica.scheduler.check_invariants()
            load = replica.scheduler.load()
            assert not load.requests.any(), "a reservation is left over"
            assert not load.queued_tokens.any(), "queued tokens are left over"
            for slot, chains in enumerate(self._chains):
                hashes, tokens = chains.chunks()
                order = np.argsort(hashes)
                given = replica.scheduler.kv_export(slot)
                assert np.array_equal(given[0], hashes[order]), "the index is not the engine's cache"
                assert np.array_equal(given[1], tokens[order]), "the index has other token counts"

    # Confirmed placement

    def _is_worth_confirming(self, replica: _Replica, placed: Any) -> bool:
        if len(self._replicas) == 1 or placed.p_own_tokens < self._confirm_tokens:
            return False
        rate = float(replica.scheduler.load().prefill_rate[placed.slot])
        return bool(placed.p_own_tokens / rate >= self._confirm_prefill_s)

    def _write_down(self, unconfirmed: _Unconfirmed, took_s: float, now_s: float) -> None:
        unconfirmed.logged_s = now_s + took_s / 2
        self._booked(unconfirmed.replica, unconfirmed.request, unconfirmed.placed, now_s, unconfirmed.logged_s)
        until_s = min(now_s + took_s, unconfirmed.since_s + self._delays.confirm_s_max)
        heapq.heappush(self._unconfirmed, (until_s, next(self._order), unconfirmed))

    def _is_confirmed(self, unconfirmed: _Unconfirmed, now_s: float) -> bool:
        replica, before, confirm_s = unconfirmed.replica, unconfirmed.placed, self._delays.confirm_s
        assert confirm_s is not None, "something was asked"
        is_late = now_s >= unconfirmed.since_s + self._delays.confirm_s_max
        if is_late or replica not in self._replicas or unconfirmed.choices == self._choices_max:
            return True
        self._words.read(replica, unconfirmed.logged_s, now_s)
        news = replica.heard[unconfirmed.heard :]
        if not any(slot == before.slot and logged_s < unconfirmed.logged_s for slot, logged_s in news):
            return True
        replica.scheduler.finish(before.reservation_id, now_s)
        self._tell(replica, now_s, "peer_finish", before.reservation_id)
        unconfirmed.placed = _placed(replica, replace(unconfirmed.asked, is_again=True), now_s)
        unconfirmed.heard = len(replica.heard)
        unconfirmed.choices += 1
        if unconfirmed.placed.slot == before.slot:
            self._booked(replica, unconfirmed.request, unconfirmed.placed, now_s)
            return True
        self._write_down(unconfirmed, confirm_s(self._rng), now_s)
        return False

    def _booked(
        self, replica: _Replica, request: EngineRequest, placed: Any, now_s: float, logged_s: float | None = None
    ) -> None:
        replica.reservations[request.request_id] = placed.reservation_id
        load = (placed.slot, placed.p_own_tokens, 1, placed.sample_hashes, placed.sample_tokens)
        self._tell(replica, now_s, "peer_reserve", placed.reservation_id, *load, logged_s=logged_s)

    # Words on their way

    def _first_token(self, request_id: str, now_s: float) -> None:
        replica = self._home[request_id]
        reservation_id = replica.reservations.get(request_id)
        if reservation_id is not None and replica.scheduler.first_token(reservation_id, now_s):
            self._tell(replica, now_s, "peer_first_token", reservation_id)

    def _seen(self, replica: _Replica, reservation_ids: U64, now_s: float) -> None:
        for reservation_id in reservation_ids.tolist():
            self._tell(replica, now_s, "peer_first_token", reservation_id)

    def _publish(self, engine: int, events: tuple[KvEvent, ...], now_s: float) -> None:
        chains = self._chains[engine]
        for event in events:
            if isinstance(event, BlockStored):
                chains.store(
                    parent=None if event.parent is None else _name(event.parent),
                    blocks=np.array([_name(block) for block in event.block_hashes], dtype=np.uint64),
                    tokens=np.array(event.tokens, dtype=np.uint32),
                    block_tokens=event.block_tokens,
                    root=self._root,
                )
            elif isinstance(event, BlockRemoved):
                chains.remove(blocks=np.array([_name(event.block_hash)], dtype=np.uint64))
            else:
                chains.clear()
        changes = chains.drain()
        if not (len(changes.added) or len(changes.removed)):
            return
        for replica in self._replicas:

            def arrive(at_s: float, to: _Replica = replica) -> None:
                seen = to.scheduler.kv_apply(engine, changes.added, changes.tokens, changes.removed, at_s)
                self._seen(to, seen, at_s)

            self._send(engine, replica, now_s, arrive)

    def _report(self, now_s: float) -> None:
        for slot, engine in enumerate(self._engines):
            stats, settings = engine.stats(), engine.settings
            report = {
                "requests": stats.running + stats.waiting,
                "block_tokens": settings.block_tokens,
                "kv_capacity_tokens": (settings.block_count - 1) * settings.block_tokens,
            }
            for replica in self._replicas:

                def arrive(
                    at_s: float, to: _Replica = replica, slot: int = slot, report: dict[str, int] = report
                ) -> None:
                    to.scheduler.report(slot, now_s=at_s, **report)

                self._send(slot, replica, now_s, arrive)

    def _tell(
        self, replica: _Replica, now_s: float, operation: str, *arguments: Any, logged_s: float | None = None
    ) -> None:
        """One load operation to all peers. `logged_s`: when it is in the log, where that is known."""
        for peer in self._replicas:
            if peer is not replica:

                def arrive(at_s: float, logged_s: float, to: _Replica = peer) -> None:
                    getattr(to.scheduler, operation)(replica.incarnation, *arguments, at_s)
                    if operation == "peer_reserve":
                        to.heard.append((arguments[1], logged_s))

                took_s = self._delays.load_s(self._rng)
                there_s = now_s + took_s / 2 if logged_s is None else logged_s
                self._words.send(replica, peer, logged_s=there_s, due_s=now_s + took_s, arrive=arrive)

    def _send(self, engine: int, reader: _Replica, now_s: float, arrive: Callable[[float], None]) -> None:
        """Something of an engine's to one replica."""
        due_s = now_s + self._delays.kv_s(self._rng)
        self._words.send(engine, reader, logged_s=due_s, due_s=due_s, arrive=lambda at_s, _: arrive(at_s))


def _placed(replica: _Replica, asked: PlacementRequest, now_s: float) -> Any:
    placed = replica.scheduler.place(asked, now_s)
    if isinstance(placed, Rejection):
        raise RuntimeError(f"a virtual fleet is never full, yet: {placed}")
    return placed


def _name(block: bytes) -> int:
    return int.from_bytes(block[:8], "little")
