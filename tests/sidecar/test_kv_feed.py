"""The feed hands on each frame once and in order, or says that it cannot: over real sockets."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import msgspec
import pytest
import zmq
import zmq.asyncio
from zmq_engine import ZmqEngine, until, zmq_context

from trimtab_sidecar.engine_log import EngineLog, LogPosition
from trimtab_sidecar.kv_feed import FeedTimes, KvFeed
from trimtab_sidecar.kv_sources import KvSource

QUICK = FeedTimes(replay_silence_s=0.15, settle_s=0.02, retry_s=0.02, notice_s=0.01)


class Recorder:
    """Keeps what the feed says, in order: a frame's event, `restarted`, `lost`."""

    def __init__(self) -> None:
        self.seen: list[object] = []
        self.is_confirmed = False

    def apply(self, sequence: int, payload: bytes) -> None:
        self.seen.append(msgspec.msgpack.decode(payload)[1][0])

    def restarted(self) -> None:
        self.seen.append("restarted")

    def lost(self) -> None:
        self.seen.append("lost")

    def flush(self) -> None: ...

    def confirmed(self) -> None:
        self.is_confirmed = True


class Rig:
    def __init__(self, context: zmq.asyncio.Context, engine: ZmqEngine) -> None:
        self.context = context
        self.engine = engine
        self.sink = Recorder()
        self._stack = contextlib.AsyncExitStack()

    async def start(self, position: LogPosition | None = None, source: KvSource | None = None) -> KvFeed:
        source = source or self.engine.source()
        self.log = EngineLog(can_replay=source.replay is not None, position=position)
        feed = KvFeed(self.context, source, self.log, self.sink, QUICK)
        task = asyncio.create_task(feed.run())

        async def stop() -> None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

        self._stack.push_async_callback(stop)
        return feed

    async def stop_feeds(self) -> None:
        await self._stack.aclose()

    async def start_and_hear(self, source: KvSource | None = None) -> KvFeed:
        """Start, and wait until published frames really arrive: a subscription takes a moment."""
        feed = await self.start(source=source)
        before = self.engine.sequence
        while not self.sink.seen or feed.frames <= before:
            await self.engine.publish("hello")
            await asyncio.sleep(0.01)
        await self.sees("hello", last=True)
        await until(lambda: self.log.position.sequence == self.engine.sequence - 1)
        self.sink.seen.clear()
        return feed

    async def sees(self, *expected: object, last: bool = False) -> None:
        if last:
            await until(lambda: self.sink.seen[-len(expected) :] == list(expected))
            return
        with contextlib.suppress(TimeoutError):
            await until(lambda: len(self.sink.seen) >= len(expected), 10.0)
        assert self.sink.seen == list(expected)


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with zmq_context() as context:
        engine = ZmqEngine(context)
        rig = Rig(context, engine)
        yield rig
        await rig.stop_feeds()
        await engine.stop()


async def test_what_was_published_before_the_feed_came_is_replayed(rig: Rig) -> None:
    for name in ("a", "b", "c"):
        rig.engine.lose(name)
    await rig.start()
    await rig.sees("a", "b", "c")
    await until(lambda: rig.sink.is_confirmed)


async def test_a_replay_in_the_older_form_without_topic_is_read(rig: Rig) -> None:
    rig.engine.has_topic = False
    rig.engine.lose("a")
    rig.engine.lose("b")
    await rig.start()
    await rig.sees("a", "b")


async def test_frames_are_handed_on_as_they_are_published(rig: Rig) -> None:
    feed = await rig.start_and_hear()
    for number in range(500):
        await rig.engine.publish(number)
    await rig.sees(*range(500))
    assert feed.gaps == 0


async def test_a_gap_is_filled_by_a_replay(rig: Rig) -> None:
    feed = await rig.start_and_hear()
    await rig.engine.publish("a")
    rig.engine.lose("b")
    rig.engine.lose("c")
    await rig.engine.publish("d")
    await rig.engine.publish("e")
    await rig.sees("a", "b", "c", "d", "e")
    assert feed.gaps == 1


async def test_a_lost_last_frame_is_found_by_asking(rig: Rig) -> None:
    feed = await rig.start_and_hear()
    rig.engine.lose("last")
    feed.check_tail()
    await rig.sees("last")


async def test_a_frame_that_comes_twice_is_applied_once(rig: Rig) -> None:
    await rig.start_and_hear()
    await rig.engine.publish("a")
    await rig.engine.repeat(rig.engine.sequence - 1)
    await rig.engine.publish("b")
    await rig.sees("a", "b")


async def test_a_gap_beyond_the_buffer_is_lost(rig: Rig) -> None:
    await rig.engine.stop()
    rig.engine = ZmqEngine(rig.context, buffer_steps=2)
    feed = await rig.start_and_hear()
    for name in ("a", "b", "c", "d"):
        rig.engine.lose(name)
    await rig.engine.publish("e")
    await rig.sees("lost", "d", "e")
    assert feed.gaps >= 1
    await rig.stop_feeds()
    await rig.engine.stop()
    rig.engine = ZmqEngine(rig.context)


async def test_a_gap_with_no_replay_socket_is_lost(rig: Rig) -> None:
    await rig.start_and_hear(rig.engine.source(replay=False))
    await rig.engine.publish("a")
    rig.engine.lose("b")
    await rig.engine.publish("c")
    await rig.sees("a", "lost", "c")


async def test_a_replay_that_stays_unanswered_makes_the_gap_lost(rig: Rig) -> None:
    await rig.start_and_hear()
    rig.engine.answers = False
    rig.engine.lose("a")
    await rig.engine.publish("b")
    await rig.sees("lost", "b")


async def test_an_engine_that_restarts_is_noticed_before_its_first_frame_is_applied(rig: Rig) -> None:
    await rig.start_and_hear()
    await rig.engine.publish("old")
    await rig.sees("old")
    await rig.engine.restart()
    rig.engine.lose("new 0")
    await rig.sees("old", "restarted", "new 0")


async def test_a_restart_whose_sequence_looks_contiguous_is_noticed(rig: Rig) -> None:
    await rig.start_and_hear()
    last = rig.engine.sequence - 1
    await rig.engine.restart()
    names = [f"new {number}" for number in range(last + 1)]
    for name in names:
        rig.engine.lose(name)
    # The next frame that anybody sees has just the number that the old process would have used next.
    assert rig.engine.sequence == last + 1
    await rig.engine.publish("looks contiguous")
    await rig.sees("restarted", *names, "looks contiguous")


async def test_a_restart_is_noticed_without_a_replay_socket_where_the_sequence_goes_back(rig: Rig) -> None:
    source = rig.engine.source(replay=False)
    await rig.start_and_hear(source)
    await rig.engine.restart()
    while "restarted" not in rig.sink.seen:
        await rig.engine.publish("new")
        await asyncio.sleep(0.01)
        if rig.engine.sequence > 1 and not rig.sink.seen:
            await rig.engine.restart()
    assert rig.sink.seen[:2] == ["restarted", "new"]


async def test_an_engine_known_to_be_new_is_read_from_the_start(rig: Rig) -> None:
    feed = await rig.start_and_hear()
    count = rig.engine.sequence
    feed.forget_engine()
    await rig.sees("restarted", *["hello"] * count)


async def test_a_checkpoint_position_of_the_same_process_is_gone_on_from(rig: Rig) -> None:
    for name in ("a", "b"):
        rig.engine.lose(name)
    await rig.start()
    await rig.sees("a", "b")
    position = rig.log.position
    await rig.stop_feeds()
    rig.engine.lose("c")
    rig.sink.seen.clear()
    await rig.start(position)
    await rig.sees("c")


async def test_a_checkpoint_position_of_another_process_is_void(rig: Rig) -> None:
    for name in ("a", "b"):
        rig.engine.lose(name)
    await rig.start()
    await rig.sees("a", "b")
    position = rig.log.position
    await rig.stop_feeds()
    await rig.engine.restart()
    for name in ("c", "d", "e"):
        rig.engine.lose(name)
    rig.sink.seen.clear()
    await rig.start(position)
    await rig.sees("restarted", "c", "d", "e")


async def test_a_checkpoint_position_older_than_the_buffer_is_a_lost_gap(rig: Rig) -> None:
    await rig.engine.stop()
    rig.engine = ZmqEngine(rig.context, buffer_steps=2)
    rig.engine.lose("a")
    await rig.start()
    await rig.sees("a")
    position = rig.log.position
    await rig.stop_feeds()
    for name in ("b", "c", "d", "e"):
        rig.engine.lose(name)
    rig.sink.seen.clear()
    await rig.start(position)
    await rig.sees("lost", "d", "e")


async def test_messages_that_are_no_frames_are_counted(rig: Rig) -> None:
    feed = await rig.start_and_hear()
    await rig.engine.send_raw(b"topic")
    await rig.engine.send_raw(b"topic", b"short", b"payload")
    await rig.engine.publish("a")
    await rig.sees("a")
    assert feed.malformed == 2


async def test_the_feed_binds_where_the_engine_connects(rig: Rig) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    source = KvSource(rank=0, events=f"tcp://127.0.0.1:{port}", replay=None, binds_here=True)
    await rig.start(source=source)
    publisher = rig.context.socket(zmq.PUB)
    publisher.connect(source.events)
    sequence = 0
    while not rig.sink.seen:
        await publisher.send_multipart([b"", sequence.to_bytes(8, "big"), msgspec.msgpack.encode([1.0, ["a"], 0])])
        sequence += 1
        await asyncio.sleep(0.01)
    publisher.close(linger=0)
    assert rig.sink.seen[0] == "a"


async def test_an_address_that_the_engine_has_bound_itself_is_connected_to(rig: Rig) -> None:
    source = rig.engine.source()
    bound = KvSource(rank=0, events=source.events, replay=source.replay, binds_here=True)
    await rig.start_and_hear(bound)
    await rig.engine.publish("a")
    await rig.sees("a")


async def test_a_log_longer_than_the_sockets_queue_is_replayed_whole(rig: Rig) -> None:
    for number in range(5_000):
        rig.engine.lose(number)
    await rig.start()
    await rig.sees(*range(5_000))
