"""Conditions of a status: how one is made, when its time moves, and which of them have turned.

The one rule: `lastTransitionTime` changes when `status` does, and not when the words do. Pure; times are given.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final, Literal

from trimtab_operator.kube import Object

MESSAGE_CHARS_MAX: Final = 1_024
"""Of ours; the API allows 32 times that."""
Truth = Literal["True", "False", "Unknown"]
Finding = tuple[Truth, str, str]
"""Status, reason, message."""


def condition(type_: str, status: Truth, reason: str, message: str, generation: int) -> Object:
    """Without its time. `reason` is a CamelCase word; the message is cut where it is too long."""
    if len(message) > MESSAGE_CHARS_MAX:
        message = message[: MESSAGE_CHARS_MAX - 1] + "…"
    return {
        "type": type_,
        "status": status,
        "reason": reason,
        "message": message,
        "observedGeneration": generation,
    }


def with_times(wanted: Iterable[Mapping[str, Any]], found: Sequence[Mapping[str, Any]], *, now: str) -> list[Object]:
    """The wanted conditions with the times of those found whose status is the same, and `now` for the others."""
    before = {old["type"]: old for old in found}
    timed = []
    for new in wanted:
        old = before.get(new["type"], {})
        is_same = old.get("status") == new["status"] and old.get("lastTransitionTime")
        timed.append({**new, "lastTransitionTime": old["lastTransitionTime"] if is_same else now})
    return timed


def turned(
    wanted: Iterable[Mapping[str, Any]], found: Sequence[Mapping[str, Any]]
) -> list[tuple[Mapping[str, Any] | None, Mapping[str, Any]]]:
    """(before, now) of the conditions whose status or reason is another, for Events; before: None if new."""
    before = {old["type"]: old for old in found}
    pairs = [(before.get(new["type"]), new) for new in wanted]
    return [
        (old, new)
        for old, new in pairs
        if old is None or (old.get("status"), old.get("reason")) != (new["status"], new["reason"])
    ]


def rfc3339(unix_s: float) -> str:
    """As the API writes times: whole seconds, UTC."""
    return datetime.fromtimestamp(int(unix_s), UTC).isoformat().replace("+00:00", "Z")
