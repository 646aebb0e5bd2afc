"""A pool's members followed on a real API server: changes, lost watches, an API server that is away."""

import asyncio

from membership_pods import LABELS, FaultyKube, Pods, following

from trimtab_operator.kube import Kube
from trimtab_operator.membership.pool_membership import Membership


async def test_a_pod_is_a_member_from_ready_until_gone_and_drains_in_between(kube: Kube, namespace: str) -> None:
    pods = Pods(kube, namespace)
    await pods.add("other", "127.0.9.9", labels={"app": "else"})
    async with following(kube, namespace) as (_, told):
        await told.until()
        await pods.add("a", "127.0.9.1", ready=False)
        await told.until_true(lambda: told.all[-1].pods_matching == 1)
        assert told.names() == []
        await pods.set("a", "127.0.9.1", ready=True)
        await told.until("127.0.9.1")
        await pods.delete("a", grace_s=60)
        await told.until("127.0.9.1!")
        await pods.add("b", "127.0.9.1")
        await told.until("127.0.9.1")
        await pods.delete("a")
        await told.until_true(lambda: told.all[-1].pods_matching == 1)
        assert told.names() == ["127.0.9.1"]
        await pods.label("b", app="else")
        await told.until()


async def test_a_list_of_several_pages_is_told_as_one(kube: Kube, namespace: str) -> None:
    count = 520
    await Pods(kube, namespace).add_many({f"p{n}": f"127.1.{n // 250}.{n % 250 + 1}" for n in range(count)})
    async with following(kube, namespace) as (_, told):
        await told.until_true(lambda: True)
        assert len(told.all[0].endpoints) == count


async def test_what_happened_while_a_watch_was_lost_is_told_and_nothing_is_taken_back(
    kube: Kube, namespace: str
) -> None:
    pods, faulty = Pods(kube, namespace), FaultyKube(kube)
    await pods.add("a", "127.0.9.1")
    await pods.add("b", "127.0.9.2")
    async with following(faulty, namespace) as (_, told):
        await told.until("127.0.9.1", "127.0.9.2")
        for status, name in ((410, "c"), (500, "d"), (0, "e")):
            faulty.is_away = True
            faulty.break_watches(status=500 if status == 410 else status)
            await pods.add(name, "127.0.9.3")
            faulty.break_watches(status)
            faulty.is_away = False
            await told.until("127.0.9.1", "127.0.9.2", "127.0.9.3")
            await pods.delete(name)
            await told.until("127.0.9.1", "127.0.9.2")
        assert all({"127.0.9.1:8000", "127.0.9.2:8000"} <= {e.name for e in m.endpoints} for m in told.all)


async def test_a_version_that_is_too_old_is_answered_by_a_new_list(kube: Kube, namespace: str) -> None:
    pods, faulty = Pods(kube, namespace), FaultyKube(kube)
    await pods.add("a", "127.0.9.1")
    async with following(faulty, namespace) as (_, told):
        await told.until("127.0.9.1")
        await pods.delete("a")
        await told.until()
        lists = faulty.lists
        faulty.break_watches(410)
        await pods.add("b", "127.0.9.2")
        await told.until("127.0.9.2")
        assert faulty.lists == lists + 1


async def test_nothing_is_told_before_a_complete_list(kube: Kube, namespace: str) -> None:
    pods, faulty = Pods(kube, namespace), FaultyKube(kube)
    await pods.add("a", "127.0.9.1")
    faulty.is_away = True
    async with following(faulty, namespace) as (membership, told):
        await asyncio.sleep(0.3)
        assert membership.members is None
        faulty.is_away = False
        await told.until("127.0.9.1")
        assert len(told.all) == 1


async def test_another_selector_takes_over_without_a_moment_of_emptiness(kube: Kube, namespace: str) -> None:
    pods, faulty = Pods(kube, namespace), FaultyKube(kube)
    await pods.add("a", "127.0.9.1")
    await pods.add("b", "127.0.9.2", labels={"app": "new"})
    async with following(faulty, namespace) as (membership, told):
        await told.until("127.0.9.1")
        faulty.is_away = True
        membership.configure(Membership({"app": "new"}, (8000,), None))
        await pods.add("c", "127.0.9.3")
        await told.until("127.0.9.1", "127.0.9.3")
        faulty.is_away = False
        await told.until("127.0.9.2")
        assert all(members.endpoints for members in told.all)


async def test_other_ranks_need_no_new_list_and_rules_may_go_back(kube: Kube, namespace: str) -> None:
    pods, faulty = Pods(kube, namespace), FaultyKube(kube)
    await pods.add("a", "127.0.9.1")
    async with following(faulty, namespace) as (membership, told):
        await told.until("127.0.9.1")
        membership.configure(Membership(LABELS, (8000,), 2))
        await told.until_true(lambda: [e.rank for e in told.all[-1].endpoints] == [0, 1])
        assert faulty.lists == 1
        faulty.is_away = True
        membership.configure(Membership({"app": "new"}, (8000,), None))
        await asyncio.sleep(0.3)
        membership.configure(Membership(LABELS, (8000,), None))
        await told.until("127.0.9.1")
        assert all(members.endpoints for members in told.all)


async def test_all_is_listed_anew_from_time_to_time(kube: Kube, namespace: str) -> None:
    pods, faulty = Pods(kube, namespace), FaultyKube(kube)
    await pods.add("a", "127.0.9.1")
    async with following(faulty, namespace, resync_s=0.3) as (_, told):
        await told.until("127.0.9.1")
        async with asyncio.timeout(20):
            while faulty.lists < 4:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        await pods.add("b", "127.0.9.2")
        await told.until("127.0.9.1", "127.0.9.2")
        assert all(members.endpoints for members in told.all)
