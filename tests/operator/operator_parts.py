"""The operator's parts in the test's own process, for one pool on a real API server: what its service puts together.

A test that wants the whole process takes `operator_rig`.
"""

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from child_objects import install
from declared import POOL, declared_policy, declared_pool

from trimtab_operator.api.pool import PoolKey
from trimtab_operator.kube import DEPLOYMENTS, POLICIES, POOLS, SECRETS, Kube, Object
from trimtab_operator.pool_run import PoolRun
from trimtab_operator.reconcile import PoolReconciler
from trimtab_operator.telemetry import Telemetry
from trimtab_operator.watches import Watches
from trimtab_operator.work_queue import PoolQueue
from trimtab_state import ControlDocument, PoolKeys, connect
from trimtab_state.documents import decode_control

SECRET = f"trimtab-{POOL}-store"


class OperatorParts:
    """Of one installation. `watched` is the namespace that it looks at; `install_changes` are fields of `Install`."""

    def __init__(
        self,
        kube: Kube,
        kube_config: Path,
        key: PoolKey,
        url: str,
        *,
        watched: str | None = None,
        let_go_s: float = 30.0,
        **install_changes: Any,
    ) -> None:
        self.store = connect(url)
        self.install = install(**{"store_url": url} | install_changes)
        rng = random.Random(self.install.namespace)
        self.watches = Watches(kube, rng=rng, kubeconfig=str(kube_config))
        self.looks: list[str | None] = []
        """The name of what each raised; only of pools that are known."""
        self._queue = PoolQueue(rng=rng, is_known=self.watches.is_known, observer=self)
        self.reconciler = PoolReconciler(
            kube=kube,
            store=self.store,
            install=self.install,
            watches=self.watches,
            queue=self._queue,
            telemetry=Telemetry(),
            clock=time.time,
            rng=rng,
            let_go_s=let_go_s,
        )
        self._key = key
        self._watched = watched or key.namespace

    @property
    def run(self) -> PoolRun | None:
        return self.reconciler.run_of(self._key)

    async def control(self) -> ControlDocument | None:
        data = await self.store.execute("GET", PoolKeys(self._key.namespace, self._key.name).control)
        return None if data is None else decode_control(data)

    def look(self) -> None:
        """Soon, as after anything that happens."""
        self._queue.add(self._key)

    async def look_now(self) -> None:
        await self.reconciler.reconcile(self._key)

    def worked(self, key: PoolKey, *, seconds: float, error: str | None) -> None:
        self.looks.append(error)

    def forgotten(self, key: PoolKey) -> None: ...

    @contextlib.asynccontextmanager
    async def at_work(self, *, looks: bool = True) -> AsyncIterator[None]:
        """All of it; without `looks` it only watches, and looks when the test says so."""
        try:
            async with asyncio.TaskGroup() as work:
                tasks = [work.create_task(self.watches.run(self._queue, [self._watched]))]
                await self.watches.synced.wait()
                if looks:
                    tasks.append(work.create_task(self.reconciler.run()))
                    tasks.append(work.create_task(self._queue.run(self.reconciler.reconcile)))
                yield
                for task in tasks:
                    task.cancel()
        finally:
            await self.reconciler.close()
            await self.store.close()


class DeclaredPool:
    """At most one pool with its policy in a namespace of its own, and operators that look at it."""

    def __init__(self, kube: Kube, kube_config: Path, namespace: str) -> None:
        self.kube = kube
        self.namespace = namespace
        self.key = PoolKey(namespace, POOL)
        self._kube_config = kube_config

    def operator(self, url: str, **changes: Any) -> OperatorParts:
        return OperatorParts(self.kube, self._kube_config, self.key, url, **changes)

    async def put_pool(self, **spec: Any) -> None:
        await self.kube.apply(declared_pool(self.namespace, **spec), manager="test")

    async def put_policy(self, **spec: Any) -> None:
        await self.kube.apply(declared_policy(self.namespace, **spec), manager="test")

    async def delete_pool(self) -> None:
        await self.kube.delete(POOLS, self.namespace, POOL)

    async def delete_policy(self) -> None:
        await self.kube.delete(POLICIES, self.namespace, POOL)

    async def pickers(self) -> Object | None:
        """Their Deployment."""
        return await self.kube.get(DEPLOYMENTS, self.namespace, f"trimtab-{POOL}")

    async def secret(self) -> Object:
        body = await self.kube.get(SECRETS, self.namespace, SECRET)
        assert body is not None
        return body

    def has_secret(self, data: Object) -> Callable[[], Awaitable[bool]]:
        async def has_it() -> bool:
            body = await self.kube.get(SECRETS, self.namespace, SECRET)
            return body is not None and body["data"] == data

        return has_it

    async def parents(self) -> list[Object]:
        """Entries of the pool's `status.parents`."""
        body = await self.kube.get(POOLS, self.namespace, POOL) or {}
        found: list[Object] = body.get("status", {}).get("parents", [])
        return found

    async def store_condition(self) -> tuple[str, str]:
        body = await self.kube.get(POLICIES, self.namespace, POOL) or {}
        found = [c for c in body.get("status", {}).get("conditions", []) if c["type"] == "StoreReachable"]
        return (found[0]["status"], found[0]["reason"]) if found else ("", "")
