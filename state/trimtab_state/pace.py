"""How often something is done: a few times at once, and then at most once in so long.

The one rule: what comes alone is not kept waiting, and what comes thick is gathered, so that the work for it is bounded
by time and not by how much comes. Sans-I/O: it says how long to wait, whoever asks waits.
"""


class Pace:
    """`every_s` between turns; up to `burst` of them, where none were taken before, at once."""

    def __init__(self, every_s: float, burst: int) -> None:
        self._every_s = every_s
        self._slack_s = every_s * (burst - 1)
        self._paid_until_s = 0.0

    def wait_s(self, now_s: float) -> float:
        """Takes the next turn; returns how long to wait for it. `now_s` does not fall."""
        begin_s = max(now_s, self._paid_until_s - self._slack_s)
        self._paid_until_s = max(self._paid_until_s, begin_s) + self._every_s
        return begin_s - now_s
