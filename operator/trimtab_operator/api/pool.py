"""An InferencePool (`inference.networking.k8s.io/v1`) as the operator reads it.

The one rule: the API server has already validated the object against the standard's schema, so reading it cannot fail;
what the schema cannot say (whether a Service is ours, whether pods match) is not decided here, but for the selector's
keys, which no schema can validate and every list of pods would stumble over.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from trimtab_operator.api.patterns import LABEL_VALUE, QUALIFIED

POOL_GROUP: Final = "inference.networking.k8s.io"
POOL_VERSION: Final = "v1"
POOL_KIND: Final = "InferencePool"
POOL_PLURAL: Final = "inferencepools"
PICKER_PORT: Final = 9002
"""Of the picker, where the pool's `endpointPickerRef` names no other."""
KEY_PREFIX_CHARS_MAX: Final = 253
LABEL_CHARS_MAX: Final = 63
"""Of a label's value."""
TEXT_CHARS_MAX: Final = 80
"""Of what is quoted of a key or value that is none."""


@dataclass(frozen=True, slots=True, order=True)
class PoolKey:
    """Names a pool, also before it exists and after it is gone."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """What the operator needs of one InferencePool."""

    key: PoolKey
    uid: str
    generation: int
    is_deleting: bool
    """It has a deletionTimestamp (somebody else's finalizer holds it)."""
    selector: Mapping[str, str]
    """Labels that a pod must carry."""
    target_ports: tuple[int, ...]
    """Each port of each pod is an endpoint."""
    app_protocol: Literal["http", "kubernetes.io/h2c"]
    picker_name: str | None
    """Service that `endpointPickerRef` names, None if the pool names none."""
    picker_port: int
    fails_open: bool
    """`endpointPickerRef.failureMode` is FailOpen."""
    created: str = ""
    """`creationTimestamp`."""

    @property
    def age(self) -> tuple[str, str]:
        """The least is the oldest; of two made in one second, the first by name."""
        return self.created, self.key.name

    @property
    def selector_problem(self) -> str:
        """What of the selector no pod's label can be, and what it would have to be; empty: all of it can."""
        for key, value in sorted(self.selector.items()):
            prefix = key.rpartition("/")[0]
            if re.fullmatch(QUALIFIED, key) is None or len(prefix) > KEY_PREFIX_CHARS_MAX:
                return (
                    f"{_quoted(key)} is no label's key: up to 63 letters, digits, '-', '_' and '.', beginning and"
                    " ending with a letter or digit, perhaps after a prefix such as example.com/"
                )
            if re.fullmatch(LABEL_VALUE, value) is None or len(value) > LABEL_CHARS_MAX:
                return (
                    f"{_quoted(value)}, of {key}, is no label's value: up to {LABEL_CHARS_MAX} letters, digits, '-',"
                    " '_' and '.', beginning and ending with a letter or digit"
                )
        return ""

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> "Pool":
        """From the API's JSON."""
        metadata, spec = body["metadata"], body["spec"]
        reference = spec.get("endpointPickerRef") or {}
        port = (reference.get("port") or {}).get("number")
        return cls(
            key=PoolKey(metadata["namespace"], metadata["name"]),
            uid=metadata["uid"],
            generation=int(metadata.get("generation", 1)),
            is_deleting="deletionTimestamp" in metadata,
            selector=dict(spec["selector"]["matchLabels"]),
            target_ports=tuple(int(entry["number"]) for entry in spec["targetPorts"]),
            app_protocol=spec.get("appProtocol") or "http",
            picker_name=reference.get("name"),
            picker_port=int(port) if port else PICKER_PORT,
            fails_open=reference.get("failureMode") == "FailOpen",
            created=str(metadata.get("creationTimestamp", "")),
        )


def _quoted(text: str) -> str:
    return repr(text if len(text) <= TEXT_CHARS_MAX else f"{text[:TEXT_CHARS_MAX]}…")
