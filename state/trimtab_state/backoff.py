"""How long to wait before the next try: a random share of a bound that doubles, so that processes spread out."""

import random


class Backoff:
    """Not shared between tasks. `rng` is given in tests."""

    def __init__(self, min_s: float, max_s: float, rng: random.Random | None = None) -> None:
        self._min_s = min_s
        self._max_s = max_s
        self._rng = random.Random() if rng is None else rng
        self._bound_s = min_s

    def reset(self) -> None:
        """The last try went well."""
        self._bound_s = self._min_s

    def next_s(self) -> float:
        """Between half of the bound and the bound."""
        bound_s = self._bound_s
        self._bound_s = min(bound_s * 2, self._max_s)
        return bound_s * (0.5 + 0.5 * self._rng.random())
