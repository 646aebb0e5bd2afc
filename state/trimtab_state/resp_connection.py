"""One connection to a Redis-compatible server, with as little between a command and its reply as can be.

The one rule: one question at a time; whatever goes wrong with it (no reply in time, a caller that no longer waits, a
lost connection) closes the connection, so that a late reply is never taken for another question's.

It must not know what commands mean, nor connect again.
"""

import asyncio
import ssl
from collections.abc import Sequence
from typing import Any, cast

import hiredis

REPLIES_MAX = 1 << 20
"""Replies that nobody asked for are a fault of the server; so many of them end the connection."""


class RespConnection(asyncio.Protocol):
    """Open one with `open_tcp` or `open_unix`. The server's errors are `hiredis.ReplyError`s among the replies."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._reader = hiredis.Reader()
        self._replies: list[Any] = []
        self._wanted = 0
        self._waiter: asyncio.Future[list[Any]] | None = None
        self._loop = asyncio.get_running_loop()

    @classmethod
    async def open_tcp(cls, host: str, port: int, tls: ssl.SSLContext | None) -> "RespConnection":
        """Raises OSError."""
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(cls, host, port, ssl=tls)
        return connection

    @classmethod
    async def open_unix(cls, path: str) -> "RespConnection":
        """Raises OSError."""
        _, connection = await asyncio.get_running_loop().create_unix_connection(cls, path)
        return connection

    @property
    def is_open(self) -> bool:
        """Whether it can be asked."""
        return self._transport is not None

    async def ask(self, packed: bytes, replies: int, timeout_s: float) -> list[Any]:
        """Sends packed commands and returns that many replies. Raises OSError (TimeoutError is one)."""
        if self._transport is None:
            raise ConnectionError("the connection is closed")
        waiter = self._waiter = self._loop.create_future()
        self._wanted = replies
        timer = self._loop.call_later(timeout_s, self._give_up, waiter)
        self._transport.write(packed)
        is_answered = False
        try:
            found: list[Any] = await waiter
            is_answered = True
            return found
        finally:
            timer.cancel()
            self._waiter = None
            if not is_answered:
                self.close()

    def close(self) -> None:
        """Idempotent."""
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.abort()

    def _give_up(self, waiter: "asyncio.Future[list[Any]]") -> None:
        if not waiter.done():
            waiter.set_exception(TimeoutError("no reply in time"))

    # asyncio.Protocol.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are none of asyncio's classes.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        reader, replies = self._reader, self._replies
        try:
            reader.feed(data)
            while (reply := reader.gets()) is not False:
                replies.append(reply)
        except hiredis.ProtocolError as error:
            self.connection_lost(ConnectionError(f"the server's reply cannot be read: {error}"))
            return
        waiter = self._waiter
        if waiter is None or len(replies) > REPLIES_MAX:
            self.connection_lost(ConnectionError("the server answers what was not asked"))
        elif len(replies) >= self._wanted and not waiter.done():
            self._replies = replies[self._wanted :]
            waiter.set_result(replies[: self._wanted] if self._replies else replies)

    def connection_lost(self, error: Exception | None) -> None:
        self.close()
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_exception(error if isinstance(error, OSError) else ConnectionError("the connection was lost"))


def pack(commands: Sequence[tuple[str | bytes | int, ...]]) -> bytes:
    """Commands as the server reads them."""
    return b"".join([hiredis.pack_command(command) for command in commands])  # type: ignore[arg-type]
