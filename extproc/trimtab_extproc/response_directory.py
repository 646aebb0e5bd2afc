"""Which endpoint made a response, for requests that build on it (`previous_response_id`, `/v1/responses/{id}`).

The one rule: asking never holds a request for long, and telling never holds an exchange at all. The shared state's map
remembers, here and for the other replicas.

Bounds: `PENDING_MAX` ids on their way to the store; beyond that the others do not hear of an id.
"""

import asyncio
import logging
from typing import Protocol

from trimtab_state import StateUnavailable

log = logging.getLogger(__name__)

LOOKUP_TIMEOUT_S = 0.1
PENDING_MAX = 1_024


class ResponseStore(Protocol):
    """The shared state's ResponseMap."""

    async def put(self, response_id: str, endpoint: str) -> None: ...

    async def get(self, response_id: str) -> str | None: ...


class ResponseDirectory:
    """Ids of responses and their endpoints."""

    def __init__(self, store: ResponseStore) -> None:
        self._store = store
        self._pending: set[asyncio.Task[None]] = set()

    def remember(self, response_id: str, endpoint: str) -> None:
        """The endpoint made this response. Returns at once."""
        if len(self._pending) >= PENDING_MAX:
            return
        task = asyncio.get_running_loop().create_task(self._put(response_id, endpoint))
        self._pending.add(task)
        task.add_done_callback(self._pending.discard)

    async def _put(self, response_id: str, endpoint: str) -> None:
        try:
            await self._store.put(response_id, endpoint)
        except StateUnavailable:
            # Remembered in this process; a request that reaches another replica may miss.
            log.debug("a response id could not be shared")

    async def close(self) -> None:
        """Wait until everything remembered has been told."""
        if self._pending:
            await asyncio.wait(self._pending)

    async def endpoint_of(self, response_id: str) -> str | None:
        """The endpoint that made it; None if that is not known in time."""
        try:
            async with asyncio.timeout(LOOKUP_TIMEOUT_S):
                return await self._store.get(response_id)
        except (TimeoutError, StateUnavailable):
            return None
