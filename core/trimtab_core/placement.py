"""What goes into a decision and what comes out of it.

The one rule: these are plain values. Arrays run over slots (the dense numbers of endpoints) and may be shorter than the
scheduler's own; a slot beyond their end is no candidate.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trimtab_core.chunks import U32, U64
from trimtab_core.extra_terms import ORDINARY_MILLI, ExtraTerms

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]
I8 = npt.NDArray[np.int8]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prompt:
    """One rendering of one engine prompt.

    `chain`: hashes of its whole 64-byte chunks (it may stop before the text does, where only the head is known).
    `size_bytes`: length of the whole text. `tokens`: its exact length, where the client sent token ids.
    """

    chain: U64
    size_bytes: int
    tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlacementRequest:
    """One HTTP request to be placed.

    `prompts[p][v]`: engine prompt p as the model card variant v renders it.
    `variant_of_slot[i]`: the variant that slot i's card gives; -1 where no text is known (routed by load only).
    `exact[i]`: the slot's KV index tells what it holds; False: only what was learned from routing does.
    `batch`: engine requests in all, n times the prompts.
    `cache_reads`: False where the engine skips its prefix cache for this request: every hit is 0.
    `batch_max`: a slot that would come to more requests than this is no candidate, unless it is idle.
    `extra`: what the request's class and the network add to the terms; None: nothing.
    `is_again`: it was placed a moment ago, and its reservation ended: the hotspot detector counts it once.
    """

    prompts: tuple[tuple[Prompt, ...], ...]
    variant_of_slot: I8
    exact: Bools
    candidates: Bools
    tokens_per_byte: float
    batch: int = 1
    cache_reads: bool = True
    policy: str = "product"
    batch_max: int | None = None
    extra: ExtraTerms | None = None
    is_again: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Placement:
    """A choice, and the reservation that was made with it.

    `alternatives`: the next best slots, at most two. `prompt_tokens`: length of all prompts together, one number for
    all slots. `p_own_tokens`: the P that the reservation adds to its slot. `samples`: what peers are to know of the
    chunks that the slot did not hold yet. `hotspot`: the prefix class for which the slots `left_out` were no
    candidates, although one of them had the least score; None: the hotspot detector changed nothing.
    The arrays, shape (slot_count,), show the terms of every candidate; other slots have 0, and an infinite score.
    `p_tokens`: P as it is in the score; `p_linear_tokens`: before its logarithm was taken; `network_tokens`: the part
    of it that is the round trip; `expert_factor`: what the rest of it was multiplied by. `batch`: requests there with
    this one's; `weighted_batch`: B as it is in the score, the same with the weights of their classes.
    """

    reservation_id: int
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
    p_own_tokens: int
    reason: str
    sample_hashes: U64
    sample_tokens: U32
    hotspot: int | None = None
    left_out: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """An expected refusal. `reason`: "no_endpoints" | "endpoints_full" | "too_many_open"."""

    reason: str
    retry_after_s: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReservationRecord:
    """One open reservation as its replica's lease tells it to others. `p_tokens` is 0 once the first token is there."""

    reservation_id: int
    slot: int
    p_tokens: int
    batch: int
    sample_hashes: U64
    sample_tokens: U32
    weight_milli: int = ORDINARY_MILLI


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoadView:
    """The load of every slot, arrays of shape (slot_count,).

    `requests`: open reservations, all replicas'. `external`: requests that came past us. `queued_tokens`: uncached
    prompt tokens on their way. `prefill_rate`: tokens per second. `weight_milli`: weights of the open reservations, in
    thousandths of an ordinary request.
    """

    requests: I64
    external: I64
    queued_tokens: F64
    prefill_rate: F64
    weight_milli: I64
