"""The front over the gRPC library's asyncio server: the reference of what a front does.

The one rule: one coroutine per stream, and whatever ends it, the conversation is closed in the same `finally`,
synchronously.
"""

import asyncio
from typing import Any

import grpc
import grpc.aio

from trimtab_extproc.certificate import Certificate
from trimtab_extproc.errors import ProtocolError
from trimtab_extproc.front import KEEPALIVE_S, KEEPALIVE_TIMEOUT_S, FrontSettings
from trimtab_extproc.grpc_status import Status
from trimtab_extproc.health import HEALTH_SERVICE, Health
from trimtab_extproc.processor import ExternalProcessor
from trimtab_extproc.wire import METHOD, SERVICE

_CODES = {code.value[0]: code for code in grpc.StatusCode}


class GrpcioFront:
    """Implements Front."""

    def __init__(self, *, settings: FrontSettings, health: Health, processor: ExternalProcessor | None = None) -> None:
        self._settings = settings
        self._health = health
        self._processor = processor
        self._server: grpc.aio.Server | None = None

    async def start(self, host: str, port: int, certificate: Certificate | None) -> int:
        server = self._server = _new_server(self._settings)
        _add(server, HEALTH_SERVICE, "Check", grpc.unary_unary_rpc_method_handler(self._check))
        _add(server, HEALTH_SERVICE, "Watch", grpc.unary_stream_rpc_method_handler(self._watch))
        if self._processor is not None:
            _add(server, SERVICE, METHOD, grpc.stream_stream_rpc_method_handler(self.process))
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            if certificate is None:
                port = server.add_insecure_port(address)
            else:
                port = server.add_secure_port(address, grpc.ssl_server_credentials([tuple(certificate)]))
        except RuntimeError as error:
            # The library's own text names the address, and with it the flag's port.
            raise OSError(str(error)) from error
        await server.start()
        return port

    async def stop(self, grace_s: float) -> None:
        if self._server is not None:
            await self._server.stop(grace_s)

    async def process(self, _requests: Any, context: Any) -> None:
        """One stream of ext_proc. Messages stay bytes here."""
        processor = self._processor
        assert processor is not None, "it is served only with one"
        conversation = processor.open()
        try:
            while (data := await context.read()) is not grpc.aio.EOF:
                try:
                    replies = conversation.receive(data)
                    if replies is None:
                        replies = await conversation.choose()
                except Exception as error:
                    await _abort(context, processor.status_of(error))
                    return
                for reply in replies:
                    await context.write(reply)
                if conversation.is_over:
                    return
        finally:
            conversation.close()

    async def _check(self, request: bytes, context: Any) -> bytes | None:
        try:
            answer = self._health.check(request)
        except ProtocolError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        else:
            if answer is not None:
                return answer
            await context.abort(grpc.StatusCode.NOT_FOUND, "unknown service")
        return None

    async def _watch(self, request: bytes, context: Any) -> None:
        answers: asyncio.Queue[bytes] = asyncio.Queue()
        end = self._health.watch(request, answers.put_nowait)
        try:
            while True:
                await context.write(await answers.get())
        finally:
            end()


def _new_server(settings: FrontSettings) -> grpc.aio.Server:
    return grpc.aio.server(
        options=[
            ("grpc.max_receive_message_length", settings.message_bytes_max),
            ("grpc.max_send_message_length", settings.message_bytes_max),
            ("grpc.so_reuseport", 0),
            ("grpc.keepalive_time_ms", int(KEEPALIVE_S * 1000)),
            ("grpc.keepalive_timeout_ms", int(KEEPALIVE_TIMEOUT_S * 1000)),
            ("grpc.keepalive_permit_without_calls", 1),
            # Gateways ping often to notice a hung picker; the library would hang up on them.
            ("grpc.http2.max_ping_strikes", 0),
            ("grpc.http2.min_recv_ping_interval_without_data_ms", 100),
        ],
        maximum_concurrent_rpcs=settings.exchanges_max,
    )


def _add(server: grpc.aio.Server, service: str, method: str, handler: Any) -> None:
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))


async def _abort(context: Any, status: Status) -> None:
    await context.abort(_CODES[status.code], status.text)
