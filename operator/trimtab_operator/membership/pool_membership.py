"""Watches the pods of one pool and tells who its members are.

The one rule: what was told stays until something newer is known. Nothing is told before the first complete list, and a
list that fails, or a selector that has just changed, never makes a pool look empty.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from trimtab_operator.api.pool import PoolKey
from trimtab_operator.kube import PODS, Kube, Object
from trimtab_operator.membership.endpoints import Members, members_of
from trimtab_operator.membership.pod_view import PodView
from trimtab_operator.membership.zones import Zones
from trimtab_operator.object_watch import ObjectWatch, Sink

logger = logging.getLogger(__name__)

GATHER_S: Final = 0.1
"""Changes are gathered for this long before they are told."""
RESYNC_S: Final = 600.0
"""All is listed anew about this often, whatever the watch says."""


@dataclass(frozen=True, slots=True)
class Membership:
    """What makes a pod a member, and its ports endpoints."""

    selector: Mapping[str, str]
    ports: tuple[int, ...]
    ranks: int | None
    """Data-parallel ranks behind each port; None: as each engine's arguments say."""

    def lists_as(self, other: "Membership") -> bool:
        """The same pods, seen in the same way: what was listed for the one serves the other."""
        return self.selector == other.selector and self.ports == other.ports


@dataclass(slots=True)
class _Session:
    """The pods of one selector, from its first list on."""

    rules: Membership
    watch: ObjectWatch
    pods: dict[str, PodView] = field(default_factory=dict)
    task: asyncio.Task[None] | None = None


class PoolMembership:
    """Of one pool. `on_change` is called with each new state, from the event loop."""

    def __init__(
        self,
        kube: Kube,
        key: PoolKey,
        zones: Zones,
        *,
        on_change: Callable[[Members], None],
        rng: random.Random | None = None,
        resync_s: float = RESYNC_S,
    ) -> None:
        self.members: Members | None = None
        """None until the first complete list."""
        self._kube = kube
        self._key = key
        self._zones = zones
        self._on_change = on_change
        self._rng = rng or random.Random()
        self._resync_s = resync_s
        self._rules: Membership | None = None
        self._changed = asyncio.Event()

    def configure(self, rules: Membership) -> None:
        """Takes effect at once where only the ranks differ; with the next complete list otherwise."""
        if rules != self._rules:
            self._rules = rules
            self._changed.set()

    async def run(self) -> None:
        """Until cancelled."""
        current: _Session | None = None
        coming: _Session | None = None
        learning: asyncio.Task[None] | None = None
        clock = asyncio.get_running_loop()
        resync_at_s = clock.time() + self._resync_s * self._rng.uniform(0.8, 1.2)
        try:
            while True:
                is_stale = not await self._changed_before(resync_at_s)
                self._changed.clear()
                rules = self._rules
                if rules is not None:
                    if is_stale or not any(s is not None and s.rules.lists_as(rules) for s in (current, coming)):
                        await _end(coming)
                        coming = self._session(rules)
                    elif coming is not None and not coming.rules.lists_as(rules):
                        # The rules are back at what is followed already.
                        await _end(coming)
                        coming = None
                if is_stale:
                    resync_at_s = clock.time() + self._resync_s * self._rng.uniform(0.8, 1.2)
                if coming is not None and coming.watch.synced.is_set():
                    await _end(current)
                    current, coming = coming, None
                _raise_if_failed(current, coming)
                if current is not None:
                    if rules is not None and current.rules.lists_as(rules):
                        current.rules = rules
                    self._tell(current)
                    if learning is None or learning.done():
                        learning = asyncio.create_task(self._learn_zones(current), name=f"zones of {self._key}")
        finally:
            await _end(current)
            await _end(coming)
            await _cancel(learning)

    async def _changed_before(self, at_s: float) -> bool:
        """Waits for a change and gathers what comes with it; False: the time has come without one."""
        try:
            async with asyncio.timeout_at(at_s):
                await self._changed.wait()
        except TimeoutError:
            return False
        await asyncio.sleep(GATHER_S)
        return True

    def _session(self, rules: Membership) -> _Session:
        selector = ",".join(f"{name}={value}" for name, value in sorted(rules.selector.items()))
        pods: dict[str, PodView] = {}

        def put(body: Object) -> None:
            view = PodView.of(body, rules.ports)
            if pods.get(view.name) != view:
                pods[view.name] = view
                self._changed.set()

        def drop(namespace: str, name: str) -> None:
            if pods.pop(name, None) is not None:
                self._changed.set()

        watch = ObjectWatch(
            self._kube,
            PODS,
            self._key.namespace,
            Sink(put=put, drop=drop),
            rng=self._rng,
            label_selector=selector,
        )
        session = _Session(rules=rules, watch=watch, pods=pods)
        session.task = asyncio.create_task(self._follow(session), name=f"pods of {self._key}")
        # One that fails is looked at then, not with the next change.
        session.task.add_done_callback(lambda _: self._changed.set())
        return session

    async def _follow(self, session: _Session) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(session.watch.run())
            await session.watch.synced.wait()
            # Also when the list was empty: that is something to tell.
            self._changed.set()

    def _tell(self, session: _Session) -> None:
        rules = session.rules
        members = members_of(session.pods.values(), rules.ports, rules.ranks, zone_of=self._zones.of)
        if members != self.members:
            if members.left_out and (self.members is None or not self.members.left_out):
                about = {"pool": str(self._key), "kept": len(members.endpoints), "left_out": members.left_out}
                logger.warning("the pool has more endpoints than it can have", extra=about)
            self.members = members
            self._on_change(members)

    async def _learn_zones(self, session: _Session) -> None:
        """Beside all else: an API server that is slow with nodes must not hold up the members."""
        if await self._zones.learn({pod.node for pod in session.pods.values() if not pod.zone and pod.is_ready}):
            self._changed.set()


def _raise_if_failed(*sessions: _Session | None) -> None:
    for session in sessions:
        if session is not None and session.task is not None and session.task.done():
            session.task.result()


async def _end(session: _Session | None) -> None:
    if session is not None:
        await _cancel(session.task)


async def _cancel(task: asyncio.Task[None] | None) -> None:
    if task is not None:
        task.cancel()
        # Also one that has failed by itself: who ends it has asked for its end only.
        await asyncio.wait([task])
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.warning("ended with an error", extra={"task": task.get_name(), "error": str(error)})
