"""Which replica works: the Lease on a real API server, and whole operators that are killed and stopped."""

import asyncio
import copy
import random
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from fault_proxy import FaultProxy, fault_proxy
from valkey_server import ValkeyProcess
from virtual_time import in_virtual_time
from waiting_on import eventually

from trimtab_operator.kube import LEASES, Kube, KubeError, Object, Resource
from trimtab_operator.leader import LEASE_S, RENEW_DEADLINE_S, Leadership, LeadershipLostError
from trimtab_operator.service import LEASE_NAME

pytestmark = pytest.mark.timeout(120)


class Clock:
    """Set by hand."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def leadership(kube: Kube, namespace: str, identity: str, clock: Any = time.monotonic) -> Leadership:
    return Leadership(
        kube, namespace=namespace, name="test", identity=identity, clock=clock, rng=random.Random(identity)
    )


async def holder(kube: Kube, namespace: str, name: str = "test") -> str:
    lease = await kube.get(LEASES, namespace, name)
    return "" if lease is None else str(lease["spec"]["holderIdentity"])


async def test_one_of_many_gets_the_lease(kube: Kube, namespace: str) -> None:
    all_of_them = [leadership(kube, namespace, f"replica-{number}") for number in range(8)]
    tasks = [asyncio.create_task(each.acquire()) for each in all_of_them]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    await asyncio.sleep(0.5)
    held = [each for each in all_of_them if each.is_held]
    assert len(held) == 1
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_lease_given_back_is_taken_at_once_and_counts_the_change(kube: Kube, namespace: str) -> None:
    one, two = leadership(kube, namespace, "one"), leadership(kube, namespace, "two")
    await one.acquire()
    waits = asyncio.create_task(two.acquire())
    await asyncio.sleep(0.2)
    assert not two.is_held
    await one.release()
    assert await holder(kube, namespace) == ""
    async with asyncio.timeout(5):
        await waits
    lease = await kube.get(LEASES, namespace, "test")
    assert lease is not None
    assert (lease["spec"]["holderIdentity"], lease["spec"]["leaseTransitions"]) == ("two", 2 - 1)
    assert lease["spec"]["leaseDurationSeconds"] == LEASE_S
    await one.release()  # no more: it is not its own
    assert await holder(kube, namespace) == "two"


async def test_a_lease_runs_out_by_our_own_clock_whatever_its_times_say(kube: Kube, namespace: str) -> None:
    clock = Clock()
    one, two = leadership(kube, namespace, "one"), leadership(kube, namespace, "two", clock)
    await one.acquire()
    lease = await kube.get(LEASES, namespace, "test")
    assert lease is not None
    lease["spec"]["renewTime"] = "1999-01-01T00:00:00.000000Z"
    await kube.replace(LEASES, lease)
    assert not await two._try()
    clock.now_s += LEASE_S - 1
    assert not await two._try()
    clock.now_s += 2
    assert await two._try()


class Leases(Kube):
    """One of them, in memory: for times that a real server would have to be waited for."""

    def __init__(self) -> None:
        self.lease: Object | None = None
        self.hangs = False
        self.refusals = 0

    async def get(self, resource: Resource, namespace: str | None, name: str, **_: Any) -> Object | None:
        await self._asked()
        return copy.deepcopy(self.lease)

    async def create(self, resource: Resource, body: Object, **_: Any) -> Object:
        return await self._written(body)

    async def replace(self, resource: Resource, body: Object, **_: Any) -> Object:
        return await self._written(body)

    async def _written(self, body: Object) -> Object:
        await self._asked()
        self.lease = copy.deepcopy(body)
        return body

    async def _asked(self) -> None:
        if self.hangs:
            await asyncio.Event().wait()
        if self.refusals:
            self.refusals -= 1
            raise KubeError(500, "InternalError", "by the test")


def test_a_leader_that_cannot_renew_says_that_it_has_lost() -> None:
    async def work() -> None:
        server, clock = Leases(), asyncio.get_running_loop().time
        leader = leadership(server, "ns", "one", clock)
        await leader.acquire()
        keeps = asyncio.create_task(leader.keep())
        await asyncio.sleep(2.5)
        began_s = clock()
        server.hangs = True
        with pytest.raises(LeadershipLostError):
            await keeps
        # Before another replica could think so.
        assert clock() - began_s < LEASE_S - 2
        assert not leader.is_held

    in_virtual_time(work())


def test_a_leader_survives_refusals_that_are_shorter_than_its_deadline() -> None:
    async def work() -> None:
        server = Leases()
        leader = leadership(server, "ns", "one", asyncio.get_running_loop().time)
        await leader.acquire()
        keeps = asyncio.create_task(leader.keep())
        server.refusals = 2
        await asyncio.sleep(RENEW_DEADLINE_S + 2)
        assert server.refusals == 0
        assert not keeps.done()
        server.lease = None  # deleted by somebody: it is made again
        await asyncio.sleep(RENEW_DEADLINE_S + 2)
        assert await holder(server, "ns") == "one"
        assert leader.is_held
        keeps.cancel()

    in_virtual_time(work())


async def test_a_leader_that_sees_another_one_stops(kube: Kube, namespace: str) -> None:
    leader = leadership(kube, namespace, "one")
    await leader.acquire()
    lease = await kube.get(LEASES, namespace, "test")
    assert lease is not None
    lease["spec"]["holderIdentity"] = "somebody"
    await kube.replace(LEASES, lease)
    with pytest.raises(LeadershipLostError):
        await leader.keep()


# Whole operators.


class Operators:
    """Processes that share a namespace and a store."""

    def __init__(self, kube_config: Path, namespace: str, store: ValkeyProcess, folder: Path) -> None:
        self._kube_config = kube_config
        self._namespace = namespace
        self._store = store
        self._folder = folder
        self.running: list[asyncio.subprocess.Process] = []

    async def start(self, name: str, kube_config: Path | None = None) -> asyncio.subprocess.Process:
        with (self._folder / f"{name}.log").open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "trimtab_operator", "--kubeconfig", str(kube_config or self._kube_config)),
                *("--operator-namespace", self._namespace, "--namespace", self._namespace),
                *("--store", self._store.url, "--bind", "127.0.0.1", "--metrics-port", "0"),
                *("--webhook-certificate", "none"),
                env={"POD_NAME": name, "PATH": "/usr/bin:/bin"},
                stderr=log,
            )
        self.running.append(process)
        return process

    def log(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_text()


@pytest.fixture
async def operators(kube_config: Path, namespace: str, tmp_path: Path) -> AsyncIterator[Operators]:
    (tmp_path / "store").mkdir()
    store = ValkeyProcess(tmp_path / "store")
    await asyncio.to_thread(store.start)
    fleet = Operators(kube_config, namespace, store, tmp_path)
    try:
        yield fleet
    finally:
        for process in fleet.running:
            if process.returncode is None:
                process.kill()
                await process.wait()
        store.kill()


@pytest.fixture
async def proxy(kube_config: Path, tmp_path: Path) -> AsyncIterator[FaultProxy]:
    (tmp_path / "proxy").mkdir()
    async with fault_proxy(kube_config, tmp_path / "proxy") as proxy:
        yield proxy


async def test_a_killed_leader_is_followed_when_its_lease_ends_and_a_stopped_one_at_once(
    kube: Kube, namespace: str, operators: Operators
) -> None:
    async def led_by(name: str) -> bool:
        return (await holder(kube, namespace, LEASE_NAME)).startswith(f"{name}_") and "operating" in operators.log(name)

    one = await operators.start("one")
    await eventually(lambda: led_by("one"))
    two = await operators.start("two")
    one.kill()
    await one.wait()
    # Not as long as it says by itself.
    await kube.merge(LEASES, namespace, LEASE_NAME, {"spec": {"leaseDurationSeconds": 3}})
    await eventually(lambda: led_by("two"))
    three = await operators.start("three")
    await asyncio.sleep(1)
    two.send_signal(signal.SIGTERM)
    assert await two.wait() == 0
    assert not (await holder(kube, namespace, LEASE_NAME)).startswith("two")
    await eventually(lambda: led_by("three"), within_s=LEASE_S - 3)
    three.send_signal(signal.SIGTERM)
    assert await three.wait() == 0


async def test_an_operator_that_loses_its_lease_or_its_watches_ends_with_1(
    kube: Kube, namespace: str, operators: Operators, proxy: FaultProxy
) -> None:
    one = await operators.start("one", proxy.kubeconfig)

    async def is_watching() -> bool:
        return bool(proxy.open_watches("inferencepools")) and "operating" in operators.log("one")

    await eventually(is_watching)
    await proxy.say("inferencepools", 500)
    assert await asyncio.wait_for(one.wait(), 15) == 1
    assert "watching has ended" in operators.log("one")
    # It has given its Lease back on its way, so the next one need not wait.
    two = await operators.start("two", proxy.kubeconfig)

    async def is_operating() -> bool:
        return "operating" in operators.log("two")

    await eventually(is_operating, within_s=LEASE_S - 3)
    proxy.hang(lambda call: "/leases/" in call.path)
    assert await asyncio.wait_for(two.wait(), RENEW_DEADLINE_S + 10) == 1
    assert "could not be renewed" in operators.log("two")
