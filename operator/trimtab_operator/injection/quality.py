"""CPU and memory of the sidecar, so that a pod keeps the quality of service and the quotas that it had.

The one rule: what the policy says holds, as far as the pod is accepted with it. Else a Guaranteed pod stays Guaranteed,
and a pod whose containers all have a limit of the processor (a quota may ask for it) keeps to that. A pod with amounts
of its own shares those.
"""

from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any, Final

from trimtab_operator.api.policy import ResourceRequirements
from trimtab_operator.api.quantity import amount
from trimtab_operator.kube import Object

REQUESTS: Final = {"cpu": "25m", "memory": "128Mi"}
MEMORY_LIMIT: Final = "512Mi"
"""65 MiB with everything imported, 58 MiB for 250,000 blocks of cache, 290 MiB for the moment in which a vocabulary of
262,000 tokens is read. docs/injection.md says what needs more."""
CPU_LIMIT: Final = "500m"
CPU_GUARANTEED: Final = "250m"
"""Of a Guaranteed pod, where it is the limit too: a model card takes some seconds of the processor."""


def sidecar_resources(asked: ResourceRequirements, pod_spec: Mapping[str, Any], others: Sequence[Object]) -> Object:
    """`others`: the pod's containers and init containers without the sidecar. Empty: as the whole pod has it."""
    requests, limits = dict(asked.requests), dict(asked.limits)
    if pod_spec.get("resources"):
        # Amounts of a pod bound the sum of its containers': one more might not fit in.
        return _given(_without_shared(requests), _without_shared(limits))
    if requests or limits:
        _complete(requests, limits, others)
        return _given(requests, limits)
    if others and all(_is_guaranteed(container) for container in others):
        amounts = {"cpu": CPU_GUARANTEED, "memory": MEMORY_LIMIT}
        return {"requests": dict(amounts), "limits": dict(amounts)}
    limits = {"memory": MEMORY_LIMIT}
    if others and all("cpu" in _of(container, "limits") for container in others):
        limits["cpu"] = CPU_LIMIT
    return {"requests": dict(REQUESTS), "limits": limits}


def _complete(requests: dict[str, str], limits: dict[str, str], others: Sequence[Object]) -> None:
    """Where all other containers have an amount, this one has: a quota may refuse a pod in which one has none."""
    for name, least, most in (("cpu", REQUESTS["cpu"], CPU_LIMIT), ("memory", REQUESTS["memory"], MEMORY_LIMIT)):
        if not others:
            continue
        if name not in limits and all(name in _of(container, "limits") for container in others):
            asked = requests.get(name, least)
            limits[name] = asked if amount(asked) > amount(most) else most
            requests.setdefault(name, least)
        is_everywhere = all(name in {**_of(each, "limits"), **_of(each, "requests")} for each in others)
        if name not in requests and name not in limits and is_everywhere:
            requests[name] = least


def _without_shared(amounts: Mapping[str, str]) -> dict[str, str]:
    """Those that a pod as a whole cannot have."""
    return {
        name: value for name, value in amounts.items() if name not in REQUESTS and not name.startswith("hugepages-")
    }


def _given(requests: Mapping[str, str], limits: Mapping[str, str]) -> Object:
    return {kind: dict(amounts) for kind, amounts in (("requests", requests), ("limits", limits)) if amounts}


def _is_guaranteed(container: Mapping[str, Any]) -> bool:
    limits, requests = _of(container, "limits"), _of(container, "requests")
    return all(
        name in limits and _amount(requests.get(name, limits[name])) == _amount(limits[name]) != Decimal(0)
        for name in ("cpu", "memory")
    )


def _of(container: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    amounts: Mapping[str, Any] = (container.get("resources") or {}).get(kind) or {}
    return amounts


def _amount(quantity: object) -> Decimal:
    try:
        return amount(str(quantity))
    except ValueError:
        return Decimal(0)
