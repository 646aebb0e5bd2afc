"""What a follower tells its replica: the interface that the picker implements.

The one rule: every method is called from the follower's task, synchronously, in an order that any prefix of which is a
true state; it must return soon and must not await. An exception from it ends the follower: it is a bug.
"""

from typing import Protocol

from trimtab_core.chunks import U32, U64

from .documents import ControlDocument, Heartbeat


class PoolSink(Protocol):
    """Receives the pool's shared state, except what this replica wrote itself."""

    def on_connected(self, connected: bool) -> None:
        """The store is reachable and what is known is current (True), or it went away (False)."""

    def on_control(self, document: ControlDocument | None) -> None:
        """A new control document. None only if none was ever seen: it says nothing about endpoints."""

    def on_kv_changes(self, endpoint: str, added: U64, tokens: U32, removed: U64) -> None:
        """Remove, then add. An added chunk that is present gets the new token count."""

    def on_kv_replace(self, endpoint: str, hashes: U64, tokens: U32) -> None:
        """The endpoint's chunks are exactly these; it is in sync (again)."""

    def on_kv_clear(self, endpoint: str) -> None:
        """The endpoint has no chunks; it is in sync (again)."""

    def on_kv_unsynced(self, endpoint: str) -> None:
        """Changes were missed: what is known of the endpoint's chunks may be wrong until replace or clear."""

    def on_heartbeat(self, heartbeat: Heartbeat) -> None:
        """Each heartbeat once."""

    def on_heartbeat_gone(self, endpoint: str) -> None:
        """No heartbeat for its time to live, or its sidecar said goodbye. Once, until it is heard of again."""

    def on_card(self, digest: str, data: bytes) -> None:
        """A model card, before the first heartbeat that names it where it can be had."""

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
    ) -> None:
        """A reservation of another replica. `p_tokens` is 0 if its first token has been seen; `weight_milli`: of each
        of its engine requests, in thousandths of an ordinary one."""

    def on_peer_first_token(self, incarnation: int, reservation_id: int) -> None: ...

    def on_peer_moved(self, incarnation: int, reservation_id: int, endpoint: str) -> None: ...

    def on_peer_finished(self, incarnation: int, reservation_id: int) -> None: ...

    def on_peer_gone(self, incarnation: int) -> None:
        """The replica said goodbye or its lease expired: all its reservations end. Once per incarnation."""

    def on_lease_lost(self) -> None:
        """Our own lease had expired; the publisher has taken a new incarnation. For information."""
