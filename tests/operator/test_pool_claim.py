"""Two installations of Trimtab in one cluster that look for pools in one namespace: one has it, one stands back."""

import asyncio
import base64
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
from operator_parts import SECRET, DeclaredPool, OperatorParts
from valkey_server import ValkeyProcess, running
from waiting_on import eventually

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
from trimtab_operator.store.pool_user import user_name

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


class Cluster(DeclaredPool):
    """Two installations share it, and a store."""

    def __init__(self, kube: Kube, kube_config: Path, namespace: str, server: ValkeyProcess) -> None:
        super().__init__(kube, kube_config, namespace)
        self.server = server

    def installation(self, namespace: str) -> OperatorParts:
        """Has a secret of its own, so it would make another user and other objects."""
        return self.operator(self.server.url, namespace=namespace, secret=namespace.encode())

    async def declare(self) -> None:
        await self.put_pool()
        await self.put_policy()

    async def objects(self) -> list[Object]:
        """All that an operator writes but Events."""
        found = []
        for resource in (*CHILD_RESOURCES, POOLS, POLICIES):
            selector = CHILD_SELECTOR if resource in CHILD_RESOURCES else ""
            bodies, _ = await self.kube.list_all(resource, self.namespace, label_selector=selector)
            found += [{**body, "kind": resource.kind} for body in bodies]
        return found

    async def annotate(self, installation: str | None) -> None:
        for body in await self.objects():
            if is_child(body):
                note = {"metadata": {"annotations": {"trimtab.dev/install": installation}}}
                await self.kube.merge(KINDS[body["kind"]], self.namespace, body["metadata"]["name"], note)

    async def versions(self) -> dict[str, str]:
        return {f"{b['kind']}/{b['metadata']['name']}": b["metadata"]["resourceVersion"] for b in await self.objects()}

    async def makers(self) -> set[str]:
        return {installation_of(body) for body in await self.objects() if body["kind"] in KINDS and is_child(body)}

    async def said(self) -> list[Object]:
        events, _ = await self.kube.list_all(EVENTS, self.namespace)
        return [event for event in events if event["reason"] == "OtherInstallation"]

    def user(self) -> bytes:
        return self.server.command("ACL", "GETUSER", user_name(self.key))

    async def until_quiet(self, *operators: OperatorParts) -> dict[str, str]:
        """Both look at once, over and over, until three times nothing was written."""
        quiet, before = 0, await self.versions()
        for _ in range(ROUNDS_MAX):
            looks = (operator.look_now() for operator in operators)
            for outcome in await asyncio.gather(*looks, return_exceptions=True):
                assert outcome is None or isinstance(outcome, KubeError), outcome
            after = await self.versions()
            quiet = quiet + 1 if after == before else 0
            if quiet == 3:
                return after
            before = after
            await asyncio.sleep(0.2)  # what was written comes back by the watches
        raise AssertionError(f"still written after {ROUNDS_MAX} looks")


async def uid_of_pickers(cluster: DeclaredPool) -> str:
    body = await cluster.pickers()
    assert body is not None
    return str(body["metadata"]["uid"])


def is_child(body: Object) -> bool:
    return body["kind"] not in (POOLS.kind, POLICIES.kind)


@pytest.fixture
async def cluster(kube: Kube, kube_config: Path, namespace: str) -> AsyncIterator[Cluster]:
    with running() as server:
        yield Cluster(kube, kube_config, namespace, server)


async def test_a_second_installation_leaves_a_pool_alone_and_says_whose_it_is(cluster: Cluster) -> None:
    first, second = cluster.installation("trimtab-green"), cluster.installation("trimtab-blue")
    await cluster.declare()
    async with first.at_work(looks=False):
        before, user = await cluster.until_quiet(first), cluster.user()
        assert len(before) == CHILDREN + 2
        async with second.at_work(looks=False):
            assert await cluster.until_quiet(first, second) == before
            assert cluster.user() == user
            assert second.reconciler.run_of(cluster.key) is None
            (event,) = await cluster.said()
            assert event["type"] == "Warning"
            assert event["regarding"]["kind"] == POLICIES.kind
            assert "in namespace trimtab-green; the one in namespace trimtab-blue leaves it alone" in event["note"]
            assert f"kubectl -n {cluster.namespace} annotate --overwrite secret," in event["note"]
            # Of a pool that goes, it takes nothing down either.
            await cluster.delete_policy()
            await cluster.delete_pool()

            async def knows() -> bool:
                return second.watches.pool(cluster.key) is None

            await eventually(knows)
            await second.look_now()
            assert len(await cluster.objects()) == CHILDREN
            assert cluster.user() == user


async def test_two_installations_that_begin_at_once_end_with_one_of_them(cluster: Cluster) -> None:
    first, second = cluster.installation("trimtab-green"), cluster.installation("trimtab-blue")
    async with first.at_work(looks=False), second.at_work(looks=False):
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
    first, second = cluster.installation("trimtab-green"), cluster.installation("trimtab-blue")
    await cluster.declare()
    register = PoolRegister(first.store, first.install)
    async with first.at_work(looks=False), second.at_work(looks=False):
        await cluster.until_quiet(first)
        await cluster.until_quiet(second)
        assert await cluster.makers() == {"trimtab-green"}
        before = await uid_of_pickers(cluster)
        # The remedy of the Event's text.
        await cluster.annotate("trimtab-blue")
        await cluster.until_quiet(first, second)
        assert await cluster.makers() == {"trimtab-blue"}
        assert await uid_of_pickers(cluster) == before
        assert first.reconciler.run_of(cluster.key) is None
        assert await register.all() == set()
        # Nor does it sweep the other's, where it let go sooner.
        await register.add(cluster.key)
        await cluster.delete_policy()
        user = cluster.user()

        async def knows() -> bool:
            return not first.watches.policies(cluster.key)

        await eventually(knows)
        await first.look_now()
        assert await register.all() == set()
        assert cluster.user() == user


async def test_children_that_tell_no_installation_stay_with_whoever_made_them(cluster: Cluster) -> None:
    first, second = cluster.installation("trimtab-green"), cluster.installation("trimtab-blue")
    await cluster.declare()
    async with first.at_work(looks=False), second.at_work(looks=False):
        await cluster.until_quiet(first)
        before = await uid_of_pickers(cluster)
        await cluster.annotate(None)
        await cluster.until_quiet(second, first)
        assert await cluster.makers() == {"trimtab-green"}
        assert await uid_of_pickers(cluster) == before


async def test_a_store_secret_that_was_deleted_is_made_again_by_its_own_installation(cluster: Cluster) -> None:
    first, second = cluster.installation("trimtab-green"), cluster.installation("trimtab-blue")
    await cluster.declare()
    async with first.at_work(looks=False), second.at_work(looks=False):
        await cluster.until_quiet(first)

        async def is_known() -> bool:
            return len(second.watches.children(cluster.key)) == CHILDREN - 1

        await eventually(is_known)
        await cluster.kube.delete(SECRETS, cluster.namespace, SECRET)
        await second.look_now()
        assert await cluster.kube.get(SECRETS, cluster.namespace, SECRET) is None
        await cluster.until_quiet(first, second)
        assert await cluster.makers() == {"trimtab-green"}
