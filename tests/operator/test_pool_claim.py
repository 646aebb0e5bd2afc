"""Two installations of Trimtab in one cluster that look for pools in one namespace: one has it, one stands back."""

import asyncio
import base64
import contextlib
import random
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
from child_objects import install
from valkey_server import ValkeyProcess, running
from waiting_on import eventually

from trimtab_operator.api.pool import PoolKey
from trimtab_operator.children.labels import CHILD_SELECTOR, installation_of
from trimtab_operator.kube import (
    CONFIG_MAPS,
    DEPLOYMENTS,
    EVENTS,
    KINDS,
    PDBS,
    POLICIES,
    POOLS,
    SECRETS,
    SERVICES,
    Kube,
    KubeError,
    Object,
)
from trimtab_operator.pool_claim import NAMELESS, holder
from trimtab_operator.pool_register import PoolRegister
from trimtab_operator.pool_user import user_name
from trimtab_operator.reconcile import PoolReconciler
from trimtab_operator.telemetry import Telemetry
from trimtab_operator.watches import Watches
from trimtab_operator.work_queue import PoolQueue
from trimtab_state import connect

CHILD_RESOURCES = (SECRETS, SERVICES, CONFIG_MAPS, DEPLOYMENTS, PDBS)
CHILDREN = 9
ROUNDS_MAX = 40


def made_by(installation: str, pool_secret: str = "ours") -> Object:
    values = {"store-url": "redis://store", "secret": pool_secret}
    return {
        "metadata": {"annotations": {"trimtab.dev/install": installation} if installation else {}},
        "data": {name: base64.b64encode(value.encode()).decode() for name, value in values.items()},
    }


@pytest.mark.parametrize(
    ("secret", "children", "expected"),
    [
        (None, [], ""),
        ("ours", [], ""),
        ("", ["theirs"], ""),
        ("theirs", [], "theirs"),
        ("theirs", ["ours"], "theirs"),
        ("ours", ["theirs"], ""),
        (None, ["theirs", ""], "theirs"),
        (None, ["ours", "theirs"], ""),
        (None, ["x", "theirs"], "theirs"),
    ],
)
def test_the_store_secret_says_whose_a_pool_is_and_the_other_children_where_there_is_none(
    secret: str | None, children: Sequence[str], expected: str
) -> None:
    found = None if secret is None else made_by(secret)
    assert holder(found, [made_by(child) for child in children], "ours", "ours") == expected


def test_a_store_secret_that_tells_no_installation_tells_by_what_it_holds() -> None:
    assert holder(made_by("", "ours"), [], "ours", "ours") == ""
    assert holder(made_by("", "theirs"), [], "ours", "ours") == NAMELESS
    damaged: Object = {**made_by(""), "data": {}}
    assert holder(damaged, [], "ours", "ours") == ""


class Operator:
    """One of the installations; the test itself says when it looks."""

    def __init__(self, kube: Kube, kube_config: Path, url: str, installation: str) -> None:
        rng = random.Random(installation)
        self.store = connect(url)
        self.watches = Watches(kube, rng=rng, kubeconfig=str(kube_config))
        self.queue = PoolQueue(rng=rng, is_known=self.watches.is_known)
        # Each has a secret of its own, so it would make another user and other objects.
        self.install = install(namespace=installation, store_url=url, secret=installation.encode())
        self.reconciler = PoolReconciler(
            kube=kube,
            store=self.store,
            install=self.install,
            watches=self.watches,
            queue=self.queue,
            telemetry=Telemetry(),
            clock=time.time,
            rng=rng,
        )

    @contextlib.asynccontextmanager
    async def at_work(self, namespace: str) -> AsyncIterator[None]:
        watching = asyncio.create_task(self.watches.run(self.queue, [namespace]))
        try:
            await self.watches.synced.wait()
            yield
        finally:
            await self.reconciler.close()
            watching.cancel()
            await asyncio.wait([watching])
            await self.store.close()


class Cluster:
    """A namespace with one pool."""

    def __init__(self, kube: Kube, kube_config: Path, namespace: str, server: ValkeyProcess) -> None:
        self.kube = kube
        self.key = PoolKey(namespace, "chat")
        self.server = server
        self._kube_config = kube_config

    def operator(self, installation: str) -> Operator:
        return Operator(self.kube, self._kube_config, self.server.url, installation)

    async def declare(self) -> None:
        about = {"name": "chat", "namespace": self.key.namespace}
        spec: Object = {"selector": {"matchLabels": {"app": "vllm"}}, "targetPorts": [{"number": 8000}]}
        spec["endpointPickerRef"] = {"name": "trimtab-chat", "port": {"number": 9002}}
        pool = {"apiVersion": POOLS.api_version, "kind": POOLS.kind, "metadata": about, "spec": spec}
        target = {"targetRef": {"name": "chat"}}
        policy = {"apiVersion": POLICIES.api_version, "kind": POLICIES.kind, "metadata": about, "spec": target}
        for body in (pool, policy):
            await self.kube.apply(body, manager="test")

    async def objects(self) -> list[Object]:
        """All that an operator writes but Events."""
        found = []
        for resource in (*CHILD_RESOURCES, POOLS, POLICIES):
            selector = CHILD_SELECTOR if resource in CHILD_RESOURCES else ""
            bodies, _ = await self.kube.list_all(resource, self.key.namespace, label_selector=selector)
            found += [{**body, "kind": resource.kind} for body in bodies]
        return found

    async def annotate(self, installation: str | None) -> None:
        for body in await self.objects():
            if is_child(body):
                note = {"metadata": {"annotations": {"trimtab.dev/install": installation}}}
                await self.kube.merge(KINDS[body["kind"]], self.key.namespace, body["metadata"]["name"], note)

    async def pickers(self) -> Object:
        body = await self.kube.get(DEPLOYMENTS, self.key.namespace, "trimtab-chat")
        assert body is not None
        return body

    async def versions(self) -> dict[str, str]:
        return {f"{b['kind']}/{b['metadata']['name']}": b["metadata"]["resourceVersion"] for b in await self.objects()}

    async def makers(self) -> set[str]:
        return {installation_of(body) for body in await self.objects() if body["kind"] in KINDS and is_child(body)}

    async def said(self) -> list[Object]:
        events, _ = await self.kube.list_all(EVENTS, self.key.namespace)
        return [event for event in events if event["reason"] == "OtherInstallation"]

    def user(self) -> bytes:
        return self.server.command("ACL", "GETUSER", user_name(self.key))

    async def until_quiet(self, *operators: Operator) -> dict[str, str]:
        """Both look at once, over and over, until three times nothing was written."""
        quiet, before = 0, await self.versions()
        for _ in range(ROUNDS_MAX):
            looks = (operator.reconciler.reconcile(self.key) for operator in operators)
            for outcome in await asyncio.gather(*looks, return_exceptions=True):
                assert outcome is None or isinstance(outcome, KubeError), outcome
            after = await self.versions()
            quiet = quiet + 1 if after == before else 0
            if quiet == 3:
                return after
            before = after
            await asyncio.sleep(0.2)  # what was written comes back by the watches
        raise AssertionError(f"still written after {ROUNDS_MAX} looks")


def is_child(body: Object) -> bool:
    return body["kind"] not in (POOLS.kind, POLICIES.kind)


@pytest.fixture
async def cluster(kube: Kube, kube_config: Path, namespace: str) -> AsyncIterator[Cluster]:
    with running() as server:
        yield Cluster(kube, kube_config, namespace, server)


async def test_a_second_installation_leaves_a_pool_alone_and_says_whose_it_is(cluster: Cluster) -> None:
    first, second = cluster.operator("trimtab-green"), cluster.operator("trimtab-blue")
    await cluster.declare()
    async with first.at_work(cluster.key.namespace):
        before, user = await cluster.until_quiet(first), cluster.user()
        assert len(before) == CHILDREN + 2
        async with second.at_work(cluster.key.namespace):
            assert await cluster.until_quiet(first, second) == before
            assert cluster.user() == user
            assert second.reconciler.run_of(cluster.key) is None
            (event,) = await cluster.said()
            assert event["type"] == "Warning"
            assert event["regarding"]["kind"] == POLICIES.kind
            assert "in namespace trimtab-green; the one in namespace trimtab-blue leaves it alone" in event["note"]
            assert f"kubectl -n {cluster.key.namespace} annotate --overwrite secret," in event["note"]
            # Of a pool that goes, it takes nothing down either.
            await cluster.kube.delete(POLICIES, cluster.key.namespace, "chat")
            await cluster.kube.delete(POOLS, cluster.key.namespace, "chat")

            async def knows() -> bool:
                return second.watches.pool(cluster.key) is None

            await eventually(knows)
            await second.reconciler.reconcile(cluster.key)
            assert len(await cluster.objects()) == CHILDREN
            assert cluster.user() == user


async def test_two_installations_that_begin_at_once_end_with_one_of_them(cluster: Cluster) -> None:
    first, second = cluster.operator("trimtab-green"), cluster.operator("trimtab-blue")
    async with first.at_work(cluster.key.namespace), second.at_work(cluster.key.namespace):
        await cluster.declare()

        async def both_know() -> bool:
            return all(o.watches.pool(cluster.key) and o.watches.policies(cluster.key) for o in (first, second))

        await eventually(both_know)
        assert len(await cluster.until_quiet(first, second)) == CHILDREN + 2
        (maker,) = await cluster.makers()
        loser = second if maker == "trimtab-green" else first
        assert loser.reconciler.run_of(cluster.key) is None
        assert await cluster.said()


async def test_a_pool_can_be_handed_over_while_both_are_at_work_and_its_pickers_stay(cluster: Cluster) -> None:
    first, second = cluster.operator("trimtab-green"), cluster.operator("trimtab-blue")
    await cluster.declare()
    register = PoolRegister(first.store, first.install)
    async with first.at_work(cluster.key.namespace), second.at_work(cluster.key.namespace):
        await cluster.until_quiet(first)
        await cluster.until_quiet(second)
        assert await cluster.makers() == {"trimtab-green"}
        before = await cluster.pickers()
        # The remedy of the Event's text.
        await cluster.annotate("trimtab-blue")
        await cluster.until_quiet(first, second)
        assert await cluster.makers() == {"trimtab-blue"}
        assert (await cluster.pickers())["metadata"]["uid"] == before["metadata"]["uid"]
        assert first.reconciler.run_of(cluster.key) is None
        assert await register.all() == set()
        # Nor does it sweep the other's, where it let go sooner.
        await register.add(cluster.key)
        await cluster.kube.delete(POLICIES, cluster.key.namespace, "chat")
        user = cluster.user()

        async def knows() -> bool:
            return not first.watches.policies(cluster.key)

        await eventually(knows)
        await first.reconciler.reconcile(cluster.key)
        assert await register.all() == set()
        assert cluster.user() == user


async def test_children_that_tell_no_installation_stay_with_whoever_made_them(cluster: Cluster) -> None:
    first, second = cluster.operator("trimtab-green"), cluster.operator("trimtab-blue")
    await cluster.declare()
    async with first.at_work(cluster.key.namespace), second.at_work(cluster.key.namespace):
        await cluster.until_quiet(first)
        before = await cluster.pickers()
        await cluster.annotate(None)
        await cluster.until_quiet(second, first)
        assert await cluster.makers() == {"trimtab-green"}
        assert (await cluster.pickers())["metadata"]["uid"] == before["metadata"]["uid"]


async def test_a_store_secret_that_was_deleted_is_made_again_by_its_own_installation(cluster: Cluster) -> None:
    first, second = cluster.operator("trimtab-green"), cluster.operator("trimtab-blue")
    await cluster.declare()
    async with first.at_work(cluster.key.namespace), second.at_work(cluster.key.namespace):
        await cluster.until_quiet(first)

        async def is_known() -> bool:
            return len(second.watches.children(cluster.key)) == CHILDREN - 1

        await eventually(is_known)
        await cluster.kube.delete(SECRETS, cluster.key.namespace, "trimtab-chat-store")
        await second.reconciler.reconcile(cluster.key)
        assert await cluster.kube.get(SECRETS, cluster.key.namespace, "trimtab-chat-store") is None
        await cluster.until_quiet(first, second)
        assert await cluster.makers() == {"trimtab-green"}
