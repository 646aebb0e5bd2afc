"""Our entry in `status.parents`, on a real API server, beside gateways that write theirs."""

import asyncio
import random
from typing import Any

import pytest
from declared import declared_pool

from trimtab_operator.api.pool import Pool, PoolKey
from trimtab_operator.kube import POOLS, Kube, KubeError, Object
from trimtab_operator.report.pool_status import (
    CONTROLLER,
    PARENTS_MAX,
    ParentsFull,
    merged,
    parent_entry,
    write_parents,
)

NOW = "2026-01-02T03:04:05Z"
LATER = "2026-01-02T04:00:00Z"


async def make_pool(kube: Kube, namespace: str) -> Pool:
    return Pool.of(await kube.create(POOLS, declared_pool(namespace)))


def gateway_entry(number: int, *, message: str = "", controller: str | None = "example.com/gateway") -> Object:
    entry: Object = {
        "parentRef": {"group": "gateway.networking.k8s.io", "kind": "Gateway", "name": f"gateway-{number}"},
        "conditions": [
            {
                "type": "Accepted",
                "status": "True",
                "reason": "Accepted",
                "message": message,
                "lastTransitionTime": NOW,
                "observedGeneration": 1,
            }
        ],
    }
    return entry if controller is None else entry | {"controllerName": controller}


async def parents_of(kube: Kube, key: PoolKey) -> list[Object]:
    body = await kube.get(POOLS, key.namespace, key.name)
    assert body is not None
    found: list[Object] = (body.get("status") or {}).get("parents") or []
    return found


async def put_parents(kube: Kube, key: PoolKey, parents: list[Object]) -> None:
    body = await kube.get(POOLS, key.namespace, key.name)
    assert body is not None
    body["status"] = {"parents": parents}
    await kube.replace(POOLS, body, subresource="status")


async def test_our_entry_is_added_kept_and_taken_away_and_the_others_stay(kube: Kube, namespace: str) -> None:
    pool = await make_pool(kube, namespace)
    # Gateways of other controllers, and one that does not say who it is.
    others = [gateway_entry(1), gateway_entry(2, controller=None), gateway_entry(3, controller="example.org/other")]
    await put_parents(kube, pool.key, others)
    entry = parent_entry(pool, "trimtab-chat-envoy")
    assert await write_parents(kube, pool.key, entry, now=NOW)
    found = await parents_of(kube, pool.key)
    assert found[:3] == others
    assert found[3]["controllerName"] == CONTROLLER
    assert found[3]["parentRef"] == {
        "group": "",
        "kind": "Service",
        "name": "trimtab-chat-envoy",
        "namespace": namespace,
    }
    said = {(c["type"], c["status"], c["reason"], c["observedGeneration"]) for c in found[3]["conditions"]}
    assert said == {("Accepted", "True", "Accepted", 1), ("ResolvedRefs", "True", "ResolvedRefs", 1)}
    assert not await write_parents(kube, pool.key, entry, now=LATER), "nothing is new"

    problem = parent_entry(pool, "trimtab-chat-envoy", problem="The Service trimtab-chat belongs to somebody else.")
    assert await write_parents(kube, pool.key, problem, now=LATER)
    found = await parents_of(kube, pool.key)
    times = {c["type"]: (c["status"], c["reason"], c["lastTransitionTime"]) for c in found[3]["conditions"]}
    assert times == {
        "Accepted": ("True", "Accepted", NOW),
        "ResolvedRefs": ("False", "InvalidExtensionRef", LATER),
    }
    assert await write_parents(kube, pool.key, None, now=LATER)
    assert await parents_of(kube, pool.key) == others
    assert not await write_parents(kube, pool.key, None, now=LATER)


async def test_neither_spec_nor_metadata_of_the_pool_is_touched(kube: Kube, namespace: str) -> None:
    pool = await make_pool(kube, namespace)
    before = await kube.get(POOLS, namespace, "chat")
    await write_parents(kube, pool.key, parent_entry(pool, "trimtab-chat-envoy"), now=NOW)
    after = await kube.get(POOLS, namespace, "chat")
    assert before is not None
    assert after is not None
    assert after["spec"] == before["spec"]
    for body in (before, after):
        for changing in ("managedFields", "resourceVersion"):
            del body["metadata"][changing]
    assert after["metadata"] == before["metadata"]


async def test_a_pool_that_is_gone_is_nobodys_child(kube: Kube, namespace: str) -> None:
    pool = await make_pool(kube, namespace)
    entry = parent_entry(pool, "trimtab-chat-envoy")
    await kube.delete(POOLS, namespace, "chat")
    assert not await write_parents(kube, pool.key, entry, now=NOW)


async def test_a_full_list_is_said_and_left_as_it_is(kube: Kube, namespace: str) -> None:
    pool = await make_pool(kube, namespace)
    others = [gateway_entry(number) for number in range(PARENTS_MAX)]
    await put_parents(kube, pool.key, others)
    with pytest.raises(ParentsFull):
        await write_parents(kube, pool.key, parent_entry(pool, "trimtab-chat-envoy"), now=NOW)
    assert await parents_of(kube, pool.key) == others


class Contended(Kube):
    """Counts the conflicts that the API server answers with, and lets others in between reading and writing."""

    conflicts = 0
    written = 0

    async def replace(self, *about: Any, **more: Any) -> Object:
        try:
            answer = await super().replace(*about, **more)
        except KubeError as error:
            self.conflicts += error.status == 409
            raise
        self.written += 1
        return answer


async def test_two_controllers_write_at_once_and_nothing_is_lost(kube_config: Any, kube: Kube, namespace: str) -> None:
    """A gateway's controller does as we do, with entries of its own that come, change and go."""
    pool = await make_pool(kube, namespace)
    rounds = 60
    ours, theirs = await Contended.connect(str(kube_config)), await Contended.connect(str(kube_config))
    rng = random.Random(7)

    async def gateway() -> list[Object]:
        mine: list[Object] = []
        for number in range(rounds):
            # Each round changes one entry, and now and then one comes or goes.
            wanted = list(mine)
            if len(wanted) < 3 or rng.random() < 0.3:
                wanted.append(gateway_entry(number, message=str(number)))
            elif rng.random() < 0.3:
                wanted.pop(0)
            else:
                at = rng.randrange(len(wanted))
                wanted[at] = {**wanted[at], "conditions": gateway_entry(0, message=str(number))["conditions"]}
            wanted = wanted[-8:]
            while True:
                body = await theirs.get(POOLS, namespace, "chat")
                assert body is not None
                found = (body.get("status") or {}).get("parents") or []
                assert [entry for entry in found if entry.get("controllerName") != CONTROLLER] == mine
                body["status"] = {
                    "parents": [entry for entry in found if entry.get("controllerName") == CONTROLLER] + wanted
                }
                try:
                    await theirs.replace(POOLS, body, subresource="status")
                except KubeError as error:
                    if error.status != 409:
                        raise
                else:
                    mine = wanted
                    break
        return mine

    async def operator() -> Object | None:
        last: Object | None = None
        for number in range(rounds):
            if number % 7 == 6:
                last = None
            else:
                last = parent_entry(pool, "trimtab-chat-envoy", problem="" if number % 2 else f"problem {number}")
            is_written = False
            while not is_written:
                try:
                    await write_parents(ours, pool.key, last, now=NOW)
                    is_written = True
                except KubeError as error:
                    # The other never let us through; the operator comes again.
                    if error.status != 409:
                        raise
            body = await parents_of(ours, pool.key)
            entries = [entry for entry in body if entry.get("controllerName") == CONTROLLER]
            assert len(entries) == (last is not None)
            await asyncio.sleep(0)
        return last

    async with asyncio.TaskGroup() as tasks:
        writers = tasks.create_task(gateway()), tasks.create_task(operator())
    left, last = writers[0].result(), writers[1].result()
    found = await parents_of(kube, pool.key)
    assert [entry for entry in found if entry.get("controllerName") != CONTROLLER] == left
    (own,) = [entry for entry in found if entry.get("controllerName") == CONTROLLER]
    assert last is not None
    assert [c["message"] for c in own["conditions"]] == [c["message"] for c in last["conditions"]]
    assert min(ours.conflicts, theirs.conflicts) > 0, "no conflict: this has shown nothing"
    await ours.close()
    await theirs.close()


def test_a_second_entry_of_ours_goes() -> None:
    pool = Pool.of(
        {
            "metadata": {"namespace": "n", "name": "chat", "uid": "u"},
            "spec": {"selector": {"matchLabels": {"a": "b"}}, "targetPorts": [{"number": 1}]},
        }
    )
    old = parent_entry(pool, "old")
    wanted = parent_entry(pool, "new")
    found = merged([gateway_entry(1), old, gateway_entry(2), old], wanted, now=NOW)
    assert [entry["parentRef"]["name"] for entry in found] == ["gateway-1", "new", "gateway-2"]
