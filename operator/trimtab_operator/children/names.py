"""Names of a pool's children.

The one rule: a name depends on the pool's name alone, is a name that a Service may have (63 characters, no dots), and
no two children of one kind ever share one, whatever their pools are called. The pickers' Service is `trimtab-POOL`, so
that of a pool `chat-envoy` would have the name of the Envoy of pool `chat`: it is the picker's that gives way. What was
cut off or changed is replaced by a hash; and a name that ends as if it had one gets one too, so that nobody can take
another's.
"""

import hashlib
import re
from typing import Final

NAME_PREFIX: Final = "trimtab-"
NAME_CHARS_MAX: Final = 63
"""Of a Service, whose name is a DNS label; of a label's value too."""
HASH_CHARS: Final = 8
_HASHED: Final = re.compile(rf"-[0-9a-f]{{{HASH_CHARS}}}$")
"""How a name ends that was changed."""
ENVOY_SUFFIX: Final = "-envoy"
ENDPOINTS_SUFFIX: Final = "-endpoints"
STORE_SUFFIX: Final = "-store"


def child_name(pool_name: str, suffix: str = "") -> str:
    """`trimtab-` + POOL + suffix; where that is no Service name, or may be another pool's: with a hash of the name."""
    stem = pool_name.replace(".", "-")
    room = NAME_CHARS_MAX - len(NAME_PREFIX) - len(suffix)
    is_anothers = not suffix and stem.endswith((ENVOY_SUFFIX, ENDPOINTS_SUFFIX))
    if stem != pool_name or len(stem) > room or is_anothers or _HASHED.search(stem):
        stem = f"{stem[: room - HASH_CHARS - 1].rstrip('-')}-{_hash(pool_name)}"
    return f"{NAME_PREFIX}{stem}{suffix}"


def label_value(pool_name: str) -> str:
    """The pool's name as a label's value: cut and hashed where it is too long, or may be another's. Dots may stay."""
    if len(pool_name) <= NAME_CHARS_MAX and not _HASHED.search(pool_name):
        return pool_name
    return f"{re.sub(r'[-.]+$', '', pool_name[: NAME_CHARS_MAX - HASH_CHARS - 1])}-{_hash(pool_name)}"


def picker_name(pool_name: str) -> str:
    """Of the pickers' Deployment, Service and PodDisruptionBudget: what the pool's `endpointPickerRef` is to name."""
    return child_name(pool_name)


def envoy_name(pool_name: str) -> str:
    """Of all that belongs to the pool's own Envoy."""
    return child_name(pool_name, ENVOY_SUFFIX)


def endpoints_name(pool_name: str) -> str:
    """Of the headless Service over the pool's pods."""
    return child_name(pool_name, ENDPOINTS_SUFFIX)


def store_secret_name(pool_name: str) -> str:
    """Of the Secret with the pool's way into the store. Pools have no other Secret, so nothing can be called alike."""
    return child_name(pool_name, STORE_SUFFIX)


def _hash(pool_name: str) -> str:
    return hashlib.sha256(pool_name.encode()).hexdigest()[:HASH_CHARS]
