"""The pools to look at: told by key, each worked on by one worker at a time, several pools side by side.

The one rule: a key says only that something may have changed; the worker finds out what. So keys fold together, a
failure is tried again with growing pauses, and every pool is looked at anew every ten minutes whatever happens.
"""

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Awaitable, Callable
from typing import Final, Protocol

from trimtab_operator.api.pool import PoolKey
from trimtab_operator.kube import KubeError
from trimtab_operator.work_schedule import RESYNC_S, WorkSchedule
from trimtab_state import StateUnavailable

log = logging.getLogger(__name__)

DEBOUNCE_S: Final = 0.2
WORKERS: Final = 8
WORK_S: Final = 60.0
"""How long one look at one pool may take; then it is cut, and tried again."""

Worker = Callable[[PoolKey], Awaitable[None]]


class WorkObserver(Protocol):
    """Counts."""

    def worked(self, key: PoolKey, *, seconds: float, error: str | None) -> None:
        """`error`: the name of what was raised."""

    def forgotten(self, key: PoolKey) -> None:
        """The pool is gone."""


class PoolQueue:
    """`is_known`: whether a pool that was just looked at is to be looked at again some day."""

    def __init__(
        self,
        *,
        rng: random.Random,
        is_known: Callable[[PoolKey], bool] = lambda key: True,
        observer: WorkObserver | None = None,
        workers: int = WORKERS,
        work_s: float = WORK_S,
        resync_s: float = RESYNC_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._schedule: WorkSchedule[PoolKey] = WorkSchedule(rng=rng, resync_s=resync_s)
        self._is_known = is_known
        self._observer = observer
        self._workers = workers
        self._work_s = work_s
        self._clock = clock
        self._changed = asyncio.Event()
        self._is_running = False
        self._is_stopping = False
        self._ended = asyncio.Event()
        self._moved_s = clock()
        """When a look last began or ended."""

    def add(self, key: PoolKey, delay_s: float = DEBOUNCE_S) -> None:
        """Look at it after that long, or sooner. Call it from the event loop."""
        self._schedule.add(key, self._clock() + delay_s)
        self._changed.set()

    @property
    def depth(self) -> int:
        """Pools that wait to be looked at."""
        return self._schedule.depth(self._clock())

    def age_s(self) -> float:
        """For how long the oldest of what is to be done now has waited, or been worked on; 0 while nobody runs it."""
        return self._schedule.age_s(self._clock()) if self._is_running else 0.0

    def stands_still_s(self) -> float:
        """For how long no look has ended though there is work, or one has been under way: a new process would mend it.

        Looks that wait for a store or an API server end (`WORK_S`), and a long queue is no sign of a fault.
        """
        return self._schedule.stands_still_s(self._clock(), self._moved_s) if self._is_running else 0.0

    def stop(self) -> None:
        """Take up nothing more; `run` returns once what is in hand is finished."""
        self._is_stopping = True
        self._changed.set()

    async def drain(self, within_s: float) -> None:
        """`stop`, and wait for what is in hand, but no longer than that."""
        self.stop()
        if self._is_running:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(within_s):
                    await self._ended.wait()

    async def run(self, worker: Worker) -> None:
        """Until `stop`, or until cancelled. What was added before is there."""
        self._is_running, self._moved_s = True, self._clock()
        hands = asyncio.Semaphore(self._workers)
        try:
            async with asyncio.TaskGroup() as tasks:
                while not self._is_stopping:
                    await hands.acquire()
                    key = await self._next()
                    if key is None:
                        return
                    task = tasks.create_task(self._work(worker, key), name=f"pool {key}")
                    task.add_done_callback(lambda _: hands.release())
        finally:
            self._is_running = False
            self._ended.set()

    async def _next(self) -> PoolKey | None:
        """The next that is due; None: told to stop."""
        while not self._is_stopping:
            self._changed.clear()
            now_s = self._clock()
            if (key := self._schedule.take(now_s)) is not None:
                return key
            due_s = self._schedule.next_due_s()
            try:
                async with asyncio.timeout(None if due_s is None else due_s - now_s):
                    await self._changed.wait()
            except TimeoutError:
                continue
        return None

    async def _work(self, worker: Worker, key: PoolKey) -> None:
        begin_s = self._moved_s = self._clock()
        error: Exception | None = None
        try:
            async with asyncio.timeout(self._work_s):
                await worker(key)
        except Exception as raised:
            error = raised
        now_s = self._moved_s = self._clock()
        if error is None:
            if self._is_known(key):
                self._schedule.done(key, now_s)
            else:
                self._schedule.forget(key)
                if self._observer is not None:
                    self._observer.forgotten(key)
        else:
            retry_after_s = error.retry_after_s if isinstance(error, KubeError) else 0.0
            wait_s = self._schedule.failed(key, now_s, retry_after_s=retry_after_s)
            _report(key, error, wait_s)
        # Whoever waits for the next one has to look again: this one is due some time.
        self._changed.set()
        if self._observer is not None and (error is not None or self._is_known(key)):
            name = None if error is None else type(error).__name__
            self._observer.worked(key, seconds=now_s - begin_s, error=name)


def _report(key: PoolKey, error: Exception, wait_s: float) -> None:
    if isinstance(error, KubeError | StateUnavailable | TimeoutError):
        reason = str(error) or "it took too long"
        log.warning("pool %s is not as it should be yet: %s. Again in %.1f s", key, reason, wait_s)
    else:
        log.error("pool %s: a fault of our own. Again in %.1f s", key, wait_s, exc_info=error)
