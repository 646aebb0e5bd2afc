"""Waiting for what other processes bring about."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

POLL_S = 0.05


async def eventually(what: Callable[[], Awaitable[object]], *, within_s: float = 30.0) -> Any:
    """The first true answer. Fails with the last one."""
    last: object = None
    try:
        async with asyncio.timeout(within_s):
            while True:
                last = await what()
                if last:
                    return last
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        raise AssertionError(f"not within {within_s:g} s; the last answer was {last!r}") from None
