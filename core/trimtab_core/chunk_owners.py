"""Chunk owners: which slots hold which chunk, and the tokens up to its end there.

The one rule: it is a map (chunk, slot) -> tokens and nothing more; what a match means is for the classes built on it.

One entry per chunk packs the set of its slots and the token count that they share: `slots << 32 | tokens`. Slots that
differ from the shared count (another block size, another tokenisation) are listed apart. So a walk along a prompt costs
one look-up per chunk, whatever the number of slots.
"""

from collections.abc import Iterable, Iterator

from trimtab_core.errors import ensure

SLOTS_SHIFT = 32
TOKENS_MASK = (1 << SLOTS_SHIFT) - 1

Slots = int
"""A set of slots as the bits of an integer."""


def slots_in(slots: Slots) -> Iterator[int]:
    """The members of a set of slots, rising."""
    while slots:
        lowest = slots & -slots
        yield lowest.bit_length() - 1
        slots ^= lowest


class ChunkOwners:
    """The map. Chunks and tokens are Python integers below 2^64 and 2^32."""

    def __init__(self) -> None:
        self._entries: dict[int, int] = {}
        self._odd: dict[int, dict[int, int]] = {}  # chunk -> slot -> tokens, where they differ from the entry's
        self.pair_count = 0

    def __len__(self) -> int:
        return len(self._entries)

    def set(self, chunk: int, slot: int, tokens: int) -> None:
        """`slot` holds `chunk`, with `tokens` up to its end."""
        bit = 1 << (SLOTS_SHIFT + slot)
        entry = self._entries.get(chunk)
        if entry is None or entry >> SLOTS_SHIFT == bit >> SLOTS_SHIFT:
            self.pair_count += entry is None
            self._entries[chunk] = bit | tokens
            if self._odd:
                self._odd.pop(chunk, None)
            return
        if not entry & bit:
            self.pair_count += 1
            self._entries[chunk] = entry | bit
        if entry & TOKENS_MASK != tokens:
            self._odd.setdefault(chunk, {})[slot] = tokens
        elif self._odd:
            self._make_even(chunk, slot)

    def discard(self, chunk: int, slot: int) -> None:
        """`slot` does not hold `chunk` (any more)."""
        bit = 1 << (SLOTS_SHIFT + slot)
        entry = self._entries.get(chunk, 0)
        if not entry & bit:
            return
        self.pair_count -= 1
        entry ^= bit
        if entry >> SLOTS_SHIFT:
            self._entries[chunk] = entry
            if self._odd:
                self._make_even(chunk, slot)
        else:
            del self._entries[chunk]
            if self._odd:
                self._odd.pop(chunk, None)

    def set_many(self, slot: int, chunks: Iterable[int], tokens: Iterable[int]) -> None:
        """`set` for many chunks; the two common cases (new, or known with the same count) cost no call."""
        entries, odd = self._entries, self._odd
        bit = 1 << (SLOTS_SHIFT + slot)
        for chunk, count in zip(chunks, tokens, strict=True):
            entry = entries.get(chunk)
            if entry is None:
                entries[chunk] = bit | count
                self.pair_count += 1
            elif entry & TOKENS_MASK == count and not odd:
                if not entry & bit:
                    entries[chunk] = entry | bit
                    self.pair_count += 1
            else:
                self.set(chunk, slot, count)

    def discard_many(self, slot: int, chunks: Iterable[int]) -> None:
        """`discard` for many chunks; the common case (the slot is the only owner) costs no call."""
        entries, odd = self._entries, self._odd
        shift = SLOTS_SHIFT
        only = 1 << slot
        for chunk in chunks:
            if entries.get(chunk, 0) >> shift == only and not odd:
                del entries[chunk]
                self.pair_count -= 1
            else:
                self.discard(chunk, slot)

    def slots_of(self, chunk: int) -> Slots:
        """The slots that hold `chunk`."""
        return self._entries.get(chunk, 0) >> SLOTS_SHIFT

    def tokens_of(self, chunk: int, slot: int) -> int | None:
        """Tokens up to the end of `chunk` on `slot`; None where the slot does not hold it."""
        entry = self._entries.get(chunk, 0)
        if not entry >> (SLOTS_SHIFT + slot) & 1:
            return None
        odd = self._odd.get(chunk) if self._odd else None
        return odd.get(slot, entry & TOKENS_MASK) if odd else entry & TOKENS_MASK

    def by_tokens(self, chunk: int, slots: Slots) -> list[tuple[int, Slots]]:
        """(tokens, slots) for those of `slots` that hold `chunk`, put together where the counts agree."""
        entry = self._entries.get(chunk, 0)
        slots &= entry >> SLOTS_SHIFT
        groups: dict[int, Slots] = {}
        odd = self._odd.get(chunk) if self._odd else None
        if odd:
            for slot, tokens in odd.items():
                if slots >> slot & 1:
                    groups[tokens] = groups.get(tokens, 0) | 1 << slot
                    slots ^= 1 << slot
        if slots:
            groups[entry & TOKENS_MASK] = slots
        return list(groups.items())

    def _make_even(self, chunk: int, slot: int) -> None:
        odd = self._odd.get(chunk)
        if odd is not None:
            odd.pop(slot, None)
            if not odd:
                del self._odd[chunk]

    def check_invariants(self) -> None:
        """Raise `InvariantError` if the state contradicts itself."""
        pairs = 0
        for chunk, entry in self._entries.items():
            ensure(entry >> SLOTS_SHIFT > 0, f"chunk {chunk}: owned by nobody")
            pairs += (entry >> SLOTS_SHIFT).bit_count()
        ensure(pairs == self.pair_count, "pairs are miscounted")
        for chunk, odd in self._odd.items():
            ensure(bool(odd), f"chunk {chunk}: an empty list of odd counts")
            for slot in odd:
                ensure(self.slots_of(chunk) >> slot & 1 == 1, f"chunk {chunk}: odd count of slot {slot}, not an owner")
