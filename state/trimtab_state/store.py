"""The store's client: one small interface whatever the topology.

The one rule: no command is tried again here and no reconnect is hidden for long, because the callers have to know that
the store was away. Every failure of the store, a refused login and a refused command included, is StateUnavailable.
One that hangs is found out once, and then fails everybody at once (`hang_watch`).
"""

import asyncio
import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import redis.asyncio as aioredis
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.credentials import CredentialProvider
from redis.exceptions import RedisClusterException, RedisError, ResponseError

from .direct_client import DirectClient, Refused
from .errors import StateUnavailable
from .hang_watch import NO_REPLY, HangWatch, is_timeout
from .settings import StateSettings
from .store_url import StoreAddress, parse_store_url

Command = tuple[str | bytes | int, ...]

FAILURES = (RedisError, RedisClusterException, OSError, TimeoutError)
"""What the client raises for a store that does not serve."""
DIRECT_FAILURES = (*FAILURES, Refused)
SINGLE = ""
"""The one server, or whoever answers what names no key."""
OTHER_TYPE = "WRONGTYPE"
"""How the server's refusal begins where a key holds another type of value."""
CONNECTIONS_MAX = 16
"""Connections of one client; more commands at once wait for one."""
PROBES_MAX = 1
"""Connections beside them: whether a server still hangs is asked though all others wait for it."""


class Store:
    """A connection pool to the store. Commands go in and replies come out as the client library shapes them (RESP2)."""

    def __init__(
        self,
        address: StoreAddress,
        settings: StateSettings,
        *,
        reply_timeout_s: float | None = None,
        origin: "Store | None" = None,
    ) -> None:
        self.address = address
        self._origin = self if origin is None else origin
        """Asks whether a server hangs, for all that are `dedicated`, and outlives them."""
        self._hangs: HangWatch = HangWatch() if origin is None else origin._hangs
        self._settings = settings
        self._reply_timeout_s = settings.command_timeout_s if reply_timeout_s is None else reply_timeout_s
        self._limit_s = settings.connect_timeout_s + self._reply_timeout_s
        """Of one command in a cluster: while a node hangs, the client library lets one after the other look for it."""
        self._sentinel: Sentinel | None = None
        self._slots = asyncio.Semaphore(CONNECTIONS_MAX)
        self._client: Any = self._connect()
        self._direct = None if address.topology == "cluster" else self._direct_client()

    def __str__(self) -> str:
        return str(self.address)

    def dedicated(self, reply_timeout_s: float) -> "Store":
        """Another client of the same store, for reads that block up to nearly `reply_timeout_s`. Close it yourself."""
        return Store(self.address, self._settings, reply_timeout_s=reply_timeout_s, origin=self._origin)

    async def pause(self, seconds: float) -> None:
        """Before the next try of somebody who failed: it ends early when a store that hung answers again."""
        await self._hangs.pause(seconds)

    async def execute(self, *command: str | bytes | int) -> Any:
        """One command. Raises StateUnavailable."""
        if self._direct is not None:
            await self._check(SINGLE)
            try:
                reply = await self._direct.execute(command)
            except DIRECT_FAILURES as error:
                raise self._failed(SINGLE, error) from error
            self._answered(SINGLE)
            return reply
        cancels, server = _cancels(), self._server(command)
        await self._check(server)
        try:
            async with self._slots:
                await self._check(server)
                async with asyncio.timeout(self._limit_s):
                    reply = await self._client.execute_command(*command)
        except FAILURES as error:
            _heed_cancel(cancels)
            raise self._failed(server, error, key=_key(command)) from error
        _heed_cancel(cancels)
        self._answered(server)
        return reply

    async def batch(
        self, commands: Sequence[Command], *, atomic: bool = False, skips_other_types: bool = False
    ) -> list[Any]:
        """Several commands on one pool's keys in one round trip, `atomic` as one transaction.

        Raises StateUnavailable if any of them fails; without `atomic` the others may have had their effect. With
        `skips_other_types` a key that holds another type of value reads as one that is not there.
        """
        if not commands:
            return []
        if self._direct is not None:
            await self._check(SINGLE)
            try:
                replies = await self._direct.batch(commands, atomic=atomic)
                for index, reply in enumerate(replies):
                    if isinstance(reply, Refused):
                        if not (skips_other_types and str(reply).startswith(OTHER_TYPE)):
                            raise reply
                        replies[index] = None
            except DIRECT_FAILURES as error:
                raise self._failed(SINGLE, error) from error
            self._answered(SINGLE)
            return replies
        cancels, server = _cancels(), self._server(*commands)
        await self._check(server)
        try:
            async with self._slots, self._client.pipeline(transaction=atomic) as pipeline:
                await self._check(server)
                if atomic and isinstance(self._client, RedisCluster):
                    pipeline.multi()
                for command in commands:
                    pipeline.execute_command(*command)
                async with asyncio.timeout(self._limit_s):
                    replies = list(await pipeline.execute(raise_on_error=not skips_other_types))
                if skips_other_types:
                    replies = [_unless_other_type(reply) for reply in replies]
        except FAILURES as error:
            _heed_cancel(cancels)
            raise self._failed(server, error, key=_key(*commands)) from error
        _heed_cancel(cancels)
        self._answered(server)
        return replies

    async def on_each_server(self, *command: str | bytes | int) -> dict[str, Any]:
        """One command on every node of a cluster, replicas too; else on the server that `execute` would ask.

        The reply by the server's address, or the client's exception for one that refused or did not answer. Raises
        StateUnavailable if none of them answered.
        """
        try:
            if isinstance(self._client, RedisCluster):
                async with asyncio.timeout(self._limit_s):
                    await self._client.initialize()
                servers = {node.name: node for node in self._client.get_nodes()}
            else:
                servers = {SINGLE: self._client}
        except FAILURES as error:
            raise self._failed(SINGLE, error) from error
        replies: dict[str, Any] = {}
        for server, client in servers.items():
            cancels, name = _cancels(), server or str(self.address)
            try:
                await self._check(server)
                async with self._slots:
                    await self._check(server)
                    replies[name] = await client.execute_command(*command)
                self._answered(server)
            except StateUnavailable as known:
                replies[name] = known
            except FAILURES as error:
                self._failed(server, error, node=client)
                replies[name] = error
            _heed_cancel(cancels)
        if not any(_has_answered(reply) for reply in replies.values()):
            raise _unavailable(next(iter(replies.values()), RedisError("no server is known")))
        return replies

    async def keys_with_prefix(self, prefix: str, count: int) -> list[bytes]:
        """All keys that start with a pool's prefix, by a scan in steps of `count`. Raises StateUnavailable."""
        pattern = "".join("\\" + c if c in "*?[]\\" else c for c in prefix) + "*"
        server = self._server(("", prefix))
        await self._check(server)
        try:
            async with self._slots:
                await self._check(server)
                found = [key async for key in self._client.scan_iter(match=pattern, count=count)]
        except FAILURES as error:
            raise self._failed(server, error, key=prefix) from error
        self._answered(server)
        return found

    async def close(self) -> None:
        """Closes all connections; never raises."""
        if self._origin is self:
            await self._hangs.close()
        if self._direct is not None:
            self._direct.close()
        try:
            async with asyncio.timeout(self._settings.connect_timeout_s):
                await self._client.aclose()
                for client in self._sentinel.sentinels if self._sentinel is not None else ():
                    await client.aclose()
        except FAILURES:
            return

    # Which servers hang.

    async def _check(self, server: str) -> None:
        if self._hangs.is_any:
            await self._hangs.check(server)

    def _answered(self, server: str) -> None:
        if self._hangs.is_any:
            self._hangs.answered(server)

    def _failed(
        self, server: str, error: Exception, *, key: str | bytes | None = None, node: Any = None
    ) -> StateUnavailable:
        """`key`, or `node`: what to ask a cluster for, to find out whether it still hangs."""

        async def probe() -> None:
            await self._origin._probe(key, node)

        if self._hangs.failed(server, error, probe) and self._direct is not None:
            # Whatever is between us and the server may have forgotten the other connections too.
            self._direct.close()
        return _unavailable(error)

    async def _probe(self, key: str | bytes | None, node: Any) -> None:
        if self._direct is not None:
            await self._client.connection_pool.disconnect(inuse_connections=False)
            await self._direct.probe()
        elif node is not None:
            await node.execute_command("PING")
        else:
            # What every user may ask, of whatever type the value is: a refusal is an answer.
            async with asyncio.timeout(self._limit_s):
                await self._client.execute_command(*(("PING",) if key is None else ("GETRANGE", key, 0, 0)))

    def _server(self, *commands: Command) -> str:
        """Who answers that: of a cluster, the node that holds the first key; SINGLE where that is not known."""
        key = _key(*commands)
        if key is None or not isinstance(self._client, RedisCluster):
            return SINGLE
        try:
            return str(self._client.nodes_manager.get_node_from_slot(self._client.keyslot(key)).name)
        except (*FAILURES, LookupError):
            return SINGLE  # it does not know its nodes yet

    def _direct_client(self) -> DirectClient:
        """For the commands of every request; the client library's own keeps the rare ones, and tells the shapes."""
        address = self.address

        async def host() -> tuple[str, int]:
            if self._sentinel is None:
                return address.hosts[0]
            found: tuple[str, int] = await self._sentinel.discover_master(address.service)
            return found

        return DirectClient(
            address,
            host=None if address.topology == "unix" else host,
            credentials=lambda: _credentials(address),
            tls=_tls_context(address),
            shapes=self._client.response_callbacks,
            connect_timeout_s=self._settings.connect_timeout_s,
            reply_timeout_s=self._reply_timeout_s,
            check=lambda: self._check(SINGLE),
        )

    def _connect(self) -> Any:
        address, settings = self.address, self._settings
        options: dict[str, Any] = {
            "socket_timeout": self._reply_timeout_s,
            "socket_connect_timeout": settings.connect_timeout_s,
            "protocol": 2,
            "health_check_interval": 0,
            "client_name": address.client_name,
        }
        once = Retry(NoBackoff(), 0)
        login, tls = _login(address), _tls(address)
        if address.topology == "cluster":
            nodes = [ClusterNode(host, port) for host, port in address.hosts]
            return RedisCluster(
                startup_nodes=nodes, max_connections=CONNECTIONS_MAX + PROBES_MAX, retry=once, **options, **login, **tls
            )
        options |= {"retry": once}
        if address.topology == "sentinel":
            own = {"username": address.sentinel_username, "password": address.sentinel_password}
            asking = options | own | tls | {"socket_timeout": settings.command_timeout_s}
            self._sentinel = Sentinel(address.hosts, sentinel_kwargs=asking)  # type: ignore[no-untyped-call]
            options |= {"db": address.db, "max_connections": CONNECTIONS_MAX + PROBES_MAX}
            return self._sentinel.master_for(address.service, **options, **login, **tls)
        options |= {"db": address.db, "max_connections": CONNECTIONS_MAX + PROBES_MAX}
        if address.topology == "unix":
            return aioredis.Redis(unix_socket_path=address.path, **options, **login)
        host, port = address.hosts[0]
        return aioredis.Redis(host=host, port=port, **options, **login, **tls)


def connect(url: str, settings: StateSettings | None = None) -> Store:
    """A store for a URL as `store_url` describes them. No I/O yet. Raises ConfigError naming the part that is wrong."""
    return Store(parse_store_url(url), settings or StateSettings())


class _PasswordFile(CredentialProvider):
    """Reads the password at each login, so that a rotated one is picked up."""

    def __init__(self, path: Path, username: str | None) -> None:
        self._path = path
        self._username = username

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        password = self._path.read_text(encoding="utf-8").strip()
        return (self._username, password) if self._username else (password,)

    async def get_credentials_async(self) -> tuple[str] | tuple[str, str]:
        # The client's own does the same and writes a warning into the log.
        return self.get_credentials()


def _credentials(address: StoreAddress) -> tuple[str, ...]:
    """What a login sends; empty: nothing."""
    if address.password_file is not None:
        return _PasswordFile(address.password_file, address.username).get_credentials()
    if address.password is None and address.username is None:
        return ()
    password = address.password or ""
    return (address.username, password) if address.username else (password,)


def _tls_context(address: StoreAddress) -> ssl.SSLContext | None:
    if not address.tls:
        return None
    context = ssl.create_default_context()
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    context.check_hostname = address.check_hostname and address.verify
    context.verify_mode = ssl.CERT_REQUIRED if address.verify else ssl.CERT_NONE
    if address.certfile is not None:
        context.load_cert_chain(address.certfile, address.keyfile)
    if address.ca_certs is not None or address.ca_data is not None:
        context.load_verify_locations(cafile=address.ca_certs, cadata=address.ca_data)
    return context


def _login(address: StoreAddress) -> dict[str, Any]:
    if address.password_file is not None:
        return {"credential_provider": _PasswordFile(address.password_file, address.username)}
    return {"username": address.username, "password": address.password}


def _tls(address: StoreAddress) -> dict[str, Any]:
    if not address.tls:
        return {}
    return {
        "ssl": True,
        "ssl_ca_certs": address.ca_certs,
        "ssl_ca_data": address.ca_data,
        "ssl_certfile": address.certfile,
        "ssl_keyfile": address.keyfile,
        "ssl_check_hostname": address.check_hostname and address.verify,
        "ssl_cert_reqs": "required" if address.verify else "none",
        # Python 3.13 asks by default for extensions that authorities made by hand do not have.
        "ssl_exclude_verify_flags": [ssl.VerifyFlags.VERIFY_X509_STRICT],
    }


def _has_answered(reply: Any) -> bool:
    """A refused command is an answer; a refused login is not, nor is a server that still loads its data."""
    return not isinstance(reply, Exception) or isinstance(reply, ResponseError)


def _unless_other_type(reply: Any) -> Any:
    if isinstance(reply, ResponseError) and str(reply).startswith(OTHER_TYPE):
        return None
    if isinstance(reply, Exception):
        raise reply
    return reply


def _key(*commands: Command) -> str | bytes | None:
    """The first that carries a hash tag, as all our keys do."""
    for command in commands:
        for word in command[1:]:
            if (isinstance(word, str) and "{" in word) or (isinstance(word, bytes) and b"{" in word):
                return word
    return None


def _cancels() -> int:
    task = asyncio.current_task()
    return 0 if task is None else task.cancelling()


def _heed_cancel(before: int) -> None:
    """The client sends through `asyncio.wait_for`, which before Python 3.12 swallows a cancellation that comes together
    with the result: without this a task that reads in a loop could not be stopped."""
    if _cancels() > before:
        raise asyncio.CancelledError


def _unavailable(error: Exception) -> StateUnavailable:
    if isinstance(error, StateUnavailable):
        return error
    if is_timeout(error):
        return StateUnavailable(NO_REPLY)
    # Without the command that the client quotes, which holds packed values.
    text = str(error).rpartition(" of pipeline caused error: ")[2]
    return StateUnavailable(f"{type(error).__name__}: {text or 'no reason given'}"[:300])
