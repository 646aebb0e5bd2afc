"""The rules between fields of a SchedulingPolicy.

The one rule: only what could never work is refused here. What is merely unwise is said in a field's description, and
what depends on other objects (the pool, its pods, the namespace) is a condition.
"""

import re
from decimal import Decimal
from typing import Any, Final

from trimtab_operator.api.patterns import QUALIFIED
from trimtab_operator.api.quantity import amount
from trimtab_operator.api.rules import Rule

PICKER_BYTES: Final = 128 << 20
"""Memory that a picker has besides bodies when it has started, rounded up."""
COPIES_OF_A_BODY: Final = 2
"""The body, and the prompt rendered from it."""
CONTAINER_RESOURCES: Final = ("cpu", "memory", "ephemeral-storage")
"""Others are hugepages-SIZE, or have a domain before a slash."""


def _are_resources(names: Any) -> bool:
    return all(name in CONTAINER_RESOURCES or name.startswith("hugepages-") or "/" in name for name in names)


def _resource_names(field: str) -> Rule:
    known = ", ".join(f"'{name}'" for name in CONTAINER_RESOURCES)
    return Rule(
        field=f".{field}",
        needs=(field,),
        cel=f"self.{field}.all(name, name in [{known}] || name.startsWith('hugepages-') || name.contains('/'))",
        message=f"expected names of resources: {', '.join(CONTAINER_RESOURCES)}, hugepages-SIZE or example.com/NAME;"
        " correct the name",
        holds=lambda resources: _are_resources(getattr(resources, field)),
    )


RESOURCE_NAMES: Final = (_resource_names("requests"), _resource_names("limits"))

WITHIN_LIMITS: Final = Rule(
    field=".requests",
    needs=("requests", "limits"),
    # What is no quantity is refused by its pattern, which says so better.
    cel="self.requests.all(name, !(name in self.limits) ||"
    " !isQuantity(string(self.requests[name])) || !isQuantity(string(self.limits[name])) ||"
    " quantity(string(self.requests[name])).compareTo(quantity(string(self.limits[name]))) <= 0)",
    message="expected no request above its limit; lower it, or raise the limit of the same name",
    holds=lambda resources: all(
        amount(value) <= amount(resources.limits.get(name, value)) for name, value in resources.requests.items()
    ),
)

MEMORY_HOLDS_A_BODY: Final = Rule(
    field=".resources.limits",
    needs=("resources", "resources.limits", "bodyBytesMax"),
    cel="!('memory' in self.resources.limits) || !isQuantity(string(self.resources.limits['memory'])) ||"
    " quantity(string(self.resources.limits['memory']))"
    f".compareTo(quantity('{PICKER_BYTES}').add({COPIES_OF_A_BODY} * self.bodyBytesMax)) >= 0",
    message=f"expected at least {PICKER_BYTES >> 20}Mi and {COPIES_OF_A_BODY} times bodyBytesMax of memory, or one"
    " large request ends the picker; raise the limit, or lower bodyBytesMax",
    holds=lambda picker: (
        amount(picker.resources.limits.get("memory", "1E"))
        >= Decimal(PICKER_BYTES + COPIES_OF_A_BODY * picker.body_bytes_max)
    ),
)

NODE_LABELS: Final = Rule(
    field=".nodeSelector",
    needs=("nodeSelector",),
    cel=f"self.nodeSelector.all(key, key.matches(r'{QUALIFIED}'))",
    message="expected labels' keys such as kubernetes.io/arch; correct the key",
    holds=lambda pods: all(re.fullmatch(QUALIFIED, key) for key in pods.node_selector),
)

SERVICE_ANNOTATIONS: Final = Rule(
    field=".serviceAnnotations",
    needs=("serviceAnnotations",),
    cel=f"self.serviceAnnotations.all(key, key.matches(r'{QUALIFIED}') && !key.startsWith('trimtab.dev/'))",
    message="expected annotations' keys such as example.com/name, none of trimtab.dev; correct the key",
    holds=lambda standalone: all(
        re.fullmatch(QUALIFIED, key) and not key.startswith("trimtab.dev/") for key in standalone.service_annotations
    ),
)

TOLERATIONS: Final = (
    Rule(
        field=".tolerations",
        needs=("tolerations",),
        cel="self.tolerations.all(t, (has(t.key) && t.key != '') || (has(t.operator) && t.operator == 'Exists'))",
        message="expected a key, or operator Exists, which without a key tolerates every taint; add one of them",
        holds=lambda pods: all(t.get("key") or t.get("operator") == "Exists" for t in pods.tolerations),
    ),
    Rule(
        field=".tolerations",
        needs=("tolerations",),
        cel="self.tolerations.all(t, !has(t.operator) || t.operator != 'Exists' || !has(t.value) || t.value == '')",
        message="expected no value beside operator Exists; remove the value, or make the operator Equal",
        holds=lambda pods: all(t.get("operator") != "Exists" or not t.get("value") for t in pods.tolerations),
    ),
    Rule(
        field=".tolerations",
        needs=("tolerations",),
        cel="self.tolerations.all(t, !has(t.tolerationSeconds) || (has(t.effect) && t.effect == 'NoExecute'))",
        message="expected tolerationSeconds beside effect NoExecute only; make the effect NoExecute, or remove it",
        holds=lambda pods: all(
            "tolerationSeconds" not in t or t.get("effect") == "NoExecute" for t in pods.tolerations
        ),
    ),
)
