"""Names by which injection is asked for, refused and known again.

The one rule: what stands in users' manifests or on their pods is named here and nowhere else.
"""

from typing import Final

from trimtab_operator.children.labels import INSTALL as INSTALL

INJECT: Final = "trimtab.dev/inject"
"""Label of a namespace (`enabled`) and of a pod (`disabled`)."""
ENABLED: Final = "enabled"
DISABLED: Final = "disabled"
INJECTED: Final = "trimtab.dev/injected"
"""Label of a pod that has the sidecar: `true`."""
ENGINE: Final = "trimtab.dev/engine"
"""Label or annotation of a pod: `vllm` or `sglang`, where its command does not tell. The policy comes first."""
IMAGE_NOTE: Final = "trimtab.dev/sidecar-image"
"""Annotation: the image that was asked for."""
DIGEST_NOTE: Final = "trimtab.dev/sidecar-digest"
"""Annotation: hash of the container that was asked for, so that a second call knows whether the pod has changed."""
LEFT_ALONE_NOTE: Final = "trimtab.dev/not-injected"
"""Annotation of a pod that is left without the sidecar although its pool asks for it: why."""
LEFT_ALONE_CHARS_MAX: Final = 300
MIRROR_NOTE: Final = "kubernetes.io/config.mirror"
"""Annotation of the copy of a pod that a node runs by itself. Such a copy may name no Secret."""
EVICTABLE_VOLUMES_NOTE: Final = "cluster-autoscaler.kubernetes.io/safe-to-evict-local-volumes"
"""The cluster autoscaler's: volumes that need not keep a node alive. Ours must not be what does."""

CONTAINER: Final = "trimtab-sidecar"
STATE_VOLUME: Final = "trimtab-sidecar"
"""The emptyDir with the checkpoint and the drain socket."""
HOME_VOLUME: Final = "trimtab-home"
ACCESS_VOLUME: Final = "trimtab-access"
"""The pool's Secret: optional, since a pod that waits for one is not started, and kept current by the kubelet."""
STATE_PATH: Final = "/var/run/trimtab"
OTHER_STATE_PATH: Final = "/trimtab-state"
"""Where the engine has a volume of its own in that place; with a number, where it has one here too."""
ACCESS_PATH: Final = "/var/run/trimtab-access"
OTHER_ACCESS_PATH: Final = "/trimtab-access"
METRICS_PORT_NAME: Final = "trimtab-metrics"
METRICS_PORT: Final = 9091
