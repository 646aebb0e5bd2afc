"""A replica that is killed or stopped as a process, seen by another one."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pool_processes import BRIEF, Replica, tasks, until

from trimtab_state import connect

HERE = Path(__file__).parent
LOAD = [(1, "a", 100, 1), (2, "a", 200, 1), (3, "a", 300, 1)]


@pytest.fixture
def process(store_url: str) -> Iterator["subprocess.Popen[str]"]:
    path = os.pathsep.join([str(HERE), str(HERE.parent)])
    command = [sys.executable, str(HERE / "replica_process.py"), store_url]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}
    ) as started:
        try:
            yield started
        finally:
            started.kill()


def incarnation(process: "subprocess.Popen[str]") -> int:
    assert process.stdout is not None
    return int(process.stdout.readline())


async def test_after_kill_9_the_reservations_end_with_the_lease(
    store_url: str, process: "subprocess.Popen[str]"
) -> None:
    own = incarnation(process)
    store = connect(store_url, BRIEF)
    other = Replica(store, BRIEF)
    async with tasks(other.follower.run()):
        await until(lambda: other.mirror.open_load() == LOAD)
        process.kill()
        await until(lambda: other.mirror.gone_peers == [own])
        assert other.mirror.open_load() == []
    await store.close()


async def test_a_replica_that_was_stopped_past_its_lease_comes_back_under_a_new_incarnation(
    store_url: str, process: "subprocess.Popen[str]"
) -> None:
    own = incarnation(process)
    store = connect(store_url, BRIEF)
    other = Replica(store, BRIEF)
    async with tasks(other.follower.run()):
        await until(lambda: other.mirror.open_load() == LOAD)
        os.kill(process.pid, signal.SIGSTOP)
        await until(lambda: other.mirror.gone_peers == [own], "the lease expires")
        assert other.mirror.open_load() == []
        os.kill(process.pid, signal.SIGCONT)
        await until(lambda: other.mirror.open_load() == LOAD, "it tells its reservations again")
        new = incarnation(process)
        assert new != own
        assert set(other.mirror.peers) == {new}
        assert other.mirror.gone_peers == [own]
    await store.close()
