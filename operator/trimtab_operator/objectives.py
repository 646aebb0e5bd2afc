"""The cluster's InferenceObjectives: which pools they are for, and which priorities they give.

The one rule: the kind is not ours, and never needed. A cluster may have it, get it or lose it at any time, and we may
not be allowed to read it; nothing waits for that. Until it is known what there is, pools keep what they had.

Bounds: of every object a name, a number and two times; of those for one pool the `OBJECTIVES_MAX` oldest are in use.
"""

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from trimtab_operator.api.pool import PoolKey
from trimtab_operator.kube import POOLS, Kube, Object, Resource
from trimtab_operator.object_watch import ObjectWatch, Sink
from trimtab_state.request_class import OBJECTIVE_PRIORITY_MAX, OBJECTIVES_MAX, Objective

OBJECTIVES: Final = Resource("inference.networking.x-k8s.io/v1alpha2", "inferenceobjectives", "InferenceObjective")
POOL_GROUP: Final = POOLS.api_version.partition("/")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolObjectives:
    """Of one pool."""

    used: tuple[Objective, ...] = ()
    """In the order of their names."""
    left_out: int = 0
    """Younger ones, of which there are too many."""


NONE: Final = PoolObjectives()


@dataclass(frozen=True, slots=True)
class _Found:
    key: PoolKey
    made_at: str
    objective: Objective

    @property
    def age(self) -> tuple[str, str]:
        return self.made_at, self.objective.name


class Objectives:
    """`changed`: a pool has others now. `known`: from now on it is known what there is in a namespace, None: in all.
    All calls from one event loop."""

    def __init__(
        self,
        kube: Kube,
        *,
        rng: random.Random,
        changed: Callable[[PoolKey], None],
        known: Callable[[str | None], None],
    ) -> None:
        self._kube = kube
        self._rng = rng
        self._changed = changed
        self._known = known
        self._found: dict[tuple[str, str], _Found] = {}
        """By namespace and name."""
        self._of: dict[PoolKey, dict[str, _Found]] = {}
        self._watches: dict[str | None, ObjectWatch] = {}

    async def run(self, namespaces: Sequence[str | None]) -> None:
        """Until cancelled; None: all namespaces."""
        sink = Sink(put=self._put, drop=self._drop)
        for namespace in namespaces:
            self._watches[namespace] = ObjectWatch(
                self._kube, OBJECTIVES, namespace, sink, rng=self._rng, is_optional=True
            )
        async with asyncio.TaskGroup() as tasks:
            for namespace, watch in self._watches.items():
                tasks.create_task(watch.run())
                # One that may not be read holds up none of the others.
                tasks.create_task(self._tell_known(namespace, watch))

    def of(self, key: PoolKey) -> PoolObjectives | None:
        """None: not known yet."""
        watch = self._watch(key)
        if watch is None or not watch.synced.is_set():
            return None
        found = sorted(self._of.get(key, {}).values(), key=lambda each: each.age)
        used = sorted((each.objective for each in found[:OBJECTIVES_MAX]), key=lambda objective: objective.name)
        return PoolObjectives(used=tuple(used), left_out=len(found) - len(used))

    def refusal(self, key: PoolKey) -> str:
        """Why those of its namespace cannot be read, though the cluster has the kind; empty: they can."""
        watch = self._watch(key)
        return "" if watch is None else watch.refusal

    async def _tell_known(self, namespace: str | None, watch: ObjectWatch) -> None:
        await watch.synced.wait()
        self._known(namespace)

    def _watch(self, key: PoolKey) -> ObjectWatch | None:
        return self._watches.get(key.namespace) or self._watches.get(None)

    def _put(self, body: Object) -> None:
        about = body["metadata"]
        at = (about["namespace"], about["name"])
        found = None if about.get("deletionTimestamp") else _read(body)
        before = self._found.get(at)
        if found == before:
            return
        self._take_out(at)
        if found is not None:
            self._found[at] = found
            self._of.setdefault(found.key, {})[found.objective.name] = found
            if before is None or before.key != found.key:
                self._changed(found.key)
        if before is not None:
            self._changed(before.key)

    def _drop(self, namespace: str, name: str) -> None:
        before = self._found.get((namespace, name))
        self._take_out((namespace, name))
        if before is not None:
            self._changed(before.key)

    def _take_out(self, at: tuple[str, str]) -> None:
        before = self._found.pop(at, None)
        if before is not None:
            of_pool = self._of[before.key]
            del of_pool[before.objective.name]
            if not of_pool:
                del self._of[before.key]


def _read(body: Object) -> _Found | None:
    """None: it is for no InferencePool of the group that we know."""
    about, spec = body["metadata"], body["spec"]
    reference: dict[str, Any] = spec["poolRef"]
    if (reference.get("group", POOL_GROUP), reference.get("kind", POOLS.kind)) != (POOL_GROUP, POOLS.kind):
        return None
    priority = max(-OBJECTIVE_PRIORITY_MAX, min(OBJECTIVE_PRIORITY_MAX, int(spec.get("priority") or 0)))
    key = PoolKey(about["namespace"], reference["name"])
    return _Found(key, about.get("creationTimestamp", ""), Objective(name=about["name"], priority=priority))
