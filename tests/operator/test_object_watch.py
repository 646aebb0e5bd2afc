"""How often a watch begins anew, in virtual time: the pauses grow until a watch has held."""

import asyncio
import random
import selectors
from collections.abc import AsyncIterator
from typing import Any

from trimtab_operator.kube import PODS, Kube, KubeError, Object, WatchEvent
from trimtab_operator.object_watch import RETRY_MAX_S, RETRY_MIN_S, ObjectWatch, Sink


class VirtualTime(asyncio.SelectorEventLoop):
    """Time passes when nobody has anything to do, and then at once."""

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


class SlowKube(Kube):
    """Lists take `list_s`; each watch holds for the next of `holds_s`, and is then refused."""

    def __init__(self, *, list_s: float, holds_s: list[float]) -> None:
        self.list_s = list_s
        self.holds_s = holds_s
        self.pauses_s: list[float] = []
        """Between the end of a watch and what came after it."""
        self.is_over = asyncio.Event()
        self._ended_s: float | None = None

    async def pages(self, *args: Any, **selectors: Any) -> AsyncIterator[tuple[list[Object], str]]:
        loop = asyncio.get_running_loop()
        if self._ended_s is not None:
            self.pauses_s.append(loop.time() - self._ended_s)
        await asyncio.sleep(self.list_s)
        yield [], "7"

    async def watch(self, *args: Any, **selectors: Any) -> AsyncIterator[WatchEvent]:
        if not self.holds_s:
            self.is_over.set()
            await asyncio.Event().wait()
        await asyncio.sleep(self.holds_s.pop(0))
        yield WatchEvent("BOOKMARK", {"metadata": {"resourceVersion": "8"}})
        self._ended_s = asyncio.get_running_loop().time()
        raise KubeError(500, "InternalError", "by the test")


def pauses_s(*, list_s: float, holds_s: list[float]) -> list[float]:
    async def watch() -> list[float]:
        kube = SlowKube(list_s=list_s, holds_s=holds_s)
        sink = Sink(put=lambda body: None, drop=lambda namespace, name: None)
        running = asyncio.create_task(ObjectWatch(kube, PODS, None, sink, rng=random.Random(3)).run())
        await kube.is_over.wait()
        running.cancel()
        await asyncio.wait([running])
        return kube.pauses_s

    with asyncio.Runner(loop_factory=VirtualTime) as runner:
        return runner.run(watch())


def test_the_pauses_grow_though_each_list_takes_longer_than_a_watch_has_to_hold() -> None:
    found = pauses_s(list_s=2 * RETRY_MAX_S, holds_s=[0.1] * 9)
    for number, pause_s in enumerate(found):
        longest_s = min(RETRY_MIN_S * 2**number, RETRY_MAX_S)
        assert longest_s / 2 <= pause_s <= longest_s, found


def test_a_watch_that_has_held_is_begun_anew_soon() -> None:
    *_, last_s = pauses_s(list_s=0.1, holds_s=[*[0.1] * 9, 2 * RETRY_MAX_S])
    assert last_s <= RETRY_MIN_S
