"""Words on their way from writers to readers, in virtual time, by way of a log that has them in one order.

The one rule: of one writer a reader hears everything once and in the order in which it was written. Usually that is
when a word is due; a reader who looks into the log hears all that has come there, before it is due.
"""

import heapq
import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True, kw_only=True, eq=False)
class _Word:
    logged_s: float
    arrive: Callable[[float, float], None]
    is_heard: bool = False


class Words:
    """Writers and readers are any objects that are told apart by identity or value."""

    def __init__(self) -> None:
        self._due: list[tuple[float, int, _Word, deque[_Word]]] = []
        self._order = itertools.count()
        self._ways: dict[tuple[object, object], deque[_Word]] = {}
        self._last_s: dict[tuple[object, object], float] = {}

    def send(
        self, writer: object, reader: object, *, logged_s: float, due_s: float, arrive: Callable[[float, float], None]
    ) -> None:
        """`arrive` is called with the time when the reader hears of it, and the time at which it came into the log.
        What the writer wrote before is there by then."""
        way = (writer, reader)
        words = self._ways.setdefault(way, deque())
        for word in reversed(words):
            if word.logged_s <= logged_s:
                break
            word.logged_s = logged_s
        self._last_s[way] = due_s = max(self._last_s.get(way, 0.0), logged_s, due_s)
        word = _Word(logged_s=logged_s, arrive=arrive)
        words.append(word)
        heapq.heappush(self._due, (due_s, next(self._order), word, words))

    def arrive_by(self, until_s: float) -> bool:
        """The next word that is due by then is heard. False: there is none."""
        while self._due and self._due[0][0] <= until_s:
            due_s, _, word, words = heapq.heappop(self._due)
            if not word.is_heard:
                while not word.is_heard:
                    _hear(words, due_s)
                return True
        return False

    def read(self, reader: object, logged_s: float, now_s: float) -> None:
        """The reader looks into the log, and hears all that came there by `logged_s`."""
        for (_, whose), words in self._ways.items():
            while whose is reader and words and words[0].logged_s <= logged_s:
                _hear(words, now_s)


def _hear(words: deque[_Word], at_s: float) -> None:
    word = words.popleft()
    word.is_heard = True
    word.arrive(at_s, word.logged_s)
