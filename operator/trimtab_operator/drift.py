"""Compares what the operator asks of an object with what the API server has.

The one rule: pure. Only what was asked counts: what the server adds, and what others add beside it, is no difference.
"""

import re
from collections.abc import Iterator, Mapping
from decimal import Decimal, InvalidOperation
from typing import Any, Final

from trimtab_operator.kube import Object

Path = tuple[str, ...]
ABSENT: Final = "<absent>"

LIST_KEYS: Final[tuple[tuple[str, ...], ...]] = (
    ("containerPort", "protocol"),
    ("port", "protocol"),
    ("uid",),
    ("topologyKey", "whenUnsatisfiable"),
    ("mountPath",),
    ("name",),
)
"""By which fields the API server tells the elements of a list apart, as far as our objects have such lists. The first
one whose fields every element has is it."""
WHOLE: Final = frozenset({"selector", "labelSelector", "nodeSelector", "tolerations", "sysctls"})
"""Objects and lists that are one value: what somebody adds to them changes it."""
LEFT_OUT_WHEN_FALSE: Final = frozenset({"publishNotReadyAddresses"})
"""Fields that the server does not write down when they are false."""
QUANTITY_PARENTS: Final = frozenset({"requests", "limits", "sizeLimit"})
_QUANTITY = re.compile(r"([+-]?[0-9.]+)(m|[kMGTPE]i?|[eE][+-]?[0-9]+|)")
_SUFFIXES: Final = {
    "": Decimal(1),
    "m": Decimal("0.001"),
    **{letter: Decimal(1000) ** n for n, letter in enumerate("kMGTPE", start=1)},
    **{f"{letter}i": Decimal(1024) ** n for n, letter in enumerate("KMGTPE", start=1)},
}


def differences(wanted: Object, live: Mapping[str, Any]) -> list[tuple[Path, Any]]:
    """(path, what is there instead) for each field that was asked for and is not so."""
    return list(_compare(wanted, live, ()))


def must_be_made_again(wanted: Object, live: Mapping[str, Any]) -> str | None:
    """The field that differs and that the API server will not change, if there is one."""
    if live.get("immutable") is True:
        return "immutable"
    asked, found = wanted.get("spec", {}), live.get("spec", {})
    if wanted["kind"] == "Deployment" and asked["selector"] != found.get("selector"):
        return "spec.selector"
    if wanted["kind"] == "Service" and (asked.get("clusterIP") == "None") != (found.get("clusterIP") == "None"):
        return "spec.clusterIP"
    if wanted["kind"] == "Secret" and wanted["type"] != live.get("type"):
        return "type"
    return None


def _compare(wanted: Any, live: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    if path and path[-1] in WHOLE:
        if wanted != live and (wanted or live):
            yield path, live
    elif isinstance(wanted, dict):
        found = live if isinstance(live, Mapping) else {}
        if not wanted and live is None:
            return
        if wanted and not isinstance(live, Mapping):
            yield path, live
            return
        for name, value in wanted.items():
            yield from _compare(value, found.get(name), (*path, name))
    elif isinstance(wanted, list):
        yield from _compare_lists(wanted, live, path)
    elif wanted is False and live is None and path[-1] in LEFT_OUT_WHEN_FALSE:
        return
    elif wanted != live and not _is_same_amount(wanted, live, path):
        yield path, ABSENT if live is None else live


def _compare_lists(wanted: list[Any], live: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    if not wanted and live is None:
        return
    if not isinstance(live, list):
        yield path, live
        return
    keys = _keys_of(wanted, live)
    if keys is None:
        if len(wanted) != len(live):
            yield path, live
            return
        for number, (one, other) in enumerate(zip(wanted, live, strict=True)):
            yield from _compare(one, other, (*path, str(number)))
        return
    by_key = {_key(element, keys): element for element in live}
    for element in wanted:
        key = _key(element, keys)
        yield from _compare(element, by_key.get(key, {}), (*path, str(key)))


def _keys_of(wanted: list[Any], live: list[Any]) -> tuple[str, ...] | None:
    elements = [*wanted, *live]
    if not all(isinstance(element, dict) for element in elements):
        return None
    return next((keys for keys in LIST_KEYS if all(keys[0] in element for element in elements)), None)


def _key(element: Mapping[str, Any], keys: tuple[str, ...]) -> tuple[str, ...]:
    # Fields after the first have defaults, which all of ours spell out.
    return tuple(str(element.get(name, "")) for name in keys)


def _is_same_amount(wanted: Any, live: Any, path: Path) -> bool:
    if len(path) < 2 or not QUANTITY_PARENTS & set(path[-2:]):
        return False
    one, other = _amount(wanted), _amount(live)
    return one is not None and one == other


def _amount(value: Any) -> Decimal | None:
    """A Kubernetes quantity as a number: the server writes `0.5` as `500m`."""
    found = _QUANTITY.fullmatch(str(value))
    if found is None:
        return None
    try:
        if found[2][:1] in ("e", "E") and found[2] not in _SUFFIXES:
            return Decimal(found[1] + found[2])
        return Decimal(found[1]) * _SUFFIXES[found[2]]
    except (InvalidOperation, KeyError):
        return None
