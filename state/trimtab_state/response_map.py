"""Which endpoint made a response: for requests that build on one that lives in one engine's memory.

The one rule: bounded three ways, by time to live, by a number in the store, and by a number in this process; what fell
out is answered with None, and the request is routed by load.
"""

from collections import OrderedDict

from .keys import PoolKeys
from .settings import StateSettings
from .store import Store


class ResponseMap:
    """One per replica."""

    def __init__(self, store: Store, keys: PoolKeys, *, settings: StateSettings | None = None) -> None:
        self._store = store
        self._keys = keys
        self._settings = settings or StateSettings()
        self._cached: OrderedDict[str, str] = OrderedDict()

    async def put(self, response_id: str, endpoint: str) -> None:
        """Remembered in this process at once. Raises StateUnavailable: the other replicas will not know."""
        key = self._keys.response(response_id)
        self._remember(key, endpoint)
        ttl_ms, order = int(self._settings.response_ttl_s * 1000), self._keys.response_order
        replies = await self._store.batch(
            [("SET", key, endpoint, "PX", ttl_ms), ("RPUSH", order, key), ("PEXPIRE", order, ttl_ms)], atomic=True
        )
        excess = replies[1] - self._settings.responses_max
        if excess > 0:
            oldest = await self._store.execute("LPOP", order, excess)
            if oldest:
                await self._store.execute("DEL", *oldest)

    async def get(self, response_id: str) -> str | None:
        """From this process's memory, else from the store. Raises StateUnavailable."""
        key = self._keys.response(response_id)
        known = self._cached.get(key)
        if known is not None:
            self._cached.move_to_end(key)
            return known
        found = await self._store.execute("GET", key)
        if found is None:
            return None
        endpoint = str(found, "utf-8", "replace")
        self._remember(key, endpoint)
        return endpoint

    def _remember(self, key: str, endpoint: str) -> None:
        self._cached[key] = endpoint
        self._cached.move_to_end(key)
        if len(self._cached) > self._settings.responses_cached_max:
            self._cached.popitem(last=False)
