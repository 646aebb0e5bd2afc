"""Gathers what is known of a pool for those who tell it: from its run, its objects, the API server and the store.

The one rule: it only looks.
"""

from collections.abc import Mapping, Sequence

from trimtab_core.chunks import pool_seed, seed_digest
from trimtab_operator.api.policy import PolicySpec
from trimtab_operator.api.pool import Pool, PoolKey
from trimtab_operator.apply import ApplyReport
from trimtab_operator.children.desired import is_standalone
from trimtab_operator.children.names import envoy_name, picker_name
from trimtab_operator.children.store_secret import StoreAccess
from trimtab_operator.injection.marks import ENABLED, INJECT
from trimtab_operator.install import Install
from trimtab_operator.kube import NAMESPACES, Kube, Object
from trimtab_operator.membership.endpoints import Members
from trimtab_operator.objectives import NONE, Objectives
from trimtab_operator.pool_run import PoolRun
from trimtab_operator.report.fleet_report import read_fleet
from trimtab_operator.report.picker_versions import running_versions
from trimtab_operator.report.pool_facts import PoolFacts
from trimtab_state import Store
from trimtab_state.store_url import parse_store_url


class FactFinder:
    """Of all pools of one operator. `runs`: what goes on for each of them."""

    def __init__(
        self, kube: Kube, store: Store, install: Install, objectives: Objectives, runs: Mapping[PoolKey, PoolRun]
    ) -> None:
        self._kube = kube
        self._store = store
        self._install = install
        self._store_address = str(parse_store_url(install.store_url))
        self._objectives = objectives
        self._runs = runs

    async def of(
        self,
        pool: Pool,
        spec: PolicySpec,
        *,
        children: Sequence[Object],
        report: ApplyReport,
        access: StoreAccess,
        access_problem: str,
        crd_problem: str,
        parents: Sequence[Object],
    ) -> PoolFacts:
        """`children`: as they were read. `access_problem`: what is wrong with the store. Raises KubeError."""
        run = self._runs[pool.key]
        members = run.members
        names = [] if members is None else [endpoint.name for endpoint in members.endpoints]
        objectives = self._objectives.of(pool.key)
        rivals = self._rivals(pool.key, spec, members)
        return PoolFacts(
            pool=pool,
            spec=spec,
            is_standalone=is_standalone(spec, self._install),
            service_name=picker_name(pool.key.name),
            members=members,
            unready={} if members is None else members.unready,
            picker=deployment_of(children, picker_name(pool.key.name)),
            envoy=deployment_of(children, envoy_name(pool.key.name)),
            picker_versions=await running_versions(
                self._kube, pool.key, deployment_of(children, picker_name(pool.key.name))
            ),
            fleet=await read_fleet(self._store, run.keys, names, seed_digest=_seed_digest(pool.key, access)),
            decision=run.decision,
            told=run.told,
            store_address=self._store_address,
            told_wait_s=None if run.decision is None else run.told_wait_s,
            objectives=objectives or NONE,
            objectives_refusal=self._objectives.refusal(pool.key),
            store_problem=access_problem,
            is_own_store_user=access.is_own_user,
            store_notes=access.notes,
            store_evicts=access.evicts,
            foreign=report.foreign,
            installations=report.installations,
            apply_errors=report.errors,
            rivals=rivals,
            older_rivals=[name for name in rivals if self._is_older(PoolKey(pool.key.namespace, name), pool)],
            namespace_opted_in=not spec.sidecar.inject or await self._is_opted_in(pool.key.namespace),
            installation=self._install.namespace,
            crd_problem=crd_problem,
            parents=parents,
        )

    def _rivals(self, key: PoolKey, spec: PolicySpec, members: Members | None) -> dict[str, int]:
        """Other pools of the namespace that ask for injection into pods of this one, which asks too."""
        found: dict[str, int] = {}
        if members is None or not spec.sidecar.inject:
            return found
        for other, run in sorted(self._runs.items()):
            if other.namespace != key.namespace or other == key or run.spec is None or not run.spec.sidecar.inject:
                continue
            if run.members is not None and (shared := len(run.members.pods & members.pods)):
                found[other.name] = shared
        return found

    def _is_older(self, key: PoolKey, pool: Pool) -> bool:
        other = self._runs[key].pool
        return other is not None and other.age < pool.age

    async def _is_opted_in(self, namespace: str) -> bool:
        body = await self._kube.get(NAMESPACES, None, namespace)
        return body is not None and (body["metadata"].get("labels") or {}).get(INJECT) == ENABLED


def deployment_of(children: Sequence[Object], name: str) -> Object | None:
    """The one of that name among the pool's objects."""
    return next(
        (child for child in children if child["kind"] == "Deployment" and child["metadata"]["name"] == name), None
    )


def _seed_digest(key: PoolKey, access: StoreAccess) -> str:
    """Of the hashes that the pool's parts make, where they have its Secret as it is."""
    return seed_digest(pool_seed(access.secret.encode(), key.namespace, key.name))
