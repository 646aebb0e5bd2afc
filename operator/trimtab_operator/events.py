"""Kubernetes Events (`events.k8s.io/v1`): what changed, said once, where `kubectl describe` shows it.

The one rule: an Event is for people and never worth an error. It is posted on transitions only: what was said last on
a topic is not said again within REPEAT_S, and no object gets more than BURST at once. What is held back is counted.
"""

import logging
import os
import secrets
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final, Literal

from trimtab_operator.kube import EVENTS, Kube, KubeError, Object
from trimtab_operator.steady_clock import SteadyClock

log = logging.getLogger(__name__)

CONTROLLER: Final = "trimtab.dev/operator"
"""`reportingController`."""
NOTE_BYTES_MAX: Final = 1_024
REASON_CHARS_MAX: Final = 128
INSTANCE_CHARS_MAX: Final = 128
REPEAT_S: Final = 600.0
"""What was said last on a topic is not said again within this time."""
BURST: Final = 10
"""Events of one object that may come at once."""
REFILL_S: Final = 30.0
"""Then one per this time."""
OBJECTS_MAX: Final = 1_024
"""Objects remembered; beyond it the one that was quiet longest is forgotten."""
EventType = Literal["Normal", "Warning"]


class EventPoster:
    """One per operator. `instance`: this replica's name."""

    def __init__(self, kube: Kube, *, instance: str | None = None, clock: Callable[[], float] | None = None) -> None:
        self.posted = 0
        self.suppressed = 0
        """Said lately, or too many of one object."""
        self.failed = 0
        self._kube = kube
        self._instance = (instance or os.environ.get("HOSTNAME") or "trimtab-operator")[:INSTANCE_CHARS_MAX]
        self._clock = clock or SteadyClock()
        self._spoken: OrderedDict[tuple[str, str, str], _Spoken] = OrderedDict()

    async def post(
        self,
        regarding: Mapping[str, Any],
        reason: str,
        note: str,
        type_: EventType = "Normal",
        *,
        topic: str = "",
        action: str = "",
    ) -> bool:
        """`regarding`: the object as read. Never raises for an API server that refuses; False if nothing was posted.

        `reason` is one CamelCase word. `topic`: what moves to and fro between reasons (a condition's type), by default
        the reason itself. `action`: what was done or tried, by default the reason.
        """
        now_s = self._clock()
        if not self._may_speak(regarding, topic or reason, (reason, note), now_s):
            self.suppressed += 1
            return False
        try:
            await self._kube.create(EVENTS, self._event(regarding, reason, note, type_, action, now_s))
        except KubeError as error:
            # Also while the namespace is being deleted, where nothing can be made any more.
            self.failed += 1
            log.warning("event %s of %s was not posted: %s", reason, _name(regarding), error)
            return False
        self.posted += 1
        return True

    def _may_speak(self, regarding: Mapping[str, Any], topic: str, what: tuple[str, str], now_s: float) -> bool:
        metadata = regarding["metadata"]
        who = (str(regarding["kind"]), metadata.get("namespace") or "", str(metadata["name"]))
        spoken = self._spoken.pop(who, None) or _Spoken(now_s)
        self._spoken[who] = spoken
        while len(self._spoken) > OBJECTS_MAX:
            self._spoken.popitem(last=False)
        return spoken.may_say(topic, what, now_s)

    def _event(
        self, regarding: Mapping[str, Any], reason: str, note: str, type_: EventType, action: str, now_s: float
    ) -> Object:
        metadata = regarding["metadata"]
        namespace = metadata.get("namespace") or "default"
        reference = {
            "apiVersion": regarding["apiVersion"],
            "kind": regarding["kind"],
            "name": metadata["name"],
            "namespace": metadata.get("namespace"),
            "uid": metadata.get("uid"),
            "resourceVersion": metadata.get("resourceVersion"),
        }
        return {
            "apiVersion": EVENTS.api_version,
            "kind": EVENTS.kind,
            # The object's name and a random end, as clients of the API make it; 253 characters at most.
            "metadata": {"name": f"{metadata['name'][:230]}.{secrets.token_hex(8)}", "namespace": namespace},
            "eventTime": datetime.fromtimestamp(now_s, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z"),
            "reportingController": CONTROLLER,
            "reportingInstance": self._instance,
            "action": (action or reason)[:REASON_CHARS_MAX],
            "reason": reason[:REASON_CHARS_MAX],
            "note": clipped(note, NOTE_BYTES_MAX),
            "type": type_,
            "regarding": {key: value for key, value in reference.items() if value},
        }


def clipped(text: str, bytes_max: int) -> str:
    """At most so many bytes of UTF-8, cut between characters, with an ellipsis where something was cut."""
    data = text.encode("utf-8", "replace")
    if len(data) <= bytes_max:
        return data.decode()
    return data[: bytes_max - 3].decode("utf-8", "ignore") + "…"


@dataclass(slots=True)
class _Spoken:
    """Of one object."""

    at_s: float
    room: float = float(BURST)
    last: dict[str, tuple[tuple[str, str], float]] = field(default_factory=dict)
    """By topic: what was said last, and when."""

    def may_say(self, topic: str, what: tuple[str, str], now_s: float) -> bool:
        self.last = {about: said for about, said in self.last.items() if now_s - said[1] < REPEAT_S}
        self.room = min(float(BURST), self.room + max(0.0, now_s - self.at_s) / REFILL_S)
        self.at_s = now_s
        if self.room < 1.0 or (topic in self.last and self.last[topic][0] == what):
            return False
        self.room -= 1.0
        self.last[topic] = (what, now_s)
        return True


def _name(regarding: Mapping[str, Any]) -> str:
    metadata = regarding["metadata"]
    return f"{regarding['kind']} {metadata.get('namespace') or ''}/{metadata['name']}"
