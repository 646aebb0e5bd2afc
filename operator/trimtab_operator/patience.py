"""How long requests may wait in the pickers of a pool while its own Envoys are being replaced.

The one rule: no Envoy gives up sooner than a request may wait. So a longer wait is told to the pickers once every Envoy
that runs was made for it, and Envoys are made for a shorter one once the store holds it. Pure.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from trimtab_operator.api.policy import PolicySpec
from trimtab_operator.children.labels import CONFIG
from trimtab_operator.policy_document import wait_s


def are_replaced(envoys: Mapping[str, Any] | None, config_hash: str) -> bool:
    """Whether all Envoys of this Deployment run with that configuration, or there are none."""
    if envoys is None:
        return True
    template = envoys["spec"]["template"].get("metadata") or {}
    if (template.get("annotations") or {}).get(CONFIG) != config_hash:
        return False
    generation, status = int(envoys["metadata"].get("generation") or 0), envoys.get("status") or {}
    if generation == 1:
        return True
    is_seen = int(status.get("observedGeneration") or 0) >= generation
    return is_seen and int(status.get("updatedReplicas") or 0) == int(status.get("replicas") or 0)


def told_wait_s(spec: PolicySpec, *, before_s: float, is_borne: bool) -> float:
    """What to tell the pickers. `before_s`: what they were told last, `is_borne`: the Envoys are made for what is
    asked."""
    return wait_s(spec) if is_borne else min(wait_s(spec), before_s)


def as_patient_as(spec: PolicySpec, longest_s: float) -> PolicySpec:
    """The same for its Envoys, but they are made for this wait where it is longer than what is asked."""
    if longest_s <= wait_s(spec):
        return spec
    patient = msgspec.structs.replace(spec.when_full, action="Wait", wait_seconds=int(longest_s))
    return msgspec.structs.replace(spec, when_full=patient)
