"""How often an engine is looked at. Pure.

The one rule: an engine at work is looked at every `busy_s`, one where nothing changes ever more rarely, up to `idle_s`;
any change brings the short pause back. A look costs an engine some 4 ms of its event loop.
"""

GROWTH = 1.5


class ScrapePace:
    """Pauses in seconds."""

    def __init__(self, *, busy_s: float, idle_s: float) -> None:
        self._busy_s = busy_s
        self._idle_s = max(busy_s, idle_s)
        self._pause_s = busy_s

    def next(self, *, changed: bool, busy: bool) -> float:
        """The pause after a look that found a change, or requests."""
        self._pause_s = self._busy_s if changed or busy else min(self._pause_s * GROWTH, self._idle_s)
        return self._pause_s
