"""KV cache events of an emulated engine, as domain values.

The one rule: a hash here is the whole digest (32 bytes) of a block and everything before it; how much of it goes on the
wire is the codec's business (`kv_wire.py`). Nothing here knows ZeroMQ or msgpack.
"""

from array import array
from dataclasses import dataclass

ExtraKeys = tuple[str, ...] | None
"""What a block's hash covers besides tokens: the LoRA name (every block), then the cache salt (first block only)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockStored:
    """Blocks in a row that became reusable; `parent` is the block before them, None at the start of a prompt."""

    block_hashes: tuple[bytes, ...]
    parent: bytes | None
    tokens: "array[int]"
    block_tokens: int
    extra_keys: tuple[ExtraKeys, ...]
    lora_id: int | None = None
    lora_name: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRemoved:
    """One copy of a block went. Another copy with the same hash may live on."""

    block_hash: bytes


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """The whole prefix cache was reset."""


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared
