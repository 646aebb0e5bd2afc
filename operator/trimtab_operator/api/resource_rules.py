"""The rules between the amounts of one container, as the API server has them for the containers of pods.

The one rule: amounts that are accepted here are accepted in a pod. A policy with others would have every pod refused
that they go into: the pool's own, and worse, its engines'.
"""

import re
from collections.abc import Mapping
from typing import Final

from trimtab_operator.api.patterns import QUALIFIED
from trimtab_operator.api.quantity import amount
from trimtab_operator.api.rules import Rule

CONTAINER_RESOURCES: Final = ("cpu", "memory", "ephemeral-storage")
"""Others are hugepages-SIZE, or have a domain before a slash."""
HUGE_PAGES: Final = "hugepages-"
HUGE_PAGE_NAME: Final = rf"^{HUGE_PAGES}[1-9][0-9]{{0,3}}(Ki|Mi|Gi)$"
HUGE_PAGE_AMOUNT: Final = r"^([0-9]{1,15}|[0-9]{1,5}(Ki|Mi|Gi))$"
"""As long as the API server can divide it: it does not divide decimals."""
COUNT: Final = r"^[0-9]{1,9}$"
"""Amount of what is counted by the piece."""
DOMAIN_LENGTH_MAX: Final = 244
"""Of 253: a quota puts `requests.` before it."""
_KNOWN: Final = ", ".join(f"'{name}'" for name in CONTAINER_RESOURCES)


def _is_huge(name: str) -> bool:
    return name.startswith(HUGE_PAGES)


def _is_counted(name: str) -> bool:
    """An extended resource, such as nvidia.com/gpu. It cannot be shared, so request and limit are the same."""
    return "/" in name and "kubernetes.io/" not in name


def _is_name(name: str) -> bool:
    if name in CONTAINER_RESOURCES or re.fullmatch(HUGE_PAGE_NAME, name):
        return True
    return (
        "/" in name
        and re.fullmatch(QUALIFIED, name) is not None
        and name.index("/") <= DOMAIN_LENGTH_MAX
        and not name.startswith("requests.")
    )


def _names(field: str) -> Rule:
    return Rule(
        field=f".{field}",
        needs=(field,),
        cel=f"self.{field}.all(name, name in [{_KNOWN}] || name.matches(r'{HUGE_PAGE_NAME}') ||"
        f" (name.contains('/') && name.indexOf('/') <= {DOMAIN_LENGTH_MAX} && !name.startsWith('requests.')"
        f" && name.matches(r'{QUALIFIED}')))",
        message=f"expected names of resources: {', '.join(CONTAINER_RESOURCES)}, hugepages-SIZE or example.com/NAME;"
        " correct the name",
        holds=lambda resources: all(map(_is_name, getattr(resources, field))),
    )


def _counts(field: str) -> Rule:
    return Rule(
        field=f".{field}",
        needs=(field,),
        cel=f"self.{field}.all(name, !name.contains('/') || name.contains('kubernetes.io/') ||"
        f" string(self.{field}[name]).matches(r'{COUNT}'))",
        message="expected a whole number of an extended resource such as nvidia.com/gpu; write it as 1, 2, ...",
        holds=lambda resources: all(
            re.fullmatch(COUNT, value) is not None
            for name, value in getattr(resources, field).items()
            if _is_counted(name)
        ),
    )


def _huge_pages(field: str) -> Rule:
    return Rule(
        field=f".{field}",
        needs=(field,),
        # What is no name of huge pages is refused as such.
        cel=f"self.{field}.all(name, !name.matches(r'{HUGE_PAGE_NAME}') ||"
        f" (string(self.{field}[name]).matches(r'{HUGE_PAGE_AMOUNT}') &&"
        f" quantity(string(self.{field}[name])).asInteger() % quantity(name.substring({len(HUGE_PAGES)})).asInteger()"
        " == 0))",
        message="expected an amount of huge pages that is a multiple of the page, such as 4Mi of hugepages-2Mi;"
        " correct the amount",
        holds=lambda resources: all(
            re.fullmatch(HUGE_PAGE_AMOUNT, value) is not None and amount(value) % amount(name[len(HUGE_PAGES) :]) == 0
            for name, value in getattr(resources, field).items()
            if re.fullmatch(HUGE_PAGE_NAME, name)
        ),
    )


def _is_shareable(name: str) -> bool:
    return not _is_huge(name) and not _is_counted(name)


def _has_its_limit(requests: Mapping[str, str], limits: Mapping[str, str]) -> bool:
    return all(
        _is_shareable(name) or (name in limits and amount(value) == amount(limits[name]))
        for name, value in requests.items()
    )


WITHIN_LIMITS: Final = Rule(
    field=".requests",
    needs=("requests", "limits"),
    # What is no quantity is refused by its pattern, which says so better.
    cel="self.requests.all(name, !(name in self.limits) ||"
    " !isQuantity(string(self.requests[name])) || !isQuantity(string(self.limits[name])) ||"
    " quantity(string(self.requests[name])).compareTo(quantity(string(self.limits[name]))) <= 0)",
    message="expected no request above its limit; lower it, or raise the limit of the same name",
    holds=lambda resources: all(
        amount(value) <= amount(resources.limits.get(name, value)) for name, value in resources.requests.items()
    ),
)

WITH_A_LIMIT: Final = Rule(
    field=".requests",
    needs=("requests", "limits"),
    cel=f"self.requests.all(name, (!name.startsWith('{HUGE_PAGES}') &&"
    " (!name.contains('/') || name.contains('kubernetes.io/'))) || (name in self.limits &&"
    " (!isQuantity(string(self.requests[name])) || !isQuantity(string(self.limits[name])) ||"
    " quantity(string(self.requests[name])).compareTo(quantity(string(self.limits[name]))) == 0)))",
    message="expected a limit of the same amount beside each request for huge pages or an extended resource such as"
    " nvidia.com/gpu; add it",
    holds=lambda resources: _has_its_limit(resources.requests, resources.limits),
)

NOT_HUGE_PAGES_ALONE: Final = Rule(
    field=".limits",
    needs=("requests", "limits"),
    cel=f"!self.limits.exists(name, name.startsWith('{HUGE_PAGES}')) || ['cpu', 'memory'].exists(name,"
    " name in self.limits || name in self.requests)",
    message="expected cpu or memory beside huge pages; add one of them",
    holds=lambda resources: (
        not any(map(_is_huge, resources.limits))
        or any(name in amounts for amounts in (resources.requests, resources.limits) for name in ("cpu", "memory"))
    ),
)

RESOURCE_RULES: Final = (
    _names("requests"),
    _names("limits"),
    _counts("requests"),
    _counts("limits"),
    _huge_pages("requests"),
    _huge_pages("limits"),
    WITHIN_LIMITS,
    WITH_A_LIMIT,
    NOT_HUGE_PAGES_ALONE,
)
"""Of one container's requests and limits."""
