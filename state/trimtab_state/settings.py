"""Every time and bound of the shared state, in one frozen object.

The one rule: all processes of a pool run with the same values (they are not negotiated), so change them only together.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSettings:
    """Times in seconds, sizes in what the name says. The defaults fit pools of up to some 512 endpoints."""

    lease_s: float = 10.0
    """Time to live of a replica's lease, and the grace that peers get after the store was away."""
    lease_renew_s: float = 2.0
    """How often a replica writes its lease with all open reservations."""
    load_window_s: float = 0.01
    """Where load operations come thick, they are gathered into one entry in so long: each wakes store and replicas."""
    load_log_entries_max: int = 16_384
    """Bound of the load log stream (approximate trimming)."""
    load_ops_per_entry_max: int = 512
    """Operations in one entry; more are split over several."""
    load_queue_ops_max: int = 50_000
    """Operations that wait while the store is away; beyond it they are dropped and the lease tells the state again."""
    samples_per_reservation_max: int = 1_024
    """Chunk samples in one reserve operation; more are thinned out evenly, the deepest one stays."""
    lease_reservations_max: int = 65_536
    """Open reservations in one lease; beyond it the newest are left out, and peers count less than there is."""

    kv_window_s: float = 0.004
    """How long chunk changes are gathered into one batch."""
    kv_log_entries_max: int = 16_384
    """Bound of the KV log stream (approximate trimming)."""
    kv_chunks_per_entry_max: int = 1_024
    """Added plus removed chunks in one entry; more are split over several."""
    kv_queue_chunks_max: int = 1_000_000
    """Changed chunks that wait while the store is away; beyond it they are dropped and a snapshot follows."""
    kv_snapshot_refresh_s: float = 15.0
    """A snapshot is written again at most this often while its chunks change."""
    kv_snapshot_ttl_s: float = 3_600.0
    """Time to live of a snapshot; renewed with the heartbeats."""
    kv_snapshot_chunks_max: int = 8_000_000
    """Chunks in one snapshot; the reader refuses a larger one as malformed."""
    kv_buffer_entries_max: int = 1_024
    """Entries kept per endpoint while its snapshot is awaited; beyond it the oldest go and a newer one is needed."""
    kv_buffer_chunks_max: int = 262_144
    """Chunks in those entries."""

    heartbeat_ttl_s: float = 10.0
    """Time to live of a heartbeat, and the grace that endpoints get after the store was away."""
    card_ttl_s: float = 86_400.0
    """Time to live of a model card; renewed with the heartbeats."""
    membership_ttl_s: float = 86_400.0
    """Time to live of the sets of endpoints and replicas; renewed by each member."""
    control_ttl_s: float = 7 * 86_400.0
    """Time to live of the control document: how long replicas can start while the operator is gone."""
    control_refresh_s: float = 5.0
    """How often the operator looks whether its document is still there."""
    generation_ttl_s: float = 14 * 86_400.0
    """Time to live of the generation key; renewed by every writer."""
    stream_ttl_s: float = 86_400.0
    """Time to live of a stream that nobody writes to."""

    notify_entries_max: int = 2_048
    """Bound of the notify stream."""
    alarm_entries_max: int = 4_096
    """Bound of the alarm stream."""
    response_ttl_s: float = 6 * 3_600.0
    """How long a response id is known to belong to its endpoint."""
    responses_max: int = 200_000
    """Response ids of a pool in the store; beyond it the oldest go."""
    responses_cached_max: int = 16_384
    """Response ids that one process remembers itself."""

    poll_s: float = 1.0
    """The slow poll of a follower: generation, control, heartbeats, leases. Notices make changes visible before."""
    read_pause_s: float = 0.008
    """Where entries come thick, a follower at the logs' end reads once in so long: it wakes once for many entries."""
    read_entries_max: int = 256
    """Entries per stream in one read: bounds the time for which a backlog holds the event loop."""
    snapshots_per_turn_max: int = 2
    """Snapshots that a follower fetches between two reads of the logs."""
    lookback_s: float = 20.0
    """How far before a stream's end a follower starts to read: more than the age of the snapshots and leases."""
    clock_step_max_s: float = 2.0
    """The most that one silence of the store moves a follower's clock of leases and heartbeats."""
    endpoints_max: int = 8_192
    """Endpoints that a follower tracks; more are ignored and counted."""
    replicas_max: int = 1_024
    """Replica incarnations that a follower tracks; more are ignored and counted."""

    connect_timeout_s: float = 2.0
    command_timeout_s: float = 2.0
    """A command without a reply for this long counts as a store that is away."""
    backoff_min_s: float = 0.05
    backoff_max_s: float = 3.0
    """Reconnects wait a random time up to a bound that doubles from the first to the second."""
