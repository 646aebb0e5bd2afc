"""SGLang's KV cache events, as an `EventBatch`.

The one rule: a block whose salt or adapter cannot be known is not claimed. Frames, envelope and field order are
vLLM's; hashes are signed 64 bit; there is an event for each page, and the last page of a prompt may be short.

A salt comes as `cache_salt` (newer releases, on every block of the prompt) or in `extra_keys` (first block only). The
adapter's name is in no release, and blocks of an adapter look like the base model's: the endpoint of an engine that
serves LoRA adapters is approximate. Not captured from a live SGLang; written from its source.
"""

from trimtab_sidecar.engine_events import (
    GPU,
    BlocksStored,
    EventBatch,
    EventFormatError,
    block_key,
    block_keys,
    token_array,
)
from trimtab_sidecar.event_envelope import Fields, decode_batch, integer_field, text_field
from trimtab_sidecar.vllm_events import read_cleared, read_removed, understood_blocks

POSITIONS = {
    "BlockStored": ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium"),
    "BlockRemoved": ("block_hashes", "medium"),
}


def decode(payload: bytes) -> EventBatch:
    """The events of one frame's payload. Raises `EventFormatError` if it is no batch of events."""
    return decode_batch(payload, POSITIONS, READERS)


def read_stored(fields: Fields) -> tuple[BlocksStored | None, int]:
    blocks = block_keys(fields.get("block_hashes"))
    if not len(blocks):
        return None, 0
    if fields.get("lora_id") is not None:
        return None, len(blocks)
    parent = fields.get("parent_block_hash")
    usable, salt = understood_blocks(fields.get("extra_keys"), len(blocks), None, parent is None)
    if not usable:
        return None, len(blocks)
    try:
        tokens = token_array(fields.get("token_ids"))
    except EventFormatError:
        # Speculative decoding keys its cache by pairs of tokens, and media stand in it as large pad numbers.
        return None, len(blocks)
    block_tokens = integer_field(fields, "block_size", 0)
    if not len(tokens):
        block_tokens = 0
    elif not (len(blocks) - 1) * block_tokens < len(tokens) <= len(blocks) * block_tokens:
        return None, len(blocks)
    return (
        BlocksStored(
            blocks=blocks[:usable],
            parent=None if parent is None else block_key(parent),
            tokens=tokens[: usable * block_tokens],
            block_tokens=block_tokens,
            cache_salt=text_field(fields, "cache_salt") or salt,
            medium=text_field(fields, "medium") or GPU,
        ),
        len(blocks) - usable,
    )


READERS = {"BlockStored": read_stored, "BlockRemoved": read_removed, "AllBlocksCleared": read_cleared}
