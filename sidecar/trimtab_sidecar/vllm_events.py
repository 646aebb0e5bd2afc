"""vLLM's KV cache events, releases 0.9 to 0.32, as an `EventBatch`.

The one rule: whatever the release, the same event becomes the same value. Events are positional arrays up to 0.23 and
maps from 0.24 on; unknown fields and unknown events are passed over.

`extra_keys` (from 0.17 on) has one entry for each block, untagged, in this order: the LoRA name where the event has
one, a pair `[item id, offset]` for each multimodal item in the block, the cache salt (first block of a prompt only), a
digest of prompt embeddings. The prefix ends before the first block with an item, or with a key whose meaning is not
certain; its descendants then have an unknown parent and fall away by themselves.
"""

from trimtab_sidecar.engine_events import (
    FULL_ATTENTION,
    GPU,
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    EventBatch,
    EventFormatError,
    block_key,
    block_keys,
    token_array,
)
from trimtab_sidecar.event_envelope import Fields, decode_batch, integer_field, text_field

POSITIONS = {
    "BlockStored": (
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
        "extra_keys",
        "group_idx",
        "kv_cache_spec_kind",
        "kv_cache_spec_sliding_window",
        "locality",
        "ownership",
        "session_id",
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx", "locality", "ownership"),
}
REMOTE = "REMOTE"
"""Locality of blocks that another machine holds: none of this endpoint's cache."""


def decode(payload: bytes) -> EventBatch:
    """The events of one frame's payload. Raises `EventFormatError` if it is no batch of events."""
    return decode_batch(payload, POSITIONS, READERS)


def read_stored(fields: Fields) -> tuple[BlocksStored | None, int]:
    blocks = block_keys(fields.get("block_hashes"))
    if fields.get("locality") == REMOTE:
        return None, 0
    parent = fields.get("parent_block_hash")
    lora_name = text_field(fields, "lora_name")
    medium = text_field(fields, "medium") or GPU
    kind = text_field(fields, "kv_cache_spec_kind")
    block_tokens = integer_field(fields, "block_size", 0)
    usable, salt, tokens = len(blocks), None, None
    if kind is not None and kind not in FULL_ATTENTION:
        # Windowed and state groups skip blocks, so their tokens do not line up with their hashes; no chain is built
        # from them, and only their presence matters.
        block_tokens = 0
    elif fields.get("extra_keys") is None and medium != GPU:
        # Offload events leave the extra keys out, so the identity of their blocks is not told. The blocks were in
        # the engine's own cache before: what is known of them stands, and this is one more reference.
        block_tokens = 0
    elif lora_name is None and fields.get("lora_id") is not None:
        # Before 0.14 an adapter has a number only, which no request knows it by.
        return None, len(blocks)
    elif len(blocks):
        usable, salt = understood_blocks(fields.get("extra_keys"), len(blocks), lora_name, parent is None)
        tokens = token_array(fields.get("token_ids"))
        if not len(tokens):
            tokens, block_tokens = None, 0
        elif not (len(blocks) - 1) * block_tokens < len(tokens) <= len(blocks) * block_tokens:
            return None, len(blocks)
    refused = len(blocks) - usable
    if refused and not usable:
        return None, refused
    return (
        BlocksStored(
            blocks=blocks[:usable],
            parent=None if parent is None else block_key(parent),
            tokens=token_array(None) if tokens is None else tokens[: usable * block_tokens],
            block_tokens=block_tokens,
            lora_name=lora_name,
            cache_salt=salt,
            medium=medium,
            group=integer_field(fields, "group_idx", 0),
            kind=kind,
        ),
        refused,
    )


def understood_blocks(extra_keys: object, count: int, lora_name: str | None, at_start: bool) -> tuple[int, str | None]:
    """How many leading blocks have an identity that is understood, and the salt of the first.

    Up to 0.18 a multimodal item's key is bare text like a salt's. In the first block it is then taken for a salt,
    which is safe: a chain under a salt that no request names attracts nobody.
    """
    if extra_keys is None:
        return count, None
    if not isinstance(extra_keys, list) or len(extra_keys) != count:
        raise EventFormatError("extra keys do not match the blocks")
    if lora_name is None and not any(extra_keys):
        return count, None
    salt: str | None = None
    for index, keys in enumerate(extra_keys):
        rest: list[object] = [] if keys is None else list(keys) if isinstance(keys, list) else [keys]
        if lora_name is not None:
            if not rest or rest[0] != lora_name:
                return index, salt
            rest = rest[1:]
        if at_start and index == 0 and len(rest) == 1 and isinstance(rest[0], str):
            salt = rest[0]
        elif rest:
            return index, salt
    return count, salt


def read_removed(fields: Fields) -> tuple[BlocksRemoved | None, int]:
    blocks = block_keys(fields.get("block_hashes"))
    if not len(blocks) or fields.get("locality") == REMOTE:
        return None, 0
    medium, group = text_field(fields, "medium") or GPU, integer_field(fields, "group_idx", 0)
    return BlocksRemoved(blocks=blocks, medium=medium, group=group), 0


def read_cleared(fields: Fields) -> tuple[CacheCleared, int]:
    return CacheCleared(), 0


READERS = {"BlockStored": read_stored, "BlockRemoved": read_removed, "AllBlocksCleared": read_cleared}
