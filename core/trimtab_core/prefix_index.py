"""The prefix index: which chunks each slot's engine holds, as the KV log tells it.

The one rule: a hit is walked exactly. A slot's hit ends before the first chunk that it does not hold; no later chunk is
looked at, because a hole in the middle (a lost event, a tiered cache) would make any shortcut claim too much.
"""

from array import array

import numpy as np

from trimtab_core.chunk_owners import SLOTS_SHIFT, ChunkOwners, Slots, slots_in
from trimtab_core.chunks import U32, U64
from trimtab_core.errors import ensure
from trimtab_core.hit import Hit

LOG_SLACK = 1024
"""A slot's log is compacted when it is longer than twice what it was after the last time, plus this."""


class PrefixIndex(ChunkOwners):
    """Chunk owners with, for each slot, a log of what it was given: what makes clearing one slot cheap.

    The log is a superset of what the slot holds: chunks that went are still in it, some twice, until it is compacted.
    """

    def __init__(self) -> None:
        super().__init__()
        self._logs: dict[int, array[int]] = {}
        self._log_limits: dict[int, int] = {}

    def apply(self, slot: int, added: U64, tokens: U32, removed: U64) -> None:
        """One batch of the KV log: `removed` goes first, then `added` comes, with its token counts."""
        self.discard_many(slot, removed.tolist())
        self.set_many(slot, added.tolist(), tokens.tolist())
        if len(added):
            log = self._logs.setdefault(slot, array("Q"))
            log.frombytes(np.ascontiguousarray(added, dtype=np.uint64).tobytes())
            if len(log) > self._log_limits.get(slot, LOG_SLACK):
                self._compact(slot, log)

    def clear(self, slot: int) -> None:
        """The slot holds nothing."""
        self.discard_many(slot, self._logs.pop(slot, ()))
        self._log_limits.pop(slot, None)

    def export(self, slot: int) -> tuple[U64, U32]:
        """All that the slot holds: chunks rising, and their token counts."""
        chunks = sorted(self._held(slot))
        tokens = [self.tokens_of(chunk, slot) for chunk in chunks]
        return np.array(chunks, dtype=np.uint64), np.array(tokens, dtype=np.uint32)

    def walk(self, chain: list[int], slots: Slots) -> list[Hit]:
        """The hits of `slots` along `chain`, rising in depth."""
        hits: list[Hit] = []
        entries = self._entries
        alive = slots << SLOTS_SHIFT
        if not alive:
            return hits
        depth = 0
        for chunk in chain:
            still = alive & entries.get(chunk, 0)
            if still != alive:
                if depth:
                    self._end(hits, alive ^ still, depth, chain)
                alive = still
                if not alive:
                    return hits
            depth += 1
        if depth:
            self._end(hits, alive, depth, chain)
        return hits

    def _end(self, hits: list[Hit], ending: int, depth: int, chain: list[int]) -> None:
        for tokens, slots in self.by_tokens(chain[depth - 1], ending >> SLOTS_SHIFT):
            hits.append(Hit(depth, tokens, slots))

    def _held(self, slot: int) -> set[int]:
        return {chunk for chunk in self._logs.get(slot, ()) if self.slots_of(chunk) >> slot & 1}

    def _compact(self, slot: int, log: "array[int]") -> None:
        held = self._held(slot)
        self._logs[slot] = array("Q", held)
        self._log_limits[slot] = 2 * len(held) + LOG_SLACK

    def check_invariants(self) -> None:
        """Raise `InvariantError` if the state contradicts itself."""
        super().check_invariants()
        held = {slot: self._held(slot) for slot in self._logs}
        for chunk, entry in self._entries.items():
            for slot in slots_in(entry >> SLOTS_SHIFT):
                ensure(chunk in held.get(slot, ()), f"chunk {chunk} of slot {slot} is not in the slot's log")
