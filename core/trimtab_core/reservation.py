"""A reservation: one request's place on a slot, from the choice to the end of its HTTP exchange.

The one rule: it is released as what it is, never by the name of where it went. If its slot is removed meanwhile it is
detached (slot `NOWHERE`) and no longer touches any load, least of all that of a slot which got the same number later.
"""

from dataclasses import dataclass, field

import numpy as np

from trimtab_core.chunks import U32, U64
from trimtab_core.extra_terms import ORDINARY_MILLI

ReservationKey = tuple[int, int]
"""(replica incarnation, reservation id), with `OWN` for this replica's incarnation."""

OWN = -1
"""Stands for this replica's own incarnation in a key, whatever it is at the time: it may change while requests run."""

NOWHERE = -1
"""The slot of a detached reservation."""


@dataclass(slots=True, kw_only=True, eq=False)
class Reservation:
    """Mutable: the scheduler and the load table move it along."""

    key: ReservationKey
    slot: int
    p_tokens: int
    """Uncached prompt tokens that it brings to its slot."""
    batch: int
    """Engine requests that it stands for."""
    weight_milli: int = ORDINARY_MILLI
    """Weight of each of them, by its class."""
    is_queued: bool = True
    """Its first token has not been seen, nor taken for granted."""
    queued_since_s: float = 0.0
    """When it came to the slot where it is now."""
    served_s: float | None = None
    """Once its prefill should have been over by the model: when. It may still wait for the signal."""
    watched: set[int] = field(default_factory=set)
    """Chunks whose appearance on the slot shows that all prompts are prefilled; empty: no signal will come from
    there."""
    expects_signal: bool = False
    is_approximate: bool = False
    """Its chunks are to be learned once the prefill is over."""
    sample_hashes: U64 = field(default_factory=lambda: np.zeros(0, dtype=np.uint64))
    sample_tokens: U32 = field(default_factory=lambda: np.zeros(0, dtype=np.uint32))
    """What peers are told of its claim (own reservations only)."""

    @property
    def is_own(self) -> bool:
        """Made by this replica."""
        return self.key[0] == OWN
