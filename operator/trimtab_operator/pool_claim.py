"""Whose a pool is, where a cluster has several installations of Trimtab that look for pools in its namespace.

The one rule: a pool has one installation: the one that made its store Secret, which is the first of its objects. The
others write nothing for it, neither objects nor status nor users of the store; they say so in an Event of their own.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final

from trimtab_operator.api.pool import PoolKey
from trimtab_operator.apply import ChildApplier
from trimtab_operator.children.labels import INSTALL, MANAGED_BY, POOL_LABEL, installation_of
from trimtab_operator.children.names import label_value, store_secret_name
from trimtab_operator.children.store_secret import access_in
from trimtab_operator.events import EventPoster
from trimtab_operator.install import MANAGER, Install
from trimtab_operator.kube import SECRETS, Kube, Object
from trimtab_operator.store.access import StoreAccessManager

log = logging.getLogger(__name__)

REASON: Final = "OtherInstallation"
NAMELESS: Final = "(it does not say which)"


class PoolClaims:
    """One per operator."""

    def __init__(
        self, kube: Kube, install: Install, applier: ChildApplier, access: StoreAccessManager, events: EventPoster
    ) -> None:
        self._kube = kube
        self._install = install
        self._applier = applier
        self._access = access
        self._events = events

    async def other(self, key: PoolKey, children: Sequence[Mapping[str, Any]]) -> str:
        """The namespace of the other installation that has the pool; empty: none. Raises KubeError."""
        secret = await self._kube.get(SECRETS, key.namespace, store_secret_name(key.name))
        return holder(secret, children, self._install.namespace, self._install.pool_secret(key))

    async def stand_back(self, key: PoolKey, other: str, about: Object, children: Sequence[Object]) -> None:
        """Leave nothing of ours in the way of the other one, and tell it. Raises KubeError.

        `about`: whatever carries the pool's Events. `children`: those that are known.
        """
        ours = self._install.namespace
        self._access.forget(key)
        # Both may have begun at once: what the later one has made meanwhile is in the way of the other.
        await self._applier.remove_all(key, [child for child in children if installation_of(child) == ours])
        text = _text(key, other, ours)
        if await self._events.post(about, REASON, text, "Warning"):
            log.warning("%s", text)


def holder(secret: Mapping[str, Any] | None, children: Sequence[Mapping[str, Any]], ours: str, pool_secret: str) -> str:
    """The namespace of the other installation that has the pool; empty: it is ours, or nobody's yet. Pure.

    `pool_secret`: as we would make it. A Secret that tells no installation tells by this one whose it is.
    """
    if secret is not None:
        found = installation_of(secret)
        if found:
            return "" if found == ours else found
        access = access_in(secret, reason="")
        return "" if access is None or access.secret == pool_secret else NAMELESS
    # Deleted by hand, or not made yet: whoever has made the rest makes it again.
    makers = {maker for child in children if (maker := installation_of(child))}
    return "" if ours in makers else min(makers, default="")


def _text(key: PoolKey, other: str, ours: str) -> str:
    labels = f"{MANAGED_BY}={MANAGER},{POOL_LABEL}={label_value(key.name)}"
    return (
        f"Pool {key} is run by the Trimtab installation in namespace {other}; the one in namespace {ours} leaves it"
        " alone. Keep one of the two from this namespace (--namespace), or hand the pool over:"
        f" kubectl -n {key.namespace} annotate --overwrite secret,service,configmap,deployment,pdb -l {labels}"
        f" {INSTALL}={ours}"
    )
