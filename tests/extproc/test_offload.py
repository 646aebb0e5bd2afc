"""Big prompts off the event loop, within bounds."""

import asyncio
import threading

import pytest
from waiting import until

from trimtab_extproc import offload
from trimtab_extproc.offload import INLINE_BYTES_MAX, Offload, OffloadOverflow

BIG = INLINE_BYTES_MAX + 1


async def test_small_jobs_run_here_and_big_ones_on_a_thread() -> None:
    pool = Offload()
    assert await pool.run(INLINE_BYTES_MAX, threading.get_ident) == threading.get_ident()
    assert await pool.run(BIG, threading.get_ident) != threading.get_ident()
    pool.close()


async def test_a_jobs_error_is_raised_to_whoever_asked() -> None:
    pool = Offload()
    for size_bytes in (1, BIG):
        with pytest.raises(ZeroDivisionError):
            await pool.run(size_bytes, lambda: 1 // 0)
    pool.close()


async def test_beyond_its_jobs_the_pool_refuses_at_once_and_takes_again_when_they_are_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(offload, "JOBS_MAX", 2)
    pool, gate = Offload(), threading.Event()
    running = [asyncio.create_task(pool.run(BIG, gate.wait)) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(OffloadOverflow) as refusal:
        await pool.run(BIG, int)
    assert refusal.value.reason == "prompt_queue_full"
    gate.set()
    await asyncio.gather(*running)
    await asyncio.sleep(0)
    assert await pool.run(BIG, int) == 0
    pool.close()


async def test_a_job_that_takes_too_long_is_given_up_but_counts_until_its_thread_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(offload, "JOBS_MAX", 1)
    monkeypatch.setattr(offload, "TIMEOUT_S", 0.01)
    pool, gate, ended = Offload(), threading.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def job() -> None:
        gate.wait()
        loop.call_soon_threadsafe(ended.set)

    with pytest.raises(OffloadOverflow) as refusal:
        await pool.run(BIG, job)
    assert refusal.value.reason == "prompt_too_slow"
    with pytest.raises(OffloadOverflow) as refusal:
        await pool.run(BIG, int)
    assert refusal.value.reason == "prompt_queue_full"
    gate.set()
    await ended.wait()
    await until(lambda: not pool.job_count, "the thread has ended")
    assert await pool.run(BIG, int) == 0
    pool.close()
