"""The last good policy of a pool, noted where an operator finds it that was not there when it was good.

The one rule: it is an annotation of the pickers' Deployment and a help, no more: one that would be too large is left
out, since the API server refuses objects with large annotations, and no picker is worth less than a note.
"""

import logging
from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

from trimtab_operator.api.policy import PolicyError, PolicySpec
from trimtab_operator.api.pool import PoolKey
from trimtab_operator.children.names import picker_name
from trimtab_operator.kube import Object

log = logging.getLogger(__name__)

SPEC_NOTE: Final = "trimtab.dev/last-good-spec"
NOTE_BYTES_MAX: Final = 192 << 10
"""Of the 256 KiB that all annotations of an object may have together: the Deployment's others are ours too, and small.
Of a policy only `standalone.serviceAnnotations`, classes and costs can be large."""


def note_of(spec: PolicySpec) -> str | None:
    """None: it is too large to be noted."""
    note = msgspec.json.encode(spec)
    return note.decode() if len(note) <= NOTE_BYTES_MAX else None


def note_spec(wanted: Iterable[Object], key: PoolKey, spec: PolicySpec) -> None:
    """Write the note on the pickers' Deployment, one of the children that the pool is to have."""
    for body in wanted:
        if body["kind"] == "Deployment" and body["metadata"]["name"] == picker_name(key.name):
            if (note := note_of(spec)) is not None:
                body["metadata"]["annotations"][SPEC_NOTE] = note
            else:
                log.warning(
                    "pool %s: its policy is too large to be noted (over %d bytes): an operator that starts while the"
                    " policy makes no sense runs the pool with the defaults",
                    key,
                    NOTE_BYTES_MAX,
                )


def spec_in(children: Iterable[Mapping[str, Any]], key: PoolKey) -> PolicySpec | None:
    """The noted policy among the pool's children; None: there is none that can be read."""
    for child in children:
        note = (child["metadata"].get("annotations") or {}).get(SPEC_NOTE)
        if note and child["metadata"]["name"] == picker_name(key.name):
            try:
                return PolicySpec.of(msgspec.json.decode(note))
            except (PolicyError, msgspec.DecodeError):
                return None
    return None
