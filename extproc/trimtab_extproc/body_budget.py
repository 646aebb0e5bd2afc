"""How much of all request bodies together is held while their ends are awaited.

The one rule: what was taken is given back, exactly once, by the exchange that took it. Where nothing is left, the
request is refused (429) rather than the process killed for its memory.
"""


class BodyBudget:
    """Bytes that all exchanges of a process share."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.held_bytes = 0

    def take(self, size_bytes: int) -> bool:
        """Whether so many more may be held; if so, they count from now on."""
        if self.held_bytes + size_bytes > self.bytes_max:
            return False
        self.held_bytes += size_bytes
        return True

    def give_back(self, size_bytes: int) -> None:
        """So many are no longer held."""
        self.held_bytes -= size_bytes
