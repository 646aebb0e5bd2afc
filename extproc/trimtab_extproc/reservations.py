"""The reservations of this replica that are open: where each step is booked in the scheduler and told to the others.

The one rule: the scheduler's change and the entry in the load log are made in one step, without anything awaited
between them, and a step that the scheduler does not know (any more) is not told. Nothing here fails.
"""

from collections.abc import Callable, Iterable
from typing import Protocol

import msgspec

from trimtab_core.chunks import U32, U64
from trimtab_core.extra_terms import ORDINARY_MILLI
from trimtab_core.placement import Placement
from trimtab_core.scheduler import Scheduler
from trimtab_extproc.endpoint_table import Endpoint, EndpointTable
from trimtab_state import OpenReservation


class LoadLog(Protocol):
    """Where a replica tells the others of its reservations: the shared state's LoadPublisher."""

    def reserve(
        self,
        reservation_id: int,
        endpoint: str,
        p_tokens: int,
        batch: int,
        sample_hashes: U64,
        sample_tokens: U32,
        weight_milli: int,
    ) -> None: ...

    def first_token(self, reservation_id: int) -> None: ...

    def moved(self, reservation_id: int, endpoint: str) -> None: ...

    def finished(self, reservation_id: int) -> None: ...


class Observer(Protocol):
    """Who counts what happens to reservations."""

    def moved(self, *, is_known: bool) -> None: ...

    def first_token(self, *, seconds: float, seen_by: str) -> None: ...

    def first_token_assumed(self) -> None: ...

    def used(self, *, model_label: str, predicted_tokens: int, prompt_tokens: int, cached_tokens: int) -> None: ...


class Responses(Protocol):
    """Who remembers which endpoint made a response."""

    def remember(self, response_id: str, endpoint: str) -> None: ...


class Open(msgspec.Struct, kw_only=True, eq=False):
    """One open reservation."""

    endpoint: Endpoint
    """Where it is now."""
    predicted_tokens: int
    """The hit that the choice counted on."""
    model_label: str
    opened_s: float


class Reservations:
    """Implements the exchange's Ledger. All calls from one event loop."""

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        table: EndpointTable,
        observer: Observer,
        responses: Responses,
    ) -> None:
        self._scheduler = scheduler
        self._table = table
        self._observer = observer
        self._responses = responses
        self._open: dict[int, Open] = {}
        self.load_log: LoadLog | None = None
        """Set once by the composition root: the log itself asks us for what is open."""
        self.on_freed: Callable[[], None] | None = None
        """Set once by the picker, whose requests may wait for a place."""

    def __len__(self) -> int:
        return len(self._open)

    def oldest_s(self, now_s: float) -> float:
        """Age of the reservation that is open for longest; 0 if none is."""
        return next((now_s - entry.opened_s for entry in self._open.values()), 0.0)

    def opened(
        self,
        placement: Placement,
        endpoint: Endpoint,
        *,
        batch: int,
        model_label: str,
        now_s: float,
        weight_milli: int = ORDINARY_MILLI,
    ) -> None:
        """A placement was made: tell it to the others."""
        hit_tokens = placement.hit_tokens
        self._open[placement.reservation_id] = Open(
            endpoint=endpoint,
            predicted_tokens=int(hit_tokens[endpoint.slot]) if endpoint.slot < len(hit_tokens) else 0,
            model_label=model_label,
            opened_s=now_s,
        )
        if self.load_log is not None:
            self.load_log.reserve(
                placement.reservation_id,
                endpoint.name,
                placement.p_own_tokens,
                batch,
                placement.sample_hashes,
                placement.sample_tokens,
                weight_milli,
            )

    def first_token(self, reservation_id: int, *, now_s: float) -> None:
        """The first token was seen in the response."""
        if not self._scheduler.first_token(reservation_id, now_s):
            return
        self._timed(reservation_id, now_s, "response")
        if self.load_log is not None:
            self.load_log.first_token(reservation_id)

    def seen(self, reservation_ids: Iterable[int], *, now_s: float) -> None:
        """The scheduler saw these first tokens in the KV events."""
        for reservation_id in reservation_ids:
            self._timed(reservation_id, now_s, "kv_events")
            if self.load_log is not None:
                self.load_log.first_token(reservation_id)

    def assumed(self, reservation_ids: Iterable[int]) -> None:
        """By the prefill rate these first tokens are there; nobody saw them."""
        for reservation_id in reservation_ids:
            self._observer.first_token_assumed()
            if self.load_log is not None:
                self.load_log.first_token(reservation_id)

    def _timed(self, reservation_id: int, now_s: float, seen_by: str) -> None:
        entry = self._open.get(reservation_id)
        if entry is not None:
            self._observer.first_token(seconds=now_s - entry.opened_s, seen_by=seen_by)

    def served(self, reservation_id: int, address: str, *, now_s: float) -> None:
        """The endpoint that really served; the reservation moves with the request."""
        entry = self._open.get(reservation_id)
        if entry is None or entry.endpoint.address == address:
            return
        at_address = self._table.at_place(address)
        if not at_address:
            # A gateway or mesh between us and the endpoint: no ground to believe that the choice was not followed.
            self._observer.moved(is_known=False)
            return
        rank = entry.endpoint.rank
        target = next((endpoint for endpoint in at_address if endpoint.rank == rank), at_address[0])
        entry.endpoint = target
        self._observer.moved(is_known=True)
        if self._scheduler.move(reservation_id, target.slot, now_s) and self.load_log is not None:
            self.load_log.moved(reservation_id, target.name)

    def named(self, reservation_id: int, response_id: str) -> None:
        """The response has this id, and later requests may name it."""
        entry = self._open.get(reservation_id)
        if entry is not None:
            self._responses.remember(response_id, entry.endpoint.name)

    def used(self, reservation_id: int, *, prompt_tokens: int, cached_tokens: int) -> None:
        """What the engine counted for the request."""
        entry = self._open.get(reservation_id)
        if entry is not None:
            self._observer.used(
                model_label=entry.model_label,
                predicted_tokens=entry.predicted_tokens,
                prompt_tokens=prompt_tokens,
                cached_tokens=cached_tokens,
            )

    def finished(self, reservation_id: int, *, now_s: float) -> None:
        """The exchange is over."""
        if self._open.pop(reservation_id, None) is None:
            return
        self._scheduler.finish(reservation_id, now_s)
        if self.load_log is not None:
            self.load_log.finished(reservation_id)
        if self.on_freed is not None:
            self.on_freed()

    def for_lease(self) -> list[OpenReservation]:
        """What the lease says: every open reservation as the scheduler knows it."""
        return [
            OpenReservation(
                reservation_id=record.reservation_id,
                endpoint=endpoint.name,
                p_tokens=record.p_tokens,
                batch=record.batch,
                sample_hashes=record.sample_hashes,
                sample_tokens=record.sample_tokens,
                weight_milli=record.weight_milli,
            )
            for record in self._scheduler.open_reservations()
            if (endpoint := self._table.at_slot(record.slot)) is not None
        ]
