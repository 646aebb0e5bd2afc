"""Unix time that does not jump: the wall clock is read once, then time passes as the monotonic clock says.

The one rule: a wall clock that is set while the process runs moves nothing here; two processes may differ by what
their wall clocks differed when they started.
"""

import time


class SteadyClock:
    """Call it for the time now, in seconds since 1970."""

    __slots__ = ("_offset_s",)

    def __init__(self) -> None:
        self._offset_s = time.time() - time.monotonic()

    def __call__(self) -> float:
        return self._offset_s + time.monotonic()
