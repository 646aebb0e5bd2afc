"""Which endpoints have a beating sidecar. No I/O; time is given, by a clock that stands still while the store is away.

The one rule: an endpoint is gone when its heartbeat is missing from the store and none was seen for the time to live,
or at once when its sidecar says goodbye; and it is gone once.
"""

from dataclasses import dataclass
from typing import Protocol

from .documents import Heartbeat
from .settings import StateSettings


class HeartbeatSink(Protocol):
    """See `sink.PoolSink`."""

    def on_heartbeat(self, heartbeat: Heartbeat) -> None: ...
    def on_heartbeat_gone(self, endpoint: str) -> None: ...


@dataclass(slots=True)
class _Beat:
    heartbeat: Heartbeat
    seen_s: float


class HeartbeatTable:
    """The live endpoints."""

    def __init__(self, sink: HeartbeatSink, settings: StateSettings) -> None:
        self.refused = 0
        """Heartbeats of endpoints beyond the bound on endpoints."""
        self._sink = sink
        self._settings = settings
        self._beats: dict[str, _Beat] = {}

    @property
    def endpoints(self) -> tuple[str, ...]:
        return tuple(self._beats)

    def cards(self) -> set[str]:
        """Digests that the live heartbeats name."""
        models = (model for beat in self._beats.values() for model in beat.heartbeat.models.values())
        return {model.card for model in models if model.card is not None}

    def seen(self, heartbeat: Heartbeat, now_s: float) -> bool:
        """The store holds this heartbeat. True and passed on if it is a new one."""
        beat = self._beats.get(heartbeat.endpoint)
        if beat is None:
            if len(self._beats) >= self._settings.endpoints_max:
                self.refused += 1
                return False
            self._beats[heartbeat.endpoint] = _Beat(heartbeat, now_s)
        else:
            old = beat.heartbeat
            is_older = old.incarnation == heartbeat.incarnation and old.beat > heartbeat.beat
            if is_older or old == heartbeat:
                return False
            beat.heartbeat, beat.seen_s = heartbeat, now_s
        self._sink.on_heartbeat(heartbeat)
        return True

    def missing(self, endpoint: str, now_s: float) -> bool:
        """The store holds none of this endpoint. True if it is gone now."""
        beat = self._beats.get(endpoint)
        if beat is None or now_s - beat.seen_s < self._settings.heartbeat_ttl_s:
            return False
        return self.goodbye(endpoint)

    def goodbye(self, endpoint: str) -> bool:
        """Its sidecar has ended. True if it was known."""
        if self._beats.pop(endpoint, None) is None:
            return False
        self._sink.on_heartbeat_gone(endpoint)
        return True

    def grace(self, now_s: float) -> None:
        """The store was away or lost its contents: every endpoint has a full time to live from now."""
        for beat in self._beats.values():
            beat.seen_s = now_s
