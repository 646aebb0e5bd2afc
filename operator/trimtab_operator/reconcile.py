"""One look at one pool: from what is declared to what runs, and back to a status that says so.

The one rule: level-based. A look sees everything anew, may come at any time and any number of times, and does only what
is missing. A pool is let go only when the API server itself has said, just now, that it is not ours any more: a cache
that is empty for a moment must not take a pool down.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, Final

from trimtab_operator.api.policy import PolicyError, PolicySpec
from trimtab_operator.api.pool import Pool, PoolKey
from trimtab_operator.apply import ApplyReport, ChildApplier
from trimtab_operator.children.desired import desired, is_as_made, is_standalone
from trimtab_operator.children.endpoints import made_selector
from trimtab_operator.children.labels import installation_of, is_ours
from trimtab_operator.children.names import NAME_PREFIX, envoy_name, picker_name, store_secret_name
from trimtab_operator.children.store_secret import StoreAccess, access_in
from trimtab_operator.conditions import rfc3339
from trimtab_operator.events import EventPoster
from trimtab_operator.fleet_report import read_fleet
from trimtab_operator.injection.marks import ENABLED, INJECT
from trimtab_operator.install import Install
from trimtab_operator.kube import NAMESPACES, POLICIES, POOLS, SECRETS, Kube, KubeError, Object
from trimtab_operator.membership.zones import Zones
from trimtab_operator.pool_claim import PoolClaims
from trimtab_operator.pool_conditions import picker_ref_problem, pool_conditions
from trimtab_operator.pool_facts import PoolFacts
from trimtab_operator.pool_register import PoolRegister
from trimtab_operator.pool_run import PoolRun
from trimtab_operator.pool_status import ParentsFull, parent_entry, write_parents
from trimtab_operator.spec_note import note_spec, spec_in
from trimtab_operator.status import announcements, policy_status, write_status
from trimtab_operator.store_access import AWAY, StoreAccessManager
from trimtab_operator.telemetry import Telemetry
from trimtab_operator.watches import Watches
from trimtab_operator.work_queue import PoolQueue
from trimtab_state import ControlWriter, PoolKeys, StateUnavailable, Store

log = logging.getLogger(__name__)

REFRESH_S: Final = 15.0
"""Even where nothing happens, a pool is looked at this often: engines come to be known, users of the store vanish."""
ORPHANS_S: Final = 60.0
"""How often pools are looked for that went in our absence."""
LET_GO_S: Final = 30.0
"""A pool that is there but not ours any more is kept up for so long: its policy may be on its way from one file or tool
to another, deleted and made again."""
CHANGED_S: Final = 0.5
"""Members that change are in the shared state at once; their numbers in the status follow after this."""


class PoolReconciler:
    """All pools of one operator. `clock`: Unix time that does not jump."""

    def __init__(
        self,
        *,
        kube: Kube,
        store: Store,
        install: Install,
        watches: Watches,
        queue: PoolQueue,
        telemetry: Telemetry,
        clock: Callable[[], float],
        rng: random.Random,
        let_go_s: float = LET_GO_S,
    ) -> None:
        self._kube = kube
        self._store = store
        self._install = install
        self._watches = watches
        self._queue = queue
        self._telemetry = telemetry
        self._clock = clock
        self._rng = rng
        self._let_go_s = let_go_s
        self._applier = ChildApplier(kube, install.namespace)
        self._access = StoreAccessManager(store, install)
        self._register = PoolRegister(store, install)
        self._events = EventPoster(kube)
        self._claims = PoolClaims(kube, install, self._applier, self._access, self._events)
        self._zones = Zones(kube)
        self._runs: dict[PoolKey, PoolRun] = {}
        self._unwanted_since_s: dict[PoolKey, float] = {}
        """Pools that are there, and were ours until then."""
        self._leaving: set[PoolKey] = set()
        """Pools whose removal has begun and did not end yet."""
        self._told: dict[PoolKey, list[Object]] = {}
        """Conditions of pools without a policy, which have no status of ours to keep them."""
        self.crd_problem = ""

    async def run(self) -> None:
        """What goes on beside the looks, until cancelled: the store's users, and pools deleted in our absence."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._access.run())
            tasks.create_task(self._find_orphans())

    async def close(self) -> None:
        """The pools go on without us."""
        async with asyncio.TaskGroup() as tasks:
            for run in self._runs.values():
                tasks.create_task(run.stop())

    def run_of(self, key: PoolKey) -> PoolRun | None:
        """What goes on for a pool that is ours."""
        return self._runs.get(key)

    @property
    def unwanted(self) -> Set[PoolKey]:
        """Pools that are kept up for a while though nobody wants them from us any more."""
        return self._unwanted_since_s.keys()

    async def reconcile(self, key: PoolKey) -> None:
        """Raises KubeError, StateUnavailable: come again."""
        body, policies = self._watches.pool(key), self._watches.policies(key)
        if not _is_ours(key, body, policies):
            body, policies = await self._asked(key)
        if body is None or not _is_ours(key, body, policies):
            for policy in policies:
                await self._say(policy, facts=None, error=None, winner=None)
            await self._let_go(key, body)
            return
        self._unwanted_since_s.pop(key, None)
        self._leaving.discard(key)
        if other := await self._claims.other(key, self._watches.children(key)):
            await self._leave_to_the_other(key)
            await self._claims.stand_back(key, other, policies[0] if policies else body, self._watches.children(key))
            return
        pool = Pool.of(body)
        spec, error = self._spec(key, policies)
        access, access_problem = await self._store_access(pool)
        run = self._running(key)
        run.configure(pool, spec, made_selector=made_selector(self._watches.children(key), key.name))
        report = await self._bring_about(pool, spec, access)
        await self._report(body, pool, spec, policies, error, run, report, access, access_problem)
        self._queue.add(key, REFRESH_S * self._rng.uniform(0.8, 1.2))

    # What is declared.

    async def _asked(self, key: PoolKey) -> tuple[Object | None, list[Object]]:
        """The pool and its policies as the API server has them now."""
        body = await self._kube.get(POOLS, key.namespace, key.name)
        found, _ = await self._kube.list_all(POLICIES, key.namespace)
        policies = [
            {"apiVersion": POLICIES.api_version, "kind": POLICIES.kind, **policy}
            for policy in found
            if ((policy.get("spec") or {}).get("targetRef") or {}).get("name") == key.name
        ]
        return body, sorted(
            policies, key=lambda each: (each["metadata"]["creationTimestamp"], each["metadata"]["name"])
        )

    def _spec(self, key: PoolKey, policies: Sequence[Object]) -> tuple[PolicySpec, PolicyError | None]:
        """In force: the oldest policy's, or the last good one, or the defaults."""
        if not policies:
            return PolicySpec.default(key.name), None
        try:
            return PolicySpec.of(policies[0].get("spec")), None
        except PolicyError as error:
            run = self._runs.get(key)
            if run is not None and run.spec is not None:
                return run.spec, error
            return spec_in(self._watches.children(key), key) or PolicySpec.default(key.name), error

    # What runs.

    def _running(self, key: PoolKey) -> PoolRun:
        run = self._runs.get(key)
        if run is not None:
            try:
                run.check()
            except Exception:
                # A fault of ours: told by the queue, and begun anew with the next look.
                del self._runs[key]
                raise
            return run
        run = PoolRun(
            kube=self._kube,
            store=self._store,
            key=key,
            zones=self._zones,
            changed=lambda changed: self._queue.add(changed, CHANGED_S),
            clock=self._clock,
        )
        run.start()
        self._runs[key] = run
        log.info("pool %s is ours", key)
        return run

    async def _store_access(self, pool: Pool) -> tuple[StoreAccess, str]:
        """The pool's way into the store, and what is wrong with the store."""
        key = pool.key
        try:
            # First the register, so that nothing is in the store that no sweep would find.
            await self._register.add(key)
            access = await self._access.ensure(key)
        except StateUnavailable as error:
            problem = f"{AWAY}: {error}"
            # What was made by it before is kept up without it.
            access = (
                self._access.last(key, reason=problem)
                or await self._access_made_before(pool, problem)
                or self._access.presumed(key, reason=problem)
            )
            return access, problem
        return access, access.reason

    async def _access_made_before(self, pool: Pool, problem: str) -> StoreAccess | None:
        """As an operator before us has put it into the pool's Secret; None: it has not, or somebody has changed it."""
        secret = await self._kube.get(SECRETS, pool.key.namespace, store_secret_name(pool.key.name))
        access = None if secret is None else access_in(secret, reason=problem)
        if secret is None or access is None or not is_as_made(secret, pool, self._install, access):
            return None
        return access

    async def _bring_about(self, pool: Pool, spec: PolicySpec, access: StoreAccess) -> ApplyReport:
        wanted = desired(pool, spec, self._install, access)
        note_spec(wanted, pool.key, spec)
        report = await self._applier.sync(pool.key, pool.uid, wanted, await self._children(pool.key))
        for what, names in (("applied", report.changed), ("made again", report.recreated), ("removed", report.removed)):
            if names:
                log.info("pool %s: %s %s", pool.key, what, ", ".join(names))
        return report

    async def _children(self, key: PoolKey) -> list[Object]:
        secret = await self._kube.get(SECRETS, key.namespace, store_secret_name(key.name))
        ours = self._install.namespace
        found = [child for child in self._watches.children(key) if installation_of(child) in ("", ours)]
        return found if secret is None or not is_ours(secret, key, "", ours) else [*found, secret]

    async def _let_go(self, key: PoolKey, body: Object | None) -> None:
        """Take down what is ours of a pool that is gone, or that nobody wants from us any more."""
        children = await self._children(key)
        if not (key in self._runs or children or key in self._leaving or await self._is_registered(key)):
            return
        if await self._claims.other(key, self._watches.children(key)):
            await self._leave_to_the_other(key)
            return
        if body is not None and key not in self._leaving and (wait_s := self._kept_for_s(key, body)) > 0:
            log.info("pool %s is nobody's any more: it is let go in %.0f s", key, wait_s)
            self._queue.add(key, wait_s)
            return
        log.info("pool %s is let go", key)
        # From here on until it is done, whatever fails meanwhile.
        self._leaving.add(key)
        await self._end(key)
        report = await self._applier.remove_all(key, children)
        if body is not None:
            await write_parents(self._kube, key, None, now=rfc3339(self._clock()))
        # First the user, so that none of its pickers writes again what is deleted next.
        await self._access.drop(key)
        await ControlWriter(self._store, PoolKeys(key.namespace, key.name)).delete_pool()
        if report.errors:
            raise KubeError(0, "NotRemoved", "; ".join(report.errors))
        await self._register.remove(key)
        self._leaving.discard(key)

    async def _end(self, key: PoolKey) -> None:
        """What we have of it in this process."""
        if (run := self._runs.pop(key, None)) is not None:
            await run.stop()
        self._unwanted_since_s.pop(key, None)
        self._told.pop(key, None)
        self._telemetry.forgotten(key)

    async def _leave_to_the_other(self, key: PoolKey) -> None:
        """Another installation has the pool: what is in the store is its own, and never ours to sweep."""
        await self._end(key)
        self._leaving.discard(key)
        try:
            await self._register.remove(key)
        except StateUnavailable as error:
            log.debug("pool %s is still in the register: %s", key, error)

    async def _is_registered(self, key: PoolKey) -> bool:
        try:
            return key in await self._register.all()
        except StateUnavailable:
            # Where there is something to sweep, it is found again once the store is back.
            return False

    def _kept_for_s(self, key: PoolKey, body: Object) -> float:
        """How long a pool that is still there is to be kept up yet."""
        if Pool.of(body).is_deleting:
            return 0.0
        now_s = self._clock()
        return self._unwanted_since_s.setdefault(key, now_s) + self._let_go_s - now_s

    async def _find_orphans(self) -> None:
        await self._watches.synced.wait()
        while True:
            try:
                for key in await self._register.all():
                    if key not in self._runs and self._watches.covers(key):
                        self._queue.add(key)
            except StateUnavailable as error:
                log.debug("orphans are not looked for: %s", error)
            await asyncio.sleep(ORPHANS_S * self._rng.uniform(0.8, 1.2))

    # What is told.

    async def _report(
        self,
        body: Object,
        pool: Pool,
        spec: PolicySpec,
        policies: Sequence[Object],
        error: PolicyError | None,
        run: PoolRun,
        report: ApplyReport,
        access: StoreAccess,
        access_problem: str,
    ) -> None:
        members = run.members
        names = [] if members is None else [endpoint.name for endpoint in members.endpoints]
        deployments = {
            child["metadata"]["name"]: child
            for child in self._watches.children(pool.key)
            if child["kind"] == "Deployment"
        }
        facts = PoolFacts(
            pool=pool,
            spec=spec,
            is_standalone=is_standalone(spec, self._install),
            service_name=picker_name(pool.key.name),
            members=members,
            unready={} if members is None else members.unready,
            picker=deployments.get(picker_name(pool.key.name)),
            envoy=deployments.get(envoy_name(pool.key.name)),
            fleet=await read_fleet(self._store, run.keys, names),
            decision=run.decision,
            store_problem=access_problem,
            is_own_store_user=access.is_own_user,
            store_notes=access.notes,
            store_evicts=access.evicts,
            foreign=report.foreign,
            installations=report.installations,
            apply_errors=report.errors,
            namespace_opted_in=not spec.sidecar.inject or await self._is_opted_in(pool.key.namespace),
            installation=self._install.namespace,
            crd_problem=self.crd_problem,
            parents=(body.get("status") or {}).get("parents") or (),
        )
        refused = (error is not None) + max(0, len(policies) - 1)
        self._telemetry.saw(facts, switches=run.switches, policies_refused=refused)
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

    async def _is_opted_in(self, namespace: str) -> bool:
        body = await self._kube.get(NAMESPACES, None, namespace)
        return body is not None and (body["metadata"].get("labels") or {}).get(INJECT) == ENABLED


def _is_ours(key: PoolKey, body: Mapping[str, Any] | None, policies: Sequence[Object]) -> bool:
    """Whether the pool is there, and a policy targets it or it names our pickers."""
    if body is None:
        return False
    pool = Pool.of(body)
    # The plain name too, where ours had to be another: then the status says so.
    names = (picker_name(key.name), f"{NAME_PREFIX}{key.name}")
    return not pool.is_deleting and (bool(policies) or pool.picker_name in names)
