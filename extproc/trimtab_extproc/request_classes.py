"""Which class a request is of and what its priority is, by what the pool's policy and its InferenceObjectives say.

The one rule: the most particular word counts. A header that names a class, where the policy allows one; else the
InferenceObjective that the request is for, by the header that gateways use; else its model. A name that nobody knows
says nothing, and the next word counts. Of an objective the policy's word about it goes before the object's own. Who may
send such headers is the gateway's business.
"""

from collections.abc import Mapping
from typing import NamedTuple

from trimtab_state import Policy
from trimtab_state.request_class import FAIRNESS_HEADER, OBJECTIVE_HEADER, RequestClass

TENANT_CHARS_MAX = 128
"""Of a tenant's name: clients choose them."""
OBJECTIVE_CHARS_MAX = 128
"""Of an objective's name that nobody knows and that is shown to people: likewise."""
ORDINARY = RequestClass(name="")
"""Of a request that is of no class."""


class ShownPriority(NamedTuple):
    """For people: what a request asked for, and what it got."""

    objective: str
    """As the request names it; empty: it names none."""
    is_known: bool
    """Whether there is such an InferenceObjective, or a class lists it."""
    priority: int


class RequestClasses:
    """The classes and objectives of one policy."""

    def __init__(self, policy: Policy) -> None:
        self._header = policy.class_header.lower()
        self._tenant_header = policy.overflow.tenant_header.lower() or FAIRNESS_HEADER
        self._by_name: dict[str, RequestClass] = {}
        self._by_objective: dict[str, RequestClass] = {}
        self._by_model: dict[str, RequestClass] = {}
        self._priorities = {objective.name: objective.priority for objective in policy.objectives}
        self._has_priorities = bool(self._priorities) or any(each.priority for each in policy.classes)
        for request_class in policy.classes:  # of several that say the same the first counts
            self._by_name.setdefault(request_class.name, request_class)
            for objective in request_class.objectives:
                self._by_objective.setdefault(objective, request_class)
            for model in request_class.models:
                self._by_model.setdefault(model, request_class)

    def of(self, headers: Mapping[str, str], model: str | None) -> RequestClass:
        """The class of a request with these headers (names in lower case) for this model."""
        if not self._by_name:
            return ORDINARY
        found = self._named(headers)
        if found is None and model is not None:
            found = self._by_model.get(model)
        return ORDINARY if found is None else found

    def priority(self, headers: Mapping[str, str], model: str | None) -> int:
        """Of such a request: the higher, the sooner it has a place; below 0 it does not wait for one."""
        if not self._has_priorities:
            return 0
        found = self._named(headers)
        if found is not None and found.priority is not None:
            return found.priority
        own = self._priorities.get(headers.get(OBJECTIVE_HEADER, ""))
        if own is not None:
            return own
        if found is None and model is not None:
            found = self._by_model.get(model)
        return 0 if found is None or found.priority is None else found.priority

    def shown_priority(self, headers: Mapping[str, str], model: str | None) -> ShownPriority | None:
        """None: nobody has asked for any."""
        objective = headers.get(OBJECTIVE_HEADER, "")
        priority = self.priority(headers, model)
        if not objective and not priority:
            return None
        is_known = objective in self._priorities or objective in self._by_objective
        return ShownPriority(objective[:OBJECTIVE_CHARS_MAX], is_known, priority)

    def _named(self, headers: Mapping[str, str]) -> RequestClass | None:
        """The class that the request's own headers lead to."""
        found = self._by_name.get(headers.get(self._header, "")) if self._header else None
        return found or self._by_objective.get(headers.get(OBJECTIVE_HEADER, ""))

    def tenant(self, headers: Mapping[str, str]) -> str:
        """Who asks; all who do not say are one."""
        return headers.get(self._tenant_header, "")[:TENANT_CHARS_MAX]
