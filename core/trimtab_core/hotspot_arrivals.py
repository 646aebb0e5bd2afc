"""How many of the last arrivals begin with which prefix: what the hotspot detector counts.

The one rule: counts are exact, of the arrivals of the window. What does not fit makes the window shorter, the oldest
arrivals going first; so a share is always one of real arrivals, never an estimate.

Prefixes are looked at every `STEP_CHUNKS` chunks: what is common to some requests and shorter than that can pull them
to an endpoint by no more than its some 256 tokens. They form a tree that grows where requests meet. A prompt leaves one
mark, at the first place where nobody was before it; a prompt that comes to such a mark marks its whole length. So a
prompt that comes once costs one entry, however long it is, and a prefix is known in full from its second arrival on.
"""

from collections import deque

from trimtab_core.errors import ensure

STEP_CHUNKS = 16
"""1 KB of text."""
PLACES_MAX = 128
"""Places looked at of one prompt, its first 128 KB; requests that share so much are of one class."""
ARRIVALS_MAX = 16_384
"""Arrivals in the window. Beyond, the oldest go, however young they are."""
PREFIXES_MAX = 32_768
"""Prefixes counted. Beyond, the oldest arrivals go until there is room."""


class Prefix:
    """One prefix: its last chunk's hash, its length, and the arrivals in the window that begin with it."""

    __slots__ = ("chunk", "count", "depth_chunks", "is_mark", "parent")

    def __init__(self, chunk: int, depth_chunks: int, parent: "Prefix | None", *, is_mark: bool) -> None:
        self.chunk = chunk
        self.depth_chunks = depth_chunks
        self.parent = parent
        self.count = 1
        self.is_mark = is_mark
        """A prompt left it, and none that goes on from here came yet."""


class Arrivals:
    """The window. Times do not fall from call to call."""

    def __init__(self) -> None:
        self.prefixes: dict[int, Prefix] = {}
        self._window: deque[tuple[float, Prefix | None]] = deque()
        """Each arrival with the deepest prefix that counts it."""

    def __len__(self) -> int:
        return len(self._window)

    def add(self, chain: list[int], now_s: float) -> list[Prefix]:
        """One more arrival; the prefixes that count it, rising in depth."""
        places = chain[STEP_CHUNKS - 1 : STEP_CHUNKS * PLACES_MAX : STEP_CHUNKS]
        path: list[Prefix] = []
        here: Prefix | None = None
        for chunk in places:
            there = self.prefixes.get(chunk)
            if there is None or there.parent is not here:
                break
            there.count += 1
            path.append(there)
            here = there
        new = places[len(path) :]
        is_mark = here is None or not here.is_mark
        if is_mark:
            new = new[:1]
        elif new:
            path[-1].is_mark = False
        while self._window and (len(self._window) >= ARRIVALS_MAX or len(self.prefixes) + len(new) > PREFIXES_MAX):
            self._forget_oldest()
        for chunk in new:
            if chunk in self.prefixes:  # a hash that two prefixes share: no sense can be made of it
                break
            here = self.prefixes[chunk] = Prefix(chunk, (len(path) + 1) * STEP_CHUNKS, here, is_mark=is_mark)
            path.append(here)
        self._window.append((now_s, here))
        return path

    def forget_before(self, time_s: float) -> None:
        """Arrivals from before that time leave the window."""
        while self._window and self._window[0][0] < time_s:
            self._forget_oldest()

    def clear(self) -> None:
        """Nothing was ever seen."""
        self.prefixes.clear()
        self._window.clear()

    def _forget_oldest(self) -> None:
        _, prefix = self._window.popleft()
        while prefix is not None:
            prefix.count -= 1
            if not prefix.count:
                del self.prefixes[prefix.chunk]
            prefix = prefix.parent

    def check_invariants(self) -> None:
        """Raise `InvariantError` if the state contradicts itself."""
        counts: dict[int, int] = {}
        for _, deepest in self._window:
            prefix = deepest
            while prefix is not None:
                counts[prefix.chunk] = counts.get(prefix.chunk, 0) + 1
                prefix = prefix.parent
        ensure(counts == {chunk: prefix.count for chunk, prefix in self.prefixes.items()}, "arrivals are miscounted")
        ensure(len(self._window) <= ARRIVALS_MAX and len(self.prefixes) <= PREFIXES_MAX, "the window is too long")
