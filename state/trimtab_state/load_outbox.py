"""What a replica has still to tell about its load: gathered operations, and entries not known to have arrived.

The one rule: a sequence number never stands for two contents; see `kv_outbox`. What is dropped leaves a gap, and the
lease tells the state again. No I/O, no clock.
"""

from collections import deque

import numpy as np

from .load_codec import LoadEntry, LoadOperation, encode_load_entry
from .settings import StateSettings

SAMPLES_PER_ENTRY_MAX = 16_384
"""Samples in one entry; an entry ends with the operation that passes it."""


class LoadOutbox:
    """Of one incarnation. Sequence numbers start at 1; `sequence` is the last one given out."""

    def __init__(self, incarnation: int, settings: StateSettings) -> None:
        self.incarnation = incarnation
        self.sequence = 0
        self.dropped = 0
        """How often operations were dropped in favour of a lease."""
        self._settings = settings
        self._pending: list[LoadOperation] = []
        self._unsent: deque[tuple[bytes, int]] = deque()
        self._unsent_operations = 0

    @property
    def has_work(self) -> bool:
        return bool(self._pending or self._unsent)

    def add(self, operation: LoadOperation) -> bool:
        """Gathers an operation. False: too many wait, so all were dropped and the lease has to tell the state."""
        self._pending.append(self._thinned(operation))
        if len(self._pending) + self._unsent_operations > self._settings.load_queue_ops_max:
            self.drop()
            return False
        return True

    def greet(self) -> None:
        """Adds an entry without operations, which makes followers look for the lease of a new incarnation at once."""
        self.sequence += 1
        self._unsent.append((encode_load_entry(LoadEntry(self.incarnation, self.sequence, [])), 0))

    def drop(self) -> None:
        """Forgets everything and leaves a gap."""
        self._pending.clear()
        self._unsent.clear()
        self._unsent_operations = 0
        self.sequence += 1
        self.dropped += 1

    def entries(self, entries_max: int) -> list[bytes]:
        """The oldest entries to send, in order. Numbers everything that is pending."""
        while self._pending:
            count = self._entry_size()
            operations = self._pending[:count]
            del self._pending[:count]
            self.sequence += 1
            self._unsent.append((encode_load_entry(LoadEntry(self.incarnation, self.sequence, operations)), count))
            self._unsent_operations += count
        return [self._unsent[i][0] for i in range(min(entries_max, len(self._unsent)))]

    def arrived(self, count: int) -> None:
        """The first `count` entries have arrived."""
        for _ in range(min(count, len(self._unsent))):
            self._unsent_operations -= self._unsent.popleft()[1]

    def _entry_size(self) -> int:
        samples = 0
        for index, operation in enumerate(self._pending):
            samples += len(operation.sample_hashes)
            if samples >= SAMPLES_PER_ENTRY_MAX or index + 1 == self._settings.load_ops_per_entry_max:
                return index + 1
        return len(self._pending)

    def _thinned(self, operation: LoadOperation) -> LoadOperation:
        count, bound = len(operation.sample_hashes), self._settings.samples_per_reservation_max
        if count <= bound:
            return operation
        # A sample that matches implies all before it, so fewer of them cost only the precision of the depth.
        kept = np.unique(np.linspace(0, count - 1, bound).round().astype(np.int64))
        return operation._replace(
            sample_hashes=operation.sample_hashes[kept], sample_tokens=operation.sample_tokens[kept]
        )
