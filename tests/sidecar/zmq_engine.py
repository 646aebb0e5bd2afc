"""An engine's event publisher over real sockets: PUB with a sequence, ROUTER that replays a bounded buffer.

It can do on purpose what happens to real ones by accident: lose frames, restart under the same address, forget old
frames, keep silent on the replay socket, and answer in the older form without a topic.
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Callable

import msgspec
import zmq
import zmq.asyncio

from trimtab_sidecar.kv_sources import KvSource

TOPIC = b"kv@pod@tiny"


class ZmqEngine:
    """`publish` sends events as one frame; `lose` takes a sequence number without sending it."""

    def __init__(self, context: zmq.asyncio.Context, *, buffer_steps: int = 10_000, has_topic: bool = True) -> None:
        self.context = context
        self.has_topic = has_topic
        self.answers = True
        """Whether replay requests are answered."""
        self.requests: list[int] = []
        self.sequence = 0
        self.buffer: deque[tuple[int, bytes]] = deque(maxlen=buffer_steps)
        self._events_port = 0
        self._replay_port = 0
        self._open()

    def _open(self) -> None:
        self.publisher = self.context.socket(zmq.PUB)
        self.router = self.context.socket(zmq.ROUTER)
        if self._events_port:
            self.publisher.bind(f"tcp://127.0.0.1:{self._events_port}")
            self.router.bind(f"tcp://127.0.0.1:{self._replay_port}")
        else:
            self._events_port = self.publisher.bind_to_random_port("tcp://127.0.0.1")
            self._replay_port = self.router.bind_to_random_port("tcp://127.0.0.1")
        self._task = asyncio.create_task(self._answer())

    def source(self, rank: int = 0, *, replay: bool = True) -> KvSource:
        return KvSource(
            rank=rank,
            events=f"tcp://127.0.0.1:{self._events_port}",
            replay=f"tcp://127.0.0.1:{self._replay_port}" if replay else None,
        )

    async def publish(self, *events: object) -> None:
        payload = self._take(events)
        await self.publisher.send_multipart([TOPIC, (self.sequence - 1).to_bytes(8, "big"), payload])

    def lose(self, *events: object) -> None:
        """The frame is in the replay buffer, but nobody receives it."""
        self._take(events)

    async def repeat(self, sequence: int) -> None:
        """Send a frame of the buffer again."""
        await self.publisher.send_multipart([TOPIC, sequence.to_bytes(8, "big"), dict(self.buffer)[sequence]])

    async def send_raw(self, *parts: bytes) -> None:
        await self.publisher.send_multipart(parts)

    def _take(self, events: tuple[object, ...]) -> bytes:
        payload = msgspec.msgpack.encode([time.time(), list(events), 0])
        self.buffer.append((self.sequence, payload))
        self.sequence += 1
        return payload

    async def stop(self) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        self.publisher.close(linger=0)
        self.router.close(linger=0)

    async def restart(self) -> None:
        """Another process at the same addresses: sequence 0, empty buffer."""
        await self.stop()
        self.sequence = 0
        self.buffer.clear()
        while True:
            try:
                self._open()
                return
            except zmq.ZMQError:
                # The old sockets are closed by ZMQ's own thread, a moment later.
                self.publisher.close(linger=0)
                self.router.close(linger=0)
                await asyncio.sleep(0.01)

    async def _answer(self) -> None:
        while True:
            identity, _, start = await self.router.recv_multipart()
            self.requests.append(int.from_bytes(start, "big"))
            if not self.answers:
                continue
            topic = [TOPIC] if self.has_topic else []
            for sequence, payload in list(self.buffer):
                if sequence >= self.requests[-1]:
                    await self.router.send_multipart([identity, b"", *topic, sequence.to_bytes(8, "big"), payload])
            end = [b""] if self.has_topic else []
            await self.router.send_multipart([identity, b"", *end, b"\xff" * 8, b""])


@contextlib.asynccontextmanager
async def zmq_context() -> AsyncIterator[zmq.asyncio.Context]:
    context = zmq.asyncio.Context()
    try:
        yield context
    finally:
        context.destroy(linger=0)


async def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Wait until `condition()` holds; fails the test where it never does."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 (what is waited for happens in other tasks and threads)
            await asyncio.sleep(0.005)
