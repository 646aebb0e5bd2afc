"""InferenceObjectives of the cluster: from their objects to the pickers, also where there is no such kind."""

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from objective_crd import objective_crd, official_objective_crd, our_copy, put_objective
from official_crd import structure
from operator_parts import DeclaredPool, OperatorParts
from valkey_server import running
from virtual_time import in_virtual_time
from waiting_on import eventually

from trimtab_operator.api.pool import PoolKey
from trimtab_operator.kube import POLICIES, Kube, KubeError, Object, WatchEvent
from trimtab_operator.object_watch import ABSENT_S, ObjectWatch, Sink
from trimtab_operator.objectives import OBJECTIVES, Objectives, PoolObjectives
from trimtab_state.request_class import OBJECTIVE_PRIORITY_MAX, OBJECTIVES_MAX, Objective

WAITS: dict[str, Any] = {"batchLimit": 2, "whenFull": {"action": "Wait"}, "standalone": {"enabled": False}}


def test_the_copy_is_the_standards_but_for_the_words() -> None:
    assert structure(our_copy()) == structure(official_objective_crd())


@pytest.fixture
def cluster(kube: Kube, kube_config: Path, namespace: str) -> DeclaredPool:
    return DeclaredPool(kube, kube_config, namespace)


def told(parts: OperatorParts, **priorities: int) -> Any:
    """Whether the pickers are told of exactly these."""

    async def are_told() -> bool:
        control = await parts.control()
        return control is not None and {each.name: each.priority for each in control.policy.objectives} == priorities

    return are_told


async def condition(cluster: DeclaredPool) -> tuple[str, str, str]:
    body = await cluster.kube.get(POLICIES, cluster.namespace, "chat") or {}
    found = [each for each in body.get("status", {}).get("conditions", []) if each["type"] == "ObjectivesRead"]
    return (found[0]["status"], found[0]["reason"], found[0]["message"]) if found else ("", "", "")


async def test_a_kind_that_comes_after_the_operator_and_goes_before_it(
    cluster: DeclaredPool, caplog: pytest.LogCaptureFixture
) -> None:
    kube, namespace = cluster.kube, cluster.namespace
    caplog.set_level(logging.INFO, "trimtab_operator.object_watch")
    await cluster.put_pool()
    await cluster.put_policy(**WAITS)
    with running() as server:
        parts = cluster.operator(server.url)
        async with parts.at_work():
            await eventually(told(parts))
            assert await condition(cluster) == ("", "", "")
            async with objective_crd(kube):
                await put_objective(kube, namespace, "gold", 10)
                await put_objective(kube, namespace, "plain")
                await put_objective(kube, namespace, "huge", 2**62)
                await put_objective(kube, namespace, "elsewhere", 5, name="another")
                await put_objective(kube, namespace, "old", 5, group="inference.networking.x-k8s.io")
                huge = OBJECTIVE_PRIORITY_MAX
                await eventually(told(parts, gold=10, plain=0, huge=huge), within_s=2 * ABSENT_S)

                async def is_said() -> bool:
                    return (await condition(cluster))[2] == "3 InferenceObjectives of the pool in use."

                await eventually(is_said)
                await kube.merge(OBJECTIVES, namespace, "gold", {"spec": {"priority": -1}})
                await kube.delete(OBJECTIVES, namespace, "huge")
                await eventually(told(parts, gold=-1, plain=0))
                await kube.merge(OBJECTIVES, namespace, "plain", {"spec": {"poolRef": {"name": "another"}}})
                await eventually(told(parts, gold=-1))
            await eventually(told(parts))
            # And once more, all of it.
            async with objective_crd(kube):
                await put_objective(kube, namespace, "again", 1)
                await eventually(told(parts, again=1), within_s=2 * ABSENT_S)
    assert len(caplog.records) <= 2, caplog.text


async def test_an_operator_that_starts_neither_forgets_what_it_has_not_read_yet_nor_keeps_what_has_gone(
    cluster: DeclaredPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    await cluster.put_pool()
    await cluster.put_policy(**WAITS)
    with running() as server:
        async with objective_crd(cluster.kube):
            await put_objective(cluster.kube, cluster.namespace, "gold", 10)
            first = cluster.operator(server.url)
            async with first.at_work():
                await eventually(told(first, gold=10))
        with monkeypatch.context() as patch:
            patch.setattr(Objectives, "of", lambda *_: None)
            second = cluster.operator(server.url)
            async with second.at_work():
                await cluster.put_policy(**WAITS | {"batchLimit": 7})

                async def is_told_anew() -> bool:
                    control = await second.control()
                    return control is not None and control.policy.batch_limit == 7

                await eventually(is_told_anew)
                assert await told(second, gold=10)()
        third = cluster.operator(server.url)
        async with third.at_work():
            await eventually(told(third))


async def test_a_pool_whose_requests_do_not_wait_is_told_that_its_objectives_do_nothing(cluster: DeclaredPool) -> None:
    await cluster.put_pool()
    await cluster.put_policy(standalone={"enabled": False})
    with running() as server:
        async with objective_crd(cluster.kube):
            await put_objective(cluster.kube, cluster.namespace, "gold", 10)
            async with cluster.operator(server.url).at_work():

                async def is_said() -> bool:
                    return (await condition(cluster))[:2] == ("True", "NothingWaits")

                await eventually(is_said)


class Scripted(Kube):
    """An API server whose answers about one kind the test gives."""

    def __init__(self, objects: list[Object]) -> None:
        self.objects = objects
        self.refusal: KubeError | None = None
        self.is_served = True
        self.lists = 0

    async def pages(self, *args: Any, **selectors: Any) -> AsyncIterator[tuple[list[Object], str]]:
        self.lists += 1
        if self.refusal is not None:
            raise self.refusal
        yield self.objects, "7"

    async def watch(self, *args: Any, **selectors: Any) -> AsyncIterator[WatchEvent]:
        if self.refusal is not None:
            raise self.refusal
        await asyncio.sleep(300)
        yield WatchEvent("BOOKMARK", {"metadata": {"resourceVersion": "8"}})

    async def kinds(self, api_version: str) -> frozenset[str]:
        return frozenset({OBJECTIVES.kind} if self.is_served else ())


def objective(name: str, priority: int = 0, *, made: str = "2026-01-01T00:00:00Z", **about: Any) -> Object:
    metadata = {"namespace": "ns", "name": name, "creationTimestamp": made, "resourceVersion": "1"} | about
    return {"metadata": metadata, "spec": {"poolRef": {"name": "chat"}, "priority": priority}}


KEY = PoolKey("ns", "chat")
NOT_FOUND = KubeError(404, "NotFound", "the server could not find the requested resource")
FORBIDDEN = KubeError(403, "Forbidden", "inferenceobjectives is forbidden")


def read(kube: Scripted, then: Any = None, *, seconds: float = 1.0) -> tuple[PoolObjectives | None, str]:
    """What is known, and what is wrong, some time after it has begun; and again after `then`."""

    async def watch() -> tuple[PoolObjectives | None, str]:
        objectives = Objectives(kube, rng=random.Random(1), changed=lambda key: None, known=lambda _: None)
        running = asyncio.create_task(objectives.run([None]))
        await asyncio.sleep(seconds)
        if then is not None:
            then()
            await asyncio.sleep(seconds)
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        return objectives.of(KEY), objectives.refusal(KEY)

    return in_virtual_time(watch())


def test_of_too_many_the_oldest_are_used() -> None:
    many = [
        objective(f"o-{n:03}", n, made=f"2026-01-01T00:{n // 60:02}:{n % 60:02}Z") for n in range(OBJECTIVES_MAX + 3)
    ]
    found, _ = read(Scripted(many[::-1]))
    assert found is not None
    assert (len(found.used), found.left_out) == (OBJECTIVES_MAX, 3)
    assert found.used[-1] == Objective(name=f"o-{OBJECTIVES_MAX - 1}", priority=OBJECTIVES_MAX - 1)


def test_one_that_is_being_deleted_counts_no_more() -> None:
    found, _ = read(Scripted([objective("gone", 1, deletionTimestamp="2026-01-02T00:00:00Z"), objective("here", 2)]))
    assert found == PoolObjectives(used=(Objective(name="here", priority=2),))


def test_a_cluster_without_the_kind_is_asked_now_and_then_and_nothing_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    kube = Scripted([])
    for kube.refusal in (NOT_FOUND, FORBIDDEN):
        kube.is_served, kube.lists = False, 0
        assert read(kube, seconds=100.0) == (PoolObjectives(), "")
        assert 10 <= kube.lists <= 20
    assert not caplog.records


def test_what_may_not_be_read_is_said_once_and_what_was_read_before_stays(caplog: pytest.LogCaptureFixture) -> None:
    kube = Scripted([])
    kube.refusal = FORBIDDEN
    assert read(kube, seconds=600.0) == (None, str(FORBIDDEN))
    assert [record.levelname for record in caplog.records] == ["WARNING"]

    kube = Scripted([objective("gold", 10)])

    def take_the_right_away() -> None:
        kube.refusal = FORBIDDEN

    found, refusal = read(kube, take_the_right_away, seconds=700.0)
    assert found == PoolObjectives(used=(Objective(name="gold", priority=10),))
    assert refusal == str(FORBIDDEN)


def test_a_namespace_that_may_not_be_read_holds_up_no_other() -> None:
    class Partly(Scripted):
        async def pages(
            self, resource: Any, namespace: str | None, **selectors: Any
        ) -> AsyncIterator[tuple[list[Object], str]]:
            if namespace == "closed":
                raise FORBIDDEN
            yield self.objects, "7"

    async def watch() -> list[str | None]:
        known: list[str | None] = []
        objectives = Objectives(Partly([]), rng=random.Random(1), changed=lambda key: None, known=known.append)
        running = asyncio.create_task(objectives.run(["closed", "ns"]))
        await asyncio.sleep(1)
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        assert objectives.of(KEY) == PoolObjectives()
        assert objectives.of(PoolKey("closed", "chat")) is None
        return known

    assert in_virtual_time(watch()) == ["ns"]


def test_a_server_that_finds_the_kind_and_then_does_not_for_a_moment_takes_nothing_back() -> None:
    kube = Scripted([objective("gold", 10)])

    def stumble() -> None:
        kube.refusal = NOT_FOUND  # and the kind is still among those that it serves

    found, _ = read(kube, stumble, seconds=700.0)
    assert found == PoolObjectives(used=(Objective(name="gold", priority=10),))


def test_a_watch_of_a_kind_that_has_to_be_there_takes_its_absence_for_a_fault(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def watch() -> bool:
        kube = Scripted([])
        kube.refusal, kube.is_served = NOT_FOUND, False
        sink = Sink(put=lambda body: None, drop=lambda namespace, name: None)
        watch = ObjectWatch(kube, OBJECTIVES, None, sink, rng=random.Random(1))
        running = asyncio.create_task(watch.run())
        await asyncio.sleep(10)
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        return watch.synced.is_set()

    assert not in_virtual_time(watch())
    assert caplog.records
