"""The ext_proc gRPC service: one coroutine per HTTP exchange, between the gateway's stream and the exchange's table.

The one rule: whatever ends a stream (the gateway closes or resets it, the client leaves, a fault of ours), its exchange
is closed in the same `finally`, synchronously. It decides nothing: the exchange says what to answer, the picker whom to
choose.

Bounds: messages of `message_bytes_max`, `exchanges_max` streams at once (more end with RESOURCE_EXHAUSTED, so that the
gateway's failureMode decides).
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from trimtab_extproc.body_budget import BodyBudget
from trimtab_extproc.errors import NotReady, ProtocolError
from trimtab_extproc.events import RequestHeaders
from trimtab_extproc.exchange import Exchange, ExchangeSettings, Ledger
from trimtab_extproc.picker import Picker
from trimtab_extproc.replies import Decide, Refuse
from trimtab_extproc.telemetry import Telemetry
from trimtab_extproc.wire import METHOD, SERVICE, decode, encode

log = logging.getLogger(__name__)

FRAMING_BYTES = 1 << 20
"""Room for headers and framing beside the largest body in one message."""
KEEPALIVE_MS = 30_000
KEEPALIVE_TIMEOUT_MS = 10_000
"""A gateway that does not answer a ping for this long is gone, and its exchanges end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """The gRPC server's bounds."""

    body_bytes_max: int = 64 << 20
    """The largest request body."""
    exchanges_max: int = 16_384
    """Exchanges in flight at once."""


def new_server(settings: ServerSettings) -> grpc.aio.Server:
    """A server without services or ports."""
    message_bytes_max = settings.body_bytes_max + FRAMING_BYTES
    return grpc.aio.server(
        options=[
            ("grpc.max_receive_message_length", message_bytes_max),
            ("grpc.max_send_message_length", message_bytes_max),
            ("grpc.so_reuseport", 0),
            ("grpc.keepalive_time_ms", KEEPALIVE_MS),
            ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
            ("grpc.keepalive_permit_without_calls", 1),
            # Gateways ping often to notice a hung picker; the library would hang up on them.
            ("grpc.http2.max_ping_strikes", 0),
            ("grpc.http2.min_recv_ping_interval_without_data_ms", 100),
        ],
        maximum_concurrent_rpcs=settings.exchanges_max,
    )


class ExternalProcessor:
    """The service. `clock` is monotonic, in seconds."""

    def __init__(
        self,
        *,
        picker: Picker,
        ledger: Ledger,
        telemetry: Telemetry,
        settings: ExchangeSettings,
        budget: BodyBudget,
        clock: Callable[[], float],
    ) -> None:
        self._picker = picker
        self._ledger = ledger
        self._telemetry = telemetry
        self._settings = settings
        self._budget = budget
        self._clock = clock
        self.in_flight_count = 0

    def add_to(self, server: grpc.aio.Server) -> None:
        """Serve on that server. Messages stay bytes here: `wire` reads and writes them."""
        handler = grpc.stream_stream_rpc_method_handler(self.process)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),))

    async def process(self, _requests: Any, context: Any) -> None:
        """One stream: one HTTP exchange."""
        exchange = Exchange(ledger=self._ledger, settings=self._settings, budget=self._budget)
        self.in_flight_count += 1
        self._telemetry.exchange_opened()
        try:
            await self._converse(exchange, context)
        except ProtocolError as error:
            self._telemetry.protocol_error()
            log.warning("protocol error: %s", error)
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except NotReady as error:
            self._telemetry.not_ready()
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        except (grpc.aio.BaseError, asyncio.CancelledError, grpc.RpcError):
            # The gateway is gone.
            raise
        except Exception:
            self._telemetry.failure()
            log.exception("an exchange failed")
            await context.abort(grpc.StatusCode.INTERNAL, "internal error")
        finally:
            exchange.close(now_s=self._clock())
            self.in_flight_count -= 1
            self._telemetry.exchange_closed()

    async def _converse(self, exchange: Exchange, context: Any) -> None:
        read, write, clock = context.read, context.write, self._clock
        while True:
            data = await read()
            if data is grpc.aio.EOF:
                return
            received_s = clock()
            event = decode(data)
            if isinstance(event, RequestHeaders) and not self._picker.is_ready:
                # Before a byte of the body has passed the gateway can still go on without us.
                raise NotReady("the pool's members are not known yet")
            answer = exchange.receive(event, now_s=received_s)
            is_choice = isinstance(answer, Decide)
            while isinstance(answer, Decide):
                # The picker's last step awaits nothing: the exchange owns the reservation before anything can end it.
                answer = exchange.receive(await self._picker.pick(answer), now_s=clock())
            for reply in answer:
                await write(encode(reply))
            if is_choice:
                self._telemetry.answered(seconds=clock() - received_s)
            if answer and isinstance(answer[0], Refuse):
                return
