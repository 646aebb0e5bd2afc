"""When things that are wanted may be asked for again.

The one rule: it only delays; what is wanted is said by somebody else. No clock: time is given.
"""

import math
from collections.abc import Set
from typing import Generic, TypeVar

K = TypeVar("K", int, str)


class RetryTimes(Generic[K]):
    """Keeps times only for what is still wanted."""

    def __init__(self, pause_s: float) -> None:
        self._pause_s = pause_s
        self._at_s: dict[K, float] = {}

    def due(self, wanted: Set[K], now_s: float) -> list[K]:
        """What of it may be asked for now: first what never was, then what has waited longest, so that none starves."""
        for key in [key for key in self._at_s if key not in wanted]:
            del self._at_s[key]
        due = [(self._at_s.get(key, -math.inf), key) for key in wanted if self._at_s.get(key, now_s) <= now_s]
        return [key for _, key in sorted(due)]

    def next_s(self, wanted: Set[K], otherwise_s: float) -> float:
        """When the first of it may be asked for; 0 if at once."""
        return min((self._at_s.get(key, 0.0) for key in wanted), default=otherwise_s)

    def tried(self, key: K, now_s: float) -> None:
        self._at_s[key] = now_s + self._pause_s

    def now(self, key: K) -> None:
        """There is news: it may be asked for at once."""
        self._at_s.pop(key, None)
