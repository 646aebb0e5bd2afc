"""The replica ledger: the open reservations of one replica, by id.

The one rule: an id is open once. What has ended stays ended: a late copy of its reserve entry must not bring it back.
"""

from collections.abc import Iterator

from trimtab_core.reservation import Reservation

ENDED_REMEMBERED = 8192
"""Ids of ended reservations remembered, the latest. A copy that comes later than so many others is no longer known."""


class ReplicaLedger:
    """Open reservations by id, in the order they came, and the ids that ended last."""

    def __init__(self) -> None:
        self._open: dict[int, Reservation] = {}
        self._ended: dict[int, None] = {}

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[Reservation]:
        return iter(self._open.values())

    def get(self, reservation_id: int) -> Reservation | None:
        """The reservation, while it is open."""
        return self._open.get(reservation_id)

    def is_new(self, reservation_id: int) -> bool:
        """Neither open nor known to have ended."""
        return reservation_id not in self._open and reservation_id not in self._ended

    def add(self, reservation: Reservation) -> None:
        """A reservation that `is_new`."""
        self._open[reservation.key[1]] = reservation

    def end(self, reservation_id: int) -> Reservation | None:
        """The reservation, for the last time; None if it is not open. Unknown ids are remembered too: the end of a
        reservation may be heard of before its beginning."""
        self._ended[reservation_id] = None
        if len(self._ended) > ENDED_REMEMBERED:
            del self._ended[next(iter(self._ended))]
        return self._open.pop(reservation_id, None)
