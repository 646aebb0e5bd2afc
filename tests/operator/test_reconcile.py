"""Looks at pools when something else goes wrong: the store is away, another cluster shares it, a policy is replaced."""

import base64
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NoReturn

import pytest
from child_objects import install
from operator_parts import SECRET, DeclaredPool, OperatorParts
from valkey_server import ValkeyProcess, running
from waiting_on import eventually

from trimtab_operator.api.pool import PoolKey
from trimtab_operator.children.labels import APPLIED
from trimtab_operator.fallback import FallbackState
from trimtab_operator.kube import DEPLOYMENTS, EVENTS, SECRETS
from trimtab_operator.pool_register import PoolRegister
from trimtab_operator.store.pool_user import user_name
from trimtab_state import PoolKeys, connect

OTHERS = "somebody-elses-picker"
"""So that only a policy makes the pool ours."""


async def test_an_operator_that_starts_while_the_store_is_away_keeps_the_children_up_and_says_so(
    cluster: DeclaredPool, server: ValkeyProcess
) -> None:
    await cluster.put_pool(picker=OTHERS)
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
    cluster: DeclaredPool, server: ValkeyProcess
) -> None:
    await cluster.put_pool(picker=OTHERS)
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


async def test_a_login_that_all_share_stays_so_while_the_store_is_away(cluster: DeclaredPool, tmp_path: Path) -> None:
    server = ValkeyProcess(tmp_path, arguments=["--rename-command", "ACL", ""])
    server.start()
    try:
        await cluster.put_pool(picker=OTHERS)
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
    cluster: DeclaredPool, server: ValkeyProcess
) -> None:
    await cluster.put_pool(picker=OTHERS)
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


async def test_a_copy_of_the_cluster_does_not_sweep_the_pools_of_the_first(cluster: DeclaredPool) -> None:
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


async def test_pools_outside_the_namespaces_that_are_looked_at_are_left_alone(cluster: DeclaredPool) -> None:
    with running() as server:
        await cluster.put_pool(picker=OTHERS)
        await cluster.put_policy()
        async with cluster.operator(server.url).at_work():
            await eventually(cluster.pickers)
        narrowed = cluster.operator(server.url, watched="default")
        register = PoolRegister(narrowed.store, install())
        await register.add(PoolKey("default", "gone"))
        async with narrowed.at_work():

            async def is_swept() -> bool:
                return await register.all() == {cluster.key}

            await eventually(is_swept)
            assert narrowed.run is None
        assert await cluster.pickers() is not None


async def test_a_policy_that_is_deleted_and_made_again_takes_nothing_down(cluster: DeclaredPool) -> None:
    with running() as server:
        await cluster.put_pool(picker=OTHERS)
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


async def test_a_pool_that_names_our_pickers_goes_on_as_before_while_its_policy_is_made_again(
    cluster: DeclaredPool, server: ValkeyProcess
) -> None:
    await cluster.put_pool(picker="trimtab-chat")
    await cluster.put_policy(batchLimit=7, picker={"replicas": 3})

    async def generation() -> int:
        body = await cluster.pickers()
        return 0 if body is None else int(body["metadata"]["generation"])

    def limited(parts: OperatorParts, limit: int | None) -> Callable[[], Awaitable[bool]]:
        async def is_limited() -> bool:
            control = await parts.control()
            return control is not None and control.policy.batch_limit == limit

        return is_limited

    async def look(parts: OperatorParts) -> None:
        seen = len(parts.looks)
        parts.look()

        async def is_looked_at() -> bool:
            return len(parts.looks) > seen

        await eventually(is_looked_at)

    parts = cluster.operator(server.url, let_go_s=3600.0)
    async with parts.at_work():
        await eventually(limited(parts, 7))
        made = await generation()
        await cluster.delete_policy()

        async def is_told() -> bool:
            found, _ = await cluster.kube.list_all(EVENTS, cluster.namespace)
            return any("goes on as before for 3600 s" in event["note"] for event in found)

        await eventually(is_told)
        await look(parts)
        assert await limited(parts, 7)()
        assert await generation() == made
    # Nor does another operator know of the policy, but what it left.
    parts = cluster.operator(server.url, let_go_s=3600.0)
    async with parts.at_work():
        await eventually(parts.control)
        await look(parts)
        assert await limited(parts, 7)()
        assert await generation() == made
        await cluster.put_policy(batchLimit=8, picker={"replicas": 3})
        await eventually(limited(parts, 8))
        await look(parts)
    # For a while only.
    await cluster.delete_policy()
    parts = cluster.operator(server.url, let_go_s=1.0)
    async with parts.at_work():
        await eventually(limited(parts, None))

        async def is_default() -> bool:
            return ((await cluster.pickers()) or {})["spec"]["replicas"] == 2

        await eventually(is_default)
        await look(parts)


async def test_a_pool_that_stays_without_its_policy_is_let_go_after_a_while_and_a_deleted_one_at_once(
    cluster: DeclaredPool,
) -> None:
    with running() as server:

        async def is_down() -> bool:
            users = server.command("ACL", "USERS")
            return await cluster.pickers() is None and user_name(cluster.key).encode() not in users

        await cluster.put_pool(picker=OTHERS)
        await cluster.put_policy()
        async with cluster.operator(server.url, let_go_s=1.0).at_work():
            await eventually(cluster.pickers)
            await cluster.delete_policy()
            await eventually(is_down)
        await cluster.put_policy()
        async with cluster.operator(server.url, let_go_s=3600.0).at_work():
            await eventually(cluster.pickers)
            await cluster.delete_policy()
            await cluster.delete_pool()
            await eventually(is_down)


@pytest.mark.parametrize("keeps_its_data", [True, False])
async def test_a_pool_that_is_let_go_while_the_store_is_away_is_swept_once_it_is_back(
    cluster: DeclaredPool, server: ValkeyProcess, keeps_its_data: bool
) -> None:
    await cluster.put_pool(picker=OTHERS)
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


async def test_pools_of_others_are_no_trouble_while_the_store_is_away(cluster: DeclaredPool) -> None:
    await cluster.put_pool(picker=OTHERS)
    parts = cluster.operator("redis://127.0.0.1:1")
    async with parts.at_work():

        async def is_looked_at() -> object:
            return parts.looks

        assert await eventually(is_looked_at) == [None]


async def test_a_run_that_fails_is_begun_anew_and_hinders_no_ending(
    cluster: DeclaredPool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with running() as server:
        await cluster.put_pool(picker=OTHERS)
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
