"""KV events as vLLM puts them on the wire: msgpack payloads, numbered, with the replay buffer behind them.

The one rule: one payload per step that had events, numbered from 0 by this process; a restart numbers from 0 again and
nothing marks it. Two forms: `map` is vLLM since 0.24 (0.32 here), `array` is 0.22 and 0.23: positional events, and no
topic in replies to a replay. No sockets here.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Literal

import msgspec

from trimtab_lab.kv_events import BlockRemoved, BlockStored, KvEvent

Encoding = Literal["map", "array"]
HashForm = Literal["int", "bytes"]

MEDIUM = "GPU"
GROUP = 0
SPEC_KIND = "full_attention"
END_OF_REPLAY = b"\xff" * 8


class StoredMap(msgspec.Struct, tag="BlockStored", omit_defaults=True):
    block_hashes: list[int] | list[bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[str, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class RemovedMap(msgspec.Struct, tag="BlockRemoved", omit_defaults=True):
    block_hashes: list[int] | list[bytes]
    medium: str | None
    group_idx: int | None = None


class ClearedMap(msgspec.Struct, tag="AllBlocksCleared"):
    pass


class KvBatchEncoder:
    """Events of one step to the payload of one message."""

    def __init__(self, *, encoding: Encoding = "map", hash_form: HashForm = "int", rank: int = 0) -> None:
        self.encoding = encoding
        self.hash_form = hash_form
        self.rank = rank
        self._encoder = msgspec.msgpack.Encoder()

    def encode(self, events: Iterable[KvEvent], *, timestamp_s: float) -> bytes:
        form = self._as_map if self.encoding == "map" else self._as_array
        return self._encoder.encode([timestamp_s, [form(event) for event in events], self.rank])

    def _hash(self, block_hash: bytes) -> int | bytes:
        return int.from_bytes(block_hash[-8:], "big") if self.hash_form == "int" else block_hash

    def _hashes(self, block_hashes: Iterable[bytes]) -> list[int] | list[bytes]:
        return [self._hash(block_hash) for block_hash in block_hashes]  # type: ignore[return-value]

    def _as_map(self, event: KvEvent) -> StoredMap | RemovedMap | ClearedMap:
        if isinstance(event, BlockStored):
            return StoredMap(
                block_hashes=self._hashes(event.block_hashes),
                parent_block_hash=None if event.parent is None else self._hash(event.parent),
                token_ids=event.tokens.tolist(),
                block_size=event.block_tokens,
                lora_id=event.lora_id,
                medium=MEDIUM,
                lora_name=event.lora_name,
                extra_keys=list(event.extra_keys),
                group_idx=GROUP,
                kv_cache_spec_kind=SPEC_KIND,
            )
        if isinstance(event, BlockRemoved):
            return RemovedMap(block_hashes=self._hashes((event.block_hash,)), medium=MEDIUM, group_idx=GROUP)
        return ClearedMap()

    def _as_array(self, event: KvEvent) -> list[object]:
        if isinstance(event, BlockStored):
            return [
                "BlockStored",
                self._hashes(event.block_hashes),
                None if event.parent is None else self._hash(event.parent),
                event.tokens.tolist(),
                event.block_tokens,
                event.lora_id,
                MEDIUM,
                event.lora_name,
                list(event.extra_keys),
                GROUP,
                SPEC_KIND,
                None,
            ]
        if isinstance(event, BlockRemoved):
            return ["BlockRemoved", self._hashes((event.block_hash,)), MEDIUM, GROUP]
        return ["AllBlocksCleared"]


class KvEventLog:
    """Numbers payloads and keeps the last `buffer_steps` of them for replay; older ones are gone without a trace."""

    def __init__(self, *, buffer_steps: int = 10_000) -> None:
        self.buffer_steps = buffer_steps
        self.next_sequence = 0
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=buffer_steps)

    def append(self, payload: bytes) -> int:
        sequence = self.next_sequence
        self.next_sequence += 1
        self._kept.append((sequence, payload))
        return sequence

    def since(self, sequence: int) -> Iterator[tuple[int, bytes]]:
        """What is kept from `sequence` on, oldest first."""
        return ((number, payload) for number, payload in self._kept if number >= sequence)

    def restart(self) -> None:
        """A new process: numbers from 0, empty buffer."""
        self.next_sequence = 0
        self._kept.clear()
