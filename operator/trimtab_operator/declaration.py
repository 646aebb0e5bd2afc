"""What is declared about a pool: itself, the policies that target it, and whether that makes it ours.

The one rule: what somebody else would see who asks the API server now.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from trimtab_operator.api.pool import Pool, PoolKey
from trimtab_operator.children.names import NAME_PREFIX, picker_name
from trimtab_operator.kube import POLICIES, POOLS, Kube, Object


async def declared(kube: Kube, key: PoolKey) -> tuple[Object | None, list[Object]]:
    """The pool, and its policies, the one in force first. Raises KubeError."""
    body = await kube.get(POOLS, key.namespace, key.name)
    found, _ = await kube.list_all(POLICIES, key.namespace)
    policies = [
        {"apiVersion": POLICIES.api_version, "kind": POLICIES.kind, **policy}
        for policy in found
        if ((policy.get("spec") or {}).get("targetRef") or {}).get("name") == key.name
    ]
    return body, sorted(policies, key=lambda each: (each["metadata"]["creationTimestamp"], each["metadata"]["name"]))


def is_for_us(key: PoolKey, body: Mapping[str, Any] | None, policies: Sequence[Object]) -> bool:
    """Whether the pool is there, and a policy targets it or it names our pickers."""
    if body is None:
        return False
    pool = Pool.of(body)
    # The plain name too, where ours had to be another: then the status says so.
    names = (picker_name(key.name), f"{NAME_PREFIX}{key.name}")
    return not pool.is_deleting and (bool(policies) or pool.picker_name in names)
