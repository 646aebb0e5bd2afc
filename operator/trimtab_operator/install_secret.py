"""The install's secret: random, made once, kept in a Secret beside the operator.

The one rule: it is made where there is none and never changed: another one would log every sidecar out and make every
prefix unknown.
"""

import base64
import secrets
from http import HTTPStatus
from typing import Final

from trimtab_operator.ending import EndingError
from trimtab_operator.install import MANAGER
from trimtab_operator.kube import SECRETS, Kube, KubeError, Object

KEY: Final = "secret"
BYTES: Final = 32
BYTES_MIN: Final = 16


class InstallSecretError(EndingError):
    """The Secret is there and holds nothing that can be used. The text names the remedy."""


async def install_secret(kube: Kube, *, namespace: str, name: str) -> bytes:
    """Read, or made by whoever comes first. Raises KubeError, InstallSecretError."""
    found = await kube.get(SECRETS, namespace, name)
    if found is None:
        body: Object = {
            "apiVersion": SECRETS.api_version,
            "kind": SECRETS.kind,
            "type": "Opaque",
            "metadata": {"name": name, "namespace": namespace, "labels": {"app.kubernetes.io/managed-by": MANAGER}},
            "data": {KEY: base64.b64encode(secrets.token_hex(BYTES).encode()).decode()},
        }
        try:
            found = await kube.create(SECRETS, body)
        except KubeError as error:
            if error.status != HTTPStatus.CONFLICT:
                raise
            found = await kube.get(SECRETS, namespace, name) or {}
    secret = base64.b64decode((found.get("data") or {}).get(KEY, "")).strip()
    if len(secret) < BYTES_MIN:
        raise InstallSecretError(
            f"Secret {namespace}/{name} has no key `{KEY}` of at least {BYTES_MIN} bytes: put one there, or delete the"
            " Secret, and a new one is made (sidecars that run must then be restarted)"
        )
    return secret
