"""The generation key: a random name of the store's contents.

The one rule: whoever finds it missing sets one, and whoever finds another than before acts as if the store had lost
everything, which it has. No I/O: gives commands and judges replies.
"""

import os

from .keys import PoolKeys
from .settings import StateSettings
from .store import Command


class Generation:
    """What one process knows of it."""

    REPLIES = 3
    """How many commands there are; the value is in the reply of the second."""

    def __init__(self, keys: PoolKeys, settings: StateSettings) -> None:
        self.value: bytes | None = None
        self._key = keys.generation
        self._ttl_ms = int(settings.generation_ttl_s * 1000)

    def commands(self) -> list[Command]:
        """To put into a batch."""
        # A new name each time: a key that is lost must not come back under the name that others know.
        return [
            ("SET", self._key, os.urandom(8).hex(), "NX", "PX", self._ttl_ms),
            ("GET", self._key),
            ("PEXPIRE", self._key, self._ttl_ms),
        ]

    def is_changed(self, value: bytes | None) -> bool:
        """Takes note of the value found. True if another was known before; the first one ever found is no change."""
        known, self.value = self.value, value
        return known is not None and known != value
