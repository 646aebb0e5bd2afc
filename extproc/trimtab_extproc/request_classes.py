"""Which class a request is of, by what the pool's policy says.

The one rule: the most particular word counts. A header that names a class, where the policy allows one; else the
InferenceObjective that the request is for, by the header that gateways use; else its model. A name that the policy does
not know is no class, and the next word counts. Who may send such headers is the gateway's business.
"""

from collections.abc import Mapping

from trimtab_state import Policy
from trimtab_state.request_class import FAIRNESS_HEADER, OBJECTIVE_HEADER, RequestClass

TENANT_CHARS_MAX = 128
"""Of a tenant's name: clients choose them."""
ORDINARY = RequestClass(name="")
"""Of a request that is of no class."""


class RequestClasses:
    """The classes of one policy."""

    def __init__(self, policy: Policy) -> None:
        self._header = policy.class_header.lower()
        self._tenant_header = policy.overflow.tenant_header.lower() or FAIRNESS_HEADER
        self._by_name: dict[str, RequestClass] = {}
        self._by_objective: dict[str, RequestClass] = {}
        self._by_model: dict[str, RequestClass] = {}
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
        found = self._by_name.get(headers.get(self._header, "")) if self._header else None
        if found is None:
            found = self._by_objective.get(headers.get(OBJECTIVE_HEADER, ""))
        if found is None and model is not None:
            found = self._by_model.get(model)
        return ORDINARY if found is None else found

    def tenant(self, headers: Mapping[str, str]) -> str:
        """Who asks; all who do not say are one."""
        return headers.get(self._tenant_header, "")[:TENANT_CHARS_MAX]
