"""Gives each pool a user of its own in the store, and looks after these users, which a store forgets when it restarts.

The one rule: a pool's parts get the operator's own credentials only where the store refuses to make users, and then the
reason is told. This module must not know how the credentials reach the pool.
"""

import asyncio
import contextlib
import logging
import math
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import Any, Final

from redis.exceptions import NoPermissionError, ResponseError

from trimtab_operator.api.pool import PoolKey
from trimtab_operator.children.store_secret import StoreAccess
from trimtab_operator.install import Install
from trimtab_operator.store.eviction import SAFE, evicting_policy
from trimtab_operator.store.login import as_given, files_left_out, with_login
from trimtab_operator.store.pool_user import user_name, user_rules
from trimtab_state import StateUnavailable, Store

log = logging.getLogger(__name__)

LOOK_AFTER_S: Final = 5.0
"""How often it is looked whether the users are still there: for so long a restarted store refuses pickers."""
EVICTION_S: Final = 60.0
"""How often the store is asked whether it evicts keys, at most."""
REASON_CHARS_MAX: Final = 200
AWAY: Final = "the store is away"
_NOT: Final = r"(not (available|support(ed)?|allowed|permitted|enabled)(?! when| under)|disabled|blocked|restricted)"
_NO_USERS: Final = re.compile(
    r"(ERR )?(unknown (sub)?command|unsupported command|error in acl setuser"
    rf"|(this )?command.{{0,60}} {_NOT}|acl.{{0,60}} {_NOT}"
    r"|.{0,40}((maximum|max|too many)( number of)?|(limit|quota) (of|on|for)) (acl )?users"
    r"|.{0,40}\busers? (limit|quota))",
    re.IGNORECASE,
)
"""How servers say that they have no users, or not such ones, or no more of them: Redis and Valkey, and hosted ones,
which mostly let users be made in a console only. Whatever else they say (BUSY, MISCONF, READONLY, ...) is over some
time, and says nothing about users; what the client library knows by a class of its own is of that kind too."""


class UserRefusedError(Exception):
    """The store does not let the operator make users: the text says why."""


@dataclass(slots=True)
class _Turn:
    """Who works on one pool's user, and how many want to."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    waiting: int = 0


class StoreAccessManager:
    """One per operator. `store` is logged in as the operator, at `install.store_url`."""

    def __init__(self, store: Store, install: Install) -> None:
        self._store = store
        self._install = install
        self._seen: dict[PoolKey, dict[str, str]] = {}
        """By pool and server: the user as the server describes it, after it was made."""
        self._known: dict[PoolKey, StoreAccess] = {}
        """The last answers."""
        self._turns: dict[PoolKey, _Turn] = {}
        """Of pools that are worked on now."""
        self._evicts, self._asked_s = "", -math.inf

    async def ensure(self, key: PoolKey) -> StoreAccess:
        """The pool's way into the store; its user is there and as it should be. Raises StateUnavailable."""
        async with self._turn(key):
            return await self._ensure(key)

    def last(self, key: PoolKey, *, reason: str) -> StoreAccess | None:
        """The last answer of `ensure`, for when there is no other; None: there was none."""
        known = self._known.get(key)
        return None if known is None else replace(known, reason=reason)

    def presumed(self, key: PoolKey, *, reason: str) -> StoreAccess:
        """What `ensure` will most likely answer: nearly every store lets us make users."""
        return replace(self._own(key), reason=reason)

    async def drop(self, key: PoolKey) -> None:
        """The pool is gone: its user goes, and is logged out. Raises StateUnavailable."""
        async with self._turn(key):
            self.forget(key)
            with contextlib.suppress(UserRefusedError):  # then there is none
                _refused(await self._store.on_each_server("ACL", "DELUSER", user_name(key)))

    def forget(self, key: PoolKey) -> None:
        """The pool is another installation's: its user is no longer looked after, and stays as it is."""
        self._seen.pop(key, None)
        self._known.pop(key, None)

    async def run(self) -> None:
        """Makes users again that a server has lost. Until cancelled."""
        while True:
            await asyncio.sleep(LOOK_AFTER_S)
            try:
                await self.look_after()
            except StateUnavailable as error:
                log.debug("users are not looked after: %s", error)

    async def look_after(self) -> int:
        """One round of `run`; returns how many pools' users had to be made again.

        Raises StateUnavailable, once all others have had their turn.
        """
        if not self._seen:
            return 0
        replies = await self._store.on_each_server("ACL", "USERS")
        present = {server: set(map(_text, users)) for server, users in replies.items() if isinstance(users, list)}
        lost = [key for key in list(self._seen) if any(user_name(key) not in names for names in present.values())]
        made = 0
        failure: StateUnavailable | None = None
        for key in lost:
            async with self._turn(key):
                # Dropped while others were made again: its user is not to come back.
                if key in self._seen:
                    log.warning("the store has lost the user of pool %s: it is made again", key)
                    try:
                        await self._ensure(key)
                    except StateUnavailable as error:
                        failure = error
                    else:
                        made += 1
        if failure is not None:
            raise failure
        return made

    @contextlib.asynccontextmanager
    async def _turn(self, key: PoolKey) -> AsyncIterator[None]:
        """One at a time for each pool: what is under way when a pool is dropped ends before its user goes."""
        turn = self._turns.setdefault(key, _Turn())
        turn.waiting += 1
        try:
            async with turn.lock:
                yield
        finally:
            turn.waiting -= 1
            if not turn.waiting:
                del self._turns[key]

    async def _ensure(self, key: PoolKey) -> StoreAccess:
        try:
            await self._ensure_user(key)
        except UserRefusedError as refusal:
            self._seen.pop(key, None)
            access = self._shared(key, str(refusal))
        else:
            access = self._own(key)
        access = replace(access, evicts=await self._eviction())
        self._known[key] = access
        return access

    async def _ensure_user(self, key: PoolKey) -> None:
        name, seen = user_name(key), self._seen.get(key, {})
        found = await self._described(name)
        if found and all(found[server] is not None and found[server] == seen.get(server) for server in found):
            return
        await self._make(key, name)
        self._seen[key] = {server: text for server, text in (await self._described(name)).items() if text is not None}

    async def _make(self, key: PoolKey, name: str) -> None:
        password = self._install.store_password(key)
        try:
            _refused(await self._store.on_each_server("ACL", "SETUSER", name, *user_rules(key, password)))
        except UserRefusedError:
            # An older server may know fewer commands.
            rules = user_rules(key, password, with_optional=False)
            _refused(await self._store.on_each_server("ACL", "SETUSER", name, *rules))

    async def _described(self, name: str) -> dict[str, str | None]:
        """The user by server, as text to compare; None where it is not there. Servers that are away are left out."""
        replies = _refused(await self._store.on_each_server("ACL", "GETUSER", name))
        return {server: None if reply is None else repr(reply) for server, reply in replies.items()}

    async def _eviction(self) -> str:
        now_s = asyncio.get_running_loop().time()
        if now_s - self._asked_s >= EVICTION_S:
            self._asked_s = now_s
            with contextlib.suppress(StateUnavailable):  # asked again in a while
                before, self._evicts = self._evicts, await evicting_policy(self._store)
                if self._evicts and self._evicts != before:
                    log.warning("the store evicts keys (maxmemory-policy %s): set it to %s", self._evicts, SAFE)
        return self._evicts

    def _own(self, key: PoolKey) -> StoreAccess:
        install = self._install
        return self._access(
            key,
            with_login(install.store_url, user_name(key), install.store_password(key)),
            is_own_user=True,
        )

    def _shared(self, key: PoolKey, refusal: str) -> StoreAccess:
        return self._access(key, as_given(self._install.store_url), is_own_user=False, refusal=refusal)

    def _access(self, key: PoolKey, url: str, *, is_own_user: bool, refusal: str = "") -> StoreAccess:
        notes = []
        if refusal:
            notes.append(
                f"The store refuses users for pools ({refusal}), so the pool's parts have the operator's own"
                " credentials, which reach every pool's keys."
            )
        if files := files_left_out(url):
            notes.append(
                f"Files named by {', '.join(files)} must be in the pool's containers too, under the same path."
            )
        return StoreAccess(
            url=url,
            secret=self._install.pool_secret(key),
            is_own_user=is_own_user,
            notes=tuple(notes),
        )


def _refused(replies: dict[str, Any]) -> dict[str, Any]:
    """The replies of the servers that answered. Raises UserRefusedError if one of them makes no users, and
    StateUnavailable if none of them can do anything now."""
    answered = {}
    unable = ""
    for server, reply in replies.items():
        if isinstance(reply, ResponseError):
            text = f"{reply}"[:REASON_CHARS_MAX]
            is_plain = type(reply) is ResponseError
            if isinstance(reply, NoPermissionError) or (is_plain and _NO_USERS.match(text)):
                raise UserRefusedError(text)
            unable = f"{type(reply).__name__}: {text}"
        elif not isinstance(reply, Exception):
            answered[server] = reply
    if not answered:
        raise StateUnavailable(unable or "no server answered")
    return answered


def _text(name: Any) -> str:
    return name.decode("utf-8", "replace") if isinstance(name, bytes) else str(name)
