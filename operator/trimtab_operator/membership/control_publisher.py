"""Puts a pool's members and policy into the shared state as one control document.

The one rule: the newest document wins, and none is written before both members and policy are known: an operator that
was away must not begin by making a pool smaller than it is.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from trimtab_operator.membership.endpoints import Members
from trimtab_state import (
    CodecError,
    ControlDocument,
    ControlWriter,
    Policy,
    PoolKeys,
    StateUnavailable,
    Store,
)
from trimtab_state.documents import decode_control

logger = logging.getLogger(__name__)

RETRY_S: Final = 0.5


class ControlPublisher:
    """Of one pool. `run` writes; the setters only note what is to be written. `on_written`: the store has it."""

    def __init__(self, store: Store, keys: PoolKeys, *, on_written: Callable[[], None] = lambda: None) -> None:
        self.version = 0
        """Of the document that the store holds; 0: none of ours yet."""
        self.longest_wait_s = 0.0
        """For which pickers may let requests wait, by what the store holds, or may hold."""
        self.told: Policy | None = None
        """Of the newest document that the store is known to have taken; None: of none."""
        self._on_written = on_written
        self._store = store
        self._keys = keys
        self._writer = ControlWriter(store, keys)
        self._members: Members | None = None
        self._policy: Policy | None = None
        self._wanted = asyncio.Event()

    @property
    def connected(self) -> bool:
        """The store holds the newest document."""
        return self._writer.connected and not self._wanted.is_set()

    def set_members(self, members: Members) -> None:
        if self._members is None or self._members.endpoints != members.endpoints:
            self._wanted.set()
        self._members = members

    def set_policy(self, policy: Policy) -> None:
        if self._policy != policy:
            self._wanted.set()
        self._policy = policy

    async def stored_policy(self) -> Policy | None:
        """Of the document that an operator before us has left. Raises StateUnavailable."""
        data = await self._store.execute("GET", self._keys.control)
        try:
            policy = None if data is None else decode_control(data).policy
            self.longest_wait_s = 0.0 if policy is None else policy.overflow.wait_s
            self.told = policy
            return policy
        except CodecError as error:
            logger.warning("the control document of %s/%s: %s", self._keys.namespace, self._keys.name, error)
            return None

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._writer.run())
            while True:
                await self._wanted.wait()
                self._wanted.clear()
                members, policy = self._members, self._policy
                if members is None or policy is None:
                    continue
                document = ControlDocument(
                    namespace=self._keys.namespace,
                    name=self._keys.name,
                    endpoints=members.endpoints,
                    policy=policy,
                )
                wait_s = policy.overflow.wait_s
                self.longest_wait_s = max(self.longest_wait_s, wait_s)
                try:
                    self.version = await self._writer.put(document)
                    self.longest_wait_s = wait_s
                    self.told = policy
                    self._on_written()
                except StateUnavailable:
                    # The writer goes on trying by itself and says so in the log; the version is for us to learn.
                    self._wanted.set()
                    await asyncio.sleep(RETRY_S)
