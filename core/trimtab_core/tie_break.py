"""The tie break: which of the best-scored slots, and in which order the next best.

The one rule: fewest requests first, then at random. Never the lowest number: every replica would send to the same slot.
"""

import numpy as np

from trimtab_core.placement import F64, I64

MASK = 0xFFFF_FFFF_FFFF_FFFF


def splitmix64(state: int) -> int:
    """The output of splitmix64 for a state, which the caller advances by the golden gamma."""
    z = ((state ^ (state >> 30)) * 0xBF58_476D_1CE4_E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D0_49BB_1331_11EB) & MASK
    return z ^ (z >> 31)


class TieBreak:
    """A seeded source of draws; the same seed and the same questions give the same answers."""

    def __init__(self, seed: int) -> None:
        self._state = seed & MASK

    def best(self, score: F64, batch: I64, count: int) -> tuple[list[int], str]:
        """The `count` best slots, best first (fewer if fewer have a finite score), and how the first was found."""
        left = score.copy()
        ranked: list[int] = []
        reason = ""
        while len(ranked) < count:
            slot = int(left.argmin())
            if left[slot] == np.inf:
                break
            how = "least score"
            equals = left == left[slot]
            if np.count_nonzero(equals) > 1:
                slots = np.flatnonzero(equals)
                requests = batch[slots]
                slots = slots[requests == requests.min()]
                slot = int(slots[0])
                how = "fewest requests among equals"
                if len(slots) > 1:
                    slot = int(slots[self._draw() % len(slots)])
                    how = "drawn among equals"
            ranked.append(slot)
            reason = reason or how
            left[slot] = np.inf
        return ranked, reason

    def _draw(self) -> int:
        self._state = (self._state + 0x9E37_79B9_7F4A_7C15) & MASK
        return splitmix64(self._state)
