"""Where we are in an engine's log of KV events, and what each frame means for that. Sans-I/O.

The one rule: a frame is applied only where it follows the last one applied, of the same engine process. An engine's
sequence starts at 0 again when it restarts, with no marker, and a restart can look contiguous. So whenever anything is
odd, the log is asked again from the last frame applied, whose digest must come back: another digest, or a log that
ends before it, is another process.

`live()` judges frames as they are published; `replayed()` and `replay_ended()` judge the answer to a replay request. A
frame for which a replay was asked and answered in full needs no second look: it was published before the request, so
the answer held it, or else it was left over from a process that is gone. Nothing here decodes events.
"""

import enum
from dataclasses import dataclass

import xxhash

WHOLE_FRAMES = 500
"""An answer of fewer frames arrives whole: an engine's socket queues 1,000 and drops what is more, the end included."""
NOWHERE = -1
"""The sequence before the first frame."""


class Verdict(enum.Enum):
    APPLY = "apply"
    """The next frame: apply it."""
    SKIP = "skip"
    """Known already, or of no use in this state."""
    ASK = "ask"
    """Ask for a replay; `live_without_replay` judges the frame where there is no answer."""
    RESTARTED = "restarted"
    """The engine is another process: forget the cache, and ask for a replay from the start."""
    LOST = "lost"
    """Frames are missing for good: unpublish, then apply this one."""


class ReplayEnd(enum.Enum):
    CURRENT = "current"
    """We have everything up to the end of the log."""
    AGAIN = "again"
    """The answer had a hole, or was so long that its tail may be missing: ask again, from where we are now."""
    RESTARTED = "restarted"
    """The log ends before our position: another process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogPosition:
    """The last frame applied; what a checkpoint keeps."""

    sequence: int = NOWHERE
    digest: int = 0
    """Of that frame's payload, which holds a time and so differs between processes."""


class EngineLog:
    """The reader's side of one rank's log. `can_replay`: the engine has a replay socket."""

    def __init__(
        self, *, can_replay: bool, position: LogPosition | None = None, whole_frames: int = WHOLE_FRAMES
    ) -> None:
        self.can_replay = can_replay
        self.position = LogPosition() if position is None else position
        self._last_live = NOWHERE
        # A position from a checkpoint, like one from before a broken connection, may be another process's.
        self._is_suspect = self.position.sequence != NOWHERE
        self._whole_frames = whole_frames
        self._answered_frames = 0
        self._has_hole = False

    @property
    def is_suspect(self) -> bool:
        """The engine may be another process than the one we know: ask before anything is believed."""
        return self._is_suspect

    def suspect(self) -> None:
        """The connection broke, or something else says that the engine may have been restarted."""
        self._is_suspect = True

    def forget(self) -> None:
        """The engine is another process: its log is read from the start."""
        self.position, self._last_live, self._is_suspect = LogPosition(), NOWHERE, False

    def live(self, sequence: int, payload: bytes) -> Verdict:
        """What to do with a published frame. APPLY and LOST take it as applied."""
        went_back = sequence <= self._last_live
        if self.can_replay:
            if self._is_suspect or went_back or sequence > self.position.sequence + 1:
                self._last_live = NOWHERE if went_back else self._last_live
                return Verdict.ASK
        elif went_back:
            return Verdict.RESTARTED
        elif self._is_suspect:
            return self.live_without_replay(sequence, payload)
        self._last_live = sequence
        if sequence <= self.position.sequence:
            return Verdict.SKIP
        lost = sequence > self.position.sequence + 1 and self.position.sequence != NOWHERE
        self._advance(sequence, payload)
        return Verdict.LOST if lost else Verdict.APPLY

    def live_without_replay(self, sequence: int, payload: bytes) -> Verdict:
        """The same for a frame for which a replay was asked in vain: what cannot be confirmed is lost."""
        self._is_suspect, self._last_live = False, sequence
        if self.position.sequence == NOWHERE:
            self._advance(sequence, payload)
            return Verdict.APPLY
        if sequence <= self.position.sequence:
            return Verdict.RESTARTED
        self._advance(sequence, payload)
        return Verdict.LOST

    def replay_from(self) -> int:
        """The sequence to ask a replay from: our position, so that its digest comes back."""
        self._answered_frames, self._has_hole = 0, False
        return max(self.position.sequence, 0)

    def replayed(self, sequence: int, payload: bytes) -> Verdict:
        """What to do with a frame of the answer. APPLY and LOST take it as applied."""
        is_first = self._answered_frames == 0
        self._answered_frames += 1
        at = self.position.sequence
        if self._has_hole or sequence < at:
            return Verdict.SKIP
        if sequence == at:
            if is_first and digest(payload) != self.position.digest:
                return Verdict.RESTARTED
            return Verdict.SKIP
        if is_first and at != NOWHERE and (self._is_suspect or sequence > at + 1):
            # The engine's buffer begins after our position: what lies between is gone, and so is the proof that it
            # is the process that we know.
            self._advance(sequence, payload)
            return Verdict.LOST
        if sequence == at + 1 or is_first:
            self._advance(sequence, payload)
            return Verdict.APPLY
        self._has_hole = True
        return Verdict.SKIP

    def replay_ended(self) -> ReplayEnd:
        if self._answered_frames == 0 and self.position.sequence != NOWHERE:
            return ReplayEnd.RESTARTED
        if self._has_hole or self._answered_frames >= self._whole_frames:
            return ReplayEnd.AGAIN
        self._is_suspect = False
        return ReplayEnd.CURRENT

    def _advance(self, sequence: int, payload: bytes) -> None:
        self.position = LogPosition(sequence=sequence, digest=digest(payload))


def digest(payload: bytes) -> int:
    return xxhash.xxh3_64_intdigest(payload)
