"""What one rank of an engine has cached, as chunks of text: events in, net chunk changes out.

The one rule: nothing is claimed that the engine may not hold. Chains are built from one KV cache group whose blocks all
matter (full attention); where the engine has further groups, a hit depends on them too, events do not show enough to
tell, and `approximate` says so. Which engine process the events are of, and whether any are missing, is the feed's
business: it calls `clear` and `unpublish`.
"""

from dataclasses import dataclass

from trimtab_core.block_chains import ChunkChanges
from trimtab_core.chunks import U32, U64, root_hash
from trimtab_core.selection import BlockChains
from trimtab_core.token_table import TokenTable
from trimtab_sidecar.engine_events import FULL_ATTENTION, BlocksRemoved, BlocksStored, CacheCleared, EventBatch

RATE_BYTES_MIN = 4_096
"""Text below it says little about how many tokens a byte is worth."""
ROOTS_MAX = 4_096
"""Chain roots (LoRA name, salt) remembered; beyond it they are computed again."""
OTHER_GROUPS_MAX = 64
"""KV cache groups besides ours that are remembered by number; one is enough to make hits uncertain."""
KIND_CHARS_MAX = 64
"""Of a kind's name that is kept."""


@dataclass(slots=True, kw_only=True)
class EventCounts:
    """What was seen, in events and blocks. They only grow."""

    stored_blocks: int = 0
    removed_blocks: int = 0
    clears: int = 0
    undecodable: int = 0
    unknown: int = 0
    refused_blocks: int = 0
    other_group_events: int = 0


class CachedPrefixes:
    """`seed` is the pool's; `chains` a map to go on from (a checkpoint's), with the group it was built from."""

    def __init__(
        self, table: TokenTable, seed: int, *, chains: BlockChains | None = None, group: int | None = None
    ) -> None:
        self.table = table
        self.seed = seed
        self.chains = BlockChains(table, seed) if chains is None else chains
        self.group = group
        """The KV cache group that chains are built from; None until an event names one."""
        self.other_groups: dict[int, str | None] = {}
        """Further groups of the engine, with their kinds."""
        self.block_tokens = 0
        """Tokens in one of the engine's blocks, as its events have it; 0 until one does."""
        self.counts = EventCounts()
        self.is_dirty = False
        """Something was applied since the last checkpoint."""
        self._roots: dict[tuple[str | None, str | None], int] = {}

    @property
    def approximate(self) -> str | None:
        """Why the engine's hits cannot be told from its events, None if they can."""
        if not self.other_groups:
            return None
        kinds = sorted({kind or "unnamed" for kind in self.other_groups.values()})
        return f"hits also need KV cache groups of kind {', '.join(kinds)}"

    @property
    def tokens_per_byte(self) -> float:
        """Of the text in the blocks seen, to two digits, so that it seldom changes; 0 while that is too little."""
        if self.chains.bytes_seen < RATE_BYTES_MIN:
            return 0.0
        return float(f"{self.chains.tokens_seen / self.chains.bytes_seen:.2g}")

    @property
    def is_empty(self) -> bool:
        """Nothing is known, not even blocks that wait to be confirmed."""
        return not (self.chains.block_count or self.chains.unconfirmed_count)

    def apply(self, batch: EventBatch) -> None:
        counts = self.counts
        counts.undecodable += batch.undecodable
        counts.unknown += batch.unknown
        counts.refused_blocks += batch.refused_blocks
        self.is_dirty = True
        if batch.removals_uncertain:
            self.chains.unpublish()
        for event in batch.events:
            if isinstance(event, BlocksStored):
                if self._is_ours(event.group, event.kind):
                    counts.stored_blocks += len(event.blocks)
                    self.block_tokens = max(self.block_tokens, event.block_tokens)
                    self.chains.store(
                        parent=event.parent,
                        blocks=event.blocks,
                        tokens=event.tokens,
                        block_tokens=event.block_tokens,
                        root=self._root(event.lora_name, event.cache_salt),
                        medium=event.medium,
                        group=event.group,
                    )
            elif isinstance(event, BlocksRemoved):
                if self.group is None or event.group == self.group:
                    counts.removed_blocks += len(event.blocks)
                    self.chains.remove(blocks=event.blocks, medium=event.medium, group=event.group)
            elif isinstance(event, CacheCleared):
                counts.clears += 1
                self.chains.clear()

    def clear(self) -> None:
        """The engine's cache is empty."""
        self.chains.clear()
        self.is_dirty = True

    def forget_engine(self) -> None:
        """Another engine process: its cache is empty, and its groups may be other ones."""
        self.clear()
        self.group = None
        self.other_groups.clear()

    def unpublish(self) -> None:
        """Events were lost."""
        self.chains.unpublish()
        self.is_dirty = True

    def drain(self) -> ChunkChanges:
        return self.chains.drain()

    def chunks(self) -> tuple[U64, U32]:
        return self.chains.chunks()

    def _is_ours(self, group: int, kind: str | None) -> bool:
        """Whether chains are built from this group: the first one seen of full attention."""
        if kind is None or kind in FULL_ATTENTION:
            if self.group is None:
                self.group = group
            if group == self.group:
                return True
        if len(self.other_groups) < OTHER_GROUPS_MAX:
            self.other_groups[group] = None if kind is None else kind[:KIND_CHARS_MAX]
        self.counts.other_group_events += 1
        return False

    def _root(self, lora_name: str | None, cache_salt: str | None) -> int:
        key = (lora_name, cache_salt)
        root = self._roots.get(key)
        if root is None:
            if len(self._roots) >= ROOTS_MAX:
                self._roots.clear()
            root = self._roots[key] = root_hash(self.seed, lora_name, cache_salt)
        return root
