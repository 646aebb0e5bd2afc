"""Paged KV memory with a prefix cache, block for block as vLLM keeps it.

The one rule: a block is in use (counted references), or in the free queue; a block in the free queue may still be
cached, and stays so until it is handed out again. Everything else follows: eviction is lazy, oldest first, and since a
request gives its blocks back tail first, a chain is eaten from its end.

What consumers of the events have to live with is kept too: equal blocks are not merged, so one hash can be stored
several times and goes at its last removal; hits emit nothing; a block that is stored again emits again.

It knows no requests and no time. Block 0 is never handed out (the engine's null block), so `block_count - 1` serve.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trimtab_lab.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, ExtraKeys, KvEvent
from trimtab_lab.token_chain import TokenChain


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedBlock:
    """What is known of a cached hash; the same for all its copies."""

    parent: bytes | None
    tokens: "array[int]"
    extra_keys: ExtraKeys
    lora_name: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveChain:
    """A cached block that no cached block follows, with everything before it. A block never outlives the one before
    it, so each whole-block prefix of `tokens` is a live block too, and all live blocks are found this way."""

    tokens: tuple[int, ...]
    block_hashes: tuple[bytes, ...]
    lora_name: str | None
    cache_salt: str | None


class BlockCache:
    def __init__(self, *, block_count: int, block_tokens: int, caching: bool = True) -> None:
        if block_count < 2:
            raise ValueError(f"block_count must be at least 2 (one is never handed out), got {block_count}")
        self.block_count = block_count
        self.block_tokens = block_tokens
        self.caching = caching
        self._references = [0] * block_count
        self._hash_of: list[bytes | None] = [None] * block_count
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, block_count))
        self._copies: dict[bytes, list[int]] = {}
        self._known: dict[bytes, CachedBlock] = {}
        self._events: list[KvEvent] = []

    @property
    def free_count(self) -> int:
        return len(self._free)

    @property
    def used_count(self) -> int:
        return self.block_count - 1 - len(self._free)

    @property
    def usage(self) -> float:
        """Share of blocks in use by requests, 0 to 1. A full prefix cache with no request is 0."""
        return self.used_count / (self.block_count - 1)

    def is_free(self, block: int) -> bool:
        return self._references[block] == 0

    def longest_hit(self, hashes: Sequence[bytes], tokens_max: int) -> list[int]:
        """The cached blocks of the longest prefix of at most `tokens_max` tokens, oldest copy of each."""
        hit: list[int] = []
        if not self.caching:
            return hit
        copies = self._copies
        for block_hash in hashes[: tokens_max // self.block_tokens]:
            blocks = copies.get(block_hash)
            if blocks is None:
                break
            hit.append(blocks[0])
        return hit

    def touch(self, blocks: Iterable[int]) -> None:
        """Take a reference on each block of a hit."""
        for block in blocks:
            if self._references[block] == 0:
                del self._free[block]
            self._references[block] += 1

    def allocate(self, count: int) -> list[int]:
        """`count` blocks from the front of the free queue; what they cached is evicted now."""
        if count > len(self._free):
            raise ValueError(f"{count} blocks wanted, {len(self._free)} free")
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self._evict(block)
            self._references[block] = 1
        return blocks

    def release(self, blocks: Iterable[int]) -> None:
        """Give references back, first to be reused first (so a request passes its tail first).

        Blocks without a hash go to the front of the queue, since nobody can hit them; cached ones to its end.
        """
        plain: list[int] = []
        for block in blocks:
            left = self._references[block] - 1
            if left < 0:
                raise ValueError(f"block {block} was given back twice")
            self._references[block] = left
            if left == 0:
                self._free[block] = None
                if self._hash_of[block] is None:
                    plain.append(block)
        for block in reversed(plain):
            self._free.move_to_end(block, last=False)

    def store(self, chain: TokenChain, blocks: Sequence[int], first: int, end: int) -> None:
        """The whole blocks `first` to `end - 1` of the request's chain are reusable from now on: one event."""
        if not self.caching or first >= end:
            return
        size = self.block_tokens
        parent = chain.hashes[first - 1] if first else None
        stored_after, lora_name = parent, None if chain.lora is None else chain.lora.name
        for index in range(first, end):
            block, block_hash = blocks[index], chain.hashes[index]
            if self._hash_of[block] is not None:
                raise ValueError(f"block {block} is cached already")
            self._hash_of[block] = block_hash
            copies = self._copies.get(block_hash)
            if copies is None:
                self._copies[block_hash] = [block]
                self._known[block_hash] = CachedBlock(
                    parent=stored_after,
                    tokens=chain.tokens[index * size : (index + 1) * size],
                    extra_keys=chain.extra_keys(index),
                    lora_name=lora_name,
                )
            else:
                copies.append(block)
            stored_after = block_hash
        self._events.append(
            BlockStored(
                block_hashes=tuple(chain.hashes[first:end]),
                parent=parent,
                tokens=chain.tokens[first * size : end * size],
                block_tokens=size,
                extra_keys=tuple(chain.extra_keys(index) for index in range(first, end)),
                lora_id=None if chain.lora is None else chain.lora.adapter_id,
                lora_name=lora_name,
            )
        )

    def reset(self) -> bool:
        """Forget all cached blocks, unless requests still hold some: then nothing happens and the answer is False."""
        if self.used_count:
            return False
        self._hash_of = [None] * self.block_count
        self._copies.clear()
        self._known.clear()
        self._events.append(AllBlocksCleared())
        return True

    def take_events(self) -> tuple[KvEvent, ...]:
        """Events since the last call, in order."""
        events, self._events = self._events, []
        return tuple(events)

    def copies(self) -> dict[bytes, int]:
        """How many live copies each cached hash has."""
        return {block_hash: len(blocks) for block_hash, blocks in self._copies.items()}

    def live_chains(self) -> list[LiveChain]:
        """The whole cache as chains, in no particular order."""
        parents = {known.parent for known in self._known.values()}
        chains = []
        for leaf in self._known.keys() - parents:
            path: list[bytes] = []
            at: bytes | None = leaf
            while at is not None:
                path.append(at)
                at = self._known[at].parent
            path.reverse()
            first = self._known[path[0]]
            salt = (first.extra_keys or ())[0 if first.lora_name is None else 1 :]
            chains.append(
                LiveChain(
                    tokens=tuple(token for block_hash in path for token in self._known[block_hash].tokens),
                    block_hashes=tuple(path),
                    lora_name=first.lora_name,
                    cache_salt=salt[0] if salt else None,
                )
            )
        return chains

    def check_invariants(self, held: Iterable[Sequence[int]]) -> None:
        """Raise unless the books balance; `held` are the blocks of each request that has some."""
        wanted = [0] * self.block_count
        for blocks in held:
            for block in blocks:
                wanted[block] += 1
        if wanted != self._references:
            raise AssertionError("references differ from what requests hold")
        if any((self._references[block] == 0) != (block in self._free) for block in range(1, self.block_count)):
            raise AssertionError("a block is both in use and free, or neither")
        if 0 in self._free:
            raise AssertionError("the null block is free")
        listed = {block: block_hash for block_hash, blocks in self._copies.items() for block in blocks}
        if listed != {block: h for block, h in enumerate(self._hash_of) if h is not None}:
            raise AssertionError("hash map and blocks disagree")
        if self._known.keys() != self._copies.keys() or not all(self._copies.values()):
            raise AssertionError("a hash without copies is still known, or the reverse")
        for known in self._known.values():
            if known.parent is not None and known.parent not in self._copies:
                raise AssertionError("a cached block outlived its parent")

    def _evict(self, block: int) -> None:
        block_hash = self._hash_of[block]
        if block_hash is None:
            return
        self._hash_of[block] = None
        blocks = self._copies[block_hash]
        blocks.remove(block)
        if not blocks:
            del self._copies[block_hash]
            del self._known[block_hash]
        self._events.append(BlockRemoved(block_hash=block_hash))
