"""What any engine says about its KV cache, in one shape: blocks stored, blocks removed, everything cleared.

The one rule: an event says only what may be believed. Blocks whose identity an adapter does not fully understand are
cut off before they get here (`EventBatch.refused_blocks` counts them), because a block that is claimed under the
wrong text attracts requests that then miss. This module must not know an engine's wire format: that is the adapters'.

Block keys are 64 bit. An engine hash given as an integer is taken modulo 2^64 (SGLang's are signed); given as bytes,
its last eight bytes, big-endian, are the key. That is how vLLM itself shortens a hash to an integer, so one block has
one key in both encodings.
"""

from array import array
from dataclasses import dataclass

import numpy as np

from trimtab_core.chunks import U32, U64

KEY_MASK = 0xFFFF_FFFF_FFFF_FFFF

GPU = "GPU"
"""The medium of blocks in the engine's own cache; what older releases mean by saying nothing."""

FULL_ATTENTION = frozenset({"full_attention", "mla_attention", "sink_full_attention"})
"""Kinds of KV cache group whose blocks all matter to a hit, so that chains may be built from them."""


class EventFormatError(ValueError):
    """A frame or an event that breaks its own format. It is counted and skipped; its neighbours still count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksStored:
    """Blocks in a row, each the child of the one before, that the engine now holds."""

    blocks: U64
    """Keys, shape (blocks,)."""
    parent: int | None
    """Key of the block before `blocks[0]`; None at the start of a prompt, or where the engine does not say."""
    tokens: U32
    """Token ids of all blocks, concatenated; empty where the event is only a further reference to known blocks."""
    block_tokens: int
    """Tokens per block; the last block may hold fewer. 0 where there are no tokens."""
    lora_name: str | None = None
    cache_salt: str | None = None
    """The salt of the first block of a prompt. Later blocks inherit it through their parent."""
    medium: str = GPU
    group: int = 0
    """Index of the engine's KV cache group."""
    kind: str | None = None
    """What the engine calls the group's kind of attention; None where it does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksRemoved:
    blocks: U64
    medium: str = GPU
    group: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheCleared:
    """The engine dropped its whole prefix cache."""


EngineEvent = BlocksStored | BlocksRemoved | CacheCleared


@dataclass(frozen=True, slots=True, kw_only=True)
class EventBatch:
    """One frame: what one engine step did."""

    events: tuple[EngineEvent, ...]
    time_s: float
    """The engine's clock, seconds since 1970, when it made the batch."""
    rank: int | None
    """Data-parallel rank, where the engine says it."""
    undecodable: int = 0
    """Events that broke their format and are left out."""
    removals_uncertain: bool = False
    """One of those may have removed blocks, so that what is known of the cache may be too much."""
    unknown: int = 0
    """Events of a type this release of Trimtab does not know, left out."""
    refused_blocks: int = 0
    """Blocks left out because something in their identity is not understood."""


def block_key(value: object) -> int:
    """The 64-bit key of an engine's block hash. Raises `EventFormatError` for anything but an integer or bytes."""
    if type(value) is int:
        return value & KEY_MASK
    if isinstance(value, bytes) and value:
        return int.from_bytes(value[-8:], "big")
    raise EventFormatError("a block hash is neither integer nor bytes")


def block_keys(values: object) -> U64:
    """Keys of a list of block hashes, shape (blocks,)."""
    if not isinstance(values, list):
        raise EventFormatError("block hashes are not a list")
    return np.array([block_key(value) for value in values], dtype=np.uint64)


def token_array(values: object) -> U32:
    """Token ids as an array. Raises `EventFormatError` where one is not an integer of 32 bits."""
    if values is None:
        return np.empty(0, dtype=np.uint32)
    if not isinstance(values, list):
        raise EventFormatError("token ids are not a list")
    try:
        # `array` converts a list some four times faster than numpy does.
        return np.frombuffer(array("I", values), dtype=np.uint32) if values else np.empty(0, dtype=np.uint32)
    except (TypeError, OverflowError) as error:
        raise EventFormatError("a token id is no integer of 32 bits") from error
