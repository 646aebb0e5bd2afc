"""Which pools this installation has written to the shared state: so that one deleted in our absence is swept too.

The one rule: only what is in the register is ever swept. A store may serve several installations, and the pools of
another one are nobody's orphans: not even where a whole cluster was copied, its install's secret included.
"""

import hashlib
from collections.abc import Set
from typing import Final

from trimtab_operator.api.pool import PoolKey
from trimtab_operator.install import Install
from trimtab_state import Store

TTL_S: Final = 90 * 86_400
"""How long the register outlives the installation."""


class PoolRegister:
    """A set in the store. All methods raise StateUnavailable."""

    def __init__(self, store: Store, install: Install) -> None:
        self._store = store
        name = hashlib.sha256(install.secret + install.cluster_uid.encode()).hexdigest()[:16]
        self._key = f"trimtab:install:{name}:pools"

    async def add(self, key: PoolKey) -> None:
        await self._store.batch([("SADD", self._key, str(key)), ("EXPIRE", self._key, TTL_S)])

    async def remove(self, key: PoolKey) -> None:
        await self._store.execute("SREM", self._key, str(key))

    async def all(self) -> Set[PoolKey]:
        members = await self._store.execute("SMEMBERS", self._key)
        return {PoolKey(*member.decode().split("/", 1)) for member in members}
