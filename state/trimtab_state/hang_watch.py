"""Which servers of the store hang: they take questions and answer none.

The one rule: a question to a server that is known to hang fails at once. Whether it still hangs is found out by one
question of our own every PROBE_S, so an outage costs a caller the time of its first question, and nobody a queue.

A store that refuses, or that is not there, says so at once and needs none of this. It must not know how to ask.

Bounds: one entry per server.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final

from redis.exceptions import TimeoutError as LibraryTimeoutError

from .errors import StateUnavailable

PROBE_S: Final = 1.0
"""Between the beginnings of two questions of our own; one that is still under way delays the next."""
NO_REPLY: Final = "TimeoutError: no reply in time"
"""Never with a time in it: the text ends in conditions, which would be new with every look."""

Probe = Callable[[], Awaitable[object]]
"""Asks a server anything, over a connection of its own. A TimeoutError: it hangs. Any other end: it does not."""


@dataclass(slots=True)
class _Hang:
    """Of one server."""

    task: asyncio.Task[None] | None = None
    first: asyncio.Event = field(default_factory=asyncio.Event)
    """The first question of our own is decided."""


class HangWatch:
    """Of one process's clients of one store."""

    def __init__(self) -> None:
        self._hangs: dict[str, _Hang] = {}
        self._are_over = asyncio.Event()

    @property
    def is_any(self) -> bool:
        """Whether `check` has anything to say."""
        return bool(self._hangs)

    async def check(self, server: str) -> None:
        """Raises StateUnavailable for one that hangs; while that is not sure yet it waits."""
        hang = self._hangs.get(server)
        if hang is None:
            return
        await hang.first.wait()
        if server in self._hangs:
            raise StateUnavailable(NO_REPLY)

    def failed(self, server: str, error: Exception, probe: Probe) -> bool:
        """A question ended with an error; whether that is the first sign that the server hangs."""
        if server in self._hangs or not is_timeout(error):
            return False
        self._are_over.clear()
        self._hangs[server] = hang = _Hang()
        hang.task = asyncio.create_task(self._watch(server, probe), name=f"whether the store {server} hangs")
        return True

    def answered(self, server: str) -> None:
        """A question got an answer."""
        if (hang := self._hangs.pop(server, None)) is None:
            return
        hang.first.set()
        if hang.task is not None and hang.task is not asyncio.current_task():
            hang.task.cancel()
        if not self._hangs:
            self._are_over.set()

    async def pause(self, seconds: float) -> None:
        """Before the next try of somebody who failed: it ends early when no server hangs any more."""
        if not self._hangs:
            await asyncio.sleep(seconds)
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._are_over.wait()

    async def close(self) -> None:
        """Nobody will ask any more."""
        for server, hang in list(self._hangs.items()):
            self.answered(server)
            if hang.task is not None:
                await asyncio.wait([hang.task])

    async def _watch(self, server: str, probe: Probe) -> None:
        hang, clock = self._hangs[server], asyncio.get_running_loop().time
        while True:
            began_s = clock()
            try:
                await probe()
            except Exception as error:
                if not is_timeout(error):
                    break
            else:
                break
            hang.first.set()
            await asyncio.sleep(max(0.0, began_s + PROBE_S - clock()))
        self.answered(server)


def is_timeout(error: BaseException) -> bool:
    """Whether it means that there was no answer in time."""
    return isinstance(error, TimeoutError | LibraryTimeoutError)
