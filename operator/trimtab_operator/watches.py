"""What the cluster says of pools, policies and our children, kept up to date.

The one rule: after whatever went wrong between us and the API server, what is here becomes equal to the truth again.
Events come from kopf; each time that it lists, and every ten minutes, everything is listed here too, since a list says
what has gone, and kopf does not.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Protocol

from trimtab_operator.api.pool import PoolKey
from trimtab_operator.children.labels import CHILD_SELECTOR
from trimtab_operator.kopf_feed import KopfFeed, Watched
from trimtab_operator.kube import (
    CONFIG_MAPS,
    DEPLOYMENTS,
    PDBS,
    POLICIES,
    POOLS,
    SERVICES,
    Kube,
    KubeError,
    Object,
    Resource,
)
from trimtab_operator.object_cache import ObjectCache

log = logging.getLogger(__name__)

WATCHED: Final = (
    Watched(POOLS),
    Watched(POLICIES),
    # Not Secrets: who may watch those that carry a label may read all of them.
    *(Watched(resource, CHILD_SELECTOR) for resource in (SERVICES, CONFIG_MAPS, DEPLOYMENTS, PDBS)),
)
CATCH_UP_S: Final = 600.0
"""Between two full lists; jittered."""
RETRY_MIN_S: Final = 0.5
RETRY_MAX_S: Final = 10.0
CRDS_OF: Final = {POOLS: "crds/inference.networking.k8s.io_inferencepools.yaml", POLICIES: "crds/trimtab.dev_*.yaml"}


class KeySink(Protocol):
    """The work queue."""

    def add(self, key: PoolKey) -> None: ...


class Watches:
    """`synced` is set once everything has been listed. Objects that are handed out are not to be changed."""

    def __init__(
        self,
        kube: Kube,
        *,
        rng: random.Random,
        kubeconfig: str | None = None,
        watched: Sequence[Watched] = WATCHED,
        catch_up_s: float = CATCH_UP_S,
    ) -> None:
        self.synced = asyncio.Event()
        self.waits_for = "the first lists"
        """Why `synced` is not set yet."""
        self.lists = 0
        """How often kopf has listed a kind: at its start, and whenever it has lost its place."""
        self.starts = 0
        """How often kopf has begun a watch."""
        self._kube = kube
        self._rng = rng
        self._kubeconfig = kubeconfig
        self._watched = tuple(watched)
        self._catch_up_s = catch_up_s
        self._cache = ObjectCache()
        self._queue: KeySink | None = None
        self._namespaces: tuple[str | None, ...] = (None,)
        self._behind = {entry.resource: asyncio.Event() for entry in self._watched}
        """Set: list it once more."""

    def pool(self, key: PoolKey) -> Object | None:
        return self._cache.pool(key)

    def policies(self, key: PoolKey) -> list[Object]:
        """Those that target the pool, oldest first."""
        return self._cache.policies(key)

    def children(self, key: PoolKey) -> list[Object]:
        """Those that carry the pool's label; whether they are ours is for `labels.is_ours` to say."""
        return self._cache.children(key)

    def keys(self) -> set[PoolKey]:
        """All pools that there are, that a policy targets, or that children belong to."""
        return self._cache.keys()

    def is_known(self, key: PoolKey) -> bool:
        """Whether it is one of `keys`."""
        return self._cache.is_known(key)

    @property
    def namespaces(self) -> Sequence[str | None]:
        """That are looked at; None: all."""
        return self._namespaces

    def covers(self, key: PoolKey) -> bool:
        """Whether it lies in a namespace that is looked at."""
        return self._namespaces == (None,) or key.namespace in self._namespaces

    async def run(self, queue: KeySink, namespaces: Sequence[str] = ()) -> None:
        """Until cancelled; no namespaces: all of them. Raises FeedEndedError."""
        self._queue = queue
        self._namespaces = tuple(namespaces) or (None,)
        for entry in self._watched:
            await self._first_list(entry)
        self.waits_for = ""
        self.synced.set()
        feed = KopfFeed(self._watched, self, kubeconfig=self._kubeconfig)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(feed.run(namespaces), name="kopf")
            for entry in self._watched:
                tasks.create_task(self._catch_up(entry), name=f"lists of {entry.resource.plural}")

    # What kopf tells.

    def changed(self, resource: Resource, event: str | None, body: Object) -> None:
        keys = self._cache.drop(resource.kind, body) if event == "DELETED" else self._cache.put(resource.kind, body)
        self._enqueue(keys)

    def listed(self, resource: Resource) -> None:
        self.lists += 1
        self._behind[resource].set()

    def watched(self, resource: Resource) -> None:
        self.starts += 1

    # What is listed here.

    async def _first_list(self, entry: Watched) -> None:
        def explain(error: KubeError) -> None:
            plural = entry.resource.plural
            self.waits_for = f"{plural} cannot be listed: {error}"
            if error.status == 404 and (files := CRDS_OF.get(entry.resource)) is not None:
                self.waits_for = f"the cluster has no {entry.resource.kind}: kubectl apply --server-side -f {files}"
            log.warning("not begun yet: %s", self.waits_for)

        await self._until_listed(entry, explain)

    async def _catch_up(self, entry: Watched) -> None:
        behind = self._behind[entry.resource]
        while True:
            try:
                async with asyncio.timeout(self._catch_up_s * self._rng.uniform(0.8, 1.2)):
                    await behind.wait()
            except TimeoutError:
                pass
            behind.clear()
            await self._until_listed(
                entry, lambda error: log.info("%s not listed for a moment: %s", entry.resource.plural, error)
            )

    async def _until_listed(self, entry: Watched, explain: Callable[[KubeError], None]) -> None:
        pause_s = RETRY_MIN_S
        while True:
            try:
                for namespace in self._namespaces:
                    await self._list(entry, namespace)
                return
            except KubeError as error:
                explain(error)
                await asyncio.sleep(max(pause_s * self._rng.uniform(0.5, 1.0), error.retry_after_s))
                pause_s = min(pause_s * 2, RETRY_MAX_S)

    async def _list(self, entry: Watched, namespace: str | None) -> None:
        kind = entry.resource.kind
        # Only what was known before the list began can be said to be gone because it is not in it.
        missing, version = self._cache.uids(kind, namespace), ""
        async for found, listed_at in self._kube.pages(entry.resource, namespace, label_selector=entry.label_selector):
            version = listed_at
            for body in found:
                missing.discard(body["metadata"]["uid"])
                self._enqueue(self._cache.put(kind, body))
        self._enqueue(self._cache.drop_uids(kind, missing, version))

    def _enqueue(self, keys: Iterable[PoolKey]) -> None:
        if self._queue is not None:
            for key in keys:
                self._queue.add(key)
