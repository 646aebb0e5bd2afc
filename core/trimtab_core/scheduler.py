"""The scheduler: index, speculation, load and policy in one. It chooses an endpoint and reserves it in one step.

The one rule: `place` returns with its reservation made, and each reservation ends exactly once. Choosing on one
snapshot and booking later is how routers herd.

It is synchronous and single-threaded, has no clock (`now_s` must not fall from call to call) and does no I/O. Endpoints
are dense numbers, slots; the caller keeps their names. A reservation is released by its id, never by where it went.
"""

import numpy as np

from trimtab_core.bookings import Bookings
from trimtab_core.chunk_owners import slots_in
from trimtab_core.chunks import U32, U64
from trimtab_core.decision import Decision, decide
from trimtab_core.errors import UnknownSlot, ensure
from trimtab_core.extra_terms import ORDINARY_MILLI, PLAIN
from trimtab_core.hotspot import HotspotDetector, HotspotSettings, HotspotView
from trimtab_core.placement import (
    I64,
    Bools,
    LoadView,
    Placement,
    PlacementRequest,
    Prompt,
    Rejection,
    ReservationRecord,
)
from trimtab_core.policies.least_request import LeastRequest
from trimtab_core.policies.policy import Policy
from trimtab_core.policies.product import Product
from trimtab_core.policies.round_robin import RoundRobin
from trimtab_core.prefix_index import PrefixIndex
from trimtab_core.replica_ledger import ReplicaLedger
from trimtab_core.reservation import NOWHERE, OWN, Reservation
from trimtab_core.settings import SchedulerSettings
from trimtab_core.tie_break import TieBreak

__all__ = [
    "LoadView",
    "Placement",
    "PlacementRequest",
    "Prompt",
    "Rejection",
    "ReservationRecord",
    "Scheduler",
    "SchedulerSettings",
]

REPLICAS_MAX = 1024
"""Most other replicas counted at once. Beyond, the reservations of further ones are ignored."""
NO_CHUNKS: U64 = np.zeros(0, dtype=np.uint64)
NO_TOKENS: U32 = np.zeros(0, dtype=np.uint32)


class Scheduler:
    """One pool as one replica sees it. Ids of reservations count from 1 and are never used again."""

    def __init__(self, *, rng_seed: int, settings: SchedulerSettings) -> None:
        self.settings = settings
        self._live: Bools = np.zeros(0, dtype=np.bool_)
        self._index = PrefixIndex()
        self._bookings = Bookings(settings, self._index)
        self._policies: dict[str, Policy] = {
            "product": Product(),
            "round_robin": RoundRobin(),
            "least_request": LeastRequest(),
        }
        self._ties = TieBreak(rng_seed)
        self._hotspots = HotspotDetector()
        self._own = ReplicaLedger()
        self._peers: dict[int, ReplicaLedger] = {}
        self._next_id = 1

    # Slots

    @property
    def slot_count(self) -> int:
        """Length of the arrays over slots; removed slots are in it until their number is given out again."""
        return len(self._live)

    def add_slot(self) -> int:
        """A number for a new endpoint: the lowest that is free. It begins unreported and empty, with the defaults."""
        free = np.flatnonzero(~self._live)
        slot = int(free[0]) if len(free) else self.slot_count
        if slot == self.slot_count:
            self._live = np.append(self._live, True)
        self._live[slot] = True
        self._reset(slot)
        return slot

    def remove_slot(self, slot: int) -> None:
        """The endpoint is gone, and all that was known of it. Its open reservations can still be moved and finished."""
        self._check_slot(slot)
        self._live[slot] = False
        self._reset(slot)

    def _reset(self, slot: int) -> None:
        self._index.clear(slot)
        self._bookings.reset_slot(slot)
        for policy in self._policies.values():
            policy.slot_reset(slot)
        self._hotspots.slot_reset(slot)

    # What engines hold and report

    def kv_apply(self, slot: int, added: U64, tokens: U32, removed: U64, now_s: float) -> U64:
        """One batch of the KV log, `removed` before `added`. Ids of own reservations that it shows to be prefilled."""
        self._check_slot(slot)
        self._index.apply(slot, added, tokens, removed)
        return self._appeared(slot, added, now_s)

    def kv_replace(self, slot: int, hashes: U64, tokens: U32, now_s: float) -> U64:
        """A snapshot: the slot holds exactly this. Ids as `kv_apply`."""
        self._check_slot(slot)
        self._index.clear(slot)
        self._index.apply(slot, hashes, tokens, NO_CHUNKS)
        return self._appeared(slot, hashes, now_s)

    def kv_clear(self, slot: int) -> None:
        """The slot's engine holds nothing: what was learned is void too. Its load is as it was."""
        self._check_slot(slot)
        self._index.clear(slot)
        self._bookings.learned.clear(slot)

    def kv_export(self, slot: int) -> tuple[U64, U32]:
        """What the index has for a slot: chunks rising, and their token counts."""
        self._check_slot(slot)
        return self._index.export(slot)

    def report(self, slot: int, *, requests: int, block_tokens: int, kv_capacity_tokens: int, now_s: float) -> None:
        """What the engine says of itself: requests running and waiting, block size and KV capacity (0: unknown)."""
        self._check_slot(slot)
        self._bookings.load.report(
            slot, requests=requests, block_tokens=block_tokens, kv_capacity_tokens=kv_capacity_tokens
        )

    # Own requests

    def place(self, request: PlacementRequest, now_s: float) -> Placement | Rejection:
        """Choose a slot and reserve it. A `Rejection` reserves nothing.

        P of a slot: queued tokens + for each prompt its tokens less the hit there, at least one block. B: requests
        there + external ones + this one's batch. Both with the request's extra terms (`extra_terms`). A hit is at most
        the whole blocks of all tokens but the last, which an engine always computes.
        """
        self._bookings.speculation.expire(now_s)
        if len(self._own) >= self.settings.reservations_max:
            return self._rejection("too_many_open")
        parts = (self._index, self._bookings, self._policies[request.policy], self._ties, self._hotspots)
        decision = decide(request, self._live, *parts, now_s)
        if isinstance(decision, str):
            return self._rejection(decision)
        weight_milli = (request.extra or PLAIN).weight_milli
        reservation = self._reserve(decision, request.batch, weight_milli, now_s)
        self._policies[request.policy].picked(decision.slot)
        return Placement(
            reservation_id=reservation.key[1],
            slot=decision.slot,
            alternatives=decision.alternatives,
            prompt_tokens=decision.prompt_tokens,
            hit_tokens=decision.hit_tokens,
            queued_tokens=decision.queued_tokens,
            p_tokens=decision.p_tokens,
            p_linear_tokens=decision.p_linear_tokens,
            network_tokens=decision.network_tokens,
            expert_factor=decision.expert_factor,
            batch=decision.batch,
            weighted_batch=decision.weighted_batch,
            score=decision.score,
            p_own_tokens=decision.p_own_tokens,
            reason=f"{request.policy}: {decision.how}{', away from a hotspot' if decision.left_out else ''}",
            sample_hashes=reservation.sample_hashes,
            sample_tokens=reservation.sample_tokens,
            hotspot=None if decision.left_out is None else decision.left_out.prefix_class,
            left_out=() if decision.left_out is None else tuple(slots_in(decision.left_out.slots)),
        )

    def first_token(self, reservation_id: int, now_s: float) -> bool:
        """The first token was seen. False: the reservation is unknown, or its prefill was over already."""
        reservation = self._own.get(reservation_id)
        if reservation is None or not reservation.is_queued:
            return False
        self._bookings.first_token(reservation, now_s, teaches=True)
        return True

    def move(self, reservation_id: int, slot: int, now_s: float) -> bool:
        """The request went to another slot than the one chosen (a dead or negative number: to none we know)."""
        reservation = self._own.get(reservation_id)
        if reservation is None:
            return False
        self._bookings.move(reservation, self._known(slot), now_s)
        return True

    def finish(self, reservation_id: int, now_s: float) -> bool:
        """The exchange ended, however it did. Idempotent; False: it had ended before, or never was."""
        reservation = self._own.end(reservation_id)
        if reservation is None:
            return False
        self._bookings.finish(reservation, now_s)
        return True

    def open_reservations(self) -> list[ReservationRecord]:
        """What others must know to count our load. Detached reservations weigh on nobody, and are not in it."""
        records = []
        for reservation in self._own:
            if reservation.slot == NOWHERE:
                continue
            claim = self._bookings.speculation.claim_of(reservation.key)
            records.append(
                ReservationRecord(
                    reservation_id=reservation.key[1],
                    slot=reservation.slot,
                    p_tokens=reservation.p_tokens if reservation.is_queued else 0,
                    batch=reservation.batch,
                    sample_hashes=NO_CHUNKS if claim is None else reservation.sample_hashes,
                    sample_tokens=NO_TOKENS if claim is None else reservation.sample_tokens,
                    weight_milli=reservation.weight_milli,
                )
            )
        return records

    def advance(self, now_s: float) -> U64:
        """Time has passed. Ids of own reservations whose prefill is now taken as over, with no first token seen."""
        self._hotspots.advance(now_s)
        return _ids(self._bookings.advance(now_s))

    # Other replicas

    def peer_reserve(
        self,
        incarnation: int,
        reservation_id: int,
        slot: int,
        p_tokens: int,
        batch: int,
        sample_hashes: U64,
        sample_tokens: U32,
        now_s: float,
        weight_milli: int = ORDINARY_MILLI,
    ) -> None:
        """Another replica reserved. Known ids change nothing, but that `p_tokens` 0 says that the prefill is over.

        The caller passes no entry of an incarnation that it has dropped: nobody would end its reservations again.
        """
        if incarnation not in self._peers and len(self._peers) >= REPLICAS_MAX:
            return
        ledger = self._peers.setdefault(incarnation, ReplicaLedger())
        reservation = ledger.get(reservation_id)
        if reservation is None:
            if not ledger.is_new(reservation_id) or len(ledger) >= self.settings.reservations_max:
                return
            reservation = Reservation(
                key=(incarnation, reservation_id),
                slot=self._known(slot),
                p_tokens=p_tokens,
                batch=batch,
                weight_milli=weight_milli,
            )
            ledger.add(reservation)
            chunks, tokens, awaited = sample_hashes.tolist(), sample_tokens.tolist(), []
            if reservation.slot != NOWHERE and not self._bookings.is_approximate[reservation.slot]:
                last = self._last_missing(chunks, reservation.slot)
                if last is None:  # events were faster than this word of what they tell of
                    chunks, tokens = [], []
                else:
                    awaited = [last]
            self._bookings.open(reservation, chunks, tokens, now_s, awaited=awaited)
        if p_tokens == 0 and reservation.is_queued:
            self._bookings.first_token(reservation, now_s, teaches=False)

    def peer_first_token(self, incarnation: int, reservation_id: int, now_s: float) -> None:
        """Another replica saw a first token, or takes it for granted."""
        reservation = self._peer(incarnation, reservation_id)
        if reservation is not None and reservation.is_queued:
            self._bookings.first_token(reservation, now_s, teaches=False)

    def peer_move(self, incarnation: int, reservation_id: int, slot: int, now_s: float) -> None:
        """Another replica's request went elsewhere."""
        reservation = self._peer(incarnation, reservation_id)
        if reservation is not None:
            self._bookings.move(reservation, self._known(slot), now_s)

    def peer_finish(self, incarnation: int, reservation_id: int, now_s: float) -> None:
        """Another replica's request ended."""
        ledger = self._peers.get(incarnation)
        reservation = None if ledger is None else ledger.end(reservation_id)
        if reservation is not None:
            self._bookings.finish(reservation, now_s)

    def peer_drop(self, incarnation: int, now_s: float) -> None:
        """The lease of another replica expired: all that it had open ends."""
        for reservation in self._peers.pop(incarnation, ()):
            self._bookings.finish(reservation, now_s, is_replica_gone=True)

    # Hotspots

    def watch_hotspots(self, settings: HotspotSettings | None) -> None:
        """Look for hotspots from now on, in this way; None: not at all. What was counted stays where it can."""
        self._hotspots.set(settings)

    def hotspots(self) -> HotspotView:
        """Classes with an alarm now, and what was counted."""
        return self._hotspots.view()

    # Views

    def load(self) -> LoadView:
        """The load of every slot."""
        return self._bookings.load.view()

    def index_size(self) -> tuple[int, int]:
        """Different chunks in the index, and pairs of slot and chunk."""
        return len(self._index), self._index.pair_count

    def learned_export(self, slot: int) -> tuple[U64, I64]:
        """What is learned of a slot: chunks, the next to forget first, and the tokens that each adds."""
        self._check_slot(slot)
        costs = self._bookings.learned.costs(slot)
        return np.array([*costs], dtype=np.uint64), np.array([*costs.values()], dtype=np.int64)

    def speculative_chunks(self) -> int:
        """Chunks claimed by reservations in flight, each as often as it is."""
        return self._bookings.speculation.chunk_count

    def replicas(self) -> frozenset[int]:
        """Incarnations of the other replicas that are counted."""
        return frozenset(self._peers)

    # Inside

    def _reserve(self, decision: Decision, batch: int, weight_milli: int, now_s: float) -> Reservation:
        """Book the choice, with a claim on what the slot's engine does not hold yet."""
        slot = decision.slot
        block_tokens = int(self._bookings.load.block_tokens[slot])
        claims = [
            claim
            for match in decision.matches
            if (claim := match.claim(slot, decision.variant, block_tokens, is_exact=decision.is_exact)) is not None
        ]
        reservation = Reservation(
            key=(OWN, self._next_id),
            slot=slot,
            p_tokens=decision.p_own_tokens,
            batch=batch,
            weight_milli=weight_milli,
            is_approximate=not decision.is_exact,
            sample_hashes=np.concatenate([NO_CHUNKS, *(claim.sample_hashes for claim in claims)]),
            sample_tokens=np.concatenate([NO_TOKENS, *(claim.sample_tokens for claim in claims)]),
        )
        self._next_id += 1
        # What is there already, behind a hole, would announce nothing.
        watched, awaited = set(), set()
        for claim in claims if decision.is_exact else ():
            whole = claim.chunks[: claim.whole_count]
            last = self._last_missing(whole, slot)
            if last is not None:
                awaited.add(last)
                if last == whole[-1]:
                    watched.add(last)
        chunks = [chunk for claim in claims for chunk in claim.chunks]
        tokens = [count for claim in claims for count in claim.tokens.tolist()]
        self._own.add(reservation)
        self._bookings.open(reservation, chunks, tokens, now_s, watched=watched, awaited=awaited)
        return reservation

    def _last_missing(self, chunks: list[int], slot: int) -> int | None:
        return next((chunk for chunk in reversed(chunks) if self._index.tokens_of(chunk, slot) is None), None)

    def _appeared(self, slot: int, chunks: U64, now_s: float) -> U64:
        return _ids(self._bookings.appeared(slot, chunks.tolist(), now_s))

    def _peer(self, incarnation: int, reservation_id: int) -> Reservation | None:
        ledger = self._peers.get(incarnation)
        return None if ledger is None else ledger.get(reservation_id)

    def _known(self, slot: int) -> int:
        return slot if 0 <= slot < self.slot_count and self._live[slot] else NOWHERE

    def _check_slot(self, slot: int) -> None:
        if self._known(slot) == NOWHERE:
            raise UnknownSlot(f"slot {slot} is not in use")

    def _rejection(self, reason: str) -> Rejection:
        return Rejection(reason=reason, retry_after_s=self.settings.retry_after_s)

    def check_invariants(self) -> None:
        """Raise `InvariantError` if the state contradicts itself. Costs as much as the whole state: for tests."""
        self._index.check_invariants()
        self._hotspots.check_invariants()
        self._bookings.check_invariants([r for ledger in (self._own, *self._peers.values()) for r in ledger])
        for slot in range(self.slot_count):
            if not self._live[slot]:
                ensure(not self._bookings.load.on_slot(slot), f"slot {slot}: removed, and loaded")
                ensure(len(self._index.export(slot)[0]) == 0, f"slot {slot}: removed, and indexed")
                ensure(self._bookings.learned.tokens_held(slot) == 0, f"slot {slot}: removed, and learned about")


def _ids(reservations: list[Reservation]) -> U64:
    return np.array([reservation.key[1] for reservation in reservations], dtype=np.uint64)
