"""The store's client for the commands of every request, where one server answers them all (no cluster).

The one rule: it does what the client library would, with a tenth of the steps: the picker's loop asks the store some
hundred times a second. Where it fails the caller is told, the connection is gone, and the next question opens another.

Replies have the library's shapes (RESP2). Bounds: `CONNECTIONS_MAX` connections; more questions at once wait.
"""

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import hiredis

from .resp_connection import RespConnection, pack
from .store_url import StoreAddress

Command = tuple[str | bytes | int, ...]
Shape = Callable[[Any], Any]

CONNECTIONS_MAX = 16


class Refused(Exception):  # noqa: N818 - the server's answer
    """The server refused a command; the text is its own."""


class DirectClient:
    """`hosts` names the server to connect to, each time anew; None: the address's Unix socket."""

    def __init__(
        self,
        address: StoreAddress,
        *,
        host: Callable[[], Awaitable[tuple[str, int]]] | None,
        credentials: Callable[[], tuple[str, ...]],
        tls: ssl.SSLContext | None,
        shapes: Mapping[str, Shape],
        connect_timeout_s: float,
        reply_timeout_s: float,
        check: Callable[[], Awaitable[None]],
    ) -> None:
        self._address = address
        self._host = host
        self._credentials = credentials
        self._tls = tls
        self._shapes = shapes
        self._connect_timeout_s = connect_timeout_s
        self._reply_timeout_s = reply_timeout_s
        self._check = check
        """Called once more when a question's turn has come: it raises what ends all that waited."""
        self._idle: list[RespConnection] = []
        self._slots = asyncio.Semaphore(CONNECTIONS_MAX)

    async def execute(self, command: Command) -> Any:
        """One command. Raises Refused and OSError."""
        (reply,) = await self._ask(pack((command,)), 1)
        return self._shaped(command, reply)

    async def batch(self, commands: Sequence[Command], *, atomic: bool) -> list[Any]:
        """All replies in the commands' order; a refusal is a Refused among them. Raises OSError, and Refused where a
        transaction was refused as a whole."""
        # One command is a transaction by itself.
        if not atomic or len(commands) == 1:
            replies = await self._ask(pack(commands), len(commands))
        else:
            wrapped = [("MULTI",), *commands, ("EXEC",)]
            *queued, replies = await self._ask(pack(wrapped), len(wrapped))
            refused = next((reply for reply in queued if isinstance(reply, hiredis.ReplyError)), None)
            if refused is not None or not isinstance(replies, list):
                raise Refused(str(refused or replies))
        return [
            Refused(str(reply)) if isinstance(reply, hiredis.ReplyError) else self._shape(command, reply)
            for command, reply in zip(commands, replies, strict=True)
        ]

    async def probe(self) -> None:
        """Asks something over a connection of its own, beside all others. Raises Refused and OSError."""
        connection = await self._open()
        try:
            await connection.ask(pack((("PING",),)), 1, self._reply_timeout_s)
        finally:
            connection.close()

    def close(self) -> None:
        """Closes what is idle, and what is in use once it is answered."""
        closed, self._idle = self._idle, []
        for connection in closed:
            connection.close()

    async def _ask(self, packed: bytes, replies: int) -> list[Any]:
        is_late = self._slots.locked()
        async with self._slots:
            if is_late:
                await self._check()
            idle = self._idle
            connection = self._take() or await self._open()
            found = await connection.ask(packed, replies, self._reply_timeout_s)
        if any(isinstance(reply, hiredis.ReplyError) and _is_elsewhere(str(reply)) for reply in found):
            # Not the server that it was: ask anew where it is.
            connection.close()
            self.close()
        elif idle is not self._idle:
            connection.close()
        elif connection.is_open:
            idle.append(connection)
        return found

    def _take(self) -> RespConnection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
        return None

    async def _open(self) -> RespConnection:
        async with asyncio.timeout(self._connect_timeout_s):
            if self._host is None:
                connection = await RespConnection.open_unix(self._address.path)
            else:
                connection = await RespConnection.open_tcp(*await self._host(), self._tls)
        greetings: list[Command] = []
        if credentials := self._credentials():
            greetings.append(("AUTH", *credentials))
        if self._address.client_name:
            greetings.append(("CLIENT", "SETNAME", self._address.client_name))
        if self._address.db:
            greetings.append(("SELECT", self._address.db))
        if greetings:
            replies = await connection.ask(pack(greetings), len(greetings), self._reply_timeout_s)
            for reply in replies:
                if isinstance(reply, hiredis.ReplyError):
                    connection.close()
                    raise Refused(str(reply))
        return connection

    def _shaped(self, command: Command, reply: Any) -> Any:
        if isinstance(reply, hiredis.ReplyError):
            raise Refused(str(reply))
        return self._shape(command, reply)

    def _shape(self, command: Command, reply: Any) -> Any:
        shape = self._shapes.get(command[0])  # type: ignore[arg-type]
        return reply if shape is None else shape(reply)


def _is_elsewhere(error: str) -> bool:
    return error.startswith(("READONLY", "LOADING", "MASTERDOWN", "NOAUTH"))
