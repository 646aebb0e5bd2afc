"""How often a watch begins anew, in virtual time: the pauses grow until a watch has held."""

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest
from virtual_time import in_virtual_time

from trimtab_operator.kube import PODS, Kube, KubeError, Object, WatchEvent
from trimtab_operator.object_watch import CUT_RETRY_MAX_S, RETRY_MAX_S, RETRY_MIN_S, ObjectWatch, Sink

REFUSED = KubeError(500, "InternalError", "by the test")
BROKEN = KubeError(0, "WatchBroken", "cut by a proxy")
UNREACHABLE = KubeError(0, "Unreachable", "connection refused")


class SlowKube(Kube):
    """Lists take `list_s`; each watch holds for the next of `holds_s`, and then ends with `end`.

    `tells`: each says something before.
    """

    def __init__(
        self, *, list_s: float, holds_s: list[float], end: KubeError | None = REFUSED, tells: bool = True
    ) -> None:
        self.end = end
        self.tells = tells
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
        loop = asyncio.get_running_loop()
        if self.end is not REFUSED and self._ended_s is not None:
            self.pauses_s.append(loop.time() - self._ended_s)
        if not self.holds_s:
            self.is_over.set()
            await asyncio.Event().wait()
        await asyncio.sleep(self.holds_s.pop(0))
        if self.tells:
            yield WatchEvent("BOOKMARK", {"metadata": {"resourceVersion": "8"}})
        self._ended_s = loop.time()
        if self.end is not None:
            raise self.end


def pauses_s(
    *, list_s: float = 0.1, holds_s: list[float], end: KubeError | None = REFUSED, tells: bool = True
) -> list[float]:
    async def watch() -> list[float]:
        kube = SlowKube(list_s=list_s, holds_s=holds_s, end=end, tells=tells)
        sink = Sink(put=lambda body: None, drop=lambda namespace, name: None)
        running = asyncio.create_task(ObjectWatch(kube, PODS, None, sink, rng=random.Random(3)).run())
        await kube.is_over.wait()
        running.cancel()
        await asyncio.wait([running])
        return kube.pauses_s

    return in_virtual_time(watch())


def test_the_pauses_grow_though_each_list_takes_longer_than_a_watch_has_to_hold() -> None:
    found = pauses_s(list_s=2 * RETRY_MAX_S, holds_s=[0.1] * 9)
    for number, pause_s in enumerate(found):
        longest_s = min(RETRY_MIN_S * 2**number, RETRY_MAX_S)
        assert longest_s / 2 <= pause_s <= longest_s, found


@pytest.mark.parametrize("hold_s", [3.0, 10.0, 20.0, 29.0, 35.0])
@pytest.mark.parametrize("end", [BROKEN, None], ids=["broken off", "ended"])
@pytest.mark.parametrize("tells", [True, False])
def test_a_watch_that_a_proxy_ends_again_and_again_is_deaf_for_moments_only(
    hold_s: float, end: KubeError | None, tells: bool
) -> None:
    found = pauses_s(holds_s=[hold_s] * 40, end=end, tells=tells)
    assert len(found) == 40
    assert max(found) <= RETRY_MIN_S


@pytest.mark.parametrize("end", [BROKEN, None], ids=["broken off", "ended"])
def test_a_watch_that_ends_as_it_begins_is_not_begun_all_the_time(end: KubeError | None) -> None:
    found = pauses_s(holds_s=[0.01] * 20, end=end, tells=False)
    assert all(CUT_RETRY_MAX_S / 2 <= pause_s <= CUT_RETRY_MAX_S for pause_s in found[3:])
    # One that says something each time is worth it.
    assert max(pauses_s(holds_s=[0.01] * 20, end=end)) <= RETRY_MIN_S


def test_a_server_that_is_not_reached_is_left_alone() -> None:
    found = pauses_s(holds_s=[0.0] * 20, end=UNREACHABLE, tells=False)
    assert all(RETRY_MAX_S / 2 <= pause_s <= RETRY_MAX_S for pause_s in found[8:])


def test_a_watch_that_has_held_is_begun_anew_soon() -> None:
    *_, last_s = pauses_s(list_s=0.1, holds_s=[*[0.1] * 9, 2 * RETRY_MAX_S])
    assert last_s <= RETRY_MIN_S
