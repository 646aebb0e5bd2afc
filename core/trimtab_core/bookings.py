"""Bookings: all that a reservation touches, from its opening to its end.

The one rule: load, speculation, watch and what is learned change together, here and nowhere else, whoever's reservation
it is. So what one event does to a peer's reservation is what it does to our own.
"""

from collections.abc import Iterable

from trimtab_core.errors import ensure
from trimtab_core.first_token_watch import FirstTokenWatch
from trimtab_core.fleet_load import FleetLoad
from trimtab_core.learned_index import LearnedIndex
from trimtab_core.prefix_index import PrefixIndex
from trimtab_core.reservation import NOWHERE, Reservation
from trimtab_core.settings import SchedulerSettings
from trimtab_core.speculation import Speculation


class Bookings:
    """The state around reservations. `index` is only read: what engines hold is not booked."""

    def __init__(self, settings: SchedulerSettings, index: PrefixIndex) -> None:
        self.settings = settings
        self.load = FleetLoad(settings)
        self.speculation = Speculation(chunks_max=settings.speculative_chunks_max)
        self.learned = LearnedIndex()
        self._index = index
        self._watch = FirstTokenWatch()
        self.is_approximate: list[bool] = []
        """By slot: some request found it in approximate mode."""

    def reset_slot(self, slot: int) -> None:
        """The slot begins (again) or is gone: nothing is known of it, and its open reservations are detached."""
        self.learned.clear(slot)
        self.speculation.drop_slot(slot)
        self._watch.drop_slot(slot)
        self.load.reset_slot(slot)
        if slot == len(self.is_approximate):
            self.is_approximate.append(False)
        self.is_approximate[slot] = False

    def open(
        self,
        reservation: Reservation,
        chunks: list[int],
        tokens: list[int],
        now_s: float,
        *,
        watched: Iterable[int] = (),
        awaited: Iterable[int] = (),
    ) -> None:
        """Book it: its load, its claim on `chunks` (which ends once all of `awaited` have appeared), and the chunks
        whose appearance is its first token."""
        # A replica that was dropped and came back may use an id again whose claim is still in its grace.
        self.speculation.end(reservation.key)
        if reservation.slot != NOWHERE:
            self.speculation.claim(reservation.key, reservation.slot, chunks, tokens, awaited)
            self._watch.watch(reservation, watched)
            if reservation.is_approximate:
                self.is_approximate[reservation.slot] = True
        self.load.open(reservation, now_s)

    def appeared(self, slot: int, chunks: list[int], now_s: float) -> list[Reservation]:
        """The slot's engine stored these chunks. Reservations that this shows to be prefilled."""
        prefilled = self._watch.appeared(slot, chunks)
        for reservation in prefilled:
            self.first_token(reservation, now_s, teaches=True)
        self.speculation.confirm(slot, chunks)
        return prefilled

    def first_token(self, reservation: Reservation, now_s: float, *, teaches: bool) -> None:
        """Its prefill is over: by a signal at this very time (`teaches`), or by the word of a peer or of the model."""
        self.load.first_token(reservation, now_s, teaches=teaches)
        self._prefilled(reservation, now_s)

    def advance(self, now_s: float) -> list[Reservation]:
        """Time has passed: claims expire. Own reservations whose prefill is over by the model."""
        faded = self.load.advance(now_s)
        for reservation in faded:
            self._prefilled(reservation, now_s)
        self.speculation.expire(now_s)
        return faded

    def move(self, reservation: Reservation, slot: int, now_s: float) -> None:
        """It went to another slot, or to `NOWHERE`: its load, claim and watch go with it."""
        if slot == reservation.slot:
            return
        watched = self._watch.unwatch(reservation)
        self.load.close(reservation, now_s)
        reservation.slot = slot
        self.load.open(reservation, now_s)
        if slot == NOWHERE:
            self.speculation.end(reservation.key)
            return
        claim = self.speculation.claim_of(reservation.key)
        if claim is not None:
            awaited = self._missing(claim.awaited, slot)
            if claim.awaited and not awaited:
                self.speculation.end(reservation.key)
            else:
                self.speculation.move(reservation.key, slot, awaited)
        self._watch.watch(reservation, self._missing(watched, slot))

    def finish(self, reservation: Reservation, now_s: float, *, is_replica_gone: bool = False) -> None:
        """It ended. Its claim stays until the events are in; without a first token it goes at once."""
        self._watch.unwatch(reservation)
        if is_replica_gone:
            self.load.close_of_gone(reservation, now_s)
        else:
            self.load.close(reservation, now_s)
        if reservation.is_queued:
            self.speculation.end(reservation.key)

    def _prefilled(self, reservation: Reservation, now_s: float) -> None:
        self._watch.unwatch(reservation)
        claim = self.speculation.claim_of(reservation.key)
        if claim is None:
            return
        slot = claim.slot
        if reservation.is_approximate or (not reservation.is_own and self.is_approximate[slot]):
            self.learned.learn(slot, claim.chunks, claim.tokens, int(self.load.kv_capacity_tokens[slot]))
        if claim.awaited:
            self.speculation.expire_at(reservation.key, now_s + self.settings.grace_s)
        else:  # learned by now, or less than a block: no events will tell of it
            self.speculation.end(reservation.key)

    def _missing(self, chunks: set[int], slot: int) -> set[int]:
        return {chunk for chunk in chunks if self._index.tokens_of(chunk, slot) is None}

    def check_invariants(self, open_reservations: list[Reservation]) -> None:
        """Raise `InvariantError` if the state contradicts itself, or what is open."""
        for part in (self.learned, self.speculation, self.load, self._watch):
            part.check_invariants()
        keys = {reservation.key for reservation in open_reservations}
        ensure(len(keys) == len(open_reservations), "a reservation is open twice")
        on_slots = {id(reservation) for slot in range(len(self.load)) for reservation in self.load.on_slot(slot)}
        attached = {id(reservation) for reservation in open_reservations if reservation.slot != NOWHERE}
        ensure(on_slots == attached, "the load is not that of the open reservations")
        for reservation in open_reservations:
            claim = self.speculation.claim_of(reservation.key)
            ensure(claim is None or claim.slot == reservation.slot, f"{reservation.key}: claim on another slot")
