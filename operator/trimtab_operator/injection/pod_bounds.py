"""How much of a pod is looked at, and how much the API server lets it become.

The one rule: beyond a bound the pod is left as it is, with a reason: reading it would hold up all others, or what is
added would have it refused.
"""

from collections.abc import Mapping
from typing import Any, Final

from trimtab_operator.injection.outcome import Skip

REVIEW_BYTES_MAX: Final = 1 << 20
"""Of a request: the pod, and a little around it. The store takes objects of 1.5 MiB, and who manages which of its
fields is written into the pod yet."""
PATCH_BYTES_MAX: Final = 256 << 10
"""A pod is not made larger by more than this."""
NOTES_BYTES_MAX: Final = 256 << 10
"""Names and values of all annotations of an object; the API server's bound."""
MOUNT_PATHS_CHARS_MAX: Final = 64 << 10
"""Of all containers' mounts together: each part of a path is looked at."""
CONTAINERS_MAX: Final = 100
VOLUMES_MAX: Final = 1_000
ENTRIES_MAX: Final[Mapping[str, int]] = {
    "volumeMounts": 1_000,
    "ports": 1_000,
    "env": 2_000,
    "envFrom": 1_000,
    "command": 10_000,
    "args": 10_000,
}
"""In all containers together."""


def beyond_bounds(pod_spec: Mapping[str, Any]) -> Skip | None:
    """None: it may be looked at."""
    containers = [*(pod_spec.get("initContainers") or ()), *(pod_spec.get("containers") or ())]
    counts = [("containers", len(containers), CONTAINERS_MAX)]
    counts.append(("volumes", len(pod_spec.get("volumes") or ()), VOLUMES_MAX))
    for name, most in ENTRIES_MAX.items():
        counts.append((name, sum(len(container.get(name) or ()) for container in containers), most))
    mounts = [mount for container in containers for mount in container.get("volumeMounts") or ()]
    chars = sum(len(str(mount.get("mountPath", ""))) for mount in mounts)
    counts.append(("characters of mountPath", chars, MOUNT_PATHS_CHARS_MAX))
    for name, count, most in counts:
        if count > most:
            return Skip("too_large", f"the pod has {count} {name}, more than the {most} that are looked at")
    return None


def notes_bytes(notes: Mapping[str, str]) -> int:
    """As the API server counts them."""
    return sum(len(name.encode()) + len(value.encode()) for name, value in notes.items())
