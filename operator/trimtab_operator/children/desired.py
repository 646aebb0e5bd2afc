"""All objects that a pool is to have: the one answer that `apply` brings about.

The one rule: pure. The same pool, policy, installation and store access give the same objects, byte for byte.
"""

from collections.abc import Mapping
from typing import Any

from trimtab_operator.api.policy import PolicySpec
from trimtab_operator.api.pool import Pool
from trimtab_operator.children.endpoints import endpoints_service
from trimtab_operator.children.envoy import envoy_objects
from trimtab_operator.children.labels import APPLIED, INSTALL, keyed_hash
from trimtab_operator.children.picker import picker_objects
from trimtab_operator.children.store_secret import StoreAccess, store_secret
from trimtab_operator.install import Install
from trimtab_operator.kube import Object


def is_standalone(spec: PolicySpec, install: Install) -> bool:
    """Whether the pool has an Envoy of its own."""
    return install.standalone_by_default if spec.standalone.enabled is None else spec.standalone.enabled


def desired(pool: Pool, spec: PolicySpec, install: Install, access: StoreAccess) -> list[Object]:
    """In the order in which they are needed: what pods refer to comes before them."""
    secret = store_secret(pool, access)
    has_envoy = is_standalone(spec, install)
    objects = [
        secret,
        endpoints_service(pool),
        *picker_objects(
            pool,
            spec,
            install,
            is_standalone=has_envoy,
            config_hash=keyed_hash(secret["data"], install.secret),
        ),
    ]
    if has_envoy:
        objects += envoy_objects(pool, spec, install)
    return [_signed(body, install) for body in objects]


def is_as_made(secret: Mapping[str, Any], pool: Pool, install: Install, access: StoreAccess) -> bool:
    """Whether the pool's Secret holds `access` because we have put it there, and nobody else has since."""
    signature: str = _signed(store_secret(pool, access), install)["metadata"]["annotations"][APPLIED]
    return signature == (secret["metadata"].get("annotations") or {}).get(APPLIED)


def _signed(body: Object, install: Install) -> Object:
    body["metadata"]["annotations"][INSTALL] = install.namespace
    body["metadata"]["annotations"][APPLIED] = keyed_hash(body, install.secret)
    return body
