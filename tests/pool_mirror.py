"""A literal sink: keeps what a follower told it in plain dictionaries, to be compared with what the writers hold."""

from dataclasses import dataclass, field

import numpy as np

from trimtab_core.chunks import U32, U64
from trimtab_state import ControlDocument, Heartbeat


@dataclass
class Reservation:
    endpoint: str
    p_tokens: int
    batch: int
    samples: tuple[tuple[int, int], ...]
    weight_milli: int = 1000


@dataclass
class PoolMirror:
    """Raises AssertionError where the order of the calls makes no sense."""

    connected: bool = False
    controls: list[ControlDocument | None] = field(default_factory=list)
    chunks: dict[str, dict[int, int]] = field(default_factory=dict)
    unsynced: set[str] = field(default_factory=set)
    heartbeats: dict[str, Heartbeat] = field(default_factory=dict)
    gone_endpoints: list[str] = field(default_factory=list)
    cards: dict[str, bytes] = field(default_factory=dict)
    peers: dict[int, dict[int, Reservation]] = field(default_factory=dict)
    gone_peers: list[int] = field(default_factory=list)
    leases_lost: int = 0
    events: list[str] = field(default_factory=list)

    def on_connected(self, connected: bool) -> None:
        self.connected = connected
        self.events.append(f"connected {connected}")

    def on_control(self, document: ControlDocument | None) -> None:
        assert document is not None or not self.controls
        self.controls.append(document)

    def on_kv_changes(self, endpoint: str, added: U64, tokens: U32, removed: U64) -> None:
        assert endpoint not in self.unsynced
        assert added.dtype == np.uint64
        assert tokens.dtype == np.uint32
        assert removed.dtype == np.uint64
        held = self.chunks[endpoint]
        for chunk in removed.tolist():
            held.pop(chunk, None)
        held.update(zip(added.tolist(), tokens.tolist(), strict=True))

    def on_kv_replace(self, endpoint: str, hashes: U64, tokens: U32) -> None:
        assert hashes.dtype == np.uint64
        assert tokens.dtype == np.uint32
        self.unsynced.discard(endpoint)
        self.chunks[endpoint] = dict(zip(hashes.tolist(), tokens.tolist(), strict=True))

    def on_kv_clear(self, endpoint: str) -> None:
        self.unsynced.discard(endpoint)
        self.chunks[endpoint] = {}

    def on_kv_unsynced(self, endpoint: str) -> None:
        assert endpoint in self.chunks
        assert endpoint not in self.unsynced
        self.unsynced.add(endpoint)

    def on_heartbeat(self, heartbeat: Heartbeat) -> None:
        self.heartbeats[heartbeat.endpoint] = heartbeat

    def on_heartbeat_gone(self, endpoint: str) -> None:
        del self.heartbeats[endpoint]
        self.gone_endpoints.append(endpoint)

    def on_card(self, digest: str, data: bytes) -> None:
        self.cards[digest] = data

    def on_peer_reserve(
        self,
        incarnation: int,
        reservation_id: int,
        endpoint: str,
        p_tokens: int,
        batch: int,
        hashes: U64,
        tokens: U32,
        weight_milli: int = 1000,
    ) -> None:
        assert incarnation not in self.gone_peers
        own = self.peers.setdefault(incarnation, {})
        assert reservation_id not in own
        samples = tuple(zip(hashes.tolist(), tokens.tolist(), strict=True))
        own[reservation_id] = Reservation(endpoint, p_tokens, batch, samples, weight_milli)

    def on_peer_first_token(self, incarnation: int, reservation_id: int) -> None:
        reservation = self.peers[incarnation][reservation_id]
        assert reservation.p_tokens > 0
        reservation.p_tokens, reservation.samples = 0, ()

    def on_peer_moved(self, incarnation: int, reservation_id: int, endpoint: str) -> None:
        self.peers[incarnation][reservation_id].endpoint = endpoint

    def on_peer_finished(self, incarnation: int, reservation_id: int) -> None:
        del self.peers[incarnation][reservation_id]

    def on_peer_gone(self, incarnation: int) -> None:
        assert incarnation not in self.gone_peers
        self.gone_peers.append(incarnation)
        self.peers.pop(incarnation, None)

    def on_lease_lost(self) -> None:
        self.leases_lost += 1

    def weights(self) -> dict[int, int]:
        """Of all open reservations of all peers, in thousandths."""
        return {i: r.weight_milli for own in self.peers.values() for i, r in own.items()}

    def open_load(self) -> list[tuple[int, str, int, int]]:
        """All open reservations of all peers, whatever their incarnations."""
        return sorted(
            (reservation_id, r.endpoint, r.p_tokens, r.batch)
            for own in self.peers.values()
            for reservation_id, r in own.items()
        )
