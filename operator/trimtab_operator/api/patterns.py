"""Patterns of names in Kubernetes, and what to call them where one does not match.

The one rule: they mean the same to RE2 (the API server), to Python and to a browser: no look-around, no \\d.
"""

from typing import Final

from trimtab_operator.api.quantity import QUANTITY

_SUBDOMAIN: Final = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"
SUBDOMAIN: Final = f"^{_SUBDOMAIN}$"
"""Name of most objects."""
SUBDOMAIN_OR_EMPTY: Final = f"^$|{SUBDOMAIN}"
LABEL_OR_EMPTY: Final = r"^$|^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
"""Name of a container."""
QUALIFIED: Final = rf"^({_SUBDOMAIN}/)?[A-Za-z0-9]([-A-Za-z0-9_.]{{0,61}}[A-Za-z0-9])?$"
"""Key of a label or a taint."""
QUALIFIED_OR_EMPTY: Final = f"^$|{QUALIFIED}"
LABEL_VALUE: Final = r"^(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?$"
IMAGE: Final = r"^[A-Za-z0-9._:/@-]*$"
"""Characters that an image's name may have; the container runtime knows the rest."""
HEADER_OR_EMPTY: Final = r"^$|^[A-Za-z0-9][-A-Za-z0-9_.]*$"

WORDS: Final = {
    QUANTITY: "an amount such as 500m, 2 or 4Gi",
    SUBDOMAIN: "a name of lower-case letters, digits, '-' and '.'",
    SUBDOMAIN_OR_EMPTY: "a name of lower-case letters, digits, '-' and '.'",
    LABEL_OR_EMPTY: "a name of lower-case letters, digits and '-'",
    QUALIFIED: "a label's key such as example.com/name",
    QUALIFIED_OR_EMPTY: "a label's key such as example.com/name",
    LABEL_VALUE: "a label's value: letters, digits, '-', '_' and '.'",
    HEADER_OR_EMPTY: "a header's name such as x-team",
    IMAGE: "an image such as registry.example/name:tag, without spaces",
}
"""Patterns are shown as they are where they have none."""
