"""Fleet load: how many requests and how many uncached prompt tokens are on each slot.

The one rule: nobody is counted twice and nobody is forgotten. A slot's requests are the open reservations of all
replicas plus what the engine reports beyond them; a reservation adds its batch and its P once and takes exactly that
away again.

Where no first token can be seen, prefill is modelled: first come, first served, one after the other, at the rate that
the slot's seen first tokens show. Nothing here knows chunks.
"""

import math
from collections.abc import Iterator

import numpy as np

from trimtab_core.errors import ensure
from trimtab_core.placement import F64, I64, LoadView
from trimtab_core.reservation import NOWHERE, Reservation, ReservationKey
from trimtab_core.settings import SchedulerSettings

PREFILL_RATE_MIN = 50.0
PREFILL_RATE_MAX = 10_000_000.0
"""Bounds of an observed prefill rate, tokens per second: a clock's hiccup must not stop or abolish the fading."""


class FleetLoad:
    """The load table. Arrays run over slots; slots are added at the end or reused, as the caller numbers them."""

    def __init__(self, settings: SchedulerSettings) -> None:
        self.settings = settings
        self.requests: I64 = np.zeros(0, dtype=np.int64)
        """Open reservations (their batches), all replicas'."""
        self.external: I64 = np.zeros(0, dtype=np.int64)
        """Requests that came past us, as of the last report."""
        self.weight_milli: I64 = np.zeros(0, dtype=np.int64)
        """Weights of the open reservations: of each its batch times the weight of its class, in thousandths."""
        self.queued_tokens: F64 = np.zeros(0, dtype=np.float64)
        self.block_tokens: I64 = np.zeros(0, dtype=np.int64)
        self.kv_capacity_tokens: I64 = np.zeros(0, dtype=np.int64)
        self.prefill_rate: F64 = np.zeros(0, dtype=np.float64)
        self._requests_peak: I64 = np.zeros(0, dtype=np.int64)  # most requests at once since the last report
        self._requests_reported: I64 = np.zeros(0, dtype=np.int64)
        self._rate_tokens: F64 = np.zeros(0, dtype=np.float64)  # decayed sums that the rate is the quotient of
        self._rate_s: F64 = np.zeros(0, dtype=np.float64)
        self._free_s: list[float] = []  # when the slot's last prefill ended, seen or modelled
        self._open: list[dict[ReservationKey, Reservation]] = []
        self._queue: list[dict[ReservationKey, Reservation]] = []  # those before their first token, in order

    def __len__(self) -> int:
        return len(self._open)

    def reset_slot(self, slot: int) -> None:
        """The slot begins (again), unreported and empty. Reservations still on it are detached."""
        if slot == len(self):
            for name in ARRAYS:
                column = getattr(self, name)
                setattr(self, name, np.append(column, np.zeros(1, dtype=column.dtype)))
            self._free_s.append(0.0)
            self._open.append({})
            self._queue.append({})
        for reservation in self._open[slot].values():
            reservation.slot = NOWHERE
        self._open[slot], self._queue[slot] = {}, {}
        self._free_s[slot] = 0.0
        self.requests[slot] = self.external[slot] = self._requests_peak[slot] = self.weight_milli[slot] = 0
        self._requests_reported[slot] = 0
        self.queued_tokens[slot] = 0.0
        self.block_tokens[slot] = self.settings.block_tokens
        self.kv_capacity_tokens[slot] = self.settings.kv_capacity_tokens
        self.prefill_rate[slot] = self._rate_tokens[slot] = self.settings.prefill_rate
        self._rate_s[slot] = 1.0

    def report(self, slot: int, *, requests: int, block_tokens: int, kv_capacity_tokens: int) -> None:
        """What the engine says of itself: requests running and waiting, block size, KV capacity (0: not known).

        What it counts beyond our own is external. Its count is older than ours: a request that it still counted may
        have ended here meanwhile. So "our own" is the most that were open at once since the previous report, and none
        of ours ever shows as foreign; the price is that foreign requests show one report late while ours fall.
        """
        self.external[slot] = max(0, requests - int(self._requests_peak[slot]))
        self._requests_reported[slot] = requests
        self._requests_peak[slot] = self.requests[slot]
        self.block_tokens[slot] = block_tokens if block_tokens > 0 else self.settings.block_tokens
        known = kv_capacity_tokens > 0
        self.kv_capacity_tokens[slot] = kv_capacity_tokens if known else self.settings.kv_capacity_tokens

    def open(self, reservation: Reservation, now_s: float) -> None:
        """The reservation's load comes to its slot."""
        slot = reservation.slot
        if slot == NOWHERE:
            return
        reservation.queued_since_s = now_s
        reservation.served_s = None
        self._open[slot][reservation.key] = reservation
        self.requests[slot] += reservation.batch
        self.weight_milli[slot] += reservation.batch * reservation.weight_milli
        self._requests_peak[slot] = max(self._requests_peak[slot], self.requests[slot])
        if reservation.is_queued:
            self._queue[slot][reservation.key] = reservation
            self.queued_tokens[slot] += reservation.p_tokens

    def close(self, reservation: Reservation, now_s: float) -> None:
        """The reservation's load goes from its slot (it ended, or moves on). If it was being prefilled, that stops
        now."""
        slot = reservation.slot
        if slot == NOWHERE:
            return
        if reservation.is_queued:
            for other, start_s, end_s in self._timeline(slot):
                if other is reservation and start_s < now_s:
                    self._free_s[slot] = max(self._free_s[slot], min(now_s, end_s))
            self._leave_queue(reservation)
        del self._open[slot][reservation.key]
        self.requests[slot] -= reservation.batch
        self.weight_milli[slot] -= reservation.batch * reservation.weight_milli
        reservation.slot = NOWHERE

    def close_of_gone(self, reservation: Reservation, now_s: float) -> None:
        """As `close`, where it is its replica that ended: the request may go on in the engine, and as far as the last
        report had room for it, it is external now."""
        slot = reservation.slot
        self.close(reservation, now_s)
        if slot != NOWHERE:
            self._requests_peak[slot] -= reservation.batch
            beyond_ours = self._requests_reported[slot] - self.requests[slot]
            external = self.external[slot]
            self.external[slot] = max(external, min(external + reservation.batch, beyond_ours))

    def first_token(self, reservation: Reservation, now_s: float, *, teaches: bool) -> None:
        """Its first token is there, so its P goes. `teaches`: seen at this very time, so it tells the slot's rate."""
        slot = reservation.slot
        if slot != NOWHERE and reservation.is_queued:
            if teaches:
                self._observe_rate(reservation, now_s)
            if reservation.p_tokens:
                self._free_s[slot] = max(self._free_s[slot], now_s)
            self._leave_queue(reservation)
        reservation.is_queued = False

    def advance(self, now_s: float) -> list[Reservation]:
        """Own reservations whose prefill is over by the model; they are out of the queue, and out of `queued_tokens`.

        With a signal to come, the model is only a safety and waits longer (`late_signal_factor`, `late_signal_s`).
        Other replicas' reservations take their time in the model, but their P goes when their replica says so.
        """
        faded: list[Reservation] = []
        for slot, queue in enumerate(self._queue):
            if not queue:
                continue
            over: list[tuple[Reservation, float]] = []
            for reservation, _, end_s in self._timeline(slot):
                if end_s > now_s:
                    break
                reservation.served_s = end_s
                deadline_s = end_s
                if reservation.expects_signal:
                    wait_s = end_s - reservation.queued_since_s
                    deadline_s = reservation.queued_since_s + self.settings.late_signal_factor * wait_s
                    deadline_s += self.settings.late_signal_s
                if reservation.is_own and deadline_s <= now_s:
                    over.append((reservation, end_s))
            for reservation, end_s in over:
                self._free_s[slot] = max(self._free_s[slot], end_s)
                self._leave_queue(reservation)
                reservation.is_queued = False
                faded.append(reservation)
        return faded

    def on_slot(self, slot: int) -> list[Reservation]:
        """The open reservations on a slot, in the order they came."""
        return list(self._open[slot].values())

    def view(self) -> LoadView:
        """Copies of what others may see."""
        return LoadView(
            requests=self.requests.copy(),
            external=self.external.copy(),
            queued_tokens=self.queued_tokens.copy(),
            prefill_rate=self.prefill_rate.copy(),
            weight_milli=self.weight_milli.copy(),
        )

    def _timeline(self, slot: int) -> Iterator[tuple[Reservation, float, float]]:
        """The queue as the model sees it: (reservation, start of its prefill, end of it), in order."""
        clock_s, rate = self._free_s[slot], float(self.prefill_rate[slot])
        for reservation in self._queue[slot].values():
            start_s = max(clock_s, reservation.queued_since_s)
            end_s = start_s + reservation.p_tokens / rate if reservation.served_s is None else reservation.served_s
            clock_s = max(clock_s, end_s)
            yield reservation, start_s, end_s

    def _leave_queue(self, reservation: Reservation) -> None:
        del self._queue[reservation.slot][reservation.key]
        self.queued_tokens[reservation.slot] -= reservation.p_tokens

    def _observe_rate(self, reservation: Reservation, now_s: float) -> None:
        """One more first token: tokens prefilled over the time that the slot was at it.

        Tokens and seconds are summed apart, and fade with the seconds. So prompts that were prefilled together (the
        time of all but the first is nearly zero) add up to the true rate. Less than a block tells more about overheads
        than about prefill.
        """
        slot = reservation.slot
        if reservation.p_tokens < self.block_tokens[slot]:
            return
        busy_s = max(now_s - max(self._free_s[slot], reservation.queued_since_s), 0.0)
        keep = math.exp(-busy_s / self.settings.prefill_rate_memory_s)
        seconds = keep * self._rate_s[slot] + busy_s
        tokens = keep * self._rate_tokens[slot] + reservation.p_tokens
        rate = min(max(tokens / max(seconds, 1e-9), PREFILL_RATE_MIN), PREFILL_RATE_MAX)
        self.prefill_rate[slot] = rate
        self._rate_s[slot] = seconds
        self._rate_tokens[slot] = rate * seconds

    def check_invariants(self) -> None:
        """Raise `InvariantError` if the state contradicts itself."""
        for slot, (reservations, queue) in enumerate(zip(self._open, self._queue, strict=True)):
            queued = [reservation for reservation in reservations.values() if reservation.is_queued]
            ensure({id(r) for r in queued} == {id(r) for r in queue.values()}, f"slot {slot}: the queue is another")
            ensure(all(r.slot == slot for r in reservations.values()), f"slot {slot}: a reservation is elsewhere")
            ensure(
                self.requests[slot] == sum(r.batch for r in reservations.values()), f"slot {slot}: requests miscounted"
            )
            weight_milli = sum(r.batch * r.weight_milli for r in reservations.values())
            ensure(self.weight_milli[slot] == weight_milli, f"slot {slot}: weights miscounted")
            ensure(self.queued_tokens[slot] == sum(r.p_tokens for r in queued), f"slot {slot}: queue miscounted")
            ensure(self._requests_peak[slot] >= self.requests[slot], f"slot {slot}: peak below the present")
            ensure(self.external[slot] >= 0, f"slot {slot}: external requests below zero")


ARRAYS = (
    "requests",
    "external",
    "weight_milli",
    "queued_tokens",
    "block_tokens",
    "kv_capacity_tokens",
    "prefill_rate",
    "_requests_peak",
    "_requests_reported",
    "_rate_tokens",
    "_rate_s",
)
