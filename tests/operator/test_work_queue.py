"""The work schedule in time that is set by hand, and the queue's tasks around it."""

import asyncio
import logging
import random

import pytest

from trimtab_operator.api.pool import PoolKey
from trimtab_operator.kube import KubeError
from trimtab_operator.work_queue import PoolQueue
from trimtab_operator.work_schedule import BACKOFF_MAX_S, JITTER, RESYNC_S, WorkSchedule

A, B = PoolKey("ns", "a"), PoolKey("ns", "b")


def schedule() -> WorkSchedule[PoolKey]:
    return WorkSchedule(rng=random.Random(3))


def test_keys_fold_together_and_the_first_due_time_holds() -> None:
    work = schedule()
    for at_s in (0.2, 0.3, 0.4):
        work.add(A, at_s)
    assert work.take(0.1) is None
    assert work.next_due_s() == 0.2
    assert work.take(0.2) == A
    assert work.take(9.0) is None


def test_what_comes_while_a_pool_is_in_work_makes_it_due_once_more_afterwards() -> None:
    work = schedule()
    work.add(A, 0.0)
    assert work.take(0.0) == A
    work.add(A, 0.2)
    work.add(A, 0.3)
    assert work.take(1.0) is None  # never in two hands
    work.done(A, 1.0)
    assert work.take(1.0) == A
    work.done(A, 1.1)
    assert work.take(100.0) is None


def test_a_failure_comes_back_later_and_later_and_success_forgets_it() -> None:
    work, now_s, waits = schedule(), 0.0, []
    work.add(A, 0.0)
    for _ in range(12):
        assert work.take(now_s) == A
        waits.append(work.failed(A, now_s))
        now_s += waits[-1]
    assert waits[0] < 1.0
    assert all(0.5 * (1 - JITTER) <= wait_s <= BACKOFF_MAX_S for wait_s in waits)
    assert waits[-1] >= BACKOFF_MAX_S * (1 - JITTER)
    assert work.take(now_s) == A
    work.done(A, now_s)
    work.add(A, now_s)
    assert work.take(now_s) == A
    assert work.failed(A, now_s) < 1.0


def test_news_brings_a_failed_pool_back_at_once_but_not_before_the_server_wants() -> None:
    work = schedule()
    for key, retry_after_s, expected_s in ((A, 0.0, 1.2), (B, 7.0, 8.0)):
        work.add(key, 0.0)
        for at_s in (0.0, 0.5, 1.0):
            if (taken := work.take(at_s)) is not None:
                assert taken == key
                for _ in range(6):
                    work.failed(key, 1.0, retry_after_s=retry_after_s)
                break
        work.add(key, 1.2)
        assert work.take(expected_s - 0.1) is None
        assert work.take(expected_s) == key
        work.forget(key)


def test_a_pool_that_nothing_happens_to_is_looked_at_every_ten_minutes_or_so() -> None:
    work = schedule()
    work.add(A, 0.0)
    work.take(0.0)
    work.done(A, 0.0)
    due_s = work.next_due_s()
    assert due_s is not None
    assert RESYNC_S * (1 - JITTER) <= due_s <= RESYNC_S * (1 + JITTER)


def test_a_pool_that_is_gone_is_not_looked_at_again_unless_it_comes_back_meanwhile() -> None:
    work = schedule()
    for is_back in (False, True):
        work.add(A, 0.0)
        assert work.take(0.0) == A
        if is_back:
            work.add(A, 1.0)
        work.forget(A)
        assert work.take(10_000.0) == (A if is_back else None)


def test_age_counts_what_waits_and_what_is_in_work_but_not_what_is_not_due() -> None:
    work = schedule()
    work.add(A, 10.0)
    assert work.age_s(9.0) == 0.0
    assert work.age_s(12.0) == 2.0
    assert work.take(12.0) == A
    assert work.age_s(15.0) == 3.0
    work.done(A, 15.0)
    assert work.age_s(16.0) == 0.0


def test_a_long_queue_that_moves_does_not_stand_still() -> None:
    work, keys = schedule(), [PoolKey("ns", str(number)) for number in range(50)]
    for key in keys:
        work.add(key, 0.0)
    now_s = moved_s = 0.0
    for _ in keys:
        # A look waits for the store as long as it may, and fails.
        key = work.take(now_s)
        assert key is not None
        now_s += 50.0
        assert work.stands_still_s(now_s, moved_s) == 50.0
        work.done(key, now_s)
        moved_s = now_s
        assert work.stands_still_s(now_s, moved_s) == 0.0


def test_a_queue_that_nobody_takes_from_and_a_look_that_never_ends_stand_still() -> None:
    work = schedule()
    work.add(A, 10.0)
    assert work.stands_still_s(9.0, 0.0) == 0.0
    assert work.stands_still_s(150.0, 0.0) == 140.0
    assert work.take(150.0) == A
    # However much goes on beside it.
    assert work.stands_still_s(400.0, 399.0) == 250.0
    work.done(A, 400.0)
    assert work.stands_still_s(500.0, 400.0) == 0.0


async def test_pools_are_worked_on_side_by_side_but_one_pool_never_twice_at_once() -> None:
    queue, running, most, done = PoolQueue(rng=random.Random(3), workers=4), dict[PoolKey, int](), 0, 0
    keys = [PoolKey("ns", str(number)) for number in range(12)]
    finished = asyncio.Event()

    async def work(key: PoolKey) -> None:
        nonlocal most, done
        running[key] = running.get(key, 0) + 1
        assert running[key] == 1
        most = max(most, sum(running.values()))
        queue.add(key, 1000.0)
        await asyncio.sleep(0.01)
        running[key] -= 1
        done += 1
        if done == len(keys):
            finished.set()

    for key in keys:
        for _ in range(5):
            queue.add(key, 0.0)
    task = asyncio.create_task(queue.run(work))
    await finished.wait()
    assert most == 4
    queue.stop()
    await task
    assert done == len(keys)


async def test_a_worker_that_raises_is_told_and_called_again(caplog: pytest.LogCaptureFixture) -> None:
    queue, tries, finished = PoolQueue(rng=random.Random(3)), 0, asyncio.Event()

    async def work(key: PoolKey) -> None:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise KubeError(500, "InternalError", "from the test")
        if tries == 2:
            raise ZeroDivisionError
        finished.set()

    queue.add(A, 0.0)
    with caplog.at_level(logging.WARNING):
        task = asyncio.create_task(queue.run(work))
        await finished.wait()
    queue.stop()
    await task
    assert [record.levelname for record in caplog.records] == ["WARNING", "ERROR"]


async def test_a_worker_that_hangs_is_cut_and_called_again() -> None:
    queue, tries, finished = PoolQueue(rng=random.Random(3), work_s=0.05), 0, asyncio.Event()

    async def work(key: PoolKey) -> None:
        nonlocal tries
        tries += 1
        if tries == 1:
            await asyncio.Event().wait()
        finished.set()

    queue.add(A, 0.0)
    task = asyncio.create_task(queue.run(work))
    await finished.wait()
    queue.stop()
    await task


async def test_what_is_in_hand_is_finished_when_it_stops_and_nothing_more_is_taken_up() -> None:
    queue, began, go, done = PoolQueue(rng=random.Random(3), workers=1), asyncio.Event(), asyncio.Event(), []

    async def work(key: PoolKey) -> None:
        began.set()
        await go.wait()
        done.append(key)

    queue.add(A, 0.0)
    queue.add(B, 0.0)
    task = asyncio.create_task(queue.run(work))
    await began.wait()
    drained = asyncio.create_task(queue.drain(30.0))
    await asyncio.sleep(0)
    go.set()
    await drained
    await task
    assert done == [A]
