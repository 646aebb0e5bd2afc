"""What the shared state says about the pool: its members, their heartbeats and their model cards.

The one rule: it implements the shared state's sink and keeps what decisions ask for; what comes in about load and KV
blocks goes straight on to the scheduler. Who may be chosen is `model_view`'s business: a view is built once per model
name and kept until something that it shows changes, which is not with every heartbeat.

Bounds: `VIEWS_MAX` views, and `CARDS_MAX` cards, the ones least recently told going first.
"""

import logging
from collections.abc import Callable, Iterable
from typing import Protocol

import numpy as np

from trimtab_core.chunks import U32, U64
from trimtab_core.extra_terms import ORDINARY_MILLI
from trimtab_core.hotspot import HotspotSettings
from trimtab_core.model_card import ModelCard
from trimtab_core.placement import Bools
from trimtab_core.scheduler import Scheduler
from trimtab_extproc.class_terms import ClassTerms
from trimtab_extproc.endpoint_table import EndpointTable
from trimtab_extproc.model_view import ModelView, build_view
from trimtab_state import ControlDocument, Heartbeat, Policy

log = logging.getLogger(__name__)

VIEWS_MAX = 256
CARDS_MAX = 256
FORGET_AFTER_S = 30.0
"""How long an endpoint that nobody names any more keeps its slot: late entries of the logs would open it again."""


REQUESTS_MAX = 1 << 24
"""On one endpoint, as it says, and of one reservation of a peer: sums of them with their weights fit in 64 bits."""
NOWHERE = -1
"""For the scheduler: none of the slots."""


class FirstTokens(Protocol):
    """Who wants to know that the KV events showed first tokens of our own reservations."""

    def seen(self, reservation_ids: Iterable[int], *, now_s: float) -> None: ...


class FleetView:
    """The pool as this replica knows it. All calls from one event loop."""

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        table: EndpointTable,
        first_tokens: FirstTokens,
        clock: Callable[[], float],
        seed_digest: str = "",
    ) -> None:
        """`seed_digest`: of our own hashes, as sidecars tell theirs."""
        self._seed_digest = seed_digest
        self._scheduler = scheduler
        self._table = table
        self._first_tokens = first_tokens
        self._clock = clock
        self._control: ControlDocument | None = None
        self.class_terms = ClassTerms(table)
        """What each class of requests adds to the terms of the endpoints."""
        self._members: dict[str, bool] = {}
        """Names in the control document, and whether each is draining there."""
        self._heartbeats: dict[str, Heartbeat] = {}
        self._cards: dict[str, ModelCard] = {}
        self._unsynced: set[str] = set()
        self._orphans_since_s: dict[str, float] = {}
        self._views: dict[str | None, ModelView] = {}
        self._listed: frozenset[str] | None = None
        """Models that heartbeats list; None: to be gathered anew."""
        self._is_caught_up = False
        self.is_connected = False

    # What a decision asks.

    @property
    def is_ready(self) -> bool:
        """Whether the pool was ever known as it is, members and chunks. It stays so: what is known stays."""
        return self._is_caught_up and self._control is not None

    @property
    def unready_reason(self) -> str:
        """What is missing before a choice can be made, for people."""
        if not self._is_caught_up:
            return "the shared state was not read yet; is the store reachable?"
        return "the shared state has no control document of this pool; the operator, or whoever stands in, writes it"

    @property
    def policy(self) -> Policy:
        """How to place; the default while nobody said."""
        return self._control.policy if self._control is not None else Policy()

    @property
    def control_version(self) -> int:
        """Of the control document that is followed; 0: there was none yet."""
        return self._control.version if self._control is not None else 0

    def view(self, model: str | None) -> ModelView:
        """The pool for a model's name. None, and any name that no endpoint lists, is the engine's own default: so
        clients' inventions neither fill memory nor push out the views of real models."""
        key = model if model in self._listed_models() else None
        view = self._views.get(key)
        if view is None:
            if len(self._views) >= VIEWS_MAX:
                self._views.clear()
            view = self._views[key] = build_view(
                key,
                members=[endpoint for name in self._members if (endpoint := self._table.named(name)) is not None],
                draining={name for name, is_draining in self._members.items() if is_draining},
                heartbeats=self._heartbeats,
                cards=self._cards,
                slot_count=self._scheduler.slot_count,
                seed_digest=self._seed_digest,
            )
        return view

    def _listed_models(self) -> frozenset[str]:
        if self._listed is None:
            self._listed = frozenset(name for beat in self._heartbeats.values() for name in beat.models if name)
        return self._listed

    def _forget_views(self) -> None:
        self._views.clear()
        self._listed = None

    def restricted(self, candidates: Bools, places: Iterable[str]) -> Bools:
        """The candidates at these places (`ip:port`, or a bare IP for all its ports)."""
        allowed = np.zeros(len(candidates), dtype=np.bool_)
        for place in places:
            for endpoint in self._table.at_place(place):
                if endpoint.slot < len(allowed):
                    allowed[endpoint.slot] = True
        result: Bools = allowed & candidates
        return result

    def is_holding(self, name: str) -> bool:
        """Whether an endpoint may still be sent what only it can answer: draining ones finish what they hold."""
        heartbeat = self._heartbeats.get(name)
        return name in self._members and (heartbeat is None or heartbeat.state in ("serving", "draining"))

    def heartbeat(self, name: str) -> Heartbeat | None:
        """The endpoint's last heartbeat, None if there is none (any more)."""
        return self._heartbeats.get(name)

    def is_unsynced(self, name: str) -> bool:
        """Whether what is known of the endpoint's chunks may be wrong until its snapshot comes."""
        return name in self._unsynced

    def is_member(self, name: str) -> bool:
        """Whether the control document names the endpoint."""
        return name in self._members

    @property
    def member_count(self) -> int:
        """Endpoints in the control document."""
        return len(self._members)

    def sweep(self, now_s: float) -> None:
        """Forget endpoints that neither the control document nor a heartbeat has named for `FORGET_AFTER_S`."""
        orphans = {
            endpoint.name
            for endpoint in self._table.all()
            if endpoint.name not in self._members and endpoint.name not in self._heartbeats
        }
        self._orphans_since_s = {name: self._orphans_since_s.get(name, now_s) for name in orphans}
        for name, since_s in list(self._orphans_since_s.items()):
            if now_s - since_s >= FORGET_AFTER_S:
                del self._orphans_since_s[name]
                self._unsynced.discard(name)
                self._table.forget(name)
                self.class_terms.forget()
                self._forget_views()

    # What the shared state tells (trimtab_state.PoolSink).

    def on_connected(self, connected: bool) -> None:
        self.is_connected = connected
        self._is_caught_up |= connected
        log.info("the shared state is %s", "current" if connected else "away: what is known stays")

    def on_control(self, document: ControlDocument | None) -> None:
        if document is None:
            # Nobody has said anything about endpoints, which is not the same as saying that there are none.
            return
        self._control = document
        self._members = {spec.name: spec.draining for spec in document.endpoints}
        for name in self._members:
            self._table.open(name)
        self.class_terms.on_control(document)
        self._scheduler.watch_hotspots(_hotspot_settings(document.policy))
        self._forget_views()

    def on_heartbeat(self, heartbeat: Heartbeat) -> None:
        endpoint = self._table.open(heartbeat.endpoint)
        if endpoint is None:
            return
        before = self._heartbeats.get(heartbeat.endpoint)
        self._heartbeats[heartbeat.endpoint] = heartbeat
        self.class_terms.on_heartbeat(heartbeat)
        if (
            before is None
            or before.state != heartbeat.state
            or before.models != heartbeat.models
            or before.approximate != heartbeat.approximate
            or before.seed_digest != heartbeat.seed_digest
            or before.tokens_per_byte != heartbeat.tokens_per_byte
        ):
            self._forget_views()
        is_other_engine = before is not None and before.epoch != heartbeat.epoch
        if is_other_engine and heartbeat.sequence == 0 and not len(self._scheduler.kv_export(endpoint.slot)[0]):
            # Another engine process, and no KV log that would say so: what was learned of the old one is void. What
            # a KV log has told is the log's business: its snapshot may be of the new engine, and here before.
            self._scheduler.kv_clear(endpoint.slot)
        self._report(endpoint.slot, heartbeat, requests=heartbeat.running + heartbeat.waiting)

    def on_heartbeat_gone(self, endpoint: str) -> None:
        last, slot = self._heartbeats.pop(endpoint, None), self._slot(endpoint)
        self.class_terms.on_heartbeat_gone(endpoint)
        if last is not None and slot is not None:
            self._forget_views()
            # Nobody would ever correct the requests that it counted beyond ours.
            self._report(slot, last, requests=0)

    def _report(self, slot: int, heartbeat: Heartbeat, *, requests: int) -> None:
        self._scheduler.report(
            slot,
            requests=min(requests, REQUESTS_MAX),
            block_tokens=heartbeat.block_tokens,
            kv_capacity_tokens=heartbeat.kv_capacity_tokens,
            now_s=self._clock(),
        )

    def on_card(self, digest: str, data: bytes) -> None:
        try:
            card = ModelCard.decode(data)
        except ValueError as error:
            log.warning("the model card %s cannot be read: %s", digest, error)
            return
        self._cards.pop(digest, None)
        self._cards[digest] = card
        while len(self._cards) > CARDS_MAX:
            del self._cards[next(iter(self._cards))]
        self._forget_views()

    def on_kv_changes(self, endpoint: str, added: U64, tokens: U32, removed: U64) -> None:
        slot = self._slot(endpoint)
        if slot is not None:
            self._seen(self._scheduler.kv_apply(slot, added, tokens, removed, self._clock()))

    def on_kv_replace(self, endpoint: str, hashes: U64, tokens: U32) -> None:
        slot = self._slot(endpoint)
        if slot is not None:
            self._unsynced.discard(endpoint)
            self._seen(self._scheduler.kv_replace(slot, hashes, tokens, self._clock()))

    def on_kv_clear(self, endpoint: str) -> None:
        slot = self._slot(endpoint)
        if slot is not None:
            self._unsynced.discard(endpoint)
            self._scheduler.kv_clear(slot)

    def on_kv_unsynced(self, endpoint: str) -> None:
        if self._slot(endpoint) is not None:
            self._unsynced.add(endpoint)

    def on_peer_reserve(
        self,
        incarnation: int,
        reservation_id: int,
        endpoint: str,
        p_tokens: int,
        batch: int,
        hashes: U64,
        tokens: U32,
        weight_milli: int = ORDINARY_MILLI,
    ) -> None:
        slot = self._slot(endpoint)
        if slot is not None:
            self._scheduler.peer_reserve(
                incarnation,
                reservation_id,
                slot,
                p_tokens,
                min(batch, REQUESTS_MAX),
                hashes,
                tokens,
                self._clock(),
                weight_milli,
            )

    def on_peer_first_token(self, incarnation: int, reservation_id: int) -> None:
        self._scheduler.peer_first_token(incarnation, reservation_id, self._clock())

    def on_peer_moved(self, incarnation: int, reservation_id: int, endpoint: str) -> None:
        slot = self._slot(endpoint)
        self._scheduler.peer_move(incarnation, reservation_id, NOWHERE if slot is None else slot, self._clock())

    def on_peer_finished(self, incarnation: int, reservation_id: int) -> None:
        self._scheduler.peer_finish(incarnation, reservation_id, self._clock())

    def on_peer_gone(self, incarnation: int) -> None:
        self._scheduler.peer_drop(incarnation, self._clock())

    def on_lease_lost(self) -> None:
        log.warning("our lease had expired: open reservations are published again under a new incarnation")

    def _slot(self, name: str) -> int | None:
        endpoint = self._table.open(name)
        return None if endpoint is None else endpoint.slot

    def _seen(self, reservation_ids: U64) -> None:
        if len(reservation_ids):
            self._first_tokens.seen(reservation_ids.tolist(), now_s=self._clock())


def _hotspot_settings(policy: Policy) -> HotspotSettings | None:
    if policy.hotspots == "off":
        return None
    return HotspotSettings(window_s=policy.hotspot_window_s, acts=policy.hotspots == "act")
