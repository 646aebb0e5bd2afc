"""What is told of a pool: the status of its policies and its own, Events, metrics.

The one rule: it tells what it is given. What was told before is remembered only where no object of ours keeps it.
"""

import logging
from collections.abc import Callable, Sequence

from trimtab_operator.api.policy import PolicyError
from trimtab_operator.api.pool import Pool, PoolKey
from trimtab_operator.children.names import envoy_name, picker_name
from trimtab_operator.declaration import declared, is_for_us
from trimtab_operator.events import EventPoster
from trimtab_operator.kube import Kube, KubeError, Object
from trimtab_operator.report.conditions import rfc3339
from trimtab_operator.report.pool_conditions import picker_ref_problem, pool_conditions
from trimtab_operator.report.pool_facts import PoolFacts
from trimtab_operator.report.pool_status import ParentsFull, parent_entry, write_parents
from trimtab_operator.report.status import announcements, policy_status, write_status
from trimtab_operator.telemetry import Telemetry

log = logging.getLogger(__name__)


class PoolVoice:
    """Of all pools of one operator. `let_go_s`: how long a pool goes on as it is whose policy has gone."""

    def __init__(
        self, kube: Kube, events: EventPoster, telemetry: Telemetry, *, clock: Callable[[], float], let_go_s: float
    ) -> None:
        self._kube = kube
        self._events = events
        self._telemetry = telemetry
        self._clock = clock
        self._let_go_s = let_go_s
        self._told: dict[PoolKey, list[Object]] = {}
        """Conditions of pools without a policy, which have no status of ours to keep them."""
        self._in_force: dict[PoolKey, str] = {}
        """Names of the policies that pools were run by."""

    async def tell(
        self, body: Object, policies: Sequence[Object], facts: PoolFacts, error: PolicyError | None, *, switches: int
    ) -> None:
        """Of a pool that is ours. `error`: why the policy in force is not what it says now. Raises KubeError."""
        pool = facts.pool
        refused = (error is not None) + max(0, len(policies) - 1)
        self._telemetry.saw(facts, switches=switches, policies_refused=refused)
        if policies:
            await self._say(policies[0], facts=facts, error=error, winner=None)
            for loser in policies[1:]:
                await self._say(loser, facts=facts, error=None, winner=policies[0]["metadata"]["name"])
        else:
            conditions = pool_conditions(facts, pool.generation)
            await self._announce(body, conditions, self._told.get(pool.key))
            self._told[pool.key] = conditions
        entry = None
        if facts.is_standalone:
            entry = parent_entry(pool, envoy_name(pool.key.name), problem=picker_ref_problem(facts))
        try:
            await write_parents(self._kube, pool.key, entry, now=rfc3339(self._clock()))
        except ParentsFull as full:
            log.warning("pool %s: %s", pool.key, full)

    async def tell_of_no_pool(self, policies: Sequence[Object]) -> None:
        """Of policies whose pool is not there. Raises KubeError."""
        for policy in policies:
            await self._say(policy, facts=None, error=None, winner=None)

    async def tell_if_left(self, key: PoolKey, body: Object | None, policies: Sequence[Object]) -> None:
        """An Event of a pool whose policy has gone: nothing else would carry it."""
        before = self._in_force.pop(key, None)
        if policies:
            self._in_force[key] = policies[0]["metadata"]["name"]
        elif (
            before is not None
            and body is not None
            and not Pool.of(body).is_deleting
            and not (await declared(self._kube, key))[1]
        ):
            gone = f"SchedulingPolicy {before} is deleted, or targets another pool."
            if is_for_us(key, body, ()):
                text = (
                    f"{gone} The pool goes on as before for {self._let_go_s:.0f} s, and then with the defaults: to keep"
                    f" it as it is, create a policy whose spec.targetRef.name is {key.name}. What it says of itself, it"
                    " says in Events and metrics."
                )
                await self._events.post(body, "NoPolicy", text, "Normal")
            else:
                text = (
                    f"{gone} Neither a policy nor spec.endpointPickerRef asks for our pickers now: all that was made"
                    f" for the pool is removed in {self._let_go_s:.0f} s. To keep it, create a policy whose"
                    f" spec.targetRef.name is {key.name}, or set spec.endpointPickerRef.name:"
                    f" {picker_name(key.name)}."
                )
                await self._events.post(body, "NoPolicy", text, "Warning")

    def forget(self, key: PoolKey) -> None:
        """The pool is not ours any more."""
        self._told.pop(key, None)
        self._in_force.pop(key, None)
        self._telemetry.forgotten(key)

    async def _say(
        self, policy: Object, *, facts: PoolFacts | None, error: PolicyError | None, winner: str | None
    ) -> None:
        status = policy_status(policy, facts=facts, error=error, winner=winner, now_s=self._clock())
        try:
            is_new = await write_status(self._kube, policy, status)
        except KubeError as refusal:
            if refusal.status in (404, 409):
                return
            raise
        if is_new:
            await self._announce(policy, status["conditions"], (policy.get("status") or {}).get("conditions"))

    async def _announce(self, about: Object, wanted: Sequence[Object], found: Sequence[Object] | None) -> None:
        for news in announcements(wanted, found):
            await self._events.post(about, news.reason, news.note, news.type_, topic=news.topic)
