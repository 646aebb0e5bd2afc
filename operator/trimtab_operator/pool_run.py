"""What goes on for one pool between two looks at it: its pods are watched, its alarms heard, its document kept.

The one rule: it lives from the first look at a pool until the pool is let go. Members and policy reach the shared
state from here at once, without waiting for a look.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from trimtab_operator.alarm_watch import AlarmWatch
from trimtab_operator.api.policy import PolicySpec
from trimtab_operator.api.pool import Pool, PoolKey
from trimtab_operator.fallback import Decision, FallbackState
from trimtab_operator.kube import Kube
from trimtab_operator.membership.control_publisher import ControlPublisher
from trimtab_operator.membership.endpoints import Members
from trimtab_operator.membership.pool_membership import Membership, PoolMembership
from trimtab_operator.membership.zones import Zones
from trimtab_operator.patience import told_wait_s
from trimtab_operator.policy_document import policy_document
from trimtab_state import PoolKeys, StateUnavailable, Store
from trimtab_state.documents import Policy
from trimtab_state.outage_log import OutageLog
from trimtab_state.request_class import Objective

log = logging.getLogger(__name__)

RETRY_S: Final = 0.5


class PoolRun:
    """Of one pool. `changed`: there is something new to look at: other members, another decision, or a run that failed.

    `clock`: Unix time that does not jump.
    """

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
        self.pool: Pool | None = None
        """As the last look has found it."""
        self.spec: PolicySpec | None = None
        """In force: what the last look has found good."""
        self.decision: Decision | None = None
        """None: what the operator before us has decided is not known yet."""
        self.switches = 0
        """How often the policy became another one."""
        self._key = key
        self._store = store
        self._changed = changed
        self._clock = clock
        self._selector: Mapping[str, str] | None = None
        """None: there was no good one yet."""
        self._membership = PoolMembership(kube, key, zones, on_change=self._on_members)
        self.publisher = ControlPublisher(store, self.keys, on_written=self._on_written)
        self.told_wait_s = 0.0
        """How long requests may wait, as the pickers are told."""
        self._is_wait_borne = False
        self._written_wait_s = 0.0
        self._objectives: Sequence[Objective] | None = None
        """None: not known yet; the operator before us may have told some."""
        self._told_before: tuple[str, str] | None = None
        self._fallback: FallbackState | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def members(self) -> Members | None:
        return self._membership.members

    @property
    def told(self) -> Policy | None:
        """What the pickers have been told last; None: nothing that is known of."""
        return self.publisher.told

    def start(self) -> None:
        """Begin. Needs a running event loop."""
        self._task = asyncio.create_task(self._run(), name=f"pool {self._key}")
        self._task.add_done_callback(self._ended)

    def configure(
        self,
        pool: Pool,
        spec: PolicySpec,
        *,
        made_selector: Mapping[str, str] | None = None,
        objectives: Sequence[Objective] | None = None,
        is_wait_borne: bool = True,
    ) -> None:
        """What is declared now. `made_selector`: by which the pool's objects were made, by whatever operator.

        `objectives`: None: not known yet. `is_wait_borne`: no Envoy of the pool gives up before the wait that is asked.
        """
        self.pool = pool
        self.spec = spec
        self._is_wait_borne = is_wait_borne
        if objectives is not None:
            self._objectives = objectives
        if not pool.selector_problem:
            self._selector = pool.selector
        elif self._selector is None:
            self._selector = made_selector
        if self._selector is not None:
            # What selects nothing that there can be is not followed: the last good one goes on.
            self._membership.configure(Membership(self._selector, pool.target_ports, spec.data_parallel_ranks))
        self._decide(self._clock())

    def check(self) -> None:
        """Raises what has ended it, if anything has: that is a bug, or a store that gives nonsense."""
        if self._task is not None and self._task.done():
            self._task.result()

    async def stop(self) -> None:
        """Returns once nothing of it is at work any more; never raises what it died of."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("pool %s: what goes on between the looks has failed", self._key, exc_info=error)
            self._changed(self._key)

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._membership.run())
            tasks.create_task(self.publisher.run())
            # Members are watched meanwhile, but none are written before it is known how they were placed.
            stored = await self._stored_policy()
            self._fallback = FallbackState(stored)
            if stored is not None:
                self.told_wait_s = self._written_wait_s = stored.overflow.wait_s
                self._objectives = stored.objectives if self._objectives is None else self._objectives
            self._decide(self._clock())
            await AlarmWatch(self._store, self.keys, self._fallback, on_turn=self._decide, clock=self._clock).run()

    async def _stored_policy(self) -> Policy | None:
        """What an operator before us has decided: it goes on from there, however long the store stays away."""
        outage = OutageLog(f"pool {self._key} waits for the store: how it was placed is not known")
        while True:
            try:
                stored = await self.publisher.stored_policy()
            except StateUnavailable as error:
                outage.failed(error)
                await asyncio.sleep(RETRY_S)
            else:
                outage.over()
                return stored

    def _on_members(self, members: Members) -> None:
        self.publisher.set_members(members)
        self._changed(self._key)

    def _on_written(self) -> None:
        told = None if self.told is None else (self.told.policy, self.told.fallback)
        if told != self._told_before:
            # The status says what was told, not what was decided.
            self._told_before = told
            self._changed(self._key)
        before_s, self._written_wait_s = self._written_wait_s, self.publisher.longest_wait_s
        if self._written_wait_s < before_s:
            # Now the Envoys may follow.
            self._changed(self._key)

    def _decide(self, now_s: float) -> None:
        if self._fallback is None or self.spec is None:
            return
        before, self.decision = self.decision, self._fallback.decide(now_s, self.spec.fallback, self.spec.mode)
        self.told_wait_s = told_wait_s(self.spec, before_s=self.told_wait_s, is_borne=self._is_wait_borne)
        self.publisher.set_policy(
            policy_document(self.decision, self.spec, objectives=self._objectives or (), told_wait_s=self.told_wait_s)
        )
        self.switches += self.decision.changed
        if before is None or (before.policy, before.stage) != (self.decision.policy, self.decision.stage):
            self._changed(self._key)
