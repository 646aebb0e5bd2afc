"""What lab tests share: a running emulator with its client, and a consumer of its KV events."""

import asyncio
import gzip
import secrets
import socket
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import zmq.asyncio

from trimtab_lab.emulated_engine import EmulatedEngine
from trimtab_lab.step_time import StepTime

FAST = StepTime().faster(40)
PORTS = range(18_000, 32_000)
"""Below those that the system gives to outgoing connections, so that none of them takes a port before its server."""
CAPTURES = Path(__file__).parent.parent / "data" / "engine_captures"


def capture(name: str) -> str:
    """A file captured from a real vLLM."""
    return gzip.decompress((CAPTURES / f"{name}.gz").read_bytes()).decode()


def free_ports(count: int) -> list[int]:
    """First of `count` ports in a row that nobody listens on."""
    while True:
        first = secrets.choice(PORTS)
        ports = list(range(first, first + count))
        try:
            for port in ports:
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
        except OSError:
            continue
        return ports


class Emulator:
    """A running emulator with a client session and the KV messages of each rank it was asked to follow."""

    def __init__(self, engine: EmulatedEngine, port: int, session: aiohttp.ClientSession, events_port: int) -> None:
        self.engine = engine
        self.url = f"http://127.0.0.1:{port}"
        self.session = session
        self.events_port = events_port

    async def get(self, path: str) -> Any:
        async with self.session.get(self.url + path) as response:
            assert response.status == 200, await response.text()
            return await response.json()

    async def post(self, path: str, body: object = None, *, status: int = 200, **headers: str) -> Any:
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self.session.post(self.url + path, json=body, headers=names) as response:
            assert response.status == status, await response.text()
            return await response.json()

    async def complete(self, prompt: object, *, max_tokens: int = 1, **more: object) -> Any:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, **more}
        return await self.post("/v1/completions", body)

    async def cached_tokens(self, prompt: object, **more: object) -> int:
        answer = await self.complete(prompt, **more)
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


class Subscription:
    """A SUB socket on one rank's events."""

    def __init__(self, socket: "zmq.asyncio.Socket") -> None:
        self.socket = socket

    async def next(self) -> tuple[bytes, int, Any]:
        topic, sequence, payload = await self.socket.recv_multipart()
        return topic, int.from_bytes(sequence, "big"), msgspec.msgpack.decode(payload)

    async def up_to_now(self, engine: EmulatedEngine, rank: int = 0) -> list[tuple[int, Any]]:
        """All messages up to the last that the rank has numbered so far."""
        publisher = engine.runners[rank].publisher
        assert publisher is not None
        messages: list[tuple[int, Any]] = []
        while not messages or messages[-1][0] < publisher.log.next_sequence - 1:
            _, sequence, payload = await self.next()
            messages.append((sequence, payload))
        return messages


Start = Callable[..., AbstractAsyncContextManager[Emulator]]


class Consumer:
    """ZeroMQ sockets of a test, closed with it."""

    def __init__(self) -> None:
        self._context = zmq.asyncio.Context()
        self._sockets: list[zmq.asyncio.Socket] = []

    async def subscribe(self, emulator: Emulator, rank: int = 0) -> Subscription:
        """A subscription that is known to be in place: what is sent before is never seen."""
        publisher = emulator.engine.runners[rank].publisher
        assert publisher is not None
        before = publisher.subscriptions
        socket = self._socket(zmq.SUB)
        socket.connect(f"tcp://127.0.0.1:{emulator.events_port + rank}")
        socket.subscribe(b"")
        await until(lambda: publisher.subscriptions > before)
        return Subscription(socket)

    def bind(self) -> tuple[Subscription, int]:
        """A bound subscription, for an engine that connects, and its port."""
        socket = self._socket(zmq.SUB)
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        socket.subscribe(b"")
        return Subscription(socket), port

    async def replay(self, port: int, first: int) -> list[list[bytes]]:
        """The whole answer to a replay request, end mark included."""
        dealer = self._socket(zmq.DEALER)
        dealer.connect(f"tcp://127.0.0.1:{port}")
        await dealer.send_multipart([b"", first.to_bytes(8, "big")])
        replies: list[list[bytes]] = []
        while not replies or b"\xff" * 8 not in replies[-1]:
            replies.append(await dealer.recv_multipart())
        return replies

    def close(self) -> None:
        for opened in self._sockets:
            opened.close(linger=0)
        self._context.term()

    def _socket(self, kind: int) -> "zmq.asyncio.Socket":
        socket = self._context.socket(kind)
        self._sockets.append(socket)
        return socket


async def until(condition: Callable[[], object]) -> None:
    """Return once the condition holds; give up after some seconds."""
    for _ in range(5000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it never happened")
