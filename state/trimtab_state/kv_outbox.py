"""What a sidecar has still to tell about its chunks: gathered changes, and entries that are not known to have arrived.

The one rule: a sequence number never stands for two contents. Entries are sent again byte for byte until they are known
to have arrived, and what is dropped leaves a gap in the numbers, which tells every follower to take the snapshot. No
I/O, no clock.
"""

from collections import deque
from typing import NamedTuple, Protocol

import numpy as np

from trimtab_core.chunks import U32, U64

from .kv_codec import KvEntry, encode_entry
from .load_codec import NO_U32, NO_U64
from .settings import StateSettings


class Changes(Protocol):
    """Net chunk changes, applied in the order cleared, removed, added."""

    @property
    def cleared(self) -> bool: ...
    @property
    def added(self) -> U64: ...
    @property
    def tokens(self) -> U32: ...
    @property
    def removed(self) -> U64: ...


class KvChange(NamedTuple):
    """Changes as values."""

    cleared: bool
    added: U64
    tokens: U32
    removed: U64


class KvOutbox:
    """Sequence numbers start at 1; `sequence` is the last one given out."""

    def __init__(self, endpoint: str, incarnation: int, settings: StateSettings, *, epoch: str = "") -> None:
        self.incarnation = incarnation
        self.sequence = 0
        self.epoch = epoch
        self.dropped = 0
        """How often changes were dropped in favour of a snapshot."""
        self._endpoint = endpoint
        self._settings = settings
        self._pending: list[KvChange] = []
        self._unsent: deque[tuple[bytes, int]] = deque()
        self._chunks = 0

    @property
    def has_work(self) -> bool:
        return bool(self._pending or self._unsent)

    def add(self, changes: Changes, epoch: str) -> bool:
        """Gathers changes; those of a new epoch start from nothing. False: too many, so a snapshot has to follow."""
        cleared = changes.cleared or epoch != self.epoch
        self.epoch = epoch
        if cleared:
            self._chunks -= sum(len(c.added) + len(c.removed) for c in self._pending)
            self._pending.clear()
        size = len(changes.added) + len(changes.removed)
        if not (cleared or size):
            return True
        self._chunks += size
        self._pending.append(KvChange(cleared, changes.added, changes.tokens, changes.removed))
        if self._chunks > self._settings.kv_queue_chunks_max:
            self.drop()
            return False
        return True

    def drop(self) -> None:
        """Forgets everything and leaves a gap: the state is told by the next snapshot."""
        self._pending.clear()
        self._unsent.clear()
        self._chunks = 0
        self.sequence += 1
        self.dropped += 1

    def entries(self, entries_max: int) -> list[bytes]:
        """The oldest entries to send, in order. Numbers everything that is pending."""
        if self._pending:
            change = merged(self._pending)
            self._pending.clear()
            self._chunks = sum(size for _, size in self._unsent) + len(change.added) + len(change.removed)
            self._number(change)
        return [self._unsent[i][0] for i in range(min(entries_max, len(self._unsent)))]

    def arrived(self, count: int) -> None:
        """The first `count` entries have arrived."""
        for _ in range(min(count, len(self._unsent))):
            self._chunks -= self._unsent.popleft()[1]

    def _number(self, change: KvChange) -> None:
        """Cuts a change into bounded entries: removals first, then additions, `cleared` in the first one."""
        bound, cleared = self._settings.kv_chunks_per_entry_max, change.cleared
        removed_at = added_at = 0
        while cleared or removed_at < len(change.removed) or added_at < len(change.added):
            removed = change.removed[removed_at : removed_at + bound]
            added_end = added_at + bound - len(removed)
            added, tokens = change.added[added_at:added_end], change.tokens[added_at:added_end]
            self.sequence += 1
            entry = KvEntry(
                self._endpoint, self.incarnation, self.sequence, self.epoch, cleared, added, tokens, removed
            )
            self._unsent.append((encode_entry(entry), len(added) + len(removed)))
            removed_at, added_at, cleared = removed_at + len(removed), added_at + len(added), False


def merged(changes: list[KvChange]) -> KvChange:
    """One change with the effect of all in a row: for each chunk its last step counts."""
    if len(changes) == 1:
        return changes[0]
    start = max((i for i, change in enumerate(changes) if change.cleared), default=0)
    steps = changes[start:]
    hashes = np.concatenate([part for change in steps for part in (change.removed, change.added)])
    tokens = np.concatenate(
        [part for change in steps for part in (np.zeros(len(change.removed), np.uint32), change.tokens)]
    )
    is_added = np.concatenate(
        [part for c in steps for part in (np.zeros(len(c.removed), np.bool_), np.ones(len(c.added), np.bool_))]
    )
    _, last_from_end = np.unique(hashes[::-1], return_index=True)
    last = np.sort(len(hashes) - 1 - last_from_end)
    kept = last[is_added[last]]
    cleared = steps[0].cleared
    removed = NO_U64 if cleared else hashes[last[~is_added[last]]]
    if not len(last):
        return KvChange(cleared, NO_U64, NO_U32, NO_U64)
    return KvChange(cleared, hashes[kept], tokens[kept], removed)
