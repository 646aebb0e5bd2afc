"""The operator's voice: the control document of a pool.

The one rule: what was put stays in the store for as long as `run` runs, whatever happens to the store.
"""

import asyncio
import logging

import msgspec

from .backoff import Backoff
from .documents import ControlDocument, decode_control, encode
from .errors import CodecError, StateUnavailable
from .generation import Generation
from .keys import PoolKeys
from .notices import Notice, notify
from .outage_log import OutageLog
from .settings import StateSettings
from .store import Command, Store

log = logging.getLogger(__name__)

SCAN_COUNT = 500


class ControlWriter:
    """One per pool and operator."""

    def __init__(self, store: Store, keys: PoolKeys, *, settings: StateSettings | None = None) -> None:
        self.connected = False
        """The store holds the document."""
        self._store = store
        self._keys = keys
        self._settings = settings or StateSettings()
        self._generation = Generation(keys, self._settings)
        self._document: ControlDocument | None = None
        self._stored: bytes | None = None
        self._writing = asyncio.Lock()
        self._wake = asyncio.Event()

    async def put(self, document: ControlDocument) -> int:
        """Makes it the pool's document; the version is set here. Followers are told only if anything else changed.

        Returns the version. Raises StateUnavailable, and then `run` sends it as soon as it can.
        """
        self._document = document
        self._wake.set()
        return await self._write()

    async def run(self) -> None:
        """Writes the document again whenever the store does not hold it. Until cancelled."""
        backoff = Backoff(self._settings.backoff_min_s, self._settings.backoff_max_s)
        outage = OutageLog(f"the control document of {self._keys.namespace}/{self._keys.name} waits")
        while True:
            self._wake.clear()
            try:
                if self._document is not None:
                    await self._write()
            except StateUnavailable as error:
                self.connected = False
                outage.failed(error)
                await self._store.pause(backoff.next_s())
                continue
            backoff.reset()
            outage.over()
            try:
                async with asyncio.timeout(self._settings.control_refresh_s):
                    await self._wake.wait()
            except TimeoutError:
                pass

    async def delete_pool(self) -> None:
        """Removes every key of the pool, for one that was deleted; `run` must have ended. Raises StateUnavailable."""
        self._document = None
        for key in await self._store.keys_with_prefix(self._keys.prefix, SCAN_COUNT):
            await self._store.execute("DEL", key)

    async def sweep(self) -> int:
        """Takes endpoints out of the set whose heartbeat is gone. Returns how many. Raises StateUnavailable."""
        members = sorted(await self._store.execute("SMEMBERS", self._keys.endpoints))
        if not members:
            return 0
        names = [member.decode("utf-8", "replace") for member in members]
        beats = await self._store.execute("MGET", *(self._keys.heartbeat(name) for name in names))
        gone = [member for member, beat in zip(members, beats, strict=True) if beat is None]
        if gone:
            await self._store.execute("SREM", self._keys.endpoints, *gone)
        return len(gone)

    async def _write(self) -> int:
        async with self._writing:
            document = self._document
            assert document is not None
            found = (await self._store.batch([*self._generation.commands(), ("GET", self._keys.control)]))[-1]
            stored = _parsed(found)
            is_current = stored is not None and msgspec.structs.replace(document, version=stored.version) == stored
            if stored is not None and is_current and self._stored in (None, found):
                self._stored = found
                await self._store.execute("PEXPIRE", self._keys.control, _ms(self._settings.control_ttl_s))
                self.connected = True
                return stored.version
            before = [d.version for d in (stored, _parsed(self._stored)) if d is not None]
            version = max(before, default=0) + 1
            data = encode(msgspec.structs.replace(document, version=version))
            commands: list[Command] = [
                ("SET", self._keys.control, data, "PX", _ms(self._settings.control_ttl_s)),
                notify(self._keys, self._settings, Notice.CONTROL),
                ("PEXPIRE", self._keys.notify, _ms(self._settings.stream_ttl_s)),
            ]
            await self._store.batch(commands, atomic=True)
            self._stored = data
            self.connected = True
            return version


def _parsed(data: bytes | None) -> ControlDocument | None:
    if data is None:
        return None
    try:
        return decode_control(data)
    except CodecError as error:
        log.warning("the stored control document is malformed and is written anew: %s", error)
        return None


def _ms(seconds: float) -> int:
    return int(seconds * 1000)
