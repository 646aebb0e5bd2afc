"""Waiting for what other tasks, threads or processes bring about."""

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable

WAIT_TIMEOUT_S = 20.0


async def until(condition: Callable[[], object | Awaitable[object]], what: str) -> None:
    """Wait for something that other tasks or processes bring about."""
    deadline_s = time.monotonic() + WAIT_TIMEOUT_S
    for _ in itertools.count():
        value = condition()
        if await value if isinstance(value, Awaitable) else value:
            return
        assert time.monotonic() < deadline_s, f"in vain: {what}"
        await asyncio.sleep(0.01)
