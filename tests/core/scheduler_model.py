"""What a scheduler has to be, written down literally: lists, look-ups one by one, every number worked out afresh.

Two things it does not predict but takes from the real one after checking that they are allowed: which of several
equally good slots was drawn, and which prefills `advance` takes as over. The prefill rates it is told.
"""

import math
from dataclasses import dataclass, field
from typing import Any

from trimtab_core.extra_terms import ExtraTerms
from trimtab_core.placement import Placement, PlacementRequest, Prompt, Rejection
from trimtab_core.settings import SchedulerSettings

Key = tuple[int, int]
OWN = -1


@dataclass(kw_only=True)
class ModelSlot:
    settings: SchedulerSettings
    held: dict[int, int] = field(default_factory=dict)
    learned: list[tuple[int, int, int]] = field(default_factory=list)  # (chunk, cost, tokens), next to forget first
    external: int = 0
    reported: int = 0
    block_tokens: int = 0
    kv_capacity_tokens: int = 0
    is_approximate: bool = False
    turn: int = 0
    totals: list[int] = field(default_factory=lambda: [0])
    """Our requests there after every change since the last report, and at it."""

    def __post_init__(self) -> None:
        self.block_tokens = self.settings.block_tokens
        self.kv_capacity_tokens = self.settings.kv_capacity_tokens


@dataclass(kw_only=True)
class ModelClaim:
    slot: int
    chunks: list[tuple[int, int]]
    awaited: set[int] = field(default_factory=set)
    expires_s: float = math.inf


@dataclass(kw_only=True)
class ModelReservation:
    key: Key
    slot: int | None
    p_tokens: int
    batch: int
    weight_milli: int = 1000
    is_queued: bool = True
    learns: bool = False
    watched: set[int] = field(default_factory=set)
    samples: list[tuple[int, int]] = field(default_factory=list)


def nth(values: Any, n: int, otherwise: float) -> float:
    return float(values[n]) if values is not None and n < len(values) else otherwise


class ModelScheduler:
    def __init__(self, settings: SchedulerSettings) -> None:
        self.settings = settings
        self.slots: dict[int, ModelSlot] = {}
        self.open: dict[Key, ModelReservation] = {}
        self.ended: set[Key] = set()
        self.claims: dict[Key, ModelClaim] = {}
        self.claimed: dict[tuple[int, int], int] = {}  # (chunk, slot) -> smallest count while the row of claims lasts
        self.round = 1
        self.rates: list[float] = []
        """The slots' prefill rates, which the real one has seen."""
        self.slot_count = 0

    # Slots

    def add_slot(self) -> int:
        slot = next(n for n in range(self.slot_count + 1) if n not in self.slots)
        self.slot_count = max(self.slot_count, slot + 1)
        self.slots[slot] = ModelSlot(settings=self.settings)
        return slot

    def remove_slot(self, slot: int) -> None:
        del self.slots[slot]
        for reservation in self.open.values():
            if reservation.slot == slot:
                reservation.slot = None
                reservation.watched = set()
        self.claims = {key: claim for key, claim in self.claims.items() if claim.slot != slot}
        self.settle()

    # Load

    def requests(self, slot: int) -> int:
        return sum(r.batch for r in self.open.values() if r.slot == slot)

    def weight_milli(self, slot: int) -> int:
        return sum(r.batch * r.weight_milli for r in self.open.values() if r.slot == slot)

    def queued(self, slot: int) -> int:
        return sum(r.p_tokens for r in self.open.values() if r.slot == slot and r.is_queued)

    def note(self) -> None:
        for slot, state in self.slots.items():
            state.totals.append(self.requests(slot))

    def report(self, slot: int, requests: int, block_tokens: int, kv_capacity_tokens: int) -> None:
        state = self.slots[slot]
        state.external = max(0, requests - max(state.totals))
        state.reported = requests
        state.totals = [self.requests(slot)]
        state.block_tokens = block_tokens or self.settings.block_tokens
        state.kv_capacity_tokens = kv_capacity_tokens or self.settings.kv_capacity_tokens

    # Chunks

    def settle(self) -> None:
        standing: dict[tuple[int, int], int] = {}
        for claim in self.claims.values():
            for chunk, tokens in claim.chunks:
                pair = (chunk, claim.slot)
                standing[pair] = min(tokens, standing.get(pair, tokens))
        self.claimed = {pair: min(tokens, self.claimed.get(pair, tokens)) for pair, tokens in standing.items()}

    def expire(self, now_s: float) -> None:
        self.claims = {key: claim for key, claim in self.claims.items() if claim.expires_s > now_s}
        self.settle()

    def claim(self, key: Key, slot: int, chunks: list[tuple[int, int]], awaited: set[int]) -> None:
        if chunks:
            self.claims[key] = ModelClaim(slot=slot, chunks=chunks, awaited=awaited)
            self.settle()

    def confirm(self, slot: int, chunks: list[int]) -> None:
        """After the index has them: claims that waited for nothing else are over."""
        for key, claim in list(self.claims.items()):
            if claim.slot == slot and claim.awaited and claim.awaited <= set(chunks):
                del self.claims[key]
            elif claim.slot == slot:
                claim.awaited -= set(chunks)
        self.settle()

    def engine_hit(self, slot: int, chain: list[int]) -> tuple[int, int]:
        held = self.slots[slot].held
        depth = 0
        while depth < len(chain) and chain[depth] in held:
            depth += 1
        return depth, held[chain[depth - 1]] if depth else 0

    def hit(self, slot: int, chain: list[int], exact: bool) -> tuple[int, int]:
        if exact:
            depth, tokens = self.engine_hit(slot, chain)
        else:
            depth, tokens = 0, 0
            learned = {chunk: end for chunk, _, end in self.slots[slot].learned}
            for k, chunk in enumerate(chain):
                if chunk in learned:
                    depth, tokens = k + 1, learned[chunk]
        for k in range(depth, len(chain)):
            if (chain[k], slot) in self.claimed:
                depth, tokens = k + 1, max(tokens, self.claimed[chain[k], slot]) if depth <= k else tokens
        return depth, tokens

    def learn(self, slot: int, chunks: list[tuple[int, int]]) -> None:
        state = self.slots[slot]
        for position in reversed(range(len(chunks))):
            chunk, end = chunks[position]
            before = chunks[position - 1][1] if position else 0
            known = [(cost, known_end) for other, cost, known_end in state.learned if other == chunk]
            cost = max(end - before if end >= before else end, 1)
            if known:
                cost, end = min(cost, known[0][0]), known[0][1]
            state.learned = [entry for entry in state.learned if entry[0] != chunk] + [(chunk, cost, end)]
        while sum(cost for _, cost, _ in state.learned) > state.kv_capacity_tokens:
            state.learned.pop(0)

    # Decisions

    def renderings(self, request: PlacementRequest, prompt: tuple[Prompt, ...], slots: list[int]) -> list[int]:
        return [v for v in range(len(prompt)) if any(self.variant(request, slot) == v for slot in slots)]

    def variant(self, request: PlacementRequest, slot: int) -> int:
        return int(request.variant_of_slot[slot]) if slot < len(request.variant_of_slot) else -1

    def exact(self, request: PlacementRequest, slot: int) -> bool:
        return bool(request.exact[slot]) if slot < len(request.exact) else False

    def candidates(self, request: PlacementRequest) -> list[int]:
        return [n for n in sorted(self.slots) if n < len(request.candidates) and request.candidates[n]]

    def place(self, request: PlacementRequest, now_s: float, given: Placement | Rejection) -> None:
        """Check `given`, the real answer, and take it over."""
        self.expire(now_s)
        slots = self.candidates(request)
        if not slots:
            assert isinstance(given, Rejection)
            assert given.reason == "no_endpoints"
            return
        batch = {n: self.requests(n) + self.slots[n].external + request.batch for n in slots}
        if request.batch_max is not None:
            slots = [n for n in slots if batch[n] <= request.batch_max or batch[n] == request.batch]
            if not slots:
                assert isinstance(given, Rejection)
                assert given.reason == "endpoints_full"
                return
        assert not isinstance(given, Rejection)
        own = dict.fromkeys(slots, 0)
        hits = dict.fromkeys(slots, 0)
        lengths = []
        bases = []
        for prompt in request.prompts:
            length, base = self.length(request, prompt, slots)
            lengths.append(length)
            bases.append(base)
            for n in slots:
                variant = self.variant(request, n)
                hit = 0
                if 0 <= variant < len(prompt) and request.cache_reads:
                    _, hit = self.hit(n, prompt[variant].chain.tolist(), self.exact(request, n))
                    block = self.slots[n].block_tokens
                    hit = min(hit, max(length - 1, 0) // block * block)
                hits[n] += hit
                own[n] += length - hit
        p = {n: max(self.queued(n) + own[n], self.slots[n].block_tokens) for n in slots}
        extra = request.extra or ExtraTerms()
        weights = {n: (self.weight_milli(n) + 1000 * (self.slots[n].external + request.batch)) / 1000 for n in slots}
        rates = self.rates
        factor = {n: nth(extra.expert_factor, n, 1.0) for n in slots}
        network = {n: nth(extra.rtt_s, n, 0.0) * rates[n] for n in slots}
        linear = {n: p[n] * factor[n] + network[n] for n in slots}
        above = extra.log_above_tokens
        p_score = {
            n: above + above * math.log1p((t - above) / above) if 0 < above < t else t for n, t in linear.items()
        }
        score: dict[int, float] = {
            "product": {n: p_score[n] * weights[n] for n in slots},
            "least_request": weights,
            "round_robin": {n: float(self.slots[n].turn >= self.round) for n in slots},
        }[request.policy]
        assert given.prompt_tokens == sum(lengths)
        for n in range(self.slot_count):
            inside = n in slots
            assert given.hit_tokens[n] == (hits[n] if inside else 0)
            assert given.queued_tokens[n] == (self.queued(n) if inside else 0)
            assert given.p_tokens[n] == (p_score[n] if inside else 0)
            assert given.p_linear_tokens[n] == (linear[n] if inside else 0)
            assert given.network_tokens[n] == (network[n] if inside else 0)
            assert given.expert_factor[n] == (factor[n] if inside else 0)
            assert given.weighted_batch[n] == (weights[n] if inside else 0)
            assert given.batch[n] == (batch[n] if inside else 0)
            assert given.score[n] == (score[n] if inside else math.inf)
        ranked = [given.slot, *given.alternatives]
        assert len(set(ranked)) == len(ranked) == min(3, len(slots))
        order = sorted((score[n], batch[n]) for n in slots)
        assert [(score[n], batch[n]) for n in ranked] == order[: len(ranked)]
        self.reserve(request, given, own[given.slot], list(zip(lengths, bases, strict=True)), slots)

    def length(
        self, request: PlacementRequest, prompt: tuple[Prompt, ...], slots: list[int]
    ) -> tuple[int, tuple[int, int]]:
        """Tokens of the prompt, and (bytes, tokens) of the deepest hit."""
        used = self.renderings(request, prompt, slots)
        options = []
        for v in used:
            for n in slots:
                if self.variant(request, n) == v:
                    depth, tokens = self.hit(n, prompt[v].chain.tolist(), self.exact(request, n))
                    if depth:
                        rest = max(prompt[v].size_bytes - 64 * depth, 0) * request.tokens_per_byte
                        options.append((-depth, tokens + rest, v, tokens))
        if not prompt:
            return 0, (0, 0)
        first = used[0] if used else 0
        whole = prompt[first].size_bytes * request.tokens_per_byte
        depth, length, _, tokens = min(options, default=(0, whole, first, 0))
        exact = [prompt[v].tokens for v in (used or [0]) if prompt[v].tokens is not None]
        estimate = exact[0] if exact and exact[0] is not None else math.ceil(length)
        return estimate, (-depth * 64, min(tokens, estimate))

    def reserve(
        self,
        request: PlacementRequest,
        given: Placement,
        p_tokens: int,
        measures: list[tuple[int, tuple[int, int]]],
        slots: list[int],
    ) -> None:
        slot = given.slot
        state = self.slots[slot]
        assert given.p_own_tokens == p_tokens
        reservation = ModelReservation(
            key=(OWN, given.reservation_id), slot=slot, p_tokens=p_tokens, batch=request.batch
        )
        reservation.weight_milli = (request.extra or ExtraTerms()).weight_milli
        reservation.learns = not self.exact(request, slot)
        state.is_approximate |= reservation.learns
        if request.policy == "round_robin":
            self.round += state.turn >= self.round
            state.turn = self.round
        variant = self.variant(request, slot)
        claimed: list[tuple[int, int]] = []
        awaited: set[int] = set()
        for prompt, (length, (base_bytes, base_tokens)) in zip(request.prompts, measures, strict=True):
            if not 0 <= variant < len(prompt):
                continue
            rendering = prompt[variant]
            chain = rendering.chain.tolist()
            held = 0 if reservation.learns else self.engine_hit(slot, chain)[0]
            rest_bytes, rest_tokens = rendering.size_bytes - base_bytes, length - base_tokens
            new = []
            for k in range(held, len(chain)):
                end = 64 * (k + 1)
                if base_bytes and end <= base_bytes:
                    tokens = end * base_tokens // base_bytes
                else:
                    tokens = base_tokens + (end - base_bytes) * rest_tokens // max(rest_bytes, 1)
                new.append((k, chain[k], max(tokens, 0) // state.block_tokens * state.block_tokens))
            claimed += [(chunk, tokens) for _, chunk, tokens in new]
            last = len(chain) - 1
            if not reservation.learns:
                last = -1
                if rest_bytes > 0 and rest_tokens > 0:
                    last_byte = (rendering.size_bytes * rest_tokens - state.block_tokens * rest_bytes) / rest_tokens
                    last = min(math.floor(math.floor(last_byte) / 64), len(chain)) - 1
                if last >= held and chain[last] not in state.held:
                    reservation.watched.add(chain[last])
                awaited |= set([chunk for k, chunk, _ in new if k <= last and chunk not in state.held][-1:])
            step = 16 if 64 * len(new) >= 4096 else 4
            reservation.samples += [(chunk, tokens) for k, chunk, tokens in new if (k + 1) % step == 0 and k <= last]
        assert list(zip(given.sample_hashes.tolist(), given.sample_tokens.tolist(), strict=True)) == reservation.samples
        self.claim(reservation.key, slot, claimed, awaited)
        self.open[reservation.key] = reservation
        self.note()

    # Reservations

    def prefilled(self, key: Key, now_s: float) -> bool:
        reservation = self.open.get(key)
        if reservation is None or not reservation.is_queued:
            return False
        reservation.is_queued = False
        reservation.watched = set()
        claim = self.claims.get(key)
        if claim is not None:
            if reservation.learns or (key[0] != OWN and self.slots[claim.slot].is_approximate):
                self.learn(claim.slot, claim.chunks)
            claim.expires_s = min(claim.expires_s, now_s + self.settings.grace_s)
            if not claim.awaited:
                del self.claims[key]
                self.settle()
        return True

    def appeared(self, slot: int, chunks: list[int], now_s: float) -> set[int]:
        seen = set()
        for reservation in list(self.open.values()):
            if reservation.slot == slot and reservation.watched and reservation.is_queued:
                reservation.watched -= set(chunks)
                if not reservation.watched:
                    seen.add(reservation.key[1])
                    self.prefilled(reservation.key, now_s)
        self.confirm(slot, chunks)
        return seen

    def move(self, key: Key, slot: int) -> bool:
        reservation = self.open.get(key)
        if reservation is None:
            return False
        target = slot if slot in self.slots else None
        if target != reservation.slot:
            reservation.slot = target
            if target is None:
                self.claims.pop(key, None)
                reservation.watched = set()
            else:
                reservation.watched -= set(self.slots[target].held)
                claim = self.claims.get(key)
                if claim is not None:
                    awaited = claim.awaited - set(self.slots[target].held)
                    if claim.awaited and not awaited:
                        del self.claims[key]
                    claim.slot, claim.awaited = target, awaited
            self.resettle(key)
            self.note()
        return True

    def resettle(self, key: Key) -> None:
        """A claim that moves leaves its old slot before it comes to the new one."""
        claim = self.claims.pop(key, None)
        self.settle()
        if claim is not None:
            self.claims[key] = claim
            self.settle()

    def finish(self, key: Key) -> bool:
        self.ended.add(key)
        reservation = self.open.pop(key, None)
        if reservation is None:
            return False
        if reservation.is_queued:
            self.claims.pop(key, None)
            self.settle()
        self.note()
        return True

    def peer_reserve(
        self,
        key: Key,
        slot: int,
        p_tokens: int,
        batch: int,
        samples: list[tuple[int, int]],
        now_s: float,
        weight_milli: int,
    ) -> None:
        if key in self.ended:
            return
        if key not in self.open:
            target = slot if slot in self.slots else None
            self.open[key] = ModelReservation(
                key=key, slot=target, p_tokens=p_tokens, batch=batch, weight_milli=weight_milli
            )
            self.claims.pop(key, None)
            self.settle()
            if target is not None:
                missing = [chunk for chunk, _ in samples if chunk not in self.slots[target].held]
                if self.slots[target].is_approximate:
                    self.claim(key, target, samples, set())
                elif missing:
                    self.claim(key, target, samples, {missing[-1]})
            self.note()
        if p_tokens == 0:
            self.prefilled(key, now_s)

    def peer_drop(self, incarnation: int) -> None:
        for key in [key for key in self.open if key[0] == incarnation]:
            slot, batch = self.open[key].slot, self.open[key].batch
            self.finish(key)
            if slot in self.slots:
                state = self.slots[slot]
                state.totals = [max(state.totals) - batch]
                state.external = max(state.external, min(state.external + batch, state.reported - self.requests(slot)))
        self.ended = {key for key in self.ended if key[0] != incarnation}
