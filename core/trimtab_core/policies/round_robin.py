"""Round robin: every candidate once per round; within a round the tie rule decides, so the least loaded goes first."""

import numpy as np

from trimtab_core.placement import F64
from trimtab_core.policies.policy import Terms


class RoundRobin:
    """Counts the picks of each slot. A slot that was no candidate for a while does not catch up on what it missed."""

    def __init__(self) -> None:
        self._round = 1
        self._last_round: list[int] = []  # the round in which each slot was picked last

    def score(self, terms: Terms) -> F64:
        """0 where the slot still has its turn in this round, else 1; all ones where a new round begins."""
        taken = np.array(self._last_round[: len(terms.candidates)], dtype=np.int64) >= self._round
        return taken.astype(np.float64)

    def picked(self, slot: int) -> None:
        """`slot` had its turn. If it had it before in this round, all had (of those that could): the next one
        begins."""
        if self._last_round[slot] >= self._round:
            self._round += 1
        self._last_round[slot] = self._round

    def slot_reset(self, slot: int) -> None:
        """A slot begins with its turn open."""
        if slot == len(self._last_round):
            self._last_round.append(0)
        self._last_round[slot] = 0
