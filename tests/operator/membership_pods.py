"""Pods on a real API server whose status the test writes, and the store's view of them, for the membership tests."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from trimtab_operator.api.pool import PoolKey
from trimtab_operator.kube import PODS, Kube, KubeError, Object, Resource, WatchEvent
from trimtab_operator.membership.endpoints import Members
from trimtab_operator.membership.pool_membership import Membership, PoolMembership
from trimtab_operator.membership.zones import Zones

LABELS = {"app": "vllm"}
RULES = Membership(LABELS, (8000,), None)
PARALLEL = 8


def status(ip: str, *, ready: bool = True) -> Object:
    return {
        "phase": "Running",
        "podIP": ip,
        "podIPs": [{"ip": ip}],
        "conditions": [{"type": "Ready", "status": "True" if ready else "False"}],
    }


class Pods:
    """Of one namespace."""

    def __init__(self, kube: Kube, namespace: str, *, padding_bytes: int = 0) -> None:
        self._kube = kube
        self._namespace = namespace
        self._padding = {"example.com/padding": "x" * padding_bytes} if padding_bytes else {}

    async def add(self, name: str, ip: str, *, ready: bool = True, labels: dict[str, str] | None = None) -> None:
        body = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": name,
                "namespace": self._namespace,
                "labels": LABELS if labels is None else labels,
                "annotations": self._padding,
            },
            "spec": {
                "nodeName": "node-1",
                "containers": [{"name": "engine", "image": "vllm/vllm-openai", "ports": [{"containerPort": 8000}]}],
            },
        }
        await self._kube.create(PODS, body)
        await self.set(name, ip, ready=ready)

    async def set(self, name: str, ip: str, *, ready: bool) -> None:
        body = {"status": status(ip, ready=ready)}
        await self._kube.merge(PODS, self._namespace, name, body, subresource="status")

    async def label(self, name: str, **labels: str | None) -> None:
        await self._kube.merge(PODS, self._namespace, name, {"metadata": {"labels": labels}})

    async def delete(self, name: str, *, grace_s: int = 0) -> None:
        await self._kube.delete(PODS, self._namespace, name, grace_s=grace_s)

    async def add_many(self, pods: dict[str, str]) -> None:
        gate = asyncio.Semaphore(PARALLEL)

        async def one(name: str, ip: str) -> None:
            async with gate:
                await self.add(name, ip)

        await asyncio.gather(*(one(name, ip) for name, ip in pods.items()))


class FaultyKube(Kube):
    """The real API server, whose watches and lists fail when the test says so."""

    def __init__(self, kube: Kube) -> None:
        super().__init__(kube._client)
        self.lists = 0
        self.is_away = False
        self._broken: list[asyncio.Future[None]] = []

    def break_watches(self, status: int) -> None:
        """Every watch that runs ends with this status, as an ERROR event in the stream would have it."""
        for watch in self._broken:
            if not watch.done():
                watch.set_exception(KubeError(status, "Broken", "by the test"))

    async def pages(self, *args: Any, **selectors: Any) -> AsyncIterator[tuple[list[Object], str]]:
        self._refuse_if_away()
        self.lists += 1
        async for page in super().pages(*args, **selectors):
            self._refuse_if_away()
            yield page

    async def watch(self, resource: Resource, *args: Any, **selectors: Any) -> AsyncIterator[WatchEvent]:
        self._refuse_if_away()
        broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._broken.append(broken)
        events = super().watch(resource, *args, **selectors)
        try:
            while True:
                coming: asyncio.Future[WatchEvent] = asyncio.ensure_future(anext(events))
                either: list[asyncio.Future[Any]] = [coming, broken]
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                if broken.done():
                    coming.cancel()
                    await asyncio.wait([coming])
                    broken.result()
                try:
                    event = coming.result()
                except StopAsyncIteration:
                    return
                yield event
        finally:
            broken.cancel()
            self._broken.remove(broken)

    def _refuse_if_away(self) -> None:
        if self.is_away:
            raise KubeError(0, "Unreachable", "by the test")


class Told:
    """What a PoolMembership has told, in order."""

    def __init__(self, also: Callable[[Members], None] | None) -> None:
        self.all: list[Members] = []
        self._also = also
        self._changed = asyncio.Event()

    def __call__(self, members: Members) -> None:
        self.all.append(members)
        self._changed.set()
        if self._also is not None:
            self._also(members)

    def names(self) -> list[str]:
        return [e.name.removesuffix(":8000") + ("!" if e.draining else "") for e in self.all[-1].endpoints]

    async def until(self, *names: str) -> None:
        await self.until_true(lambda: self.names() == list(names))

    async def until_true(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(40):
            while not (self.all and holds()):
                self._changed.clear()
                await self._changed.wait()


@contextlib.asynccontextmanager
async def following(
    kube: Kube,
    namespace: str,
    *,
    rules: Membership = RULES,
    on_members: Callable[[Members], None] | None = None,
    **more: Any,
) -> AsyncIterator[tuple[PoolMembership, Told]]:
    told = Told(on_members)
    membership = PoolMembership(kube, PoolKey(namespace, "chat"), Zones(kube), on_change=told, **more)
    membership.configure(rules)
    with _running(membership):
        yield membership, told


@contextlib.contextmanager
def _running(membership: PoolMembership) -> Iterator[None]:
    task = asyncio.create_task(membership.run())
    try:
        yield
        assert not task.done(), task
    finally:
        task.cancel()
