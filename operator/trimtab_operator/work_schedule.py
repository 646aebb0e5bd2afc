"""Which pool is due when, and which is being worked on: what the work queue knows, without a clock or a task.

The one rule: a pool is in at most one pair of hands, and what happens to it meanwhile makes it due once more. A pool
that fails comes back later and later; anything new about it brings it back at once.

Bounds: one entry per pool known.
"""

import heapq
import itertools
import random
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

BACKOFF_MIN_S: Final = 0.5
BACKOFF_MAX_S: Final = 15.0
RESYNC_S: Final = 600.0
"""How long a pool that nothing happened to is left alone; jittered by `JITTER` either way."""
JITTER: Final = 0.2

Key = TypeVar("Key", bound=Hashable)


@dataclass(slots=True)
class _Entry:
    due_s: float | None = None
    """None: in work, and nothing new came meanwhile."""
    began_s: float | None = None
    """None: not in work."""
    failures: int = 0
    not_before_s: float = 0.0
    """The API server wants to be left alone until then."""
    is_news: bool = False
    """Due because something happened, and not for the resync's sake."""


class WorkSchedule(Generic[Key]):
    """All methods take the time; it never goes back."""

    def __init__(self, *, rng: random.Random, resync_s: float = RESYNC_S) -> None:
        self._rng = rng
        self._resync_s = resync_s
        self._entries: dict[Key, _Entry] = {}
        self._heap: list[tuple[float, int, Key]] = []
        """May hold what is no longer so: an entry's own `due_s` tells."""
        self._number = itertools.count()

    def add(self, key: Key, due_s: float) -> None:
        """Something happened to it: due then, or earlier if it is already due earlier."""
        entry = self._entries.setdefault(key, _Entry())
        due_s = max(due_s, entry.not_before_s)
        if entry.due_s is None or due_s < entry.due_s:
            self._set_due(key, entry, due_s)
        entry.is_news = True

    def take(self, now_s: float) -> Key | None:
        """One that is due, now in work; None: there is none."""
        while self._heap and self._heap[0][0] <= now_s:
            due_s, _, key = heapq.heappop(self._heap)
            entry = self._entries.get(key)
            if entry is None or entry.due_s != due_s or entry.began_s is not None:
                continue
            entry.due_s, entry.began_s, entry.is_news = None, now_s, False
            return key
        return None

    def done(self, key: Key, now_s: float) -> None:
        """It is as it should be."""
        entry = self._entries[key]
        entry.began_s, entry.failures = None, 0
        if entry.due_s is None:
            self._set_due(key, entry, now_s + self._resync_s * self._rng.uniform(1 - JITTER, 1 + JITTER))
        else:
            self._set_due(key, entry, entry.due_s)

    def failed(self, key: Key, now_s: float, *, retry_after_s: float = 0.0) -> float:
        """It is not; returns the seconds until it is due again. `retry_after_s`: not before that, whatever comes."""
        entry = self._entries[key]
        backoff_s = min(BACKOFF_MAX_S, BACKOFF_MIN_S * 2.0 ** min(entry.failures, 30))
        wait_s = max(backoff_s * self._rng.uniform(1 - JITTER, 1.0), retry_after_s)
        due_s = now_s + wait_s
        entry.not_before_s = now_s + retry_after_s
        if entry.due_s is not None:
            due_s = min(due_s, max(entry.due_s, entry.not_before_s))
        entry.began_s = None
        entry.failures += 1
        entry.is_news = True
        self._set_due(key, entry, due_s)
        return due_s - now_s

    def forget(self, key: Key) -> None:
        """It is gone for good: it comes back only if something new happens to it."""
        entry = self._entries.get(key)
        if entry is None:
            return
        if entry.due_s is not None and entry.is_news:
            entry.began_s, entry.failures = None, 0
            self._set_due(key, entry, entry.due_s)
        else:
            del self._entries[key]

    def next_due_s(self) -> float | None:
        """When something that is not in work is due; None: nothing."""
        while self._heap:
            due_s, _, key = self._heap[0]
            entry = self._entries.get(key)
            if entry is not None and entry.due_s == due_s and entry.began_s is None:
                return due_s
            heapq.heappop(self._heap)
        return None

    def depth(self, now_s: float) -> int:
        """How many are due and not in work."""
        return sum(
            entry.began_s is None and entry.due_s is not None and entry.due_s <= now_s
            for entry in self._entries.values()
        )

    def in_work(self) -> int:
        return sum(entry.began_s is not None for entry in self._entries.values())

    def stands_still_s(self, now_s: float, moved_s: float) -> float:
        """For how long one has been in work, or nothing has moved though something is due; `moved_s`: when it last did.

        However many wait, and whatever each of them waits for: as long as they come and go it is 0, or little.
        """
        began_s = min((entry.began_s for entry in self._entries.values() if entry.began_s is not None), default=now_s)
        waits = self.depth(now_s) > 0
        return max(now_s - began_s, min(now_s - moved_s, self.age_s(now_s)) if waits else 0.0)

    def age_s(self, now_s: float) -> float:
        """For how long the one that waits longest has been due, or in work."""
        oldest_s = now_s
        for entry in self._entries.values():
            since_s = entry.began_s if entry.began_s is not None else entry.due_s
            if since_s is not None:
                oldest_s = min(oldest_s, since_s)
        return now_s - oldest_s

    def _set_due(self, key: Key, entry: _Entry, due_s: float) -> None:
        entry.due_s = due_s
        if entry.began_s is None:
            heapq.heappush(self._heap, (due_s, next(self._number), key))
