"""What is logged while the store is away: the start, each other reason, and the end; not each try.

The one rule: an operator who looks at the log sees why a process is not connected, also if it never was.
"""

import logging

from .errors import StateUnavailable

log = logging.getLogger(__name__)


class OutageLog:
    """Of one task. `what` says in the log what waits."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._reason: str | None = None

    def failed(self, error: StateUnavailable) -> None:
        """A try failed."""
        reason = str(error)
        is_new = self._reason is None or reason.partition(":")[0] != self._reason.partition(":")[0]
        self._reason = reason
        log.log(logging.WARNING if is_new else logging.DEBUG, "store away, %s: %s", self._what, reason)

    def over(self) -> None:
        """A try went well."""
        if self._reason is not None:
            self._reason = None
            log.info("store is back; over: %s", self._what)
