"""Follows the load of the other replicas through the load log and their leases. No I/O; time is given.

The one rule: operations of a replica incarnation are passed on in its own order without a gap; after a gap, and for an
incarnation that is new to us, its lease says the whole state and the log goes on from there. Whatever was missed, the
sink ends with the open reservations that the replica has, and when its lease expires it is gone exactly once.
"""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from trimtab_core.chunks import U32, U64

from .entry_tail import EntryTail
from .load_codec import Lease, LeaseHead, LoadEntry, LoadKind, LoadOperation
from .settings import StateSettings

TAIL_ENTRIES_MAX = 2_048
"""Entries kept per replica while its lease is awaited."""
TAIL_OPERATIONS_MAX = 65_536
"""Operations in them."""
GONE_MAX = 1_024
"""Incarnations that are remembered as gone, so that late entries do not bring them back."""


class LoadSink(Protocol):
    """See `sink.PoolSink`."""

    def on_peer_reserve(
        self,
        incarnation: int,
        reservation_id: int,
        endpoint: str,
        p_tokens: int,
        batch: int,
        hashes: U64,
        tokens: U32,
        weight_milli: int,
    ) -> None: ...
    def on_peer_first_token(self, incarnation: int, reservation_id: int) -> None: ...
    def on_peer_moved(self, incarnation: int, reservation_id: int, endpoint: str) -> None: ...
    def on_peer_finished(self, incarnation: int, reservation_id: int) -> None: ...
    def on_peer_gone(self, incarnation: int) -> None: ...


@dataclass(slots=True)
class _Open:
    """What the sink knows of one reservation."""

    endpoint: str
    is_prefilling: bool


@dataclass(slots=True, kw_only=True)
class _Peer:
    """`position` None: no lease seen yet, so nothing was passed on."""

    alive_s: float
    tail: EntryTail[LoadEntry]
    position: int | None = None
    is_synced: bool = False
    renewal: int = -1
    claims: tuple[int, int] = (0, 0)
    """The newest positions in what was read by the last two renewals, the older first: no later lease is behind them,
    unless somebody else has written them."""
    announced: int = 0
    """Position in a lease that is beyond ours; still beyond at the next look: something was missed."""
    open: dict[int, _Open] = field(default_factory=dict)


class LoadFollower:
    """`wanted` holds the incarnations whose lease has to be read; give what was read to `lease`."""

    def __init__(self, sink: LoadSink, settings: StateSettings, own_incarnations: Container[int]) -> None:
        self.wanted: set[int] = set()
        self.gaps = 0
        """How often a replica's log lost its place."""
        self.refused = 0
        """Entries of replicas beyond the bound on replicas."""
        self._sink = sink
        self._settings = settings
        self._own = own_incarnations
        self._peers: dict[int, _Peer] = {}
        self._gone: dict[int, None] = {}

    @property
    def peers(self) -> tuple[int, ...]:
        """Incarnations that are followed."""
        return tuple(self._peers)

    def open_reservations(self, incarnation: int) -> int:
        """How many reservations of a peer are open."""
        peer = self._peers.get(incarnation)
        return 0 if peer is None else len(peer.open)

    def entry(self, entry: LoadEntry, now_s: float) -> None:
        """One entry of the log, in the log's order."""
        peer = self._peer(entry.incarnation, now_s)
        if peer is None:
            return
        peer.alive_s = now_s
        if peer.position is not None and entry.sequence <= peer.position:
            return
        if peer.is_synced and peer.position is not None and entry.sequence == peer.position + 1:
            self._apply(entry, peer)
            return
        if any(operation.kind is LoadKind.GOODBYE for operation in entry.operations):
            self._end(entry.incarnation)
            return
        self._lose(entry.incarnation, peer)
        peer.tail.add(entry, len(entry.operations))

    def lease(self, incarnation: int, lease: Lease | None, now_s: float) -> None:
        """What the store holds, read after the incarnation was wanted. It stays wanted while that is not new enough."""
        if lease is None or incarnation != lease.head.incarnation:
            return
        peer = self._peer(incarnation, now_s)
        if peer is None:
            return
        self._see(incarnation, peer, lease.head, now_s)
        if peer.is_synced:
            self.wanted.discard(incarnation)
            return
        if lease.head.sequence < max(peer.tail.needs, peer.position or 0):
            return
        peer.position, peer.is_synced, peer.announced = lease.head.sequence, True, 0
        self.wanted.discard(incarnation)
        self._replace(incarnation, peer, lease.reservations)
        for entry in peer.tail.take_after(lease.head.sequence):
            self._apply(entry, peer)

    def heads(self, heads: Mapping[int, LeaseHead | None], now_s: float, *, caught_up: bool) -> list[int]:
        """The leases of the known replicas as they are now, None where there is none; replicas that are left out keep
        what they have. `caught_up`: the log has been read to its end since the last look. Returns the incarnations
        that are gone for good and may be taken out of the set of replicas."""
        dead = []
        for incarnation, head in heads.items():
            if head is None:
                peer = self._peers.get(incarnation)
                if peer is not None and now_s - peer.alive_s >= self._settings.lease_s:
                    self._end(incarnation)
                    dead.append(incarnation)
                elif incarnation in self._gone:
                    dead.append(incarnation)
                elif peer is None:
                    self._peer(incarnation, now_s)
                continue
            peer = self._peer(incarnation, now_s)
            if peer is None:
                continue
            self._see(incarnation, peer, head, now_s)
            if peer.is_synced and head.sequence > (peer.position or 0):
                if caught_up and peer.announced > 0 and (peer.position or 0) < peer.announced:
                    self._lose(incarnation, peer)
                elif not peer.announced or (peer.position or 0) >= peer.announced:
                    peer.announced = head.sequence
        return dead

    def grace(self, now_s: float) -> None:
        """The store was away or lost its contents: every peer has a full lease time from now."""
        for peer in self._peers.values():
            peer.alive_s = now_s

    def check_invariants(self) -> None:
        """Raises AssertionError."""
        for incarnation, peer in self._peers.items():
            assert incarnation not in self._gone
            assert peer.is_synced or incarnation in self.wanted
            assert peer.position is not None or not peer.open

    def _peer(self, incarnation: int, now_s: float) -> _Peer | None:
        """The peer, a new one if it was not known. None for ourselves, for one that is gone, and beyond the bound."""
        peer = self._peers.get(incarnation)
        if peer is not None:
            return peer
        if incarnation in self._own or incarnation in self._gone:
            return None
        if len(self._peers) >= self._settings.replicas_max:
            self.refused += 1
            return None
        peer = self._peers[incarnation] = _Peer(alive_s=now_s, tail=EntryTail(TAIL_ENTRIES_MAX, TAIL_OPERATIONS_MAX))
        self.wanted.add(incarnation)
        return peer

    def _see(self, incarnation: int, peer: _Peer, head: LeaseHead, now_s: float) -> None:
        if head.renewal == peer.renewal:
            return
        older, newer = peer.claims
        if head.renewal > peer.renewal and head.sequence < older:
            # A damaged entry or lease: believing it, we would wait for ever for what it says is to come.
            self._lose(incarnation, peer)
            peer.tail.clear()
            peer.position = None if peer.position is None else 0
            newer = 0
        peer.claims = (newer, max(peer.position or 0, peer.tail.newest))
        peer.renewal = head.renewal
        peer.alive_s = now_s

    def _lose(self, incarnation: int, peer: _Peer) -> None:
        self.wanted.add(incarnation)
        if peer.is_synced:
            peer.is_synced = False
            peer.announced = 0
            self.gaps += 1

    def _end(self, incarnation: int) -> None:
        peer = self._peers.pop(incarnation)
        self.wanted.discard(incarnation)
        self._gone[incarnation] = None
        if len(self._gone) > GONE_MAX:
            del self._gone[next(iter(self._gone))]
        if peer.position is not None:
            self._sink.on_peer_gone(incarnation)

    def _apply(self, entry: LoadEntry, peer: _Peer) -> None:
        peer.position = entry.sequence
        for operation in entry.operations:
            if operation.kind is LoadKind.GOODBYE:
                self._end(entry.incarnation)
                return
            self._operate(entry.incarnation, peer, operation)

    def _operate(self, incarnation: int, peer: _Peer, operation: LoadOperation) -> None:
        reservation_id = operation.reservation_id
        known = peer.open.get(reservation_id)
        if operation.kind is LoadKind.RESERVE:
            if known is None:
                peer.open[reservation_id] = _Open(operation.endpoint, operation.p_tokens > 0)
                self._sink.on_peer_reserve(
                    incarnation,
                    reservation_id,
                    operation.endpoint,
                    operation.p_tokens,
                    operation.batch,
                    operation.sample_hashes,
                    operation.sample_tokens,
                    operation.weight_milli,
                )
        elif known is None:
            return
        elif operation.kind is LoadKind.FIRST_TOKEN:
            if known.is_prefilling:
                known.is_prefilling = False
                self._sink.on_peer_first_token(incarnation, reservation_id)
        elif operation.kind is LoadKind.MOVED:
            if known.endpoint != operation.endpoint:
                known.endpoint = operation.endpoint
                self._sink.on_peer_moved(incarnation, reservation_id, operation.endpoint)
        else:
            del peer.open[reservation_id]
            self._sink.on_peer_finished(incarnation, reservation_id)

    def _replace(self, incarnation: int, peer: _Peer, reservations: Sequence[LoadOperation]) -> None:
        """Makes the sink's view of a peer equal to its lease, by the steps that were missed."""
        listed = {operation.reservation_id for operation in reservations}
        for reservation_id in [i for i in peer.open if i not in listed]:
            del peer.open[reservation_id]
            self._sink.on_peer_finished(incarnation, reservation_id)
        for operation in reservations:
            if operation.reservation_id not in peer.open:
                self._operate(incarnation, peer, operation)
                continue
            self._operate(incarnation, peer, operation._replace(kind=LoadKind.MOVED))
            if operation.p_tokens == 0:
                self._operate(incarnation, peer, operation._replace(kind=LoadKind.FIRST_TOKEN))
