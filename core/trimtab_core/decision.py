"""The decision: which slot, and the terms that said so.

The one rule: it only looks. What it finds is booked by the scheduler in the same breath, with nothing in between.

    P_i = queued_i + sum over prompts of (prompt - hit_i), at least one block
    B_i = requests_i + external_i + this request's batch
    both with the extra terms of the request, where it has any
    pick = argmin of the policy's score, by default P_i * B_i
"""

from dataclasses import dataclass

import numpy as np

from trimtab_core.bookings import Bookings
from trimtab_core.chunk_owners import Slots, slots_in
from trimtab_core.extra_terms import PLAIN, factors, network_tokens, smoothed, weighted
from trimtab_core.hotspot import Alarm, HotspotDetector, LeftOut
from trimtab_core.placement import F64, I8, I64, Bools, PlacementRequest
from trimtab_core.policies.policy import Policy, Terms
from trimtab_core.prefix_index import PrefixIndex
from trimtab_core.prompt_match import PromptMatch, Variant, match_prompt
from trimtab_core.tie_break import TieBreak

RANKED = 3
"""How many slots are ranked: the best and its alternatives."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Decision:
    """As `Placement`, before anything is booked. `how` the best slot was found; `variant`, `is_exact`: of that slot."""

    slot: int
    alternatives: tuple[int, ...]
    prompt_tokens: int
    hit_tokens: I64
    queued_tokens: F64
    p_tokens: F64
    p_linear_tokens: F64
    network_tokens: F64
    expert_factor: F64
    batch: I64
    weighted_batch: F64
    score: F64
    how: str
    p_own_tokens: int
    variant: int
    is_exact: bool
    matches: list[PromptMatch]
    left_out: LeftOut | None


def decide(
    request: PlacementRequest,
    live: Bools,
    index: PrefixIndex,
    bookings: Bookings,
    policy: Policy,
    ties: TieBreak,
    hotspots: HotspotDetector,
    now_s: float,
) -> Decision | str:
    """Rank the candidates among the `live` slots; without any, the reason of a rejection."""
    load, slots = bookings.load, len(live)
    candidates = live & _padded(request.candidates, slots)
    if not candidates.any():
        return "no_endpoints"
    batch = load.requests + load.external + request.batch
    if request.batch_max is not None:
        candidates &= (batch <= request.batch_max) | (batch == request.batch)
        if not candidates.any():
            return "endpoints_full"

    exact = _padded(request.exact, slots)
    variant_of_slot = request.variant_of_slot
    if len(variant_of_slot) != slots:
        variant_of_slot = np.full(slots, -1, dtype=np.int8)
        variant_of_slot[: len(request.variant_of_slot)] = request.variant_of_slot[:slots]
    matches = _match(request, candidates, exact, variant_of_slot, index, bookings)
    prompt_tokens = 0
    hit_tokens: I64 = np.zeros(slots, dtype=np.int64)
    for match in matches:
        prompt_tokens += match.prompt_tokens
        if request.cache_reads:
            # An engine always computes the last token: a hit is at most the whole blocks of all the others.
            whole_blocks = max(match.prompt_tokens - 1, 0) // load.block_tokens * load.block_tokens
            hit_tokens += np.minimum(match.hit_tokens, whole_blocks)
    uncached = prompt_tokens - hit_tokens
    extra = request.extra or PLAIN
    expert_factor, network = factors(extra, slots), network_tokens(extra, load.prefill_rate)
    p_linear = np.maximum(load.queued_tokens + uncached, load.block_tokens) * expert_factor + network
    p_tokens = smoothed(p_linear, extra.log_above_tokens)
    weighted_batch = weighted(load.weight_milli, load.external, request.batch)
    terms = Terms(candidates=candidates, p_tokens=p_tokens, batch=weighted_batch)
    score = np.where(candidates, policy.score(terms), np.inf)
    left_out = None
    alarm = _hotspot_alarm(request, matches, candidates, hotspots, now_s)
    if alarm is not None:
        is_product = request.policy == "product"
        judged = score
        if not is_product:  # in the shadow: what the product would say if nobody but the alarm's holders held it
            left = [slot for slot in range(slots) if not alarm.holders >> slot & 1]
            tokens = load.queued_tokens + uncached
            tokens[left] = load.queued_tokens[left] + prompt_tokens
            p_shadow = smoothed(np.maximum(tokens, load.block_tokens) * expert_factor + network, extra.log_above_tokens)
            judged = p_shadow * weighted_batch
        left_out = hotspots.routed(alarm, _slots(candidates), judged, is_product=is_product, is_again=request.is_again)
    if left_out is not None:
        score[[*slots_in(left_out.slots)]] = np.inf
    ranked, how = ties.best(score, batch, RANKED)
    slot = ranked[0]
    return Decision(
        slot=slot,
        alternatives=tuple(ranked[1:]),
        prompt_tokens=prompt_tokens,
        hit_tokens=hit_tokens * candidates,
        queued_tokens=load.queued_tokens * candidates,
        p_tokens=p_tokens * candidates,
        p_linear_tokens=p_linear * candidates,
        network_tokens=network * candidates,
        expert_factor=expert_factor * candidates,
        batch=batch * candidates,
        weighted_batch=weighted_batch * candidates,
        score=score,
        how=how,
        p_own_tokens=int(uncached[slot]),
        variant=int(variant_of_slot[slot]),
        is_exact=bool(exact[slot]),
        matches=matches,
        left_out=left_out,
    )


def _hotspot_alarm(
    request: PlacementRequest, matches: list[PromptMatch], candidates: Bools, hotspots: HotspotDetector, now_s: float
) -> Alarm | None:
    """The detector knows requests by their first prompt, as the first card renders it; those without one it does not
    count."""
    if not request.prompts:
        return None
    renderings = request.prompts[0]
    return hotspots.arrived(
        renderings[0].chain.tolist() if renderings else [],
        matches[0].hits if renderings else [],
        _slots(candidates),
        is_product=request.policy == "product",
        is_again=request.is_again,
        now_s=now_s,
    )


def _match(
    request: PlacementRequest,
    candidates: Bools,
    exact: Bools,
    variant_of_slot: I8,
    index: PrefixIndex,
    bookings: Bookings,
) -> list[PromptMatch]:
    """One match for each prompt of which some text is known."""
    numbers = range(max(map(len, request.prompts), default=0))
    all_exact = _slots(exact)
    of_variant = [_slots(candidates & (variant_of_slot == number)) for number in numbers]
    exact_slots = [slots & all_exact for slots in of_variant]
    other_slots = [slots & ~all_exact for slots in of_variant]
    matches = []
    for renderings in request.prompts:
        variants = [
            Variant(number=n, prompt=prompt, exact_slots=exact_slots[n], approximate_slots=other_slots[n])
            for n, prompt in enumerate(renderings)
            if of_variant[n]
        ]
        if not variants and renderings:  # nobody can hold any of it, but its length is known
            variants = [Variant(number=0, prompt=renderings[0], exact_slots=0, approximate_slots=0)]
        if variants:
            parts = (index, bookings.learned, bookings.speculation)
            matches.append(match_prompt(variants, len(candidates), request.tokens_per_byte, *parts))
    return matches


def _padded(flags: Bools, slots: int) -> Bools:
    """As long as there are slots; False where nothing was said."""
    if len(flags) == slots:
        return flags
    padded = np.zeros(slots, dtype=np.bool_)
    padded[: len(flags)] = flags[:slots]
    return padded


def _slots(flags: Bools) -> Slots:
    return int.from_bytes(np.packbits(flags, bitorder="little").tobytes(), "little")
