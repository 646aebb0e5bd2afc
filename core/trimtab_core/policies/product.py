"""P-token x BS: the uncached tokens ahead of the first token, times the requests that share the engine."""

from trimtab_core.placement import F64
from trimtab_core.policies.policy import Terms


class Product:
    """The default. Both factors have a floor (one block, one request), so that neither ever makes the other void."""

    def score(self, terms: Terms) -> F64:
        """P times B, in token-requests."""
        return terms.p_tokens * terms.batch

    def picked(self, slot: int) -> None:
        """Remembers nothing: the reservation is in the load already."""

    def slot_reset(self, slot: int) -> None:
        """Remembers nothing."""
