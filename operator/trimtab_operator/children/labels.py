"""Labels, annotations and owner references that a pool's children carry, and how the operator knows its own by them.

The one rule: whether an object is ours is decided here and nowhere else, and in doubt it is not.
"""

import hashlib
import hmac
import json
from collections.abc import Mapping
from typing import Any, Final, Literal

from trimtab_operator.api.pool import POOL_GROUP, POOL_KIND, POOL_VERSION, Pool, PoolKey
from trimtab_operator.children.names import label_value
from trimtab_operator.install import MANAGER
from trimtab_operator.kube import Object

Component = Literal["picker", "envoy", "endpoints", "store-access"]

MANAGED_BY: Final = "app.kubernetes.io/managed-by"
POOL_LABEL: Final = "trimtab.dev/pool"
"""Label: the pool's name, cut and hashed where it is too long. Annotation of the same name: the whole of it."""
APPLIED: Final = "trimtab.dev/applied"
"""Annotation: keyed hash of all that the operator asked of the object."""
CONFIG: Final = "trimtab.dev/config"
"""Annotation of pods: keyed hash of what they read at their start, so that a change of it rolls them out."""
INSTALL: Final = "trimtab.dev/install"
"""Annotation: the namespace of the operator that made the object, for clusters with more than one. Pods of pickers and
Envoys have it as a label, by which monitors choose them."""
CHILD_SELECTOR: Final = f"{MANAGED_BY}={MANAGER},{POOL_LABEL}"
"""Label selector of all children of all pools."""


def selector(pool: PoolKey, component: Component) -> dict[str, str]:
    """Labels by which a Deployment knows its pods: immutable, so only what never changes."""
    return {
        "app.kubernetes.io/name": f"trimtab-{component}",
        "app.kubernetes.io/instance": label_value(pool.name),
        "app.kubernetes.io/component": component,
    }


def labels(pool: PoolKey, component: Component) -> dict[str, str]:
    """Of a child, and of its pods."""
    return {**selector(pool, component), MANAGED_BY: MANAGER, POOL_LABEL: label_value(pool.name)}


def metadata(pool: Pool, name: str, component: Component) -> Object:
    """Of a child: it goes when its pool goes."""
    return {
        "name": name,
        "namespace": pool.key.namespace,
        "labels": labels(pool.key, component),
        "annotations": {POOL_LABEL: pool.key.name},
        "ownerReferences": [
            {
                "apiVersion": f"{POOL_GROUP}/{POOL_VERSION}",
                "kind": POOL_KIND,
                "name": pool.key.name,
                "uid": pool.uid,
                "controller": True,
                # True would need a right on the pool's finalizers, and hold the pool back while it is deleted.
                "blockOwnerDeletion": False,
            }
        ],
    }


def keyed_hash(value: object, key: bytes) -> str:
    """Of a JSON value. Keyed, because it stands in the open and a value may hold a password."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()[:32]


def installation_of(child: Mapping[str, Any]) -> str:
    """The namespace of the operator that made the object; empty: it does not say."""
    return str((child["metadata"].get("annotations") or {}).get(INSTALL, ""))


def is_ours(child: Mapping[str, Any], pool: PoolKey, owner_uid: str, installation: str) -> bool:
    """Whether the object was made by the operator for this very pool, or one of that name before it.

    `installation`: the operator's namespace. One whose labels were taken away is still known by its owner; one with our
    labels that another controller owns (a copy), or that another installation has made, is not ours.
    """
    about = child["metadata"]
    if installation_of(child) not in ("", installation):
        return False
    controllers = [owner for owner in about.get("ownerReferences") or () if owner.get("controller")]
    if any(owner.get("kind") != POOL_KIND or owner.get("name") != pool.name for owner in controllers):
        return False
    if any(owner.get("uid") == owner_uid for owner in controllers):
        return True
    found, notes = about.get("labels") or {}, about.get("annotations") or {}
    return (
        found.get(MANAGED_BY) == MANAGER
        and found.get(POOL_LABEL) == label_value(pool.name)
        and notes.get(POOL_LABEL, pool.name) == pool.name
    )
