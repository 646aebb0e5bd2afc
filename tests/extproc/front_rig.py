"""A picker behind a real gRPC server of either kind, and a gateway that talks to it over loopback."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
from envoy_data_plane.envoy.service.ext_proc import v3 as ext_proc
from picker_rig import PickerRig
from waiting import until

from trimtab_extproc.body_budget import BodyBudget
from trimtab_extproc.certificate import Certificate
from trimtab_extproc.exchange import ExchangeSettings
from trimtab_extproc.front import Front, FrontSettings, new_front
from trimtab_extproc.health import Health
from trimtab_extproc.processor import ExternalProcessor
from trimtab_extproc.wire import METHOD, SERVICE

PROCESS = f"/{SERVICE}/{METHOD}"


class ProcessorRig(PickerRig):
    """A picker with the ext_proc method over it."""

    def __init__(self) -> None:
        super().__init__()
        self.budget = BodyBudget(1 << 26)
        self.processor = ExternalProcessor(
            picker=self.picker,
            ledger=self.reservations,
            telemetry=self.telemetry,
            settings=ExchangeSettings(is_mode_override_allowed=True),
            budget=self.budget,
            clock=lambda: self.now_s,
        )

    def assert_idle(self) -> None:
        """Nothing in flight, nothing reserved, and every reservation that was told was told to be over."""
        assert self.processor.in_flight_count == len(self.reservations) == self.budget.held_bytes == 0
        assert self.count("trimtab_exchanges_in_flight") == 0
        assert not any(self.requests().values())
        assert not self.scheduler.open_reservations()
        told = [entry[1] for entry in self.log.entries if entry[0] == "reserve"]
        over = [entry[1] for entry in self.log.entries if entry[0] == "finished"]
        assert sorted(told) == sorted(over)
        self.scheduler.check_invariants()


class FrontRig(ProcessorRig):
    """The same behind a server; see `serving`."""

    def __init__(self, name: str, **bounds: int) -> None:
        super().__init__()
        self.name = name
        self.health = Health()
        self.front: Front = new_front(
            name, settings=FrontSettings(**bounds), health=self.health, processor=self.processor
        )
        self.port = 0

    @asynccontextmanager
    async def serving(self, certificate: Certificate | None = None) -> AsyncIterator["FrontRig"]:
        """Inside it the server runs; at the end nothing may be left."""
        self.port = await self.front.start("127.0.0.1", 0, certificate)
        try:
            yield self
        finally:
            await self.front.stop(0)
        await self.until_idle()

    async def until_idle(self) -> None:
        """All that the server has heard of is over."""

        async def is_idle() -> bool:
            return self.processor.in_flight_count == 0

        await until(is_idle, "no exchange is in flight")
        self.assert_idle()

    async def until_in_flight(self, count: int) -> None:
        """So many exchanges are in flight."""

        async def is_so() -> bool:
            return self.processor.in_flight_count == count

        await until(is_so, f"{count} exchanges are in flight")

    @asynccontextmanager
    async def gateway(self, **options: Any) -> AsyncIterator["Gateway"]:
        """A gateway with one connection."""
        arguments = [(f"grpc.{name}", value) for name, value in options.items()]
        # Connections are shared in a process otherwise.
        arguments.append(("grpc.use_local_subchannel_pool", 1))
        arguments.append(("grpc.max_receive_message_length", -1))
        async with grpc.aio.insecure_channel(f"127.0.0.1:{self.port}", options=arguments) as channel:
            yield Gateway(channel)


class Gateway:
    """The client's side of a connection."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel

    def open(self, *, timeout: float | None = None, **options: Any) -> "GatewayStream":
        """A stream."""
        return GatewayStream(self.channel.stream_stream(PROCESS)(timeout=timeout, **options))

    async def run(self, *messages: bytes) -> tuple[list[ext_proc.ProcessingResponse], grpc.StatusCode]:
        """A stream of messages from its beginning to its end: what was answered, and the status."""
        stream = self.open()
        return await stream.talk(*messages), await stream.end()

    async def refused(self, *messages: bytes) -> grpc.StatusCode:
        """The status of a stream that the server ends at the last of these messages. (The client library takes it for a
        fault of its own if there is more to send.)"""
        stream = self.open()
        await stream.send(*messages)
        await stream.rest()
        return await stream.end()


class GatewayStream:
    """The client's side of a stream."""

    def __init__(self, call: Any) -> None:
        self.call = call

    async def send(self, *messages: bytes) -> None:
        for message in messages:
            await self.call.write(message)

    async def read(self) -> ext_proc.ProcessingResponse | None:
        """The next reply; None: the stream has ended."""
        data = await self.call.read()
        return None if data is grpc.aio.EOF else ext_proc.ProcessingResponse.parse(data)

    async def talk(self, *messages: bytes) -> list[ext_proc.ProcessingResponse]:
        """Sends all, closes its side and reads to the end, whatever the end is."""
        try:
            await self.send(*messages)
            await self.call.done_writing()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass
        return await self.rest()

    async def rest(self) -> list[ext_proc.ProcessingResponse]:
        """What is still answered; without reading it the client never comes to the status."""
        replies = []
        try:
            while (reply := await self.read()) is not None:
                replies.append(reply)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass
        return replies

    async def end(self) -> grpc.StatusCode:
        """The status that it ended with."""
        code: grpc.StatusCode = await self.call.code()
        return code
