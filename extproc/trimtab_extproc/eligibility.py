"""Which endpoints can take a request, as the pool is at the time.

The one rule: what narrows them down is a `Group`, a plain value that says the same of all requests that are equal in
it, now and later: so those who wait can be compared when the pool has changed meanwhile.
"""

from collections.abc import Set
from typing import NamedTuple

import numpy as np

from trimtab_core.placement import Bools
from trimtab_extproc.endpoint_table import EndpointTable
from trimtab_extproc.fleet_view import FleetView
from trimtab_extproc.model_view import ModelView


class Group(NamedTuple):
    """What says which endpoints can take a request."""

    model: str | None
    """None: one that no endpoint lists. Names that clients invent are one."""
    subset: tuple[str, ...] | None
    holder: str | None
    wanted: str | None
    """By the header of conformance tests."""

    @property
    def is_restricted(self) -> bool:
        """Whether the request itself narrows the endpoints down."""
        return self.subset is not None or self.wanted is not None


class Eligibility:
    """Of one pool. All calls from one event loop."""

    def __init__(self, *, fleet: FleetView, table: EndpointTable) -> None:
        self._fleet = fleet
        self._table = table

    def of(self, group: Group, view: ModelView | None = None) -> Bools:
        """Who may be chosen. `view`: the group's, where the caller has it."""
        candidates = (view or self._fleet.view(group.model)).candidates
        if group.holder is not None and self._fleet.is_holding(group.holder):
            holder = self._table.named(group.holder)
            if holder is not None:
                # It may be draining: what it holds it must still answer.
                candidates = np.zeros(max(len(candidates), holder.slot + 1), dtype=np.bool_)
                candidates[holder.slot] = True
        if group.subset is not None:
            candidates = self._fleet.restricted(candidates, group.subset)
        if group.wanted is not None:
            candidates = self._fleet.restricted(candidates, [place.strip() for place in group.wanted.split(",")])
        return candidates


def overlap(one: Bools, other: Bools) -> bool:
    """Whether some endpoint is in both."""
    slots = min(len(one), len(other))
    return bool((one[:slots] & other[:slots]).any())


def without(candidates: Bools, slots: Set[int]) -> Bools:
    """The candidates that are none of these."""
    left = candidates.copy()
    left[[slot for slot in slots if slot < len(left)]] = False
    return left
