"""One gateway's connection on the native front: events of its streams to conversations, their replies back.

The one rule: a stream is in `_streams` from its opening until it ends, for whatever reason, and leaves it by `_close`
alone, which closes its conversation in the same step. Small requests are answered in the same turn in which they came;
only a choice that has to wait runs as a task, and its stream stands still meanwhile.

Bounds: of a stream that stands still at most one turn's events wait here (the peer's window holds the rest).
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from trimtab_extproc._front import ENDED, PAUSE, RESUME, Connection
from trimtab_extproc.errors import ProtocolError
from trimtab_extproc.front import KEEPALIVE_S, KEEPALIVE_TIMEOUT_S
from trimtab_extproc.grpc_status import OK, Code, Status
from trimtab_extproc.health import HEALTH_SERVICE, Health
from trimtab_extproc.processor import Conversation, ExternalProcessor
from trimtab_extproc.wire import METHOD, SERVICE

if TYPE_CHECKING:
    from trimtab_extproc._front import Answer, Event

log = logging.getLogger(__name__)

PROCESS = f"/{SERVICE}/{METHOD}"
CHECK = f"/{HEALTH_SERVICE}/Check"
WATCH = f"/{HEALTH_SERVICE}/Watch"
LATE_S = 0.005
"""How long the status of a stream that is over may wait for other answers to go with: nobody waits for it."""


class _Stream:
    """What is known of one stream. Without a conversation it is a health check or watch."""

    __slots__ = ("conversation", "end_watch", "is_watch", "task", "timer", "waiting")

    def __init__(self, conversation: Conversation | None, *, is_watch: bool = False) -> None:
        self.conversation = conversation
        self.is_watch = is_watch
        self.end_watch: Callable[[], None] | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.task: asyncio.Task[None] | None = None
        """The choice that the stream waits for."""
        self.waiting: deque[bytes | int] = deque()
        """What came meanwhile."""


class GatewayConnection:
    """`on_closed` is called once, when it is over; `on_ended` after each stream that ends once it is shut down."""

    def __init__(
        self,
        native: Connection,
        descriptor: int,
        *,
        health: Health,
        processor: ExternalProcessor | None,
        exchanges_max: int,
        on_closed: Callable[["GatewayConnection"], None],
        on_ended: Callable[[], None],
    ) -> None:
        self._native: Connection | None = native
        self._descriptor = descriptor
        self._health = health
        self._processor = processor
        self._exchanges_max = exchanges_max
        self._on_closed = on_closed
        self._on_ended = on_ended
        self._is_leaving = False
        self._streams: dict[int, _Stream] = {}
        self._loop = asyncio.get_running_loop()
        self._is_writer = False
        self._late: list[Answer] = []
        """Statuses that wait."""
        self._is_late_awaited = False
        self._loop.add_reader(descriptor, self._on_readable)
        self._keepalive = self._loop.call_later(KEEPALIVE_S, self._ping)
        # The handshake's first bytes are ours.
        self._work(native.readable)

    @property
    def is_closed(self) -> bool:
        """Whether it is over."""
        return self._native is None

    @property
    def exchange_count(self) -> int:
        """Exchanges in flight."""
        return sum(stream.conversation is not None for stream in self._streams.values())

    def shut_down(self) -> None:
        """Take no new streams, and close after the last one; watchers are told to go elsewhere."""
        if self._native is None:
            return
        self._is_leaving = True
        gone = Status(Code.UNAVAILABLE, "the process ends")
        watches: list[Answer] = [(number, gone) for number, stream in self._streams.items() if stream.is_watch]
        for number, _ in watches:
            self._close(number)
        self._answer(watches)
        if self._native is not None:
            self._work(self._native.shut_down)

    def cut(self) -> None:
        """End everything now."""
        if self._native is not None:
            status = Status(Code.UNAVAILABLE, "the process ends")
            cut: list[Answer] = [(number, status) for number in self._streams]
            for number, _ in cut:
                self._close(number)
            self._native.answer([*self._late, *cut])
        self._gone()

    # Turns.

    def _on_readable(self) -> None:
        if self._native is not None:
            self._work(self._native.readable)

    def _on_writable(self) -> None:
        if self._native is not None:
            self._work(self._native.writable)

    def _answer(self, answers: "list[Answer]") -> None:
        native = self._native
        if native is not None:
            self._work(lambda: native.answer(answers))

    def _work(self, turn: "Callable[[], list[Event]]") -> None:
        """A turn, then what comes of it, until nothing more does."""
        native = self._native
        assert native is not None, "asked before"
        try:
            events = turn()
            while events:
                answers: list[Answer] = []
                for number, what in events:
                    self._take(number, what, answers)
                if answers and self._late:
                    answers += self._late
                    self._late.clear()
                events = native.answer(answers) if answers else []
        except Exception:
            # Not a conversation's own fault, which ends its stream alone.
            log.exception("a gateway's connection failed")
            self._gone()
            return
        if native.is_closed:
            self._gone()
        elif native.is_blocked is not self._is_writer:
            self._watch_for_room(native.is_blocked)

    def _watch_for_room(self, is_blocked: bool) -> None:
        self._is_writer = is_blocked
        if is_blocked:
            self._loop.add_writer(self._descriptor, self._on_writable)
        else:
            self._loop.remove_writer(self._descriptor)

    # Events.

    def _take(self, number: int, what: Any, answers: "list[Answer]") -> None:
        if type(what) is tuple:
            path, timeout_s = what
            self._open(number, path, timeout_s, answers)
            return
        stream = self._streams.get(number)
        if stream is None:
            # We have ended it, and this was on its way.
            return
        if type(what) is int and what == ENDED:
            self._close(number)
        elif stream.task is not None:
            stream.waiting.append(what)
        elif stream.conversation is None:
            self._check_health(number, stream, what, answers)
        elif type(what) is bytes:
            self._converse(number, stream, stream.conversation, what, answers)
        else:
            self._close(number)
            self._end_late(number)

    def _end_late(self, number: int) -> None:
        """Both sides have said all: the status goes with what is sent next, or soon."""
        self._late.append((number, OK))
        if not self._is_late_awaited:
            self._is_late_awaited = True
            self._loop.call_later(LATE_S, self._send_late)

    def _send_late(self) -> None:
        self._is_late_awaited = False
        if self._late:
            late, self._late = self._late, []
            self._answer(late)

    def _open(self, number: int, path: str, timeout_s: float | None, answers: "list[Answer]") -> None:
        processor = self._processor
        if path == PROCESS and processor is not None:
            if processor.in_flight_count >= self._exchanges_max:
                answers.append((number, Status(Code.RESOURCE_EXHAUSTED, "too many exchanges in flight")))
                return
            stream = self._streams[number] = _Stream(processor.open())
        elif path in (CHECK, WATCH):
            stream = self._streams[number] = _Stream(None, is_watch=path == WATCH)
        else:
            answers.append((number, Status(Code.UNIMPLEMENTED, "unknown method")))
            return
        if timeout_s is not None:
            stream.timer = self._loop.call_later(timeout_s, self._on_deadline, number)

    def _converse(
        self, number: int, stream: _Stream, conversation: Conversation, data: bytes, answers: "list[Answer]"
    ) -> None:
        try:
            replies = conversation.receive(data)
        except Exception as error:
            self._fail(number, error, answers)
            return
        if replies is None:
            answers.append((number, PAUSE))
            stream.task = self._loop.create_task(self._choose(number, stream, conversation))
        else:
            self._reply(number, conversation, replies, answers)

    def _reply(self, number: int, conversation: Conversation, replies: list[bytes], answers: "list[Answer]") -> None:
        for reply in replies:
            answers.append((number, reply))
        if conversation.is_over:
            self._end(number, OK, answers)

    async def _choose(self, number: int, stream: _Stream, conversation: Conversation) -> None:
        """The choice that a stream waits for, then what came meanwhile. Cancelled when the stream ends."""
        answers: list[Answer] = []
        try:
            replies = await conversation.choose()
        except Exception as error:
            # From here on nothing is awaited: the stream cannot end under us.
            stream.task = None
            self._fail(number, error, answers)
        else:
            stream.task = None
            self._reply(number, conversation, replies, answers)
        answers.append((number, RESUME))
        while stream.waiting and stream.task is None:
            self._take(number, stream.waiting.popleft(), answers)
        self._answer(answers)

    def _check_health(self, number: int, stream: _Stream, what: Any, answers: "list[Answer]") -> None:
        if type(what) is int:
            if not stream.is_watch:
                self._end(number, Status(Code.INVALID_ARGUMENT, "a check without a request"), answers)
            return
        try:
            if stream.is_watch:
                if stream.end_watch is None:
                    stream.end_watch = self._health.watch(what, lambda status: self._answer([(number, status)]))
                return
            answer = self._health.check(what)
        except ProtocolError as error:
            self._end(number, Status(Code.INVALID_ARGUMENT, str(error)), answers)
            return
        if answer is None:
            self._end(number, Status(Code.NOT_FOUND, "unknown service"), answers)
        else:
            answers.append((number, answer))
            self._end(number, OK, answers)

    def _on_deadline(self, number: int) -> None:
        answers: list[Answer] = []
        self._end(number, Status(Code.DEADLINE_EXCEEDED, "the caller's deadline has passed"), answers)
        self._answer(answers)

    # Ends.

    def _fail(self, number: int, error: Exception, answers: "list[Answer]") -> None:
        assert self._processor is not None, "conversations are its own"
        self._end(number, self._processor.status_of(error), answers)

    def _end(self, number: int, status: Status, answers: "list[Answer]") -> None:
        """We end the stream."""
        self._close(number)
        answers.append((number, status))

    def _close(self, number: int) -> None:
        """The stream is over."""
        stream = self._streams.pop(number, None)
        if stream is None:
            return
        if stream.timer is not None:
            stream.timer.cancel()
        if stream.task is not None:
            stream.task.cancel()
        if stream.end_watch is not None:
            stream.end_watch()
        if stream.conversation is not None:
            stream.conversation.close()
        if self._is_leaving:
            self._on_ended()

    def _gone(self) -> None:
        """The connection is over, and so is all that was on it."""
        if self._native is None:
            return
        self._loop.remove_reader(self._descriptor)
        self._loop.remove_writer(self._descriptor)
        self._keepalive.cancel()
        for number in list(self._streams):
            self._close(number)
        # The last reference: the descriptor is closed here, on this thread, and not before the loop has let go of it.
        self._native = None
        self._on_closed(self)

    # Keepalive.

    def _ping(self) -> None:
        if self._native is not None:
            self._keepalive = self._loop.call_later(KEEPALIVE_TIMEOUT_S, self._expect_pong)
            self._work(self._native.ping)

    def _expect_pong(self) -> None:
        # It may have come while the loop was busy.
        self._on_readable()
        if self._native is None:
            return
        if self._native.is_pong_awaited:
            log.info("a gateway does not answer a ping: its connection is cut")
            self._gone()
        else:
            self._keepalive = self._loop.call_later(KEEPALIVE_S - KEEPALIVE_TIMEOUT_S, self._ping)
