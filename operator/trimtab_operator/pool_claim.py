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
from trimtab_operator.events import EventPoster
from trimtab_operator.install import MANAGER, Install
from trimtab_operator.kube import SECRETS, Kube, Object
from trimtab_operator.store_access import StoreAccessManager

log = logging.getLogger(__name__)

REASON: Final = "OtherInstallation"


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

    async def stands_back(self, key: PoolKey, about: Object, children: Sequence[Object]) -> bool:
        """Whether the pool is another installation's; then nothing of ours is left of it, and it is told.

        `about`: whatever carries the pool's Events. `children`: those that are known. Raises KubeError.
        """
        ours = self._install.namespace
        secret = await self._kube.get(SECRETS, key.namespace, store_secret_name(key.name))
        other = holder(secret, children, ours)
        if not other:
            return False
        self._access.forget(key)
        # Both may have begun at once: what the later one has made meanwhile is in the way of the other.
        await self._applier.remove_all(key, [child for child in children if installation_of(child) == ours])
        text = _text(key, other, ours)
        if await self._events.post(about, REASON, text, "Warning"):
            log.warning("%s", text)
        return True


def holder(secret: Mapping[str, Any] | None, children: Sequence[Mapping[str, Any]], ours: str) -> str:
    """The namespace of the other installation that has the pool; empty: it is ours, or nobody's yet. Pure."""
    if secret is not None:
        found = installation_of(secret)
        return "" if found == ours else found
    # Deleted by hand, or not made yet: whoever has made the rest makes it again.
    makers = {maker for child in children if (maker := installation_of(child))}
    return "" if ours in makers else min(makers, default="")


def _text(key: PoolKey, other: str, ours: str) -> str:
    labels = f"{MANAGED_BY}={MANAGER},{POOL_LABEL}={label_value(key.name)}"
    return (
        f"Pool {key} is run by the Trimtab installation in namespace {other}; the one in namespace {ours} leaves it"
        " alone. Keep one of the two from this namespace (--namespace), or, where the other is gone, hand the pool"
        f" over: kubectl -n {key.namespace} annotate secret,service,configmap,deployment,pdb -l {labels} {INSTALL}-"
    )
