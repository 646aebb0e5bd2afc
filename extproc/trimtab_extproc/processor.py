"""The ext_proc method without a server: one conversation per gRPC stream, bytes in and bytes out.

The one rule: whoever opens a conversation closes it exactly once, synchronously, when its stream ends for whatever
reason (the gateway closes or resets it, the client leaves, a fault of ours). It decides nothing: the exchange says what
to answer, the picker whom to choose.
"""

import logging
from collections.abc import Callable, Sequence

from trimtab_extproc.body_budget import BodyBudget
from trimtab_extproc.errors import NotReady, ProtocolError
from trimtab_extproc.events import GatewayEvent, Placed, Refused, RequestHeaders
from trimtab_extproc.exchange import Exchange, ExchangeSettings, Ledger
from trimtab_extproc.grpc_status import Code, Status
from trimtab_extproc.picker import Picker, Undecided
from trimtab_extproc.replies import Decide, Refuse, Reply
from trimtab_extproc.telemetry import Telemetry
from trimtab_extproc.wire import decode, encode

log = logging.getLogger(__name__)


class ExternalProcessor:
    """Opens conversations and counts them. `clock` is monotonic, in seconds; `decode` reads the gateway's messages."""

    def __init__(
        self,
        *,
        picker: Picker,
        ledger: Ledger,
        telemetry: Telemetry,
        settings: ExchangeSettings,
        budget: BodyBudget,
        clock: Callable[[], float],
        decode: Callable[[bytes], GatewayEvent] = decode,
    ) -> None:
        self.picker = picker
        self.ledger = ledger
        self.telemetry = telemetry
        self.settings = settings
        self.budget = budget
        self.clock = clock
        self.decode = decode
        self.in_flight_count = 0

    def open(self) -> "Conversation":
        """A stream was opened."""
        self.in_flight_count += 1
        self.telemetry.exchange_opened()
        return Conversation(self)

    def status_of(self, error: Exception) -> Status:
        """What the stream of a conversation that raised this ends with. Counts it."""
        if isinstance(error, ProtocolError):
            self.telemetry.protocol_error()
            log.warning("protocol error: %s", error)
            return Status(Code.INVALID_ARGUMENT, str(error))
        if isinstance(error, NotReady):
            self.telemetry.not_ready()
            return Status(Code.UNAVAILABLE, str(error))
        self.telemetry.failure()
        log.error("an exchange failed", exc_info=error)
        return Status(Code.INTERNAL, "internal error")


class Conversation:
    """One stream: one HTTP exchange. Give it every message in order; after one of `receive` or `choose` has raised,
    nothing but `close`."""

    __slots__ = ("_exchange", "_processor", "_received_s", "_undecided", "is_over")

    def __init__(self, processor: ExternalProcessor) -> None:
        self.is_over = False
        """Nothing more is to be said: end the stream once all replies are sent."""
        self._processor = processor
        self._exchange = Exchange(ledger=processor.ledger, settings=processor.settings, budget=processor.budget)
        self._undecided: Undecided | None = None
        self._received_s = 0.0

    def receive(self, data: bytes) -> list[bytes] | None:
        """The replies to one message; None: they have to be awaited, by `choose`, before the next message."""
        processor = self._processor
        now_s = processor.clock()
        event = processor.decode(data)
        if type(event) is RequestHeaders and not processor.picker.is_ready:
            # Before a byte of the body has passed the gateway can still go on without us.
            raise NotReady("the pool's members are not known yet")
        answer = self._exchange.receive(event, now_s=now_s)
        if not isinstance(answer, Decide):
            return self._encoded(answer)
        self._received_s = now_s
        outcome = processor.picker.pick_now(answer)
        if isinstance(outcome, Undecided):
            self._undecided = outcome
            return None
        return self._chosen(outcome)

    async def choose(self) -> list[bytes]:
        """The replies to the message for which `receive` had none."""
        assert self._undecided is not None, "receive asked for it"
        # The picker's last step awaits nothing: the exchange owns the reservation before anything can end it.
        return self._chosen(await self._processor.picker.decide(self._undecided))

    def close(self) -> None:
        """The stream has ended, in whatever way."""
        if self._undecided is not None:
            self._processor.picker.drop(self._undecided)
        self._exchange.close(now_s=self._processor.clock())
        self._processor.in_flight_count -= 1
        self._processor.telemetry.exchange_closed()

    def _chosen(self, outcome: Placed | Refused) -> list[bytes]:
        self._undecided = None
        answer = self._exchange.receive(outcome, now_s=self._processor.clock())
        assert not isinstance(answer, Decide), "one choice for each exchange"
        replies = self._encoded(answer)
        self._processor.telemetry.answered(seconds=self._processor.clock() - self._received_s)
        return replies

    def _encoded(self, answer: Sequence[Reply]) -> list[bytes]:
        if answer and type(answer[0]) is Refuse:
            self.is_over = True
        return [encode(reply) for reply in answer]
