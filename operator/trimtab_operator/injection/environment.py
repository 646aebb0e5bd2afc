"""The environment of a container as far as a pod's manifest tells it.

The one rule: a value that only the kubelet will know (of a Secret, of the pod's status) is never guessed: it is passed
on as the reference that it is, together with all that it depends on.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final

from trimtab_operator.injection.references import STRING_CHARS_MAX, expand, names_in
from trimtab_operator.kube import Object

VALUES_CHARS_MAX: Final = 1 << 20
"""All values together, each with its references put in; what is beyond that is left to the kubelet. Values that refer
to each other can grow without end, and anybody may create a pod."""


class Environment:
    """Of one container. Of two entries with one name the last counts, as with the kubelet."""

    def __init__(self, container: Mapping[str, Any]) -> None:
        self.sources: list[Object] = list(container.get("envFrom") or ())
        """Whole ConfigMaps and Secrets, whose names and values are not known here."""
        self._entries: dict[str, Object] = {}
        self._values: dict[str, str] = {}
        room = VALUES_CHARS_MAX
        for entry in container.get("env") or ():
            name = str(entry.get("name", ""))
            self._entries.pop(name, None)
            self._values.pop(name, None)
            value = "" if entry.get("value") is None else str(entry["value"])
            # References reach back to what stands above; what they cannot reach stays text.
            is_known = all(used in self._values or used not in self._entries for used in names_in(value))
            if entry.get("valueFrom") is None and is_known and not (self.sources and self._is_open(value)):
                expanded = expand(value, self._values.get, chars_max=min(room, STRING_CHARS_MAX))
                if expanded is not None:
                    self._values[name] = expanded
                    room -= len(expanded)
            self._entries[name] = entry

    def _is_open(self, value: str) -> bool:
        """It refers to something that may be in a whole ConfigMap or Secret."""
        return any(used not in self._values for used in names_in(value))

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def value(self, name: str) -> str | None:
        """None: there is no such entry, or only the kubelet will know."""
        return self._values.get(name)

    def may_have(self, name: str) -> bool:
        """The kubelet may know a value where `value` does not."""
        return name in self._entries or bool(self.sources)

    def entries(self, names: Iterable[str]) -> list[Object]:
        """Those of `names` that there are, with all that their values refer to, in their order."""
        wanted: set[str] = set()
        waiting = [name for name in names if name in self._entries]
        while waiting:
            name = waiting.pop()
            if name not in wanted:
                wanted.add(name)
                waiting += [n for n in names_in(str(self._entries[name].get("value") or "")) if n in self._entries]
        return [dict(entry) for name, entry in self._entries.items() if name in wanted]
