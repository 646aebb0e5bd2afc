"""The ZeroMQ side of an emulated engine's KV events: a PUB socket, and a ROUTER that answers replays.

The one rule: frames are exactly vLLM's. Live: `[topic, sequence u64 big-endian, payload]`. Replay: a DEALER sends
`["", sequence]` and gets `["", topic, sequence, payload]` for each batch kept, then `["", "", ff*8, ""]`; the `array`
encoding's releases send no topic there. As in vLLM, a replay is answered in one go, so live events wait meanwhile.
"""

import asyncio
import time
from collections.abc import Iterable

import zmq
import zmq.asyncio

from trimtab_lab.kv_events import KvEvent
from trimtab_lab.kv_wire import END_OF_REPLAY, KvBatchEncoder, KvEventLog

LIVE_MESSAGES_MAX = 100_000
"""The PUB socket's high-water mark: beyond it, a slow subscriber loses messages silently."""


def rank_endpoint(endpoint: str, rank: int) -> str:
    """A data-parallel rank's own endpoint: the port plus the rank."""
    if rank == 0:
        return endpoint
    address, _, port = endpoint.rpartition(":")
    return f"{address}:{int(port) + rank}"


def binds(endpoint: str) -> bool:
    """Whether a PUB socket binds to this endpoint (or else connects, and the consumer binds)."""
    return "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))


class KvPublisher:
    """Publishes one rank's events. Open it inside a running event loop, and close it there."""

    def __init__(
        self,
        context: "zmq.asyncio.Context",
        *,
        encoder: KvBatchEncoder,
        log: KvEventLog,
        endpoint: str,
        replay_endpoint: str | None,
        topic: str,
        bind_host: str,
    ) -> None:
        self.endpoint = rank_endpoint(endpoint, encoder.rank)
        self.replay_endpoint = None if replay_endpoint is None else rank_endpoint(replay_endpoint, encoder.rank)
        self.topic = topic
        self.log = log
        self._encoder = encoder
        self._topic_bytes = topic.encode()
        self._bind_host = bind_host
        self._context = context
        self._pub: zmq.Socket[bytes] | None = None
        self._router: zmq.asyncio.Socket | None = None
        self._subscriptions = 0
        self._replays: asyncio.Task[None] | None = None

    def open(self) -> None:
        """Bind (or connect) the sockets and begin to answer replays. Raises zmq.ZMQError if a port is taken."""
        # XPUB is PUB that tells of subscriptions. A plain socket, since it never blocks: there is nothing to await.
        self._pub = zmq.Socket(self._context, zmq.XPUB)
        self._pub.set_hwm(LIVE_MESSAGES_MAX)
        self._pub.setsockopt(zmq.XPUB_VERBOSER, 1)
        if binds(self.endpoint):
            self._pub.bind(self._on_host(self.endpoint))
        else:
            self._pub.connect(self.endpoint)
        if self.replay_endpoint is not None:
            self._router = self._context.socket(zmq.ROUTER)
            self._router.bind(self._on_host(self.replay_endpoint))
            self._replays = asyncio.create_task(self._answer_replays(self._router), name="kv-replays")

    def publish(self, events: Iterable[KvEvent]) -> None:
        """Send one step's events and keep them for replay."""
        payload = self._encoder.encode(events, timestamp_s=time.time())
        sequence = self.log.append(payload)
        if self._pub is not None:
            self._count_subscriptions()
            self._pub.send_multipart((self._topic_bytes, sequence.to_bytes(8, "big"), payload))

    @property
    def subscriptions(self) -> int:
        """How many are in place. What was published before a subscription arrived is never seen by it."""
        self._count_subscriptions()
        return self._subscriptions

    def lose(self, events: Iterable[KvEvent]) -> None:
        """Number and keep one step's events, but send nothing: what a subscriber sees when a message was dropped."""
        self.log.append(self._encoder.encode(events, timestamp_s=time.time()))

    async def close(self) -> None:
        if self._replays is not None:
            self._replays.cancel()
            await asyncio.gather(self._replays, return_exceptions=True)
            self._replays = None
        for socket in (self._pub, self._router):
            if socket is not None:
                socket.close(linger=0)
        self._pub = self._router = None

    def _count_subscriptions(self) -> None:
        while self._pub is not None and self._pub.poll(0, zmq.POLLIN):
            self._subscriptions += 1 if self._pub.recv()[:1] == b"\x01" else -1

    def _on_host(self, endpoint: str) -> str:
        """Where a wildcard endpoint is bound here: the emulator's own address rather than every interface."""
        return endpoint.replace("*", self._bind_host)

    async def _answer_replays(self, router: "zmq.asyncio.Socket") -> None:
        while True:
            frames = await router.recv_multipart()
            if len(frames) != 3:
                continue  # vLLM logs and ignores it
            client, _, first = frames
            topic = [self._topic_bytes] if self._encoder.encoding == "map" else []
            for sequence, payload in self.log.since(int.from_bytes(first, "big")):
                router.send_multipart([client, b"", *topic, sequence.to_bytes(8, "big"), payload])
            end = [b""] if topic else []
            await router.send_multipart([client, b"", *end, END_OF_REPLAY, b""])
