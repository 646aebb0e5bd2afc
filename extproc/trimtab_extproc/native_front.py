"""The native front: a listening socket and its connections, all in the event loop's own thread.

The one rule: it only accepts and counts; what happens on a connection is `native_connection`'s.

Bounds: `CONNECTIONS_MAX` connections; more are closed at once.
"""

import asyncio
import logging
import socket
from collections.abc import Callable

from trimtab_extproc import _front
from trimtab_extproc.certificate import Certificate
from trimtab_extproc.errors import ConfigError
from trimtab_extproc.front import FrontSettings
from trimtab_extproc.health import Health
from trimtab_extproc.native_connection import GatewayConnection
from trimtab_extproc.processor import ExternalProcessor

log = logging.getLogger(__name__)

CONNECTIONS_MAX = 4_096
BACKLOG = 1_024
ACCEPTS_PER_TURN_MAX = 64
ACCEPT_RETRY_S = 0.5
"""How long nobody is accepted after the system refused: descriptors do not come back at once."""
LINGER_S = 1.0
"""How long a connection without streams may take to close when the process ends."""


class NativeFront:
    """Implements Front."""

    def __init__(self, *, settings: FrontSettings, health: Health, processor: ExternalProcessor | None = None) -> None:
        self._settings = settings
        self._health = health
        self._processor = processor
        self._tls: _front.Tls | None = None
        self._listener: socket.socket | None = None
        self._connections: set[GatewayConnection] = set()
        self._changed = asyncio.Event()

    async def start(self, host: str, port: int, certificate: Certificate | None) -> int:
        if certificate is not None:
            try:
                self._tls = _front.Tls(certificate.chain, certificate.key)
            except ValueError as error:
                raise ConfigError(f"--cert-path: {error}") from error
        is_v6 = ":" in host
        listener = socket.create_server(
            (host, port),
            family=socket.AF_INET6 if is_v6 else socket.AF_INET,
            backlog=BACKLOG,
            dualstack_ipv6=host == "::" and socket.has_dualstack_ipv6(),
        )
        listener.setblocking(False)
        self._listener = listener
        asyncio.get_running_loop().add_reader(listener.fileno(), self._accept)
        bound: int = listener.getsockname()[1]
        return bound

    async def stop(self, grace_s: float) -> None:
        self._close_listener()
        for connection in list(self._connections):
            connection.shut_down()
        loop = asyncio.get_running_loop()
        cut_at_s = loop.time() + grace_s
        await self._until(lambda: not any(c.exchange_count for c in self._connections), cut_at_s)
        # What is left has nothing to lose.
        await self._until(lambda: not self._connections, min(cut_at_s, loop.time() + LINGER_S))
        for connection in list(self._connections):
            connection.cut()

    async def _until(self, is_so: Callable[[], bool], until_s: float) -> None:
        while not is_so():
            self._changed.clear()
            try:
                async with asyncio.timeout_at(until_s):
                    await self._changed.wait()
            except TimeoutError:
                return

    def _close_listener(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            asyncio.get_running_loop().remove_reader(listener.fileno())
            listener.close()

    def _accept(self) -> None:
        for _ in range(ACCEPTS_PER_TURN_MAX):
            if self._listener is None:
                return
            try:
                accepted, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                log.warning("no connection can be accepted for %s s: %s", ACCEPT_RETRY_S, error)
                loop = asyncio.get_running_loop()
                loop.remove_reader(self._listener.fileno())
                loop.call_later(ACCEPT_RETRY_S, self._accept_again)
                return
            if len(self._connections) >= CONNECTIONS_MAX:
                accepted.close()
                continue
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._connect(accepted)

    def _accept_again(self) -> None:
        if self._listener is not None:
            asyncio.get_running_loop().add_reader(self._listener.fileno(), self._accept)

    def _connect(self, accepted: socket.socket) -> None:
        descriptor = accepted.detach()
        native = _front.Connection(
            descriptor,
            self._tls,
            message_bytes_max=self._settings.message_bytes_max,
            gathered_bytes_max=self._settings.gathered_bytes_max,
            streams_max=2 * self._settings.exchanges_max,
        )
        connection = GatewayConnection(
            native,
            descriptor,
            health=self._health,
            processor=self._processor,
            exchanges_max=self._settings.exchanges_max,
            on_closed=self._forget,
            on_ended=self._changed.set,
        )
        if not connection.is_closed:
            self._connections.add(connection)

    def _forget(self, connection: GatewayConnection) -> None:
        self._connections.discard(connection)
        self._changed.set()
