"""What goes on for one pool between two looks at it: its pods are watched, its alarms heard, its document kept.

The one rule: it lives from the first look at a pool until the pool is let go. Members and policy reach the shared
state from here at once, without waiting for a look.
"""

import asyncio
import contextlib
from collections.abc import Callable

from trimtab_operator.alarm_watch import AlarmWatch
from trimtab_operator.api.policy import PolicySpec
from trimtab_operator.api.pool import Pool, PoolKey
from trimtab_operator.fallback import Decision, FallbackState
from trimtab_operator.kube import Kube
from trimtab_operator.membership.control_publisher import ControlPublisher
from trimtab_operator.membership.endpoints import Members
from trimtab_operator.membership.pool_membership import Membership, PoolMembership
from trimtab_operator.membership.zones import Zones
from trimtab_state import PoolKeys, Store

STOP_S = 5.0
"""How long its last words to the store may take."""


class PoolRun:
    """Of one pool. `changed` is called when members or the decision are others. `clock`: Unix time, without jumps."""

    def __init__(
        self,
        *,
        kube: Kube,
        store: Store,
        key: PoolKey,
        zones: Zones,
        changed: Callable[[PoolKey], None],
        clock: Callable[[], float],
    ) -> None:
        self.keys = PoolKeys(key.namespace, key.name)
        self.spec: PolicySpec | None = None
        """In force: what the last look has found good."""
        self.decision: Decision | None = None
        self.switches = 0
        """How often the policy became another one."""
        self._key = key
        self._store = store
        self._changed = changed
        self._clock = clock
        self._membership = PoolMembership(kube, key, zones, on_change=self._on_members)
        self.publisher = ControlPublisher(store, self.keys)
        self._fallback: FallbackState | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def members(self) -> Members | None:
        return self._membership.members

    async def start(self, spec: PolicySpec) -> None:
        """Go on where the operator before us has left off. Raises StateUnavailable: nothing is begun then."""
        stored = await self.publisher.stored_policy()
        self._fallback = FallbackState(stored)
        self.spec = spec
        self._task = asyncio.create_task(self._run(self._fallback), name=f"pool {self._key}")

    def configure(self, pool: Pool, spec: PolicySpec) -> None:
        """What is declared now."""
        self.spec = spec
        self._membership.configure(Membership(pool.selector, pool.target_ports, spec.data_parallel_ranks))
        self._decide(self._clock())

    def check(self) -> None:
        """Raises what has ended it, if anything has: that is a bug, or a store that gives nonsense."""
        if self._task is not None and self._task.done():
            self._task.result()

    async def stop(self, *, delete: bool) -> None:
        """`delete`: remove what the store holds of the pool. Raises StateUnavailable then."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        if delete:
            await self.publisher.delete()

    async def _run(self, fallback: FallbackState) -> None:
        alarms = AlarmWatch(self._store, self.keys, fallback, on_turn=self._decide, clock=self._clock)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._membership.run())
            tasks.create_task(self.publisher.run())
            tasks.create_task(alarms.run())

    def _on_members(self, members: Members) -> None:
        self.publisher.set_members(members)
        self._changed(self._key)

    def _decide(self, now_s: float) -> None:
        if self._fallback is None or self.spec is None:
            return
        before, self.decision = self.decision, self._fallback.decide(now_s, self.spec.fallback, self.spec.mode)
        self.publisher.set_policy(self.decision.document(batch_limit=self.spec.batch_limit))
        self.switches += self.decision.changed
        if before is not None and (before.policy, before.stage) != (self.decision.policy, self.decision.stage):
            self._changed(self._key)
