"""An event loop whose time passes when nobody has anything to do, and then at once."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class VirtualTime(asyncio.SelectorEventLoop):
    """Begins at 0."""

    def __init__(self) -> None:
        self._now_s = 0.0
        super().__init__(_Jumping(self))

    def time(self) -> float:
        return self._now_s

    def pass_by(self, seconds: float) -> None:
        self._now_s += seconds


class _Jumping(selectors.DefaultSelector):
    def __init__(self, loop: VirtualTime) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout:
            self._loop.pass_by(timeout)
        return super().select(0)


def in_virtual_time(work: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=VirtualTime) as runner:
        return runner.run(work)
