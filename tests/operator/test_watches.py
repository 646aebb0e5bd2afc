"""The caches of pools, policies and children against a real API server, and under faults in front of it."""

import asyncio
import contextlib
import os
import random
import signal
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import yaml
from api_calls import ApiCalls
from control_plane import control_plane, die_with_parent
from declared import declared_policy, declared_pool
from fault_proxy import FaultProxy, fault_proxy
from waiting_on import eventually

from trimtab_operator.api.pool import PoolKey
from trimtab_operator.children.labels import MANAGED_BY, POOL_LABEL
from trimtab_operator.kopf_feed import FeedEndedError
from trimtab_operator.kube import CONFIG_MAPS, POLICIES, POOLS, SERVICES, Kube, KubeError, Object, Resource
from trimtab_operator.watches import WATCHED, Watches

Names = dict[tuple[str, str], str]
"""Resource version by kind and name."""


class Keys:
    """What was enqueued."""

    def __init__(self) -> None:
        self.added: list[PoolKey] = []

    def add(self, key: PoolKey) -> None:
        self.added.append(key)


class Rig:
    """Watches of one namespace, through a proxy; the test itself writes past it."""

    def __init__(self, kube: Kube, proxy: FaultProxy, through: Kube, namespace: str) -> None:
        self.kube = kube
        self.proxy = proxy
        self.namespace = namespace
        self.keys = Keys()
        self.watches = Watches(through, rng=random.Random(1), kubeconfig=str(proxy.kubeconfig), catch_up_s=10_000.0)

    def key(self, name: str) -> PoolKey:
        return PoolKey(self.namespace, name)

    async def start(self, tasks: asyncio.TaskGroup) -> asyncio.Task[None]:
        task = tasks.create_task(self.watches.run(self.keys, [self.namespace]))
        await self.watches.synced.wait()
        await eventually(self._is_watching, within_s=30)
        return task

    async def _is_watching(self) -> bool:
        return all(self.proxy.open_watches(entry.resource.plural) for entry in WATCHED)

    async def pool(self, name: str) -> Object:
        return await self.kube.create(POOLS, declared_pool(self.namespace, name))

    async def policy(self, name: str, pool: str) -> Object:
        return await self.kube.create(POLICIES, declared_policy(self.namespace, name, pool=pool))

    async def child(self, name: str, pool: str, resource: Resource = CONFIG_MAPS) -> Object:
        labels = {MANAGED_BY: "trimtab", POOL_LABEL: pool}
        about = {"name": name, "namespace": self.namespace, "labels": labels, "annotations": {POOL_LABEL: pool}}
        body: Object = {"apiVersion": resource.api_version, "kind": resource.kind, "metadata": about}
        if resource is SERVICES:
            body["spec"] = {"clusterIP": "None", "ports": [{"port": 80}]}
        return await self.kube.create(resource, body)

    async def touch(self, resource: Resource, name: str, value: str) -> None:
        body = {"metadata": {"annotations": {"test/touched": value}}}
        await self.kube.merge(resource, self.namespace, name, body)

    async def truth(self) -> Names:
        found: Names = {}
        for entry in WATCHED:
            listed, _ = await self.kube.list_all(entry.resource, self.namespace, label_selector=entry.label_selector)
            for body in listed:
                found[entry.resource.kind, body["metadata"]["name"]] = body["metadata"]["resourceVersion"]
        return found

    def known(self) -> Names:
        found: Names = {}
        for key in self.watches.keys():  # noqa: SIM118 (no mapping)
            pool = self.watches.pool(key)
            for body in [*self.watches.policies(key), *self.watches.children(key), *([pool] if pool else [])]:
                found[body["kind"], body["metadata"]["name"]] = body["metadata"]["resourceVersion"]
        return found

    async def is_equal(self, within_s: float = 30.0) -> None:
        async def same() -> bool:
            return self.known() == await self.truth()

        try:
            await eventually(same, within_s=within_s)
        except AssertionError:
            assert self.known() == await self.truth()
            raise


@pytest.fixture
async def rig(kube: Kube, kube_config: Path, namespace: str, tmp_path: Path) -> AsyncIterator[Rig]:
    async with fault_proxy(kube_config, tmp_path) as proxy:
        through = await Kube.connect(str(proxy.kubeconfig))
        try:
            yield Rig(kube, proxy, through, namespace)
        finally:
            await through.close()


@contextlib.asynccontextmanager
async def running(rig: Rig) -> AsyncIterator[None]:
    async with asyncio.TaskGroup() as tasks:
        task = await rig.start(tasks)
        yield
        task.cancel()


async def some_objects(rig: Rig) -> None:
    for name in ("one", "two", "three"):
        await rig.pool(name)
        await rig.policy(f"policy-{name}", name)
        await rig.child(f"trimtab-{name}", name)
        await rig.child(f"trimtab-{name}", name, SERVICES)


async def change_everything(rig: Rig, round_: str) -> None:
    """One pool goes with all that is its, one changes, one comes."""
    await rig.kube.delete(POOLS, rig.namespace, "one")
    await rig.kube.delete(POLICIES, rig.namespace, "policy-one")
    await rig.kube.delete(CONFIG_MAPS, rig.namespace, "trimtab-one")
    await rig.kube.delete(SERVICES, rig.namespace, "trimtab-one")
    for resource, name in ((POOLS, "two"), (POLICIES, "policy-two"), (CONFIG_MAPS, "trimtab-two")):
        await rig.touch(resource, name, round_)
    await rig.pool("four")
    await rig.policy("policy-four", "four")
    await rig.child("trimtab-four", "four", SERVICES)


async def test_what_is_there_before_and_what_comes_after_is_known(rig: Rig) -> None:
    await some_objects(rig)
    async with running(rig):
        assert rig.known() == await rig.truth()
        assert {rig.key(name) for name in ("one", "two", "three")} <= set(rig.keys.added)
        rig.keys.added.clear()
        await change_everything(rig, "first")
        await rig.is_equal()
        assert {rig.key(name) for name in ("one", "two", "four")} == set(rig.keys.added)
        assert rig.watches.pool(rig.key("one")) is None
        assert not rig.watches.is_known(rig.key("one"))


async def test_nobody_is_warned_of_signals_that_others_take(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    async with running(rig):
        pass
    assert [record for record in caplog.records if "signals" in record.getMessage()] == []


async def test_watching_writes_nothing_and_leaves_others_marks_alone(rig: Rig) -> None:
    body = await rig.pool("one")
    body["metadata"]["finalizers"] = ["kopf.zalando.org/KopfFinalizerMarker"]
    body["metadata"]["annotations"] = {"kopf.zalando.org/last-handled-configuration": "{}"}
    await rig.kube.replace(POOLS, body)
    async with running(rig):
        await rig.touch(POOLS, "one", "x")
        await rig.is_equal()
        await rig.kube.delete(POOLS, rig.namespace, "one")  # held by the finalizer
        await rig.is_equal()
    assert rig.proxy.writes() == []
    live = await rig.kube.get(POOLS, rig.namespace, "one")
    assert live is not None
    assert live["metadata"]["finalizers"] == ["kopf.zalando.org/KopfFinalizerMarker"]
    assert set(live["metadata"]["annotations"]) == {"kopf.zalando.org/last-handled-configuration", "test/touched"}
    await rig.kube.merge(POOLS, rig.namespace, "one", {"metadata": {"finalizers": None}})


async def test_what_changed_while_a_watch_was_cut_is_known_afterwards(rig: Rig) -> None:
    await some_objects(rig)
    async with running(rig):
        rig.proxy.mute()
        await change_everything(rig, "unseen")
        rig.proxy.drop_watches()
        await rig.is_equal()


async def test_what_went_before_a_version_too_old_is_known_to_be_gone(rig: Rig) -> None:
    await some_objects(rig)
    async with running(rig):
        rig.proxy.mute()
        await change_everything(rig, "unseen")
        for entry in WATCHED:
            await rig.proxy.say(entry.resource.plural, 410)
        await rig.is_equal()
        assert rig.key("one") in rig.keys.added


async def test_a_server_that_is_busy_is_left_alone_for_as_long_as_it_says(rig: Rig) -> None:
    await some_objects(rig)
    async with running(rig):
        count = len(rig.proxy.calls)
        # kopf's next list and, a moment later, the one of our own.
        rig.proxy.refuse(lambda call: call.is_list, status=429, times=len(WATCHED), headers={"Retry-After": "2"})
        rig.proxy.mute()
        await change_everything(rig, "unseen")
        for entry in WATCHED:
            await rig.proxy.say(entry.resource.plural, 410)
        await rig.is_equal()
        for entry in WATCHED:
            calls = [c for c in rig.proxy.calls[count:] if c.is_list and c.path.endswith(f"/{entry.resource.plural}")]
            assert calls[1].at_s - calls[0].at_s >= 2.0


async def test_lists_that_hang_and_fail_are_repeated(rig: Rig) -> None:
    await some_objects(rig)
    async with running(rig):
        rig.proxy.refuse(lambda call: call.is_list, status=500, times=3)
        rig.proxy.hang(lambda call: call.is_list and call.path.endswith("/inferencepools"))
        rig.proxy.mute()
        await change_everything(rig, "unseen")
        for entry in WATCHED:
            await rig.proxy.say(entry.resource.plural, 410)
        await asyncio.sleep(1)  # some hang by now
        rig.proxy.release()
        await rig.is_equal()


async def test_an_api_server_that_was_away_is_taken_up_again(rig: Rig) -> None:
    await some_objects(rig)
    async with running(rig):
        await rig.proxy.go_down()
        await change_everything(rig, "unseen")
        await rig.proxy.come_back()
        await rig.is_equal()


async def test_an_error_that_kopf_does_not_survive_ends_the_run_and_a_new_one_begins_well(rig: Rig) -> None:
    await some_objects(rig)

    async def fail() -> None:
        async with running(rig):
            await rig.proxy.say("inferencepools", 500)
            await asyncio.sleep(30)

    with pytest.raises(ExceptionGroup) as failed:
        await fail()
    assert failed.group_contains(FeedEndedError)
    await change_everything(rig, "unseen")
    again = Rig(rig.kube, rig.proxy, rig.watches._kube, rig.namespace)
    async with running(again):
        await again.is_equal()


async def test_a_child_whose_labels_are_taken_away_and_put_back_goes_and_comes(rig: Rig) -> None:
    await some_objects(rig)
    async with running(rig):
        rig.keys.added.clear()
        await rig.kube.merge(CONFIG_MAPS, rig.namespace, "trimtab-one", {"metadata": {"labels": {POOL_LABEL: None}}})
        await rig.is_equal()
        assert rig.keys.added == [rig.key("one")]
        await rig.kube.merge(CONFIG_MAPS, rig.namespace, "trimtab-one", {"metadata": {"labels": {POOL_LABEL: "one"}}})
        await rig.is_equal()
        assert rig.keys.added == [rig.key("one")] * 2


async def test_a_policy_that_turns_to_another_pool_concerns_both(rig: Rig) -> None:
    await some_objects(rig)
    async with running(rig):
        rig.keys.added.clear()
        await rig.kube.merge(POLICIES, rig.namespace, "policy-one", {"spec": {"targetRef": {"name": "two"}}})
        await rig.is_equal()
        assert set(rig.keys.added) == {rig.key("one"), rig.key("two")}
        assert [body["metadata"]["name"] for body in rig.watches.policies(rig.key("two"))] == [
            "policy-one", "policy-two",
        ]  # fmt: skip


def api_server_of(kube_config: Path) -> tuple[int, list[str]]:
    """Process and command of the server that the kubeconfig leads to."""
    port = yaml.safe_load(kube_config.read_text())["clusters"][0]["cluster"]["server"].rpartition(":")[2]
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (folder / "cmdline").read_text().split("\0")[:-1]
            if words and words[0].endswith("/kube-apiserver") and words[words.index("--secure-port") + 1] == port:
                return int(folder.name), words
    raise AssertionError(f"no kube-apiserver at port {port}")


async def test_an_api_server_that_is_killed_and_started_again_is_taken_up_again() -> None:
    """A server of the test's own, whose memory of versions is really lost."""
    with control_plane() as kube_config:
        with ApiCalls(kube_config) as api:
            for file in sorted((Path(__file__).parents[2] / "crds").glob("*.yaml")):
                api.serve(yaml.safe_load(file.read_text()))
        kube = await Kube.connect(str(kube_config))
        pid, words = api_server_of(kube_config)
        watches, keys = Watches(kube, rng=random.Random(1), kubeconfig=str(kube_config), catch_up_s=10_000.0), Keys()

        async def pool(name: str) -> None:
            await kube.create(POOLS, declared_pool("default", name))

        async def is_written(name: str) -> bool:
            try:
                await pool(name)
            except KubeError as error:
                return error.reason == "AlreadyExists"
            return True

        async def knows(*names: str) -> bool:
            return watches.keys() == {PoolKey("default", name) for name in names}

        task = asyncio.create_task(watches.run(keys))
        await watches.synced.wait()
        await pool("before")
        await eventually(lambda: knows("before"))
        os.kill(pid, signal.SIGKILL)
        again = subprocess.Popen(  # noqa: ASYNC220 (its end is the test's end)
            words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=die_with_parent
        )
        try:
            await eventually(lambda: is_written("after"), within_s=60)
            await kube.delete(POOLS, "default", "before")
            await eventually(lambda: knows("after"), within_s=60)
            assert not task.done()
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            await kube.close()
            again.kill()
            again.wait()
