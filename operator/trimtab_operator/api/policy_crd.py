"""The CustomResourceDefinition of SchedulingPolicy, and whether the one in a cluster is as new as this operator.

The one rule: made from the Structs; what is said here is how the kind is named, listed and versioned.
"""

from typing import Any, Final

from trimtab_operator.api.open_api import Schema, structural
from trimtab_operator.api.policy import POLICY_GROUP, POLICY_KIND, POLICY_PLURAL, POLICY_VERSION, spec_schema
from trimtab_operator.api.policy_status import PolicyStatus

CRD_NAME: Final = f"{POLICY_PLURAL}.{POLICY_GROUP}"
SCHEMA_REVISION: Final = 1
"""Raised with each release in which the schema is another: the operator compares it with the cluster's."""
REVISION: Final = "trimtab.dev/schema-revision"
"""Annotation of the CRD."""


def policy_crd() -> dict[str, Any]:
    """As it is applied."""
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": CRD_NAME,
            "annotations": {REVISION: str(SCHEMA_REVISION)},
            "labels": {"app.kubernetes.io/name": "trimtab", "app.kubernetes.io/part-of": "trimtab"},
        },
        "spec": {
            "group": POLICY_GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": POLICY_KIND,
                "listKind": f"{POLICY_KIND}List",
                "plural": POLICY_PLURAL,
                "singular": POLICY_KIND.lower(),
                "shortNames": ["schedpol"],
                "categories": ["trimtab"],
            },
            "versions": [
                {
                    "name": POLICY_VERSION,
                    "served": True,
                    "storage": True,
                    "subresources": {"status": {}},
                    "additionalPrinterColumns": _columns(),
                    "schema": {"openAPIV3Schema": _root()},
                }
            ],
        },
    }


def revision_problem(annotations: dict[str, str] | None) -> str | None:
    """What to tell of the annotations of the cluster's CRD (None: it has no such CRD); None: all is well.

    A newer one is well: it has all that this operator knows.
    """
    remedy = "apply the CRDs of this release: kubectl apply --server-side -f crds/"
    if annotations is None:
        return f"there is no CustomResourceDefinition {CRD_NAME}; {remedy}"
    text = annotations.get(REVISION, "0")
    revision = int(text) if text.isdecimal() else 0
    if revision >= SCHEMA_REVISION:
        return None
    return (
        f"CustomResourceDefinition {CRD_NAME} has revision {revision}, this operator's is {SCHEMA_REVISION}; {remedy}"
    )


def _root() -> Schema:
    return {
        "description": "How the requests of one InferencePool are placed, and how Trimtab's parts for it run. All"
        " but `spec.targetRef` may be left out; a pool without a policy runs with the same defaults.",
        "type": "object",
        "required": ["spec"],
        "properties": {
            "apiVersion": {
                "description": f"Group and version of this object: `{POLICY_GROUP}/{POLICY_VERSION}`.",
                "type": "string",
            },
            "kind": {"description": f"Kind of this object: `{POLICY_KIND}`.", "type": "string"},
            "metadata": {"type": "object"},
            "spec": spec_schema(),
            "status": structural(PolicyStatus, with_defaults=False),
        },
    }


def _columns() -> list[dict[str, Any]]:
    def column(name: str, path: str, type_: str, description: str, *, wide: bool = False) -> dict[str, Any]:
        body = {"name": name, "type": type_, "jsonPath": path, "description": description}
        # Shown with `-o wide` only. A priority of 0 is not said: the server would not keep it, and who applies the same
        # again would be in conflict.
        return body | {"priority": 1} if wide else body

    accepted = '.status.conditions[?(@.type=="Accepted")]'
    return [
        column("Pool", ".spec.targetRef.name", "string", "The pool that the policy is for."),
        column("Mode", ".spec.mode", "string", "How endpoints are to be chosen."),
        column("Active", ".status.activePolicy", "string", "How they are chosen now."),
        column("Ready", ".status.endpoints.ready", "integer", "Endpoints that may be chosen."),
        column("Endpoints", ".status.endpoints.total", "integer", "Endpoints in all."),
        column("Accepted", f"{accepted}.status", "string", "Whether the policy is in force."),
        column("Since", ".status.activeSince", "date", "For how long they are chosen so.", wide=True),
        column("Pickers", ".status.pickers.shown", "string", "Pickers that answer, of how many.", wide=True),
        column("Version", ".status.pickers.version", "string", "What the pickers run.", wide=True),
        column("Reason", f"{accepted}.reason", "string", "Why it is in force or is not.", wide=True),
        column("Age", ".metadata.creationTimestamp", "date", "For how long the policy exists."),
    ]
