"""What an installation of Trimtab knows about itself: images, addresses, secrets. Set once, at the operator's start.

The one rule: plain frozen values that the process's flags fill in; nothing here talks to anybody.
"""

import hashlib
import hmac
from dataclasses import dataclass
from typing import Final

from trimtab_operator.api.pool import PoolKey

MANAGER: Final = "trimtab"
"""Value of `app.kubernetes.io/managed-by` on all that the operator makes, and its field manager."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Install:
    """One installation."""

    namespace: str
    """Where the operator itself runs."""
    store_url: str
    """The shared state, with the operator's own credentials."""
    secret: bytes
    """The install's secret; pools get secrets derived from it, never this one."""
    picker_image: str
    sidecar_image: str
    envoy_image: str
    image_pull_policy: str = "IfNotPresent"
    image_pull_secrets: tuple[str, ...] = ()
    standalone_by_default: bool = True
    """What a policy's `standalone.enabled: null` means."""
    cluster_domain: str = "cluster.local"
    listen_address: str = "0.0.0.0"
    """What a pool's Envoy listens on: `::` takes IPv4 as well, and fails where a node has no IPv6 at all."""
    cluster_uid: str = ""
    """Of this cluster and no other: a copy of it may have the same secret and the same store. Only `run` needs it."""

    def pool_secret(self, key: PoolKey) -> str:
        """Keys the hashes of one pool's prompts. Derived, so that a pool that is made again keeps it."""
        return self._derive("secret", key)

    def store_password(self, key: PoolKey) -> str:
        """Of the pool's ACL user. Derived, so that a pool made again finds its running sidecars logged in."""
        return self._derive("store-password", key)

    def _derive(self, purpose: str, key: PoolKey) -> str:
        return hmac.new(self.secret, f"{purpose}:{key}".encode(), hashlib.sha256).hexdigest()
