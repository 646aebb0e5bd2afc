"""The notify stream: names what changed outside the logs, so that followers read it at once.

The one rule: a notice holds no state and may be lost or repeated; the slow poll finds what it would have told.
"""

from enum import StrEnum

from .keys import PoolKeys
from .settings import StateSettings
from .store import Command


class Notice(StrEnum):
    CONTROL = "control"
    HEARTBEAT = "heartbeat"
    """Of the named endpoint: what requests must not be sent on is different."""
    GONE = "gone"
    """The named endpoint's sidecar has ended."""
    SNAPSHOT = "snapshot"
    """Of the named endpoint: written anew."""
    CARD = "card"
    """With the named digest."""


def notify(keys: PoolKeys, settings: StateSettings, notice: Notice, name: str = "") -> Command:
    """The command that adds a notice."""
    return ("XADD", keys.notify, "MAXLEN", "~", settings.notify_entries_max, "*", "k", notice.value, "n", name)


def parse_notice(fields: dict[bytes, bytes]) -> tuple[Notice, str] | None:
    """None for a notice that this version does not know, or that is malformed."""
    try:
        return Notice(fields[b"k"].decode()), fields[b"n"].decode()
    except (KeyError, ValueError):
        return None
