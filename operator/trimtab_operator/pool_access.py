"""A pool's way into the store as it is to be now, whether the store can be asked or not.

The one rule: what was made before is kept up without the store; a Secret that somebody has changed is not believed.
"""

from trimtab_operator.api.pool import Pool
from trimtab_operator.children.desired import is_as_made
from trimtab_operator.children.names import store_secret_name
from trimtab_operator.children.store_secret import StoreAccess, access_in
from trimtab_operator.install import Install
from trimtab_operator.kube import SECRETS, Kube
from trimtab_operator.pool_register import PoolRegister
from trimtab_operator.store.access import AWAY, StoreAccessManager
from trimtab_state import StateUnavailable


class PoolAccess:
    """Of all pools of one operator."""

    def __init__(self, kube: Kube, install: Install, register: PoolRegister, access: StoreAccessManager) -> None:
        self._kube = kube
        self._install = install
        self._register = register
        self._access = access

    async def of(self, pool: Pool) -> tuple[StoreAccess, str]:
        """The pool's way into the store, and what is wrong with the store. Raises KubeError."""
        key = pool.key
        try:
            # First the register, so that nothing is in the store that no sweep would find.
            await self._register.add(key)
            access = await self._access.ensure(key)
        except StateUnavailable as error:
            problem = f"{AWAY}: {error}"
            # What was made by it before is kept up without it.
            access = (
                self._access.last(key, reason=problem)
                or await self._access_made_before(pool, problem)
                or self._access.presumed(key, reason=problem)
            )
            return access, problem
        return access, access.reason

    async def _access_made_before(self, pool: Pool, problem: str) -> StoreAccess | None:
        """As an operator before us has put it into the pool's Secret; None: it has not, or somebody has changed it."""
        secret = await self._kube.get(SECRETS, pool.key.namespace, store_secret_name(pool.key.name))
        access = None if secret is None else access_in(secret, reason=problem)
        if secret is None or access is None or not is_as_made(secret, pool, self._install, access):
            return None
        return access
