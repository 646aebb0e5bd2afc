"""What a follower counts, for metrics.

The one rule: counters only grow.
"""

from dataclasses import dataclass


@dataclass(slots=True)
class FollowerCounters:
    """Since the start of the process."""

    sessions: int = 0
    """Connections to the store."""
    resyncs: int = 0
    """How often the store had lost its contents or a stream had gone back."""
    kv_entries: int = 0
    load_entries: int = 0
    snapshots: int = 0
    leases: int = 0
    malformed: int = 0
    """Values and entries that were skipped."""
