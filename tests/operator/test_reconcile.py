"""Looks at pools when something else goes wrong: the store is away, another cluster shares it, a policy is replaced."""

import asyncio
import base64
import contextlib
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
from child_objects import install
from valkey_server import ValkeyProcess, running
from waiting_on import eventually

from trimtab_operator.api.pool import PoolKey
from trimtab_operator.children.labels import APPLIED
from trimtab_operator.fallback import FallbackState
from trimtab_operator.kube import DEPLOYMENTS, POLICIES, POOLS, SECRETS, Kube, Object
from trimtab_operator.pool_register import PoolRegister
from trimtab_operator.pool_run import PoolRun
from trimtab_operator.pool_user import user_name
from trimtab_operator.reconcile import PoolReconciler
from trimtab_operator.telemetry import Telemetry
from trimtab_operator.watches import Watches
from trimtab_operator.work_queue import PoolQueue
from trimtab_state import ControlDocument, PoolKeys, connect
from trimtab_state.documents import decode_control

SECRET = "trimtab-chat-store"


class OperatorParts:
    """What the service puts together, for the pools of one namespace."""

    def __init__(
        self,
        kube: Kube,
        kube_config: Path,
        url: str,
        key: PoolKey,
        namespace: str,
        *,
        let_go_s: float = 30.0,
        **install_changes: Any,
    ) -> None:
        rng = random.Random(1)
        self.store = connect(url)
        self.looks: list[str | None] = []
        """The name of what each raised; only of pools that are known."""
        self._watches = Watches(kube, rng=rng, kubeconfig=str(kube_config))
        self._queue = PoolQueue(rng=rng, is_known=self._watches.is_known, observer=self)
        self.reconciler = PoolReconciler(
            kube=kube,
            store=self.store,
            install=install(**{"store_url": url} | install_changes),
            watches=self._watches,
            queue=self._queue,
            telemetry=Telemetry(),
            clock=time.time,
            rng=rng,
            let_go_s=let_go_s,
        )
        self._key = key
        self._namespace = namespace

    @property
    def run(self) -> PoolRun | None:
        return self.reconciler.run_of(self._key)

    async def control(self) -> ControlDocument | None:
        data = await self.store.execute("GET", PoolKeys(self._key.namespace, self._key.name).control)
        return None if data is None else decode_control(data)

    def look(self) -> None:
        """Now, as after anything that happens."""
        self._queue.add(self._key)

    def worked(self, key: PoolKey, *, seconds: float, error: str | None) -> None:
        self.looks.append(error)

    def forgotten(self, key: PoolKey) -> None: ...

    @contextlib.asynccontextmanager
    async def at_work(self) -> AsyncIterator[None]:
        try:
            async with asyncio.TaskGroup() as work:
                tasks = [work.create_task(self._watches.run(self._queue, [self._namespace]))]
                await self._watches.synced.wait()
                tasks.append(work.create_task(self.reconciler.run()))
                tasks.append(work.create_task(self._queue.run(self.reconciler.reconcile)))
                yield
                for task in tasks:
                    task.cancel()
        finally:
            await self.reconciler.close()
            await self.store.close()


class Cluster:
    """One namespace with, at most, one pool `chat`; and operators that look at it."""

    def __init__(self, kube: Kube, kube_config: Path, namespace: str) -> None:
        self.kube = kube
        self.namespace = namespace
        self.key = PoolKey(namespace, "chat")
        self._kube_config = kube_config

    def operator(self, url: str, *, namespace: str | None = None, **changes: Any) -> OperatorParts:
        return OperatorParts(self.kube, self._kube_config, url, self.key, namespace or self.namespace, **changes)

    async def put_pool(self) -> None:
        """One that only a policy makes ours."""
        await self.kube.apply(
            {
                "apiVersion": POOLS.api_version,
                "kind": POOLS.kind,
                "metadata": {"name": "chat", "namespace": self.namespace},
                "spec": {
                    "selector": {"matchLabels": {"app": "vllm"}},
                    "targetPorts": [{"number": 8000}],
                    "endpointPickerRef": {"name": "somebody-elses-picker", "port": {"number": 9002}},
                },
            },
            manager="test",
        )

    async def put_policy(self, **spec: Any) -> None:
        await self.kube.apply(
            {
                "apiVersion": POLICIES.api_version,
                "kind": POLICIES.kind,
                "metadata": {"name": "chat", "namespace": self.namespace},
                "spec": {"targetRef": {"name": "chat"}, **spec},
            },
            manager="test",
        )

    async def delete_policy(self) -> None:
        await self.kube.delete(POLICIES, self.namespace, "chat")

    async def pickers(self) -> Object | None:
        """Their Deployment."""
        return await self.kube.get(DEPLOYMENTS, self.namespace, "trimtab-chat")

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
        body = await self.kube.get(POOLS, self.namespace, "chat") or {}
        found: list[Object] = body.get("status", {}).get("parents", [])
        return found

    async def store_condition(self) -> tuple[str, str]:
        body = await self.kube.get(POLICIES, self.namespace, "chat") or {}
        found = [c for c in body.get("status", {}).get("conditions", []) if c["type"] == "StoreReachable"]
        return (found[0]["status"], found[0]["reason"]) if found else ("", "")


@pytest.fixture
def cluster(kube: Kube, kube_config: Path, namespace: str) -> Cluster:
    return Cluster(kube, kube_config, namespace)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ValkeyProcess]:
    """A store that the test may stop and start."""
    process = ValkeyProcess(tmp_path)
    process.start()
    yield process
    process.kill()


async def test_an_operator_that_starts_while_the_store_is_away_keeps_the_children_up_and_says_so(
    cluster: Cluster, server: ValkeyProcess
) -> None:
    await cluster.put_pool()
    await cluster.put_policy()
    before = cluster.operator(server.url)
    async with before.at_work():
        await eventually(cluster.pickers)
        await eventually(before.control)
    server.kill()
    await cluster.kube.delete(DEPLOYMENTS, cluster.namespace, "trimtab-chat")
    after = cluster.operator(server.url)
    async with after.at_work():
        await eventually(cluster.pickers)

        async def is_said() -> bool:
            return (await cluster.store_condition())[0] == "False"

        await eventually(is_said)
        server.start()
        await eventually(after.control)


async def test_the_store_secret_is_made_again_without_the_store_and_no_changed_one_is_believed(
    cluster: Cluster, server: ValkeyProcess
) -> None:
    await cluster.put_pool()
    await cluster.put_policy()
    parts = cluster.operator(server.url)
    async with parts.at_work():
        before = await eventually(cluster.pickers)
        asked = (await cluster.secret())["data"]
        await eventually(parts.control)
        server.kill()
        await cluster.kube.delete(SECRETS, cluster.namespace, SECRET)
        parts.look()
        await eventually(cluster.has_secret(asked))
    # One that knows nothing from before, and a Secret that leads elsewhere.
    elsewhere = {"data": {"store-url": base64.b64encode(b"redis://evil.example:6379/0").decode()}}
    for _ in range(2):
        await cluster.kube.merge(SECRETS, cluster.namespace, SECRET, elsewhere)
        async with cluster.operator(server.url).at_work():
            await eventually(cluster.has_secret(asked))
        await cluster.kube.merge(SECRETS, cluster.namespace, SECRET, {"metadata": {"annotations": {APPLIED: "x"}}})
    after = await cluster.pickers()
    assert after is not None
    assert after["metadata"]["generation"] == before["metadata"]["generation"]


async def test_a_login_that_all_share_stays_so_while_the_store_is_away(cluster: Cluster, tmp_path: Path) -> None:
    server = ValkeyProcess(tmp_path, arguments=["--rename-command", "ACL", ""])
    server.start()
    try:
        await cluster.put_pool()
        await cluster.put_policy()
        before = cluster.operator(server.url)
        async with before.at_work():
            await eventually(cluster.pickers)
            asked = (await cluster.secret())["data"]
            assert base64.b64decode(asked["store-url"]).decode() == server.url
        server.kill()
        after = cluster.operator(server.url)
        async with after.at_work():

            async def is_looked_at() -> object:
                return after.looks

            await eventually(is_looked_at)
            assert (await cluster.secret())["data"] == asked
    finally:
        server.kill()


async def test_a_pool_goes_on_as_it_was_placed_where_the_store_comes_later_than_the_operator(
    cluster: Cluster, server: ValkeyProcess
) -> None:
    await cluster.put_pool()
    await cluster.put_policy(mode="RoundRobin")
    first = cluster.operator(server.url)
    async with first.at_work():
        written = await eventually(first.control)
        assert written.policy.policy == "round_robin"
    server.pause()
    second = cluster.operator(server.url)
    async with second.at_work():

        async def runs() -> object:
            return second.run

        run = await eventually(runs)
        assert run.decision is None
        server.resume()

        async def is_decided() -> object:
            return run.decision

        decision = await eventually(is_decided)
        assert decision.policy == "round_robin"
        assert not decision.changed
        assert decision.since_s == pytest.approx(written.policy.since_s)


async def test_a_copy_of_the_cluster_does_not_sweep_the_pools_of_the_first(cluster: Cluster) -> None:
    with running() as server:
        store = connect(server.url)
        live, gone = (PoolKey(cluster.namespace, name) for name in ("live", "gone"))
        await PoolRegister(store, install(cluster_uid="the first")).add(live)
        own = PoolRegister(store, install(cluster_uid="its copy"))
        await own.add(gone)
        for key in (live, gone):
            await store.execute("SET", PoolKeys(key.namespace, key.name).control, "x")
        async with cluster.operator(server.url, cluster_uid="its copy").at_work():

            async def is_swept() -> bool:
                return not await own.all()

            await eventually(is_swept)
        assert await store.execute("EXISTS", PoolKeys(cluster.namespace, "live").control)
        assert not await store.execute("EXISTS", PoolKeys(cluster.namespace, "gone").control)
        await store.close()


async def test_pools_outside_the_namespaces_that_are_looked_at_are_left_alone(cluster: Cluster) -> None:
    with running() as server:
        await cluster.put_pool()
        await cluster.put_policy()
        async with cluster.operator(server.url).at_work():
            await eventually(cluster.pickers)
        narrowed = cluster.operator(server.url, namespace="default")
        register = PoolRegister(narrowed.store, install())
        await register.add(PoolKey("default", "gone"))
        async with narrowed.at_work():

            async def is_swept() -> bool:
                return await register.all() == {cluster.key}

            await eventually(is_swept)
            assert narrowed.run is None
        assert await cluster.pickers() is not None


async def test_a_policy_that_is_deleted_and_made_again_takes_nothing_down(cluster: Cluster) -> None:
    with running() as server:
        await cluster.put_pool()
        await cluster.put_policy()
        parts = cluster.operator(server.url)
        async with parts.at_work():
            before = await eventually(cluster.pickers)
            await cluster.delete_policy()

            async def is_unwanted() -> bool:
                return cluster.key in parts.reconciler.unwanted

            await eventually(is_unwanted)
            await cluster.put_policy(batchLimit=7)

            async def is_wanted_again() -> bool:
                control = await parts.control()
                return control is not None and control.policy.batch_limit == 7

            await eventually(is_wanted_again)
            assert not await is_unwanted()
        after = await cluster.pickers()
        assert after is not None
        assert after["metadata"]["uid"] == before["metadata"]["uid"]


async def test_a_pool_that_stays_without_its_policy_is_let_go_after_a_while_and_a_deleted_one_at_once(
    cluster: Cluster,
) -> None:
    with running() as server:

        async def is_down() -> bool:
            users = server.command("ACL", "USERS")
            return await cluster.pickers() is None and user_name(cluster.key).encode() not in users

        await cluster.put_pool()
        await cluster.put_policy()
        async with cluster.operator(server.url, let_go_s=1.0).at_work():
            await eventually(cluster.pickers)
            await cluster.delete_policy()
            await eventually(is_down)
        await cluster.put_policy()
        async with cluster.operator(server.url, let_go_s=3600.0).at_work():
            await eventually(cluster.pickers)
            await cluster.delete_policy()
            await cluster.kube.delete(POOLS, cluster.namespace, "chat")
            await eventually(is_down)


@pytest.mark.parametrize("keeps_its_data", [True, False])
async def test_a_pool_that_is_let_go_while_the_store_is_away_is_swept_once_it_is_back(
    cluster: Cluster, server: ValkeyProcess, keeps_its_data: bool
) -> None:
    await cluster.put_pool()
    await cluster.put_policy()
    parts = cluster.operator(server.url, let_go_s=0.5)
    async with parts.at_work():
        await eventually(parts.control)

        async def is_parent() -> bool:
            return bool(await cluster.parents())

        await eventually(is_parent)
        server.pause() if keeps_its_data else server.kill()
        await cluster.delete_policy()

        async def is_down() -> bool:
            return await cluster.pickers() is None and not await cluster.parents()

        await eventually(is_down)
        server.resume() if keeps_its_data else server.start()

        async def is_swept() -> bool:
            users = server.command("ACL", "USERS")
            return (
                user_name(cluster.key).encode() not in users
                and await parts.control() is None
                and not await PoolRegister(parts.store, install()).all()
            )

        await eventually(is_swept)


async def test_pools_of_others_are_no_trouble_while_the_store_is_away(cluster: Cluster) -> None:
    await cluster.put_pool()
    parts = cluster.operator("redis://127.0.0.1:1")
    async with parts.at_work():

        async def is_looked_at() -> object:
            return parts.looks

        assert await eventually(is_looked_at) == [None]


async def test_a_run_that_fails_is_begun_anew_and_hinders_no_ending(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with running() as server:
        await cluster.put_pool()
        await cluster.put_policy()
        parts = cluster.operator(server.url)
        async with parts.at_work():
            await eventually(parts.control)
            run = parts.run
            with monkeypatch.context() as patch:
                patch.setattr(FallbackState, "decide", a_bug)

                async def is_told() -> bool:
                    return "what goes on between the looks has failed" in caplog.text

                await eventually(is_told)

            async def is_another() -> bool:
                return parts.run not in (None, run) and parts.run.decision is not None

            await eventually(is_another)
            monkeypatch.setattr(FallbackState, "decide", a_bug)
            caplog.clear()
            await eventually(is_told)


def a_bug(*_: object) -> NoReturn:
    raise RuntimeError("a bug")
