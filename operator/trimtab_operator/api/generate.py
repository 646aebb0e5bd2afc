"""Writes what follows from the definitions: our CRD in `crds/`, and the reference pages in `docs/` (`make generate`).

The one rule: the same definitions give the same files, byte for byte, so that a test can hold them against each other.

    python -m trimtab_operator.api.generate [ROOT]
"""

import sys
from pathlib import Path
from typing import Any, Final

import yaml

from trimtab_operator.api.policy_crd import policy_crd
from trimtab_operator.api.reference import reference_page

LINE_LENGTH: Final = 118
POLICY_CRD: Final = "crds/trimtab.dev_schedulingpolicies.yaml"
POOL_CRD: Final = "crds/inference.networking.k8s.io_inferencepools.yaml"
"""By hand; only its page is generated."""


POLICY_SOURCE: Final = (
    "Schema: `crds/trimtab.dev_schedulingpolicies.yaml`. This page is generated from it. A policy that the API server"
    " takes and the operator cannot use gets the condition `Accepted: False`, which names the field; the pool runs on"
    " with what it had."
)
POLICY_EXAMPLE: Final = """\
apiVersion: trimtab.dev/v1alpha1
kind: SchedulingPolicy
metadata:
  name: chat
  namespace: models
spec:
  targetRef:
    name: chat # all the rest has defaults
  sidecar:
    inject: true
  picker:
    replicas: 3
    resources:
      requests: {cpu: "1", memory: 512Mi}
      limits: {memory: 2Gi}
"""
POOL_SOURCE: Final = (
    "The kind is the Gateway API Inference Extension's; a pool that is written for any other endpoint picker works"
    " here. Schema: `crds/inference.networking.k8s.io_inferencepools.yaml`, the standard's own of bundle v1.5.0 in"
    " other words; where the cluster has the standard's, nothing else is needed. A pool is Trimtab's if a"
    " [SchedulingPolicy](reference-schedulingpolicy.md) targets it, or if its picker is named `trimtab-<pool>`."
)
POOL_EXAMPLE: Final = """\
apiVersion: inference.networking.k8s.io/v1
kind: InferencePool
metadata:
  name: chat
  namespace: models
spec:
  selector:
    matchLabels: {app: vllm}
  targetPorts:
    - number: 8000
  endpointPickerRef:
    name: trimtab-chat
    port: {number: 9002}
"""


class _Dumper(yaml.SafeDumper):
    """Lists indented under their key, no anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


def files(root: Path) -> dict[str, str]:
    """What each file is to hold, by its path below the root."""
    policy = policy_crd()
    pool = yaml.safe_load((root / POOL_CRD).read_text())
    return {
        POLICY_CRD: "# Generated from operator/trimtab_operator/api: change it there, then `make generate`.\n"
        + yaml.dump(policy, Dumper=_Dumper, sort_keys=False, width=LINE_LENGTH, allow_unicode=True),
        "docs/reference-schedulingpolicy.md": reference_page(policy, source=POLICY_SOURCE, example=POLICY_EXAMPLE),
        "docs/reference-inferencepool.md": reference_page(pool, source=POOL_SOURCE, example=POOL_EXAMPLE),
    }


def main(root: Path) -> None:
    for name, text in files(root).items():
        path = root / name
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
            print(f"wrote {name}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[3])
