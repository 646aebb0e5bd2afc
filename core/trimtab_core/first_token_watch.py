"""The first-token watch: own reservations that wait for a chunk to appear on their slot.

The one rule: the last chunk of a prompt that a whole KV block completes appears when the engine stores that block,
which is when its prefill is over. It must not be there already, or it would say nothing.
"""

from collections.abc import Iterable

from trimtab_core.errors import ensure
from trimtab_core.reservation import Reservation


class FirstTokenWatch:
    """slot -> chunk -> reservations. A reservation with several prompts waits for all of its chunks."""

    def __init__(self) -> None:
        self._waiting: dict[int, dict[int, list[Reservation]]] = {}

    def watch(self, reservation: Reservation, chunks: Iterable[int]) -> None:
        """Wait for these chunks on the reservation's slot. None: no signal is expected from there."""
        reservation.watched = set(chunks)
        reservation.expects_signal = bool(reservation.watched)
        for chunk in reservation.watched:
            self._waiting.setdefault(reservation.slot, {}).setdefault(chunk, []).append(reservation)

    def unwatch(self, reservation: Reservation) -> set[int]:
        """Wait no more. The chunks that had not appeared."""
        chunks, reservation.watched = reservation.watched, set()
        for chunk in chunks:
            of_slot = self._waiting[reservation.slot]
            of_slot[chunk].remove(reservation)
            if not of_slot[chunk]:
                del of_slot[chunk]
            if not of_slot:
                del self._waiting[reservation.slot]
        return chunks

    def appeared(self, slot: int, chunks: list[int]) -> list[Reservation]:
        """Reservations that waited for nothing but these, in the order in which their last one came."""
        of_slot = self._waiting.get(slot)
        if of_slot is None:
            return []
        complete = []
        for chunk in chunks:
            for reservation in of_slot.pop(chunk, ()):
                reservation.watched.discard(chunk)
                if not reservation.watched:
                    complete.append(reservation)
        if not of_slot:
            del self._waiting[slot]
        return complete

    def drop_slot(self, slot: int) -> None:
        """The slot is gone: nobody waits there any more."""
        for waiting in self._waiting.pop(slot, {}).values():
            for reservation in waiting:
                reservation.watched = set()
                reservation.expects_signal = False

    def check_invariants(self) -> None:
        """Raise `InvariantError` if the state contradicts itself."""
        for slot, of_slot in self._waiting.items():
            ensure(bool(of_slot), f"slot {slot}: an empty list of watches")
            for chunk, waiting in of_slot.items():
                ensure(bool(waiting), f"slot {slot}: nobody waits for chunk {chunk}")
                for reservation in waiting:
                    ensure(chunk in reservation.watched, f"slot {slot}: {reservation.key} does not wait for {chunk}")
                    ensure(reservation.slot == slot, f"slot {slot}: {reservation.key} is elsewhere")
                    ensure(reservation.is_queued, f"slot {slot}: {reservation.key} has its first token")
