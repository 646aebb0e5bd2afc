"""The latest entries of one writer, in a row without gaps, kept while the state they build on is awaited.

The one rule: it always ends with the newest entry seen. What does not join on starts a new row, and what is too much
goes from the front, because a newer snapshot can stand in for it.
"""

from collections import deque
from typing import Generic, Protocol, TypeVar


class Numbered(Protocol):
    @property
    def sequence(self) -> int: ...


E = TypeVar("E", bound=Numbered)


class EntryTail(Generic[E]):
    """`entries_max` and `weight_max` (in the unit of the given weights) bound it; one entry is always kept."""

    __slots__ = ("_entries", "_entries_max", "_weight", "_weight_max")

    def __init__(self, entries_max: int, weight_max: int) -> None:
        self._entries: deque[tuple[E, int]] = deque()
        self._entries_max = entries_max
        self._weight_max = weight_max
        self._weight = 0

    @property
    def needs(self) -> int:
        """The least position from which the row can be replayed; 0 if it is empty."""
        return self._entries[0][0].sequence - 1 if self._entries else 0

    @property
    def newest(self) -> int:
        """The position of the newest entry; 0 if it is empty."""
        return self._entries[-1][0].sequence if self._entries else 0

    def add(self, entry: E, weight: int) -> None:
        """An entry that is older than the newest one is ignored."""
        if self._entries:
            newest = self._entries[-1][0].sequence
            if entry.sequence <= newest:
                return
            if entry.sequence != newest + 1:
                self.clear()
        self._entries.append((entry, weight))
        self._weight += weight
        while len(self._entries) > 1 and (len(self._entries) > self._entries_max or self._weight > self._weight_max):
            self._weight -= self._entries.popleft()[1]

    def take_after(self, position: int) -> list[E]:
        """Empties it; the entries after the position."""
        entries = [entry for entry, _ in self._entries if entry.sequence > position]
        self.clear()
        return entries

    def clear(self) -> None:
        self._entries.clear()
        self._weight = 0
