"""A clock that stands still while the store is away: for leases and heartbeats, whose writers cannot be heard then.

The one rule: time passes only between two replies of the store, and no silence moves it by more than a bounded step.
"""


class ConnectedClock:
    """Starts at 0, disconnected."""

    def __init__(self, step_max_s: float) -> None:
        self.now_s = 0.0
        self._step_max_s = step_max_s
        self._contact_s: float | None = None

    def contact(self, loop_s: float) -> float:
        """The store has answered at `loop_s` of the caller's clock. Returns this clock's time."""
        if self._contact_s is not None:
            self.now_s += min(max(loop_s - self._contact_s, 0.0), self._step_max_s)
        self._contact_s = loop_s
        return self.now_s

    def away(self) -> None:
        """The store is away until the next contact."""
        self._contact_s = None
