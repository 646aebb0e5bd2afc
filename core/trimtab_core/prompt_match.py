"""A prompt match: how much of one engine prompt each slot holds, and how long the prompt is.

The one rule: the length is one number for all slots. It is the tokens at the deepest hit of any of them plus the rest
of the bytes at the pool's tokens per byte (or exact, where the client sent tokens), so that an argmin compares like
with like.

What counts as held: for exact slots the chunks of the prefix index, walked exactly; for approximate slots the learned
ones; for both, speculation where it reaches deeper.
"""

import math
from dataclasses import dataclass

import numpy as np

from trimtab_core.chunk_owners import Slots, slots_in
from trimtab_core.chunks import CHUNK_BYTES, U32, U64
from trimtab_core.hit import Hit, all_slots, deeper
from trimtab_core.learned_index import LearnedIndex
from trimtab_core.placement import I64, Prompt
from trimtab_core.prefix_index import PrefixIndex
from trimtab_core.speculation import Speculation

SAMPLE_STEP = 16
"""One published sample for so many chunks (1 KB of text)."""
SAMPLE_STEP_SHORT = 4
"""The same where little is new, so that short prompts have a sample at all."""
SHORT_BYTES = 4096
"""How much is little."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One rendering of the prompt and the slots that it is for."""

    number: int
    prompt: Prompt
    exact_slots: Slots
    approximate_slots: Slots


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PromptClaim:
    """What a slot's engine will hold of a prompt once it is prefilled, beyond what it holds now.

    `chunks` and `tokens` in parallel; `sample_hashes` and `sample_tokens`: those of them that peers are told of.
    `whole_count`: how many of `chunks` whole blocks of the prompt complete, and KV events can tell of.
    """

    chunks: list[int]
    tokens: U32
    sample_hashes: U64
    sample_tokens: U32
    whole_count: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PromptMatch:
    """`hit_tokens`: per slot, not yet cut to whole blocks. `engine_hits`: what the engines themselves are known to
    hold; `hits`: what slots hold or will, as `hit_tokens` counts it. `renderings`: prompt and chain by variant.
    `deepest_bytes`, `deepest_tokens`: the deepest hit, which `prompt_tokens` builds on.
    """

    prompt_tokens: int
    hit_tokens: I64
    engine_hits: list[Hit]
    hits: list[Hit]
    renderings: dict[int, tuple[Prompt, list[int]]]
    deepest_bytes: int
    deepest_tokens: int

    def claim(self, slot: int, variant: int, block_tokens: int, *, is_exact: bool) -> PromptClaim | None:
        """What the prompt, sent to `slot` in this rendering, will add there; None where that is nothing.

        Where KV events will tell, samples are of what they can tell of: of the others nobody would know when they go.
        """
        if variant not in self.renderings:
            return None
        prompt, chain = self.renderings[variant]
        held = next((hit.depth for hit in self.engine_hits if hit.slots >> slot & 1), 0)
        if held == len(chain):
            return None
        tokens = self.tokens_at(prompt, np.arange(held, len(chain)), block_tokens)
        whole = max(self.last_whole_chunk(prompt, len(chain), block_tokens) + 1, held)
        sampled = sample_positions(len(chain), held, whole if is_exact else len(chain))
        return PromptClaim(
            chunks=chain[held:],
            tokens=tokens,
            sample_hashes=prompt.chain[sampled],
            sample_tokens=tokens[sampled.start - held : sampled.stop - held : sampled.step],
            whole_count=whole - held,
        )

    def tokens_at(self, prompt: Prompt, chunks: I64, block_tokens: int) -> U32:
        """Tokens up to the end of each of these chunks (by position), in whole blocks: a claim, not knowledge."""
        ends = (chunks + 1) * CHUNK_BYTES
        rest_bytes = max(prompt.size_bytes - self.deepest_bytes, 1)
        rest_tokens = self.prompt_tokens - self.deepest_tokens
        tokens = self.deepest_tokens + (ends - self.deepest_bytes) * rest_tokens // rest_bytes
        if self.deepest_bytes:
            tokens = np.where(ends <= self.deepest_bytes, ends * self.deepest_tokens // self.deepest_bytes, tokens)
        return (np.maximum(tokens, 0) // block_tokens * block_tokens).astype(np.uint32)

    def last_whole_chunk(self, prompt: Prompt, chunk_count: int, block_tokens: int) -> int:
        """Position of the last chunk that a whole block of this prompt surely completes; -1 where there is none.

        A chunk that ends at least one block's bytes before the prompt's end is in a whole block however blocks and
        bytes are aligned. Bytes per token are those of the part beyond the deepest hit.
        """
        rest_tokens = self.prompt_tokens - self.deepest_tokens
        rest_bytes = prompt.size_bytes - self.deepest_bytes
        if rest_tokens <= 0 or rest_bytes <= 0:
            return -1
        whole_bytes = (prompt.size_bytes * rest_tokens - block_tokens * rest_bytes) // rest_tokens
        return min(whole_bytes // CHUNK_BYTES, chunk_count) - 1


def match_prompt(
    variants: list[Variant],
    slot_count: int,
    tokens_per_byte: float,
    index: PrefixIndex,
    learned: LearnedIndex,
    speculation: Speculation,
) -> PromptMatch:
    """Match one engine prompt, in all its renderings, against all slots that take part. `variants` is not empty."""
    hit_tokens = [0] * slot_count
    engine_hits: list[Hit] = []
    all_hits: list[Hit] = []
    renderings: dict[int, tuple[Prompt, list[int]]] = {}
    deepest = (0, math.inf)
    deepest_at = (variants[0].prompt, 0, 0)
    for variant in variants:
        prompt = variant.prompt
        chain: list[int] = prompt.chain.tolist()
        renderings[variant.number] = (prompt, chain)
        slots = variant.exact_slots | variant.approximate_slots
        hits = index.walk(chain, variant.exact_slots)
        engine_hits += hits
        hits = hits + learned.index.deepest(chain, variant.approximate_slots)
        # No speculative chunk is of use that lies no deeper than what every slot holds anyway.
        shallowest = min((hit.depth for hit in hits), default=0) if all_slots(hits) == slots else 0
        hits = deeper(hits, speculation.index.deepest(chain, slots, shallowest))
        all_hits += hits
        for depth, tokens, same in hits:
            for slot in slots_in(same):
                hit_tokens[slot] = tokens
            rank = (-depth, _length(prompt, depth, tokens, tokens_per_byte))
            if rank < deepest:
                deepest, deepest_at = rank, (prompt, depth, tokens)
    prompt, depth, tokens = deepest_at
    exact_tokens = next((variant.prompt.tokens for variant in variants if variant.prompt.tokens is not None), None)
    estimate = math.ceil(_length(prompt, depth, tokens, tokens_per_byte))
    prompt_tokens = estimate if exact_tokens is None else exact_tokens
    return PromptMatch(
        prompt_tokens=prompt_tokens,
        hit_tokens=np.array(hit_tokens, dtype=np.int64),
        engine_hits=engine_hits,
        hits=all_hits,
        renderings=renderings,
        deepest_bytes=depth * CHUNK_BYTES,
        deepest_tokens=min(tokens, prompt_tokens),
    )


def sample_positions(chunk_count: int, first_new: int, stop: int) -> slice:
    """Which chunks of a chain, before `stop`, peers are told of; `first_new` and those behind were not held yet."""
    new_bytes = (chunk_count - first_new) * CHUNK_BYTES
    step = SAMPLE_STEP if new_bytes >= SHORT_BYTES else SAMPLE_STEP_SHORT
    return slice(first_new + (-(first_new + 1)) % step, stop, step)


def _length(prompt: Prompt, depth: int, tokens: int, tokens_per_byte: float) -> float:
    return tokens + max(prompt.size_bytes - depth * CHUNK_BYTES, 0) * tokens_per_byte
