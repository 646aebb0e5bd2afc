"""The Secret that the webhook's certificate lives in: `kubernetes.io/tls`, with its CA beside it.

The one rule: what is in a Secret may be anything; a pair comes out only if all its parts are there.
"""

import base64
from collections.abc import Mapping
from typing import Any, Final

from trimtab_operator.injection.authority import ServingPair
from trimtab_operator.install import MANAGER
from trimtab_operator.kube import Object

CERTIFICATE: Final = "tls.crt"
KEY: Final = "tls.key"
CA: Final = "ca.crt"
"""The CA of `tls.crt`, then those that are still trusted."""


def pair_in(secret: Mapping[str, Any] | None) -> ServingPair | None:
    """None: there is none, or not all of it. Without `ca.crt` (whoever brings the Secret may leave it out): no CA."""
    data = (secret or {}).get("data") or {}
    try:
        parts = {name: base64.b64decode(data.get(name) or "", validate=True) for name in (CERTIFICATE, KEY, CA)}
    except (ValueError, TypeError):
        return None
    if not parts[CERTIFICATE] or not parts[KEY]:
        return None
    return ServingPair(certificate=parts[CERTIFICATE], key=parts[KEY], ca=parts[CA])


def secret_of(pair: ServingPair, *, namespace: str, name: str, resource_version: str | None) -> Object:
    """With a resource version: to replace that very state of the Secret."""
    metadata: Object = {
        "name": name,
        "namespace": namespace,
        "labels": {
            "app.kubernetes.io/managed-by": MANAGER,
            "app.kubernetes.io/name": "trimtab-webhook",
            "app.kubernetes.io/component": "webhook",
        },
    }
    if resource_version is not None:
        metadata["resourceVersion"] = resource_version
    values = {CERTIFICATE: pair.certificate, KEY: pair.key, CA: pair.ca}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata,
        "type": "kubernetes.io/tls",
        "data": {key: base64.b64encode(value).decode() for key, value in values.items()},
    }
