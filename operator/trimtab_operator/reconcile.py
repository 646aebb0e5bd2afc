"""One look at one pool: from what is declared to what runs, and back to a status that says so.

The one rule: level-based. A look sees everything anew, may come at any time and any number of times, and does only what
is missing. A pool is let go only when the API server itself has said, just now, that it is not ours any more: a cache
that is empty for a moment must not take a pool down.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Sequence, Set
from typing import Final

from trimtab_operator.api.policy import PolicyError, PolicySpec
from trimtab_operator.api.pool import Pool, PoolKey
from trimtab_operator.apply import ApplyReport, ChildApplier
from trimtab_operator.children.desired import desired, is_standalone
from trimtab_operator.children.endpoints import made_selector
from trimtab_operator.children.envoy import envoy_config_hash
from trimtab_operator.children.labels import installation_of, is_ours
from trimtab_operator.children.names import envoy_name, store_secret_name
from trimtab_operator.children.store_secret import StoreAccess
from trimtab_operator.declaration import declared, is_for_us
from trimtab_operator.events import EventPoster
from trimtab_operator.install import Install
from trimtab_operator.kube import SECRETS, Kube, KubeError, Object
from trimtab_operator.membership.zones import Zones
from trimtab_operator.objectives import Objectives
from trimtab_operator.patience import are_replaced, as_patient_as
from trimtab_operator.pool_access import PoolAccess
from trimtab_operator.pool_claim import PoolClaims
from trimtab_operator.pool_register import PoolRegister
from trimtab_operator.pool_run import PoolRun
from trimtab_operator.report.conditions import rfc3339
from trimtab_operator.report.fact_finder import FactFinder, deployment_of
from trimtab_operator.report.pool_status import write_parents
from trimtab_operator.report.pool_voice import PoolVoice
from trimtab_operator.spec_note import note_spec, spec_in
from trimtab_operator.store.access import StoreAccessManager
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
"""A pool that is there but not ours any more is kept up for so long, and one that is ours without its policy goes on by
it: the policy may be on its way from one file or tool to another, deleted and made again."""
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
        self._clock = clock
        self._rng = rng
        self._let_go_s = let_go_s
        self._applier = ChildApplier(kube, install.namespace)
        self._access = StoreAccessManager(store, install)
        self._register = PoolRegister(store, install)
        self._pool_access = PoolAccess(kube, install, self._register, self._access)
        events = EventPoster(kube)
        self._voice = PoolVoice(kube, events, telemetry, clock=clock, let_go_s=let_go_s)
        self._claims = PoolClaims(kube, install, self._applier, self._access, events)
        self._zones = Zones(kube)
        self._objectives = Objectives(kube, rng=rng, changed=self._has_other_objectives, known=self._knows_objectives)
        self._runs: dict[PoolKey, PoolRun] = {}
        self._facts = FactFinder(kube, store, install, self._objectives, self._runs)
        self._unwanted_since_s: dict[PoolKey, float] = {}
        """Pools that are there, and were ours until then."""
        self._bereft_since_s: dict[PoolKey, float] = {}
        """Pools that are ours without a policy, and go on by one that was there until then."""
        self._leaving: set[PoolKey] = set()
        """Pools whose removal has begun and did not end yet."""
        self.crd_problem = ""

    async def run(self) -> None:
        """What goes on beside the looks, until cancelled: the store's users, pools deleted in our absence, and what is
        not ours and need not be there."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._access.run())
            tasks.create_task(self._objectives.run(self._watches.namespaces))
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
        if not is_for_us(key, body, policies):
            body, policies = await declared(self._kube, key)
        await self._voice.tell_if_left(key, body, policies)
        if body is None or not is_for_us(key, body, policies):
            await self._voice.tell_of_no_pool(policies)
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
        access, access_problem = await self._pool_access.of(pool)
        run = self._running(key)
        children = self._watches.children(key)
        for_envoys = as_patient_as(spec, run.publisher.longest_wait_s)
        objectives = self._objectives.of(key)
        run.configure(
            pool,
            spec,
            made_selector=made_selector(children, key.name),
            objectives=None if objectives is None else objectives.used,
            is_wait_borne=not is_standalone(spec, self._install)
            or are_replaced(
                deployment_of(children, envoy_name(key.name)), envoy_config_hash(pool, for_envoys, self._install)
            ),
        )
        report = await self._bring_about(pool, spec, for_envoys, access)
        facts = await self._facts.of(
            pool,
            spec,
            children=self._watches.children(key),
            report=report,
            access=access,
            access_problem=access_problem,
            crd_problem=self.crd_problem,
            parents=(body.get("status") or {}).get("parents") or (),
        )
        await self._voice.tell(body, policies, facts, error, switches=run.switches)
        self._queue.add(key, REFRESH_S * self._rng.uniform(0.8, 1.2))

    # What is declared.

    def _spec(self, key: PoolKey, policies: Sequence[Object]) -> tuple[PolicySpec, PolicyError | None]:
        """In force: the oldest policy's, or the last good one, or the defaults."""
        if not policies:
            return self._spec_without(key), None
        self._bereft_since_s.pop(key, None)
        try:
            return PolicySpec.of(policies[0].get("spec")), None
        except PolicyError as error:
            run = self._runs.get(key)
            if run is not None and run.spec is not None:
                return run.spec, error
            return spec_in(self._watches.children(key), key) or PolicySpec.default(key.name), error

    def _spec_without(self, key: PoolKey) -> PolicySpec:
        """In force where no policy is: for a while what was before, then the defaults."""
        run, default = self._runs.get(key), PolicySpec.default(key.name)
        last = spec_in(self._watches.children(key), key) if run is None or run.spec is None else run.spec
        if last is not None and last != default:
            now_s = self._clock()
            if key not in self._bereft_since_s:
                log.info("pool %s is without its policy: it gets the defaults in %.0f s", key, self._let_go_s)
            wait_s = self._bereft_since_s.setdefault(key, now_s) + self._let_go_s - now_s
            if wait_s > 0:
                self._queue.add(key, wait_s)
                return last
        self._bereft_since_s.pop(key, None)
        return default

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

    async def _bring_about(
        self, pool: Pool, spec: PolicySpec, for_envoys: PolicySpec, access: StoreAccess
    ) -> ApplyReport:
        wanted = desired(pool, for_envoys, self._install, access)
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
        self._bereft_since_s.pop(key, None)
        self._voice.forget(key)

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

    def _has_other_objectives(self, key: PoolKey) -> None:
        if self._watches.is_known(key):
            self._queue.add(key)

    def _knows_objectives(self, namespace: str | None) -> None:
        for key in self._runs:
            # Of those that have none any more nothing else says so.
            if namespace in (None, key.namespace):
                self._queue.add(key)

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
