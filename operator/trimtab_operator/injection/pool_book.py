"""Which pools there are, and which of them a pod gets its sidecar for: plain data, fed by watches.

The one rule: a pool has the policy here that the operator gives it: the oldest that targets it. Where that one makes no
sense, what was in force before goes on; where nothing is known of that, since this process is young, there is no
injection, and it is said why. Never does a younger policy take the place of an older one that makes no sense.
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
    target: str
    """Name of its pool; empty: it does not say."""
    spec: PolicySpec | None
    """None: it is not understood."""
    holder: str
    """Namespace of the installation that runs the pool, as that one says; empty: nobody has said so yet."""

    @property
    def age(self) -> tuple[str, str]:
        """The least is the oldest; of two made in one second, the first by name."""
        return self.created, self.name


@dataclass(frozen=True, slots=True)
class Match:
    """A pool that a pod belongs to and that wants the sidecar in it."""

    pool: Pool
    spec: PolicySpec


class PoolBook:
    """All pools and policies that this process knows of. `namespace`: of its own installation."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        self._pools: dict[str, dict[str, Pool]] = {}
        self._policies: dict[str, dict[str, _Policy]] = {}
        self._good: dict[str, dict[str, _Policy]] = {}
        """By pool: the policy that was in force last and was understood."""

    @property
    def pool_count(self) -> int:
        return sum(map(len, self._pools.values()))

    def put_pool(self, body: Object) -> None:
        pool = Pool.of(body)
        self._pools.setdefault(pool.key.namespace, {})[pool.key.name] = pool

    def drop_pool(self, namespace: str, name: str) -> None:
        _drop(self._pools, namespace, name)
        _drop(self._good, namespace, name)

    def put_policy(self, body: Object) -> None:
        metadata = body["metadata"]
        namespace, name = metadata["namespace"], metadata["name"]
        spec = None
        try:
            spec = PolicySpec.of(body.get("spec"))
        except PolicyError as error:
            logger.warning("policy not understood", extra={"policy": f"{namespace}/{name}", "error": str(error)})
        before = self._policies.get(namespace, {}).get(name)
        entry = _Policy(
            created=str(metadata.get("creationTimestamp", "")),
            name=name,
            target=_text(body, "spec", "targetRef", "name"),
            spec=spec,
            holder=_text(body, "status", "installation"),
        )
        self._policies.setdefault(namespace, {})[name] = entry
        for target in {entry.target, entry.target if before is None else before.target}:
            self._settle(PoolKey(namespace, target))

    def drop_policy(self, namespace: str, name: str) -> None:
        before = self._policies.get(namespace, {}).get(name)
        _drop(self._policies, namespace, name)
        if before is not None:
            self._settle(PoolKey(namespace, before.target))

    def match(self, namespace: str, labels: Mapping[str, str]) -> Match | Skip:
        """The one pool that a pod with these labels gets its sidecar for, or why there is none.

        Of several the oldest: one that comes later takes nothing from it. Pools that want no sidecar do not count:
        while a pod moves from one pool to another, both select it.
        """
        own = [pool for pool in self._pools.get(namespace, {}).values() if _selects(pool, labels)]
        if not own:
            return Skip("no_pool", "no InferencePool selects the pod")
        found = [(pool, self._wish(pool.key)) for pool in own]
        asking = [(pool, wish) for pool, wish in found if isinstance(wish, PolicySpec)]
        if asking:
            return Match(*min(asking, key=lambda each: each[0].age))
        for _, wish in found:
            if isinstance(wish, Skip):
                return wish
        return Skip("not_asked", f"no policy of {_names(pool.key for pool in own)} asks for spec.sidecar.inject")

    def _wish(self, key: PoolKey) -> PolicySpec | Skip | None:
        """The policy in force, if it asks for the sidecar; Skip: it may ask for it, and still there is to be none."""
        oldest = self._oldest(key)
        if oldest is None:
            return None
        in_force = oldest if oldest.spec is not None else self._good.get(key.namespace, {}).get(key.name)
        if in_force is None or in_force.spec is None:
            text = f"SchedulingPolicy {oldest.name} of pool {key.name} is not understood: see its condition Accepted"
            return Skip("policy_not_understood", text)
        if not in_force.spec.sidecar.inject:
            return None
        if oldest.holder not in ("", self._namespace):
            return Skip("other_installation", f"pool {key.name} is run by the installation in {oldest.holder}")
        return in_force.spec

    def _oldest(self, key: PoolKey) -> _Policy | None:
        targeting = [p for p in self._policies.get(key.namespace, {}).values() if p.target == key.name]
        return min(targeting, key=lambda policy: policy.age, default=None)

    def _settle(self, key: PoolKey) -> None:
        """Note what is in force now. Policies come in any order at first: of one younger than the oldest, which is not
        understood, nobody knows that it ever was."""
        oldest = self._oldest(key)
        good = self._good.get(key.namespace, {}).get(key.name)
        if oldest is not None and oldest.spec is not None:
            self._good.setdefault(key.namespace, {})[key.name] = oldest
        elif good is not None and (oldest is None or good.age > oldest.age):
            _drop(self._good, key.namespace, key.name)


def _text(body: Mapping[str, Any], *path: str) -> str:
    """Of a body that may be anything; empty: there is none."""
    value: Any = body
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value if isinstance(value, str) else ""


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
