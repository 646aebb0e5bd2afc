"""What a policy is: the terms it is given, and the score it answers with.

The one rule: the least score wins. Ties are broken by whoever asks (fewest requests, then at random), never by a
policy.
"""

from dataclasses import dataclass
from typing import Protocol

from trimtab_core.placement import F64, Bools


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Terms:
    """The terms of every slot, arrays of shape (slots,). Only those of `candidates` mean something.

    `p_tokens`: P with its floor and its extra terms. `batch`: requests there with the weights of their classes, and
    this one.
    """

    candidates: Bools
    p_tokens: F64
    batch: F64


class Policy(Protocol):
    """A way to score slots. A policy may remember what it picked, by slot."""

    def score(self, terms: Terms) -> F64:
        """A score for every slot; least is best. Shape (slots,)."""

    def picked(self, slot: int) -> None:
        """The request went to `slot`."""

    def slot_reset(self, slot: int) -> None:
        """`slot` begins (again)."""
