"""The rules between fields of a SchedulingPolicy.

The one rule: only what could never work is refused here. What is merely unwise is said in a field's description, and
what depends on other objects (the pool, its pods, the namespace) is a condition.
"""

import re
from decimal import Decimal
from typing import Final

from trimtab_operator.api.patterns import QUALIFIED
from trimtab_operator.api.quantity import amount
from trimtab_operator.api.rules import Rule

PICKER_BYTES: Final = 128 << 20
"""Memory that a picker has besides bodies when it has started, rounded up."""
COPIES_OF_A_BODY: Final = 2
"""The body, and the prompt rendered from it."""

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
