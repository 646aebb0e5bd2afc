"""A sidecar and a replica as the shared state sees them: real publishers around plain chunks or reservations."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from pool_mirror import PoolMirror

from trimtab_core.chunks import U32, U64
from trimtab_state import (
    Heartbeat,
    KvPublisher,
    LoadPublisher,
    OpenReservation,
    PoolFollower,
    PoolKeys,
    StateSettings,
    Store,
)

KEYS = PoolKeys("default", "pool")
EPOCH = "e1"
QUICK = StateSettings(
    lease_renew_s=0.2,
    poll_s=0.1,
    control_refresh_s=0.1,
    backoff_max_s=0.2,
    kv_snapshot_refresh_s=0.5,
    kv_chunks_per_entry_max=8,
)
"""Polls and renews often, so that tests do not wait. Its times to live are long enough for a machine that is busy."""
BRIEF = replace(QUICK, lease_s=2.0, heartbeat_ttl_s=2.0, command_timeout_s=0.5, clock_step_max_s=0.3)
"""For tests in which something has to expire."""


@dataclass(frozen=True)
class Changes:
    cleared: bool
    added: U64
    tokens: U32
    removed: U64


def u64(values: Iterable[int]) -> U64:
    return np.fromiter(values, dtype=np.uint64)


def u32(values: Iterable[int]) -> U32:
    return np.fromiter(values, dtype=np.uint32)


WEIGHTS_MILLI = (1_000, 1_000, 4_000, 250)
"""Of reservations by their ids: with and without what makes the log's newer form."""


class Sidecar:
    """Chunks of one endpoint and their publisher."""

    def __init__(self, store: Store, endpoint: str, settings: StateSettings, incarnation: int | None = None) -> None:
        self.endpoint = endpoint
        self.epoch = EPOCH
        self.chunks: dict[int, int] = {}
        self.publisher = KvPublisher(
            store, KEYS, endpoint, snapshot=self._snapshot, epoch=EPOCH, settings=settings, incarnation=incarnation
        )

    def add(self, chunks: dict[int, int]) -> None:
        self.chunks.update(chunks)
        self.publisher.publish(Changes(False, u64(chunks), u32(chunks.values()), u64(())), self.epoch)

    def remove(self, chunks: Iterable[int]) -> None:
        gone = list(chunks)
        for chunk in gone:
            self.chunks.pop(chunk, None)
        self.publisher.publish(Changes(False, u64(()), u32(()), u64(gone)), self.epoch)

    def clear(self) -> None:
        self.chunks.clear()
        self.publisher.publish(Changes(True, u64(()), u32(()), u64(())), self.epoch)

    def beat(self, **fields: object) -> None:
        self.publisher.heartbeat(Heartbeat(endpoint=self.endpoint, epoch=self.epoch, **fields))

    async def beating(self, period_s: float) -> None:
        while True:
            self.beat()
            await asyncio.sleep(period_s)

    def _snapshot(self) -> tuple[U64, U32]:
        return u64(self.chunks), u32(self.chunks.values())


class Replica:
    """Reservations of one picker, their publisher, and its view of the others."""

    def __init__(self, store: Store, settings: StateSettings) -> None:
        self.open: dict[int, OpenReservation] = {}
        self.mirror = PoolMirror()
        self.publisher = LoadPublisher(
            store,
            KEYS,
            open_reservations=lambda: list(self.open.values()),
            settings=settings,
            on_lease_lost=self.mirror.on_lease_lost,
        )
        self.follower = PoolFollower(
            store, KEYS, self.mirror, own_incarnations=self.publisher.own_incarnations, settings=settings
        )
        self.publisher.reader = self.follower

    def reserve(self, reservation_id: int, endpoint: str, p_tokens: int = 100, samples: int = 0) -> None:
        hashes, tokens = u64(range(samples)), u32(range(samples))
        weight_milli = WEIGHTS_MILLI[reservation_id % len(WEIGHTS_MILLI)]
        self.open[reservation_id] = OpenReservation(
            reservation_id=reservation_id,
            endpoint=endpoint,
            p_tokens=p_tokens,
            batch=1,
            sample_hashes=hashes,
            sample_tokens=tokens,
            weight_milli=weight_milli,
        )
        self.publisher.reserve(reservation_id, endpoint, p_tokens, 1, hashes, tokens, weight_milli)
        if reservation_id % 3 == 0:  # whoever confirms placements reads the log beside the follower
            self.publisher.tell_now()

    def first_token(self, reservation_id: int) -> None:
        self.open[reservation_id] = replace(
            self.open[reservation_id], p_tokens=0, sample_hashes=u64(()), sample_tokens=u32(())
        )
        self.publisher.first_token(reservation_id)

    def move(self, reservation_id: int, endpoint: str) -> None:
        self.open[reservation_id] = replace(self.open[reservation_id], endpoint=endpoint)
        self.publisher.moved(reservation_id, endpoint)

    def finish(self, reservation_id: int) -> None:
        del self.open[reservation_id]
        self.publisher.finished(reservation_id)

    def weights(self) -> dict[int, int]:
        return {i: r.weight_milli for i, r in self.open.items()}

    def load(self) -> list[tuple[int, str, int, int]]:
        return sorted((r.reservation_id, r.endpoint, r.p_tokens, r.batch) for r in self.open.values())


@asynccontextmanager
async def tasks(*coroutines: "object") -> AsyncIterator[list["asyncio.Task[None]"]]:
    """Runs coroutines until the end of the block; an exception of one of them fails the test."""
    started = [asyncio.ensure_future(coroutine) for coroutine in coroutines]  # type: ignore[call-overload]
    try:
        yield started
        for task in started:
            if task.done() and not task.cancelled():
                task.result()
    finally:
        for task in started:
            task.cancel()
        for task in started:
            with suppress(asyncio.CancelledError):
                await task


async def until_read(
    read: Callable[[], Awaitable[Any]], condition: Callable[[Any], bool], timeout_s: float = 30.0
) -> Any:
    """Reads until what was read meets a condition, and returns it."""
    async with asyncio.timeout(timeout_s):
        while not condition(found := await read()):  # noqa: ASYNC110 (a server's value, nothing sets an event)
            await asyncio.sleep(0.01)
    return found


async def until(condition: Callable[[], bool], what: str = "", timeout_s: float = 30.0) -> None:
    """Waits for a condition; the time only bounds how long a failing test hangs."""
    try:
        async with asyncio.timeout(timeout_s):
            while not condition():  # noqa: ASYNC110 (any condition, not only one that sets an event)
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(f"never became true: {what or condition}") from None
