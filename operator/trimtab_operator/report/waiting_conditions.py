"""What the status says of requests that wait for a place: in which order, and whether they may wait yet as is asked.

The one rule: as of all conditions: a reason for programs, what was found, and what mends it. Pure.
"""

from trimtab_operator.policy_document import wait_s
from trimtab_operator.report.conditions import Finding
from trimtab_operator.report.pool_facts import PoolFacts
from trimtab_operator.report.wording import plural, sentence, so_many_are


def wait_in_force(facts: PoolFacts) -> Finding | None:
    """None: it is, or none is asked for."""
    if facts.told_wait_s is None or facts.told_wait_s >= wait_s(facts.spec):
        return None
    envoys = facts.envoy or {"spec": {}}
    status, wanted = envoys.get("status") or {}, int(envoys["spec"].get("replicas", 1))
    replaced = int(status.get("updatedReplicas") or 0)
    old = int(status.get("replicas") or 0) - replaced
    ending = f", but {so_many_are(old, 'old Envoy')} still ending" if replaced >= wanted and old > 0 else ""
    now = f"Requests wait for {facts.told_wait_s:.0f} s" if facts.told_wait_s else "Requests are refused at once"
    return (
        "False",
        "EnvoysBeingReplaced",
        f"{now}, and not yet for the {wait_s(facts.spec):.0f} s of spec.whenFull.waitSeconds: the pool's Envoys give up"
        f" before. Replaced are {replaced} of {wanted}{ending}. Where it stays so, see Ready and"
        " Programmed.",
    )


def objectives_read(facts: PoolFacts) -> Finding | None:
    """None: there are none for the pool."""
    if facts.objectives_refusal:
        return (
            "False",
            "NotReadable",
            f"{sentence(facts.objectives_refusal)} InferenceObjectives keep the priorities that were read last, new"
            " ones have 0: apply the operator's roles of this release (manifests/operator-rbac.yaml, or the chart).",
        )
    used, left_out = len(facts.objectives.used), facts.objectives.left_out
    if left_out:
        return (
            "False",
            "TooManyObjectives",
            f"The {used} oldest InferenceObjectives of the pool are in use, which is all that a pool can have;"
            f" {left_out} younger ones count as priority 0. Delete some, or split the pool in two.",
        )
    if not used:
        return None
    found = plural(used, "InferenceObjective")
    if not wait_s(facts.spec) or facts.spec.batch_limit is None:
        return (
            "True",
            "NothingWaits",
            f"{found} of the pool. A priority only orders requests that wait for a place, and none does: set"
            " spec.batchLimit and spec.whenFull.action: Wait.",
        )
    return "True", "ObjectivesRead", f"{found} of the pool in use."
