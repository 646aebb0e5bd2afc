"""The feed of one rank's KV events: sockets in, whole and ordered frames out.

The one rule: the sink sees each frame of an engine process once and in order, or is told what it cannot see
(`restarted`, `lost`). While a replay is awaited nothing else is read, so published frames wait in their socket, and a
stale frame can never undo a newer one. What a frame means for our position is `EngineLog`'s business; this module
must not decode events.
"""

import asyncio
import contextlib
import time
from dataclasses import dataclass
from typing import Protocol

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from trimtab_sidecar.engine_log import EngineLog, ReplayEnd, Verdict
from trimtab_sidecar.kv_sources import KvSource

FRAMES_WAITING_MAX = 50_000
"""Frames that wait in a socket. Beyond it the socket drops them, which shows as a gap and is replayed."""
REPLAY_ATTEMPTS = 3
"""Unanswered replays after which frames that were missed are given up."""
REPLAY_ROUNDS_MAX = 1_000
"""Rounds of one replay. The engine's socket drops what it cannot queue (1,000 frames), so a long log takes several."""
END_OF_REPLAY = b"\xff" * 8


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedTimes:
    """Seconds."""

    slice_s: float = 0.005
    """How long frames are applied before the event loop gets its turn."""
    replay_silence_s: float = 2.0
    """A replay without another frame for this long is taken as unanswered."""
    settle_s: float = 0.3
    """How long after a connection the log is asked once more: what was published until then may have been missed."""
    retry_s: float = 1.0
    """Pause before the log is asked again when the engine did not answer."""
    notice_s: float = 0.2
    """How soon a request to ask the log is noticed where no frame arrives."""


class FeedSink(Protocol):
    """What consumes the feed. All methods are called from the feed's task and must return soon."""

    def apply(self, sequence: int, payload: bytes) -> None:
        """The next frame."""

    def restarted(self) -> None:
        """The engine is another process: its cache is empty, and its log follows from the start."""

    def lost(self) -> None:
        """Frames are missing for good; the next `apply` comes after the gap."""

    def flush(self) -> None:
        """A slice of frames is over: hand on what has changed."""

    def confirmed(self) -> None:
        """What was applied is known to be this engine process's, as far as that can be known."""


class ReplayError(Exception):
    """The engine did not answer a replay."""


class KvFeed:
    """Reads one source until cancelled. `log` holds the position to go on from."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        source: KvSource,
        log: EngineLog,
        sink: FeedSink,
        times: FeedTimes | None = None,
    ) -> None:
        self.source = source
        self.log = log
        self._context = context
        self._sink = sink
        self._times = times or FeedTimes()
        self._check = asyncio.Event()
        self._is_forgotten = False
        self.malformed = 0
        """Messages that are no frames."""
        self.frames = 0
        """Frames received, published or replayed."""
        self.gaps = 0
        """Times that the sequence did not follow."""
        self.replays = 0
        """Replays asked for."""
        self.restarts = 0
        """Engine processes found to be new."""
        self.is_current = False
        """Nothing is known to be missing."""

    def suspect(self) -> None:
        """Something says that the engine may have been restarted: ask its log before anything more is believed."""
        self.log.suspect()
        self._check.set()

    def forget_engine(self) -> None:
        """The engine is known to be another process: start over with its log."""
        self._is_forgotten = True
        self._check.set()

    def check_tail(self) -> None:
        """Ask the log whether anything was published that we did not see. The last frame's loss shows in no gap."""
        self._check.set()

    async def run(self) -> None:
        """Receives until cancelled. Raises zmq.ZMQError where the address cannot be used at all."""
        subscriber = self._subscribe()
        monitor = subscriber.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_ACCEPTED | zmq.EVENT_CONNECTED)
        watcher = asyncio.create_task(self._watch_connection(monitor))
        settle = asyncio.get_running_loop().call_later(self._times.settle_s, self.check_tail)
        try:
            self._check.set()
            while True:
                if self._check.is_set():
                    self._check.clear()
                    await self._catch_up(subscriber)
                if await subscriber.poll(round(self._times.notice_s * 1_000)):
                    await self._read_slice(subscriber)
        finally:
            settle.cancel()
            watcher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watcher
            subscriber.disable_monitor()
            subscriber.close(linger=0)

    def _subscribe(self) -> zmq.asyncio.Socket:
        subscriber = self._context.socket(zmq.SUB)
        subscriber.setsockopt(zmq.RCVHWM, FRAMES_WAITING_MAX)
        subscriber.setsockopt(zmq.SUBSCRIBE, self.source.topic.encode())
        subscriber.setsockopt(zmq.RECONNECT_IVL_MAX, 1_000)
        subscriber.setsockopt(zmq.IPV6, 1)
        try:
            if not self.source.binds_here or not self._bind(subscriber):
                subscriber.connect(self.source.events)
        except zmq.ZMQError:
            subscriber.close(linger=0)
            raise
        return subscriber

    def _bind(self, subscriber: zmq.asyncio.Socket) -> bool:
        """False: the engine is bound there itself; it had a wildcard with port 0 and reports what came of it."""
        try:
            subscriber.bind(self.source.events)
        except zmq.ZMQError as error:
            if error.errno != zmq.EADDRINUSE:
                raise
            return False
        return True

    async def _watch_connection(self, monitor: zmq.asyncio.Socket) -> None:
        """A connection that breaks may be an engine that restarts; one that is made may have missed frames."""
        while True:
            event = parse_monitor_message(await monitor.recv_multipart())["event"]
            if event == zmq.EVENT_MONITOR_STOPPED:
                return
            if event == zmq.EVENT_DISCONNECTED:
                self.log.suspect()
                self.is_current = False
            else:
                asyncio.get_running_loop().call_later(self._times.settle_s, self.check_tail)

    async def _read_slice(self, subscriber: zmq.asyncio.Socket) -> None:
        """Apply the frames that wait, for at most a slice of time, and hand on what changed."""
        now: zmq.Socket[bytes] = zmq.Socket.shadow(subscriber.underlying)
        deadline_s = time.monotonic() + self._times.slice_s
        while time.monotonic() < deadline_s:
            try:
                parts = now.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            if len(parts) != 3 or len(parts[1]) != 8:
                self.malformed += 1
                continue
            self.frames += 1
            await self._take(int.from_bytes(parts[1], "big"), parts[2], subscriber)
        self._sink.flush()
        await asyncio.sleep(0)

    async def _take(self, sequence: int, payload: bytes, subscriber: zmq.asyncio.Socket) -> None:
        verdict = self.log.live(sequence, payload)
        if verdict is Verdict.ASK:
            self.gaps += not self.log.is_suspect
            if await self._catch_up(subscriber):
                return
            verdict = self.log.live_without_replay(sequence, payload)
        if verdict is Verdict.RESTARTED:
            self._restart()
            verdict = self.log.live(sequence, payload)
        if verdict is Verdict.LOST:
            self.gaps += not self.log.can_replay
            self._sink.lost()
        if verdict in (Verdict.APPLY, Verdict.LOST):
            self._sink.confirmed()
            self._sink.apply(sequence, payload)

    def _restart(self) -> None:
        self._is_forgotten = False
        self.restarts += 1
        self.log.forget()
        self._sink.restarted()

    async def _catch_up(self, subscriber: zmq.asyncio.Socket) -> bool:
        """Replay from our position to the end of the log. False: the engine did not answer."""
        if self._is_forgotten:
            self._restart()
        if self.source.replay is None:
            self.is_current = True
            self._sink.flush()
            return False
        self.is_current = False
        for attempt in range(REPLAY_ATTEMPTS):
            try:
                for _ in range(REPLAY_ROUNDS_MAX):
                    end = await self._replay_round()
                    if end is ReplayEnd.RESTARTED:
                        self._restart()
                    elif end is ReplayEnd.CURRENT:
                        self.is_current = True
                        self._sink.confirmed()
                        self._sink.flush()
                        return True
            except ReplayError:
                self._sink.flush()
                if attempt + 1 < REPLAY_ATTEMPTS:
                    await asyncio.sleep(self._times.retry_s)
        # Nobody answers. If frames come all the same they must be judged without; else the engine is away, and the
        # question stays open until it is back.
        if not await subscriber.poll(0):
            asyncio.get_running_loop().call_later(self._times.retry_s, self.check_tail)
        return False

    async def _replay_round(self) -> ReplayEnd:
        """Ask for the log from our position and apply the answer. Raises `ReplayError`."""
        assert self.source.replay is not None
        self.replays += 1
        dealer = self._context.socket(zmq.DEALER)
        try:
            # Whatever the engine sends must be taken off it at once: it answers in the thread that publishes.
            dealer.setsockopt(zmq.RCVHWM, FRAMES_WAITING_MAX)
            dealer.setsockopt(zmq.IPV6, 1)
            dealer.connect(self.source.replay)
            await dealer.send_multipart([b"", self.log.replay_from().to_bytes(8, "big")])
            now: zmq.Socket[bytes] = zmq.Socket.shadow(dealer.underlying)
            while True:
                if not await dealer.poll(round(self._times.replay_silence_s * 1_000)):
                    raise ReplayError(self.source.replay)
                deadline_s = time.monotonic() + self._times.slice_s
                while time.monotonic() < deadline_s:
                    try:
                        parts = now.recv_multipart(zmq.NOBLOCK)
                    except zmq.Again:
                        break
                    if len(parts) < 3 or len(parts[-2]) != 8:
                        continue
                    # Up to vLLM 0.25 a reply has no topic between the delimiter and the sequence.
                    if parts[-2] == END_OF_REPLAY:
                        return self.log.replay_ended()
                    self.frames += 1
                    if self._apply_replayed(int.from_bytes(parts[-2], "big"), parts[-1]):
                        return ReplayEnd.RESTARTED
                self._sink.flush()
                await asyncio.sleep(0)
        finally:
            dealer.close(linger=0)

    def _apply_replayed(self, sequence: int, payload: bytes) -> bool:
        """True: this frame belongs to another process than the one we know."""
        verdict = self.log.replayed(sequence, payload)
        if verdict is Verdict.RESTARTED:
            return True
        if verdict is Verdict.LOST:
            self.gaps += 1
            self._sink.lost()
        if verdict in (Verdict.APPLY, Verdict.LOST):
            self._sink.apply(sequence, payload)
        return False
