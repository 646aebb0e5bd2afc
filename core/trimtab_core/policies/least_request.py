"""Least request: the slot with the fewest requests, whatever they are."""

import numpy as np

from trimtab_core.placement import F64
from trimtab_core.policies.policy import Terms


class LeastRequest:
    """Blind to prompts and caches."""

    def score(self, terms: Terms) -> F64:
        """B, in requests."""
        return terms.batch.astype(np.float64)

    def picked(self, slot: int) -> None:
        """Remembers nothing: the reservation is in the load already."""

    def slot_reset(self, slot: int) -> None:
        """Remembers nothing."""
