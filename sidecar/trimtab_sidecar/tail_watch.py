"""When to ask an engine's log for its end: the loss of the last events before a silence shows in no gap. Pure.

The one rule: work that was seen after the last question is owed one, however long that has to wait. It is due at a look
that found no event since the look before (while events come, the next one shows what is missing), and at most every
`check_s`.
"""


class TailWatch:
    """Told what each look at the engine found. Times in seconds."""

    def __init__(self, *, check_s: float) -> None:
        self._check_s = check_s
        self._checked_s: float | None = None
        self._work: object = None
        self._frames = 0
        self._is_owed = False

    def look(self, *, work: object, frames: int, now_s: float) -> bool:
        """Whether to ask now. `work` is what changes whenever the engine computes; `frames` counts events received."""
        self._is_owed |= work != self._work
        is_quiet = frames == self._frames
        self._work, self._frames = work, frames
        if not (self._is_owed and is_quiet):
            return False
        if self._checked_s is not None and now_s - self._checked_s < self._check_s:
            return False
        self._is_owed, self._checked_s = False, now_s
        return True
