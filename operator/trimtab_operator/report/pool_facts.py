"""What the operator knows of one pool at one moment: all that a status is made of.

The one rule: plain values, gathered by whoever reconciles; what they mean to people is said in `pool_conditions`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trimtab_operator.api.policy import PolicySpec
from trimtab_operator.api.pool import Pool
from trimtab_operator.fallback import Decision
from trimtab_operator.membership.endpoints import Members
from trimtab_operator.objectives import NONE, PoolObjectives
from trimtab_operator.report.fleet_report import FleetReport
from trimtab_state.documents import Policy


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolFacts:
    """Of a pool that is ours."""

    pool: Pool
    spec: PolicySpec
    """In force now: the policy's, its last good one, or the defaults."""
    is_standalone: bool
    """The pool has an Envoy of its own."""
    service_name: str
    """Of the pickers, as the operator makes it."""
    members: Members | None = None
    """None: the pods have not been listed yet."""
    unready: Mapping[str, int] = field(default_factory=dict)
    """Why matching pods are not ready: number of pods by reason."""
    picker: Mapping[str, Any] | None = None
    """The pickers' Deployment as read, None: there is none."""
    picker_versions: Sequence[str] = ()
    """What the pickers that are ready run."""
    envoy: Mapping[str, Any] | None = None
    """The Envoy's Deployment as read."""
    fleet: FleetReport | None = None
    """None: not read yet."""
    decision: Decision | None = None
    told: Policy | None = None
    """What the pickers have been told last; None: nothing that is known of."""
    told_wait_s: float | None = None
    """How long requests may wait in the pickers now; None: not known yet."""
    objectives: PoolObjectives = NONE
    """The pool's InferenceObjectives, as far as they are known."""
    objectives_refusal: str = ""
    """Why they may not be read, though the cluster has the kind."""
    store_address: str = ""
    """Where the store is, without a login."""
    store_problem: str = ""
    """Why the pool's own access to the store could not be looked after (`StoreAccess.reason`)."""
    is_own_store_user: bool = True
    store_notes: Sequence[str] = ()
    """What there is to know about that access, in sentences."""
    store_evicts: str = ""
    """The store's `maxmemory-policy`, where it evicts keys."""
    foreign: Sequence[str] = ()
    """Objects of somebody else that have a child's name, `Kind/name`."""
    installations: Mapping[str, str] = field(default_factory=dict)
    """Of these, the namespaces of other installations of Trimtab that have made them."""
    apply_errors: Sequence[str] = ()
    """`Kind/name: the API server's words`."""
    rivals: Mapping[str, int] = field(default_factory=dict)
    """Other pools that ask for injection and select pods of this one: number of pods by the pool's name."""
    older_rivals: Sequence[str] = ()
    """Of these, those that are older, and have the injection."""
    namespace_opted_in: bool = True
    """The namespace carries the label that injection needs."""
    installation: str = ""
    """The operator's namespace."""
    crd_problem: str = ""
    """What is wrong with the CRDs that the cluster has, for people."""
    parents: Sequence[Mapping[str, Any]] = ()
    """The pool's `status.parents` as read."""
