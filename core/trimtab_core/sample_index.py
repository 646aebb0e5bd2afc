"""The sample index: chunks that a slot is taken to hold because a prompt that contains them was sent there.

The one rule: the deepest chunk that matches counts, and implies all before it. A prompt was sent whole, so whoever got
a later chunk got the earlier ones with it; this is what lets a peer's claim be told in a few samples.
"""

from trimtab_core.chunk_owners import SLOTS_SHIFT, ChunkOwners, Slots
from trimtab_core.hit import Hit


class SampleIndex(ChunkOwners):
    """Chunk owners looked up from the prompt's end."""

    def add(self, slot: int, chunks: list[int], tokens: list[int]) -> list[int]:
        """`slot` holds these as well. Those that it held already; of them the smaller token count stays."""
        held: list[int] = []
        entries = self._entries
        bit = 1 << (SLOTS_SHIFT + slot)
        for chunk, count in zip(chunks, tokens, strict=True):
            if chunk not in entries:  # nearly always; so it costs no call
                entries[chunk] = bit | count
                self.pair_count += 1
                continue
            standing = self.tokens_of(chunk, slot)
            if standing is not None:
                held.append(chunk)
            if standing is None or count < standing:
                self.set(chunk, slot, count)
        return held

    def deepest(self, chain: list[int], slots: Slots, shallowest: int = 0) -> list[Hit]:
        """The hits of `slots` by their deepest match beyond `shallowest` chunks, falling in depth."""
        hits: list[Hit] = []
        entries = self._entries
        wanted = slots << SLOTS_SHIFT
        if not entries or not wanted:
            return hits
        for depth in range(len(chain), shallowest, -1):
            found = wanted & entries.get(chain[depth - 1], 0)
            if found:
                for tokens, same in self.by_tokens(chain[depth - 1], found >> SLOTS_SHIFT):
                    hits.append(Hit(depth, tokens, same))
                wanted ^= found
                if not wanted:
                    break
        return hits
