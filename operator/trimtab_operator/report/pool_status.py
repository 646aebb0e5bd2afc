"""Our own entry in an InferencePool's `status.parents`, where we are the pool's parent: read, change, write.

The one rule: `parents` is one atomic list that gateways share. Only the entry whose `controllerName` is ours is
touched, and the list is written under the resourceVersion it was read at, so nobody's entry is ever lost. Never by
server-side apply: that would own the whole list.
"""

import asyncio
import logging
import random
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final

from trimtab_operator.api.pool import Pool, PoolKey
from trimtab_operator.kube import POOLS, Kube, KubeError, Object
from trimtab_operator.report.conditions import condition, with_times

log = logging.getLogger(__name__)

CONTROLLER: Final = "trimtab.dev/operator"
"""`controllerName` of our entry."""
PARENTS_MAX: Final = 32
"""Of the schema. Where others fill the list, ours is left out."""
WRITES_MAX: Final = 12
"""Tries under conflicts; then the caller comes again."""
PAUSE_MIN_S: Final = 0.01
PAUSE_MAX_S: Final = 0.5


class ParentsFull(Exception):  # noqa: N818 (a condition, not a fault)
    """Others' entries fill `status.parents`: there is no room for ours."""


def parent_entry(pool: Pool, service_name: str, *, problem: str = "") -> Object:
    """Our entry of a pool whose Service in front is ours. `problem`: why `endpointPickerRef` cannot be resolved.

    Without times: `write_parents` sets them, since they depend on what is there.
    """
    resolved = (
        condition("ResolvedRefs", "False", "InvalidExtensionRef", problem, pool.generation)
        if problem
        else condition("ResolvedRefs", "True", "ResolvedRefs", "The pickers' Service is there.", pool.generation)
    )
    return {
        "parentRef": {"group": "", "kind": "Service", "name": service_name, "namespace": pool.key.namespace},
        "controllerName": CONTROLLER,
        "conditions": [
            condition("Accepted", "True", "Accepted", f"Served by the Service {service_name}.", pool.generation),
            resolved,
        ],
    }


async def write_parents(
    kube: Kube, key: PoolKey, entry: Mapping[str, Any] | None, *, now: str, rng: random.Random | None = None
) -> bool:
    """Makes `entry` our only one; None: we are no parent (any more). True if something was written.

    `now`: RFC 3339, for transitions. Raises KubeError, also 409 if others never let us through, and ParentsFull.
    """
    rng = rng or random.Random()
    pause_s = PAUSE_MIN_S
    for attempt in range(1, WRITES_MAX + 1):
        pool = await kube.get(POOLS, key.namespace, key.name)
        if pool is None:
            return False
        found = (pool.get("status") or {}).get("parents") or []
        parents = merged(found, entry, now=now)
        if parents == found:
            return False
        # Only what is ours to say: the whole status as read, with the list changed.
        pool["status"] = {**(pool.get("status") or {}), "parents": parents}
        try:
            await kube.replace(POOLS, pool, subresource="status")
        except KubeError as error:
            if error.status == HTTPStatus.NOT_FOUND:
                return False
            if error.status != HTTPStatus.CONFLICT or attempt == WRITES_MAX:
                raise
            await asyncio.sleep(rng.uniform(pause_s / 2, pause_s))
            pause_s = min(pause_s * 2, PAUSE_MAX_S)
        else:
            return True
    raise AssertionError("unreachable")


def merged(found: Sequence[Mapping[str, Any]], entry: Mapping[str, Any] | None, *, now: str) -> list[Object]:
    """The list with our entry as it is to be, everybody else's as it is and where it is. Raises ParentsFull."""
    ours = [old for old in found if old.get("controllerName") == CONTROLLER]
    if entry is None:
        return [dict(old) for old in found if old.get("controllerName") != CONTROLLER]
    before = next((old for old in ours if old.get("parentRef") == entry["parentRef"]), {})
    wanted = {**entry, "conditions": with_times(entry["conditions"], before.get("conditions") or (), now=now)}
    parents: list[Object] = []
    is_in = False
    for old in found:
        if old.get("controllerName") != CONTROLLER:
            parents.append(dict(old))
        elif not is_in:
            parents.append(wanted)
            is_in = True
    if not is_in:
        parents.append(wanted)
    if len(parents) > PARENTS_MAX:
        raise ParentsFull(f"status.parents holds {PARENTS_MAX} entries of others")
    return parents
