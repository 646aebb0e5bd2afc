"""Block chains: what an engine's KV blocks hold, turned into the chunks of text that they complete.

The one rule: the published chunks are exactly those that some held block completes, each with the smallest token count
among the held blocks that complete it. Engine hashes mean something inside one engine only and never leave this map.

A chunk belongs to the block that holds its last byte. Its token count is block-aligned: the block's end for the last
chunk that ends in the block, the block's start for the earlier ones, so that a reader needs no block size.

Not here: where events come from, gaps in their sequence, epochs. The caller fences those, and says `clear` or
`unpublish`.
"""

from dataclasses import dataclass, field

import numpy as np

from trimtab_core.chunks import CHUNK_BYTES, U32, U64, extend_chain
from trimtab_core.errors import ensure
from trimtab_core.token_table import TokenTable, UnknownToken

BLOCKS_MAX = 8_000_000
"""Most blocks known at once, far beyond what an engine holds. At the bound new blocks are dropped and counted."""

Place = tuple[str, int]
"""Where a reference is held: (medium, KV cache group)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChunkChanges:
    """What a consumer of an endpoint's chunks has to do to catch up.

    Apply `cleared` first, then `removed`, then `added`. A chunk in `added` that the consumer holds already gets the new
    token count. `added` and `tokens` run in parallel.
    """

    cleared: bool
    added: U64
    tokens: U32
    removed: U64

    def is_empty(self) -> bool:
        """True where there is nothing to apply."""
        return not (self.cleared or len(self.added) or len(self.removed))


@dataclass(slots=True, kw_only=True, eq=False)
class Block:
    """One engine block: its end state, the chunks that it completes, and who refers to it."""

    parent: int | None
    chain: int
    """Hash of the last chunk completed up to the block's end (the root where none is)."""
    tail: bytes
    """The open chunk's bytes, fewer than 64."""
    tokens: int
    """Tokens from the start of the prompt to the block's end."""
    chunks: tuple[tuple[int, int], ...]
    """(hash, token count) of each chunk whose last byte is in this block."""
    references: dict[Place, int] = field(default_factory=dict)
    set_aside: set[Place] = field(default_factory=set)
    """Where it was referred to before a gap: this no longer holds the block, but says that it may still be there."""
    is_published: bool = False


class BlockChains:
    """The map of one engine (one data-parallel rank). References are counted by (medium, group); any of them holds."""

    def __init__(self, table: TokenTable, seed: int) -> None:
        self.table = table
        self.seed = seed
        self.bytes_seen = 0
        self.tokens_seen = 0
        self.dropped_unknown_parent = 0
        self.dropped_unknown_token = 0
        self.dropped_malformed = 0
        self.dropped_full = 0
        self._blocks: dict[int, Block] = {}
        self._unconfirmed: dict[int, int] = {}  # blocks kept only by what was set aside -> since which gap
        self._gaps = 0
        self._held_max = 0
        self._chunks: dict[int, list[int]] = {}  # chunk -> token counts, one for each published block that completes it
        self._before: dict[int, int | None] = {}  # chunks touched since the last drain -> tokens at that drain
        self._is_cleared = False

    @property
    def block_count(self) -> int:
        """Blocks with at least one reference."""
        return len(self._blocks) - len(self._unconfirmed)

    @property
    def unconfirmed_count(self) -> int:
        """Blocks known from before a gap and not seen again since."""
        return len(self._unconfirmed)

    @property
    def chunk_count(self) -> int:
        """Published chunks."""
        return len(self._chunks)

    def store(
        self,
        *,
        parent: int | None,
        blocks: U64,
        tokens: U32,
        block_tokens: int,
        root: int,
        medium: str = "GPU",
        group: int = 0,
    ) -> None:
        """One event: `blocks` follow each other, `tokens` are theirs in a row (the last block may be short).

        `root` stands in for the end state of `parent` None. No tokens (offload media): a reference to blocks that are
        known, nothing else. A block whose parent is unknown, or that has a token without bytes, is dropped, and so are
        its descendants. An engine that stores a block holds all before it: ancestors from before a gap are confirmed.
        """
        names = blocks.tolist()
        if len(tokens) and not (len(names) - 1) * block_tokens < len(tokens) <= len(names) * block_tokens:
            self.dropped_malformed += len(names)
            return
        place = (medium, group)
        if len(tokens) and names and parent is not None:
            self._confirm(parent, place)
        for position, name in enumerate(names):
            block = self._blocks.get(name)
            if block is None and len(tokens):
                start = position * block_tokens
                block = self._new_block(parent, tokens[start : start + block_tokens], root)
                if block is not None:
                    self._blocks[name] = block
            if block is not None:
                self._refer(name, block, place)
            parent = name
        self._held_max = max(self._held_max, self.block_count)

    def remove(self, *, blocks: U64, medium: str = "GPU", group: int = 0) -> None:
        """Each block loses one reference at (medium, group); with its last one it is forgotten, end state and all."""
        place = (medium, group)
        for name in blocks.tolist():
            block = self._blocks.get(name)
            if block is None:
                continue
            count = block.references.get(place, 0)
            if count > 1:
                block.references[place] = count - 1
            elif count == 1:
                del block.references[place]
            else:
                block.set_aside.discard(place)
            self._settle(name, block)

    def clear(self) -> None:
        """The engine's cache is empty: nothing is known any more."""
        self._blocks.clear()
        self._unconfirmed.clear()
        self._held_max = 0
        self._forget_chunks()

    def unpublish(self) -> None:
        """Events were lost: no chunk can be vouched for, but the end states stay, to build on and to be confirmed.

        Blocks whose removal was among the lost events would stay for ever; so no more of them are kept than the engine
        held at its fullest. Those of the oldest gap go first, and of one gap the deepest, as nothing else builds on
        them.
        """
        self._forget_chunks()
        self._gaps += 1
        for name, block in self._blocks.items():
            block.is_published = False
            if block.references:
                block.set_aside.update(block.references)
                block.references.clear()
                self._unconfirmed[name] = self._gaps
        excess = len(self._unconfirmed) - self._held_max
        if excess > 0:
            by_age = sorted(
                self._unconfirmed.items(), key=lambda item: (item[1], -self._blocks[item[0]].tokens, item[0])
            )
            for name, _ in by_age[:excess]:
                del self._unconfirmed[name], self._blocks[name]

    def drain(self) -> ChunkChanges:
        """Net changes since the last drain: a chunk that came and went is not in it."""
        added, tokens, removed = [], [], []
        for chunk, before in self._before.items():
            counts = self._chunks.get(chunk)
            now = min(counts) if counts else None
            if now is None:
                if before is not None:
                    removed.append(chunk)
            elif now != before:
                added.append(chunk)
                tokens.append(now)
        changes = ChunkChanges(
            cleared=self._is_cleared,
            added=np.array(added, dtype=np.uint64),
            tokens=np.array(tokens, dtype=np.uint32),
            removed=np.array(removed, dtype=np.uint64),
        )
        self._before = {}
        self._is_cleared = False
        return changes

    def chunks(self) -> tuple[U64, U32]:
        """All that is published: chunk hashes in no order, and their token counts."""
        count = len(self._chunks)
        hashes = np.fromiter(self._chunks.keys(), dtype=np.uint64, count=count)
        tokens = np.fromiter((min(counts) for counts in self._chunks.values()), dtype=np.uint32, count=count)
        return hashes, tokens

    def dump(self) -> bytes:
        """A checkpoint for `load`. What was not drained is not told again: after a load, publish `chunks()`."""
        from trimtab_core.chain_checkpoint import pack

        return pack(self)

    @classmethod
    def load(cls, table: TokenTable, seed: int, data: bytes) -> "BlockChains":
        """The map that `dump` packed. Raises `DataError` on damage, and on another table, seed or version."""
        from trimtab_core.chain_checkpoint import unpack

        return unpack(table, seed, data)

    def _new_block(self, parent: int | None, tokens: U32, root: int) -> Block | None:
        if parent is None:
            chain, tail, start = root, b"", 0
        else:
            before = self._blocks.get(parent)
            if before is None:
                self.dropped_unknown_parent += 1
                return None
            chain, tail, start = before.chain, before.tail, before.tokens
        if len(self._blocks) >= BLOCKS_MAX:
            self.dropped_full += 1
            return None
        try:
            text = self.table.bytes_of(tokens)
        except UnknownToken:
            self.dropped_unknown_token += 1
            return None
        self.bytes_seen += len(text)
        self.tokens_seen += len(tokens)
        end = start + len(tokens)
        text = tail + text
        hashes = extend_chain(chain, text, self.seed)
        return Block(
            parent=parent,
            chain=hashes[-1] if hashes else chain,
            tail=text[len(hashes) * CHUNK_BYTES :],
            tokens=end,
            chunks=tuple((chunk, start) for chunk in hashes[:-1]) + tuple((chunk, end) for chunk in hashes[-1:]),
        )

    def _refer(self, name: int, block: Block, place: Place) -> None:
        block.references[place] = block.references.get(place, 0) + 1
        block.set_aside.discard(place)
        self._settle(name, block)

    def _confirm(self, name: int | None, place: Place) -> None:
        """Give the block, and its ancestors, the reference that a gap may have hidden."""
        while name is not None:
            block = self._blocks.get(name)
            if block is None or not block.set_aside or place in block.references:
                return
            self._refer(name, block, place)
            name = block.parent

    def _settle(self, name: int, block: Block) -> None:
        """After its references changed: publish or withdraw the block's chunks, forget it if nothing keeps it."""
        held = bool(block.references)
        if held != block.is_published:
            block.is_published = held
            for chunk, tokens in block.chunks:
                self._publish(chunk, tokens) if held else self._withdraw(chunk, tokens)
        if block.references:
            self._unconfirmed.pop(name, None)
        elif block.set_aside and (name in self._unconfirmed or len(self._unconfirmed) < self._held_max):
            self._unconfirmed.setdefault(name, self._gaps)
        else:
            self._unconfirmed.pop(name, None)
            del self._blocks[name]

    def _publish(self, chunk: int, tokens: int) -> None:
        counts = self._chunks.setdefault(chunk, [])
        self._before.setdefault(chunk, min(counts) if counts else None)
        counts.append(tokens)

    def _withdraw(self, chunk: int, tokens: int) -> None:
        counts = self._chunks[chunk]
        self._before.setdefault(chunk, min(counts))
        counts.remove(tokens)
        if not counts:
            del self._chunks[chunk]

    def _forget_chunks(self) -> None:
        self._chunks.clear()
        self._before.clear()
        self._is_cleared = True

    def check_invariants(self) -> None:
        """Raise `InvariantError` if the state contradicts itself. Costs as much as the whole map: for tests."""
        published: dict[int, list[int]] = {}
        for name, block in self._blocks.items():
            ensure(block.is_published == bool(block.references), f"block {name}: published is not held")
            ensure(bool(block.references or block.set_aside), f"block {name}: kept by nothing")
            ensure((name in self._unconfirmed) == (not block.references), f"block {name}: wrongly (un)confirmed")
            ensure(all(count > 0 for count in block.references.values()), f"block {name}: reference count below one")
            ensure(len(block.tail) < CHUNK_BYTES, f"block {name}: a whole chunk left open")
            for chunk, tokens in block.chunks if block.is_published else ():
                published.setdefault(chunk, []).append(tokens)
        ensure(self._unconfirmed.keys() <= self._blocks.keys(), "an unconfirmed block is not known")
        ensure(len(self._unconfirmed) <= self._held_max, "more unconfirmed blocks than the engine ever held")
        ensure(published.keys() == self._chunks.keys(), "published chunks are not those of the held blocks")
        for chunk, counts in self._chunks.items():
            ensure(sorted(counts) == sorted(published[chunk]), f"chunk {chunk}: token counts differ from its blocks'")
