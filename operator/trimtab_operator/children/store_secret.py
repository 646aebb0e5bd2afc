"""The Secret that gives a pool's pickers and sidecars their way into the store.

The one rule: it holds what belongs to this one pool, and neither the install's secret nor, where the store lets us make
users, the operator's own credentials.
"""

import base64
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from trimtab_operator.api.pool import Pool
from trimtab_operator.children.labels import metadata
from trimtab_operator.children.names import store_secret_name
from trimtab_operator.kube import Object

URL_KEY: Final = "store-url"
SECRET_KEY: Final = "secret"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreAccess:
    """A pool's way into the store."""

    url: str = field(repr=False)
    """With a user's name and password in it."""
    secret: str = field(repr=False)
    """Keys the hashes of the pool's prompts."""
    is_own_user: bool
    """The user may touch this pool's keys only. False: the URL has the operator's own credentials."""
    reason: str = ""
    """Why it could not be looked after now, for people; empty: it was."""
    notes: tuple[str, ...] = ()
    """What whoever runs the pool should know about it, in sentences."""
    evicts: str = ""
    """The store's `maxmemory-policy`, where it evicts keys."""


def store_secret(pool: Pool, access: StoreAccess) -> Object:
    """Keys `store-url` and `secret`."""
    values = {URL_KEY: access.url, SECRET_KEY: access.secret}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata(pool, store_secret_name(pool.key.name), "store-access"),
        "type": "Opaque",
        "data": {key: base64.b64encode(value.encode()).decode() for key, value in values.items()},
    }


def access_in(secret: Mapping[str, Any], *, reason: str) -> StoreAccess | None:
    """What a Secret made by `store_secret` holds, for when the store cannot be asked; None: it is damaged."""
    try:
        url, own_secret = (
            base64.b64decode(secret["data"][key], validate=True).decode() for key in (URL_KEY, SECRET_KEY)
        )
    except (KeyError, TypeError, ValueError):
        return None
    return StoreAccess(url=url, secret=own_secret, is_own_user=f"//{USER_PREFIX}" in url, reason=reason)


def secret_env(pool_name: str) -> list[Object]:
    """The environment of a container that logs in: of pickers, and of sidecars too."""
    name = store_secret_name(pool_name)
    return [
        {"name": "TRIMTAB_STORE", "valueFrom": {"secretKeyRef": {"name": name, "key": URL_KEY}}},
        {"name": "TRIMTAB_SECRET", "valueFrom": {"secretKeyRef": {"name": name, "key": SECRET_KEY}}},
    ]


USER_PREFIX: Final = "trimtab-"
"""Of the store's users that the operator makes."""
