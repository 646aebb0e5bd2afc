"""Which pools there are, and which of them a pod gets its sidecar for: plain data, fed by watches.

The one rule: the last configuration that made sense keeps counting. A policy that is changed into nonsense changes
nothing here, and the operator says so in its status.
"""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from trimtab_operator.api.policy import PolicyError, PolicySpec
from trimtab_operator.api.pool import Pool, PoolKey
from trimtab_operator.injection.outcome import Skip
from trimtab_operator.kube import Object

logger = logging.getLogger(__name__)

POOLS_NAMED_MAX: Final = 5
"""Pools that a reason names; the rest are counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Policy:
    created: str
    name: str
    spec: PolicySpec


@dataclass(frozen=True, slots=True)
class Match:
    """A pool that a pod belongs to and that wants the sidecar in it."""

    pool: Pool
    spec: PolicySpec


class PoolBook:
    """All pools and policies that this process knows of."""

    def __init__(self) -> None:
        self._pools: dict[str, dict[str, Pool]] = {}
        self._policies: dict[str, dict[str, _Policy]] = {}

    @property
    def pool_count(self) -> int:
        return sum(map(len, self._pools.values()))

    def put_pool(self, body: Object) -> None:
        pool = Pool.of(body)
        self._pools.setdefault(pool.key.namespace, {})[pool.key.name] = pool

    def drop_pool(self, namespace: str, name: str) -> None:
        _drop(self._pools, namespace, name)

    def put_policy(self, body: Object) -> None:
        metadata = body["metadata"]
        namespace, name = metadata["namespace"], metadata["name"]
        try:
            spec = PolicySpec.of(body.get("spec"))
        except PolicyError as error:
            logger.warning("policy not understood", extra={"policy": f"{namespace}/{name}", "error": str(error)})
            return
        entry = _Policy(created=str(metadata.get("creationTimestamp", "")), name=name, spec=spec)
        self._policies.setdefault(namespace, {})[name] = entry

    def drop_policy(self, namespace: str, name: str) -> None:
        _drop(self._policies, namespace, name)

    def match(self, namespace: str, labels: Mapping[str, str]) -> Match | Skip:
        """The one pool that a pod with these labels gets its sidecar for, or why there is none.

        Pools that want no sidecar do not count: while a pod moves from one pool to another, both select it.
        """
        own = [pool for pool in self._pools.get(namespace, {}).values() if _selects(pool, labels)]
        if not own:
            return Skip("no_pool", "no InferencePool selects the pod")
        asking = [
            Match(pool, policy.spec)
            for pool in own
            if (policy := self._policy_of(pool.key)) is not None and policy.spec.sidecar.inject
        ]
        if not asking:
            return Skip("not_asked", f"no policy of {_names(pool.key for pool in own)} asks for spec.sidecar.inject")
        if len(asking) > 1:
            names = _names(match.pool.key for match in asking)
            return Skip("several_pools", f"several pools select the pod and want their sidecar in it: {names}")
        return asking[0]

    def _policy_of(self, key: PoolKey) -> _Policy | None:
        """The oldest that targets the pool."""
        targeting = [p for p in self._policies.get(key.namespace, {}).values() if p.spec.target_ref.name == key.name]
        return min(targeting, key=lambda policy: (policy.created, policy.name), default=None)


def _selects(pool: Pool, labels: Mapping[str, str]) -> bool:
    """A selector without labels selects everything in other kinds; a pool of everything is nobody's wish here."""
    return (
        not pool.is_deleting
        and bool(pool.selector)
        and all(labels.get(name) == value for name, value in pool.selector.items())
    )


def _names(keys: Iterable[PoolKey]) -> str:
    names = sorted(key.name for key in keys)
    more = len(names) - POOLS_NAMED_MAX
    return ", ".join(names[:POOLS_NAMED_MAX]) + (f" and {more} more" if more > 0 else "")


def _drop(book: dict[str, dict[str, Any]], namespace: str, name: str) -> None:
    entries = book.get(namespace)
    if entries is not None and entries.pop(name, None) is not None and not entries:
        del book[namespace]
