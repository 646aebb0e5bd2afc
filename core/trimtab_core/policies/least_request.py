"""Least request: the slot with the fewest requests, each with the weight of its class."""

from trimtab_core.placement import F64
from trimtab_core.policies.policy import Terms


class LeastRequest:
    """Blind to prompts and caches."""

    def score(self, terms: Terms) -> F64:
        """B, in requests."""
        return terms.batch

    def picked(self, slot: int) -> None:
        """Remembers nothing: the reservation is in the load already."""

    def slot_reset(self, slot: int) -> None:
        """Remembers nothing."""
