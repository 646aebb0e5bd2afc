"""What comes of a pod: it gets the sidecar, or it does not, and why.

The one rule: reasons are few and fixed, since they are counted; the text beside them is for people.
"""

from dataclasses import dataclass
from typing import Final, Literal

from trimtab_operator.kube import Object

SkipReason = Literal[
    "opted_out",
    "protected_namespace",
    "no_pool",
    "not_asked",
    "no_engine",
    "own_sidecar",
    "other_installation",
    "policy_not_understood",
    "mirror_pod",
    "windows",
    "no_room",
    "too_large",
]
SPOKEN: Final = frozenset({"no_engine", "policy_not_understood", "windows", "no_room", "too_large"})
"""Reasons that surprise: told to whoever creates the pod."""

MARKED: Final = SPOKEN - {"too_large"}
"""Of these, those that the pod itself tells, since nobody sees warnings of pods that a controller makes."""


@dataclass(frozen=True, slots=True)
class Skip:
    """The pod is left as it is, but for a note of the reason where that is one of MARKED."""

    reason: SkipReason
    text: str
    """With the remedy, where one is needed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Injection:
    """The pod gets, or has, the sidecar."""

    patch: list[Object]
    """JSON patch; empty: it has all of it already."""
    warnings: tuple[str, ...] = ()
    """What will keep the sidecar from doing its best, with the remedy; shown by kubectl."""
