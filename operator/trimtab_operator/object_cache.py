"""Pools, policies and children as they were last seen, by the pool that they belong to.

The one rule: an object never goes back: what is older than what is here, or than its own end, changes nothing. So it
does not matter in which order a list, a watch and another list arrive. It must not know where objects come from.

Bounds: what is in the cluster under our labels, without what nobody here reads; `GONE_MAX` objects that have ended.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from trimtab_operator.api.pool import PoolKey
from trimtab_operator.children.labels import POOL_LABEL
from trimtab_operator.children.names import label_value
from trimtab_operator.kube import POLICIES, POOLS, Object
from trimtab_operator.report.pool_status import CONTROLLER

GONE_MAX: Final = 4096
LAST_APPLIED: Final = "kubectl.kubernetes.io/last-applied-configuration"


@dataclass(slots=True)
class _Member:
    """One object, and what it is filed under."""

    body: Object
    version: int
    keys: frozenset[PoolKey]


@dataclass(slots=True)
class _Kind:
    objects: dict[tuple[str, str], _Member] = field(default_factory=dict)
    """By namespace and name."""


class ObjectCache:
    """`put` and `drop` return the pools to look at."""

    def __init__(self) -> None:
        self._kinds: dict[str, _Kind] = {}
        self._policies: dict[PoolKey, dict[str, Object]] = {}
        self._children: dict[tuple[str, str], dict[tuple[str, str], Object]] = {}
        """By namespace and label; then by kind and name."""
        self._gone: OrderedDict[str, int] = OrderedDict()
        """By uid: the version at which it ended."""

    def pool(self, key: PoolKey) -> Object | None:
        member = self._kind(POOLS.kind).objects.get((key.namespace, key.name))
        return None if member is None else member.body

    def policies(self, key: PoolKey) -> list[Object]:
        """Those that target the pool, oldest first."""
        found = self._policies.get(key, {}).values()
        return sorted(found, key=lambda body: (body["metadata"].get("creationTimestamp", ""), body["metadata"]["name"]))

    def children(self, key: PoolKey) -> list[Object]:
        """Those that carry the pool's label, in a fixed order."""
        found = self._children.get((key.namespace, label_value(key.name)), {})
        return [found[name] for name in sorted(found)]

    def keys(self) -> set[PoolKey]:
        """All pools that there are, that a policy targets, or that children belong to."""
        return {key for kind in self._kinds.values() for member in kind.objects.values() for key in member.keys}

    def is_known(self, key: PoolKey) -> bool:
        return (
            self.pool(key) is not None
            or bool(self._policies.get(key))
            or bool(self._children.get((key.namespace, label_value(key.name))))
        )

    def uids(self, kind: str, namespace: str | None) -> set[str]:
        """Of what is here of that kind; `namespace` None: everywhere."""
        return {
            member.body["metadata"]["uid"]
            for (at, _), member in self._kind(kind).objects.items()
            if namespace is None or at == namespace
        }

    def put(self, kind: str, body: Object) -> Iterable[PoolKey]:
        """It is there, and so."""
        about = body["metadata"]
        at, uid, version = (about.get("namespace", ""), about["name"]), about["uid"], _version(about)
        if version <= self._gone.get(uid, -1):
            return ()
        objects = self._kind(kind).objects
        before = objects.get(at)
        if before is not None:
            if version <= before.version:
                return ()
            self._unfile(kind, before)
        # Nothing here writes to what it was given; the caller does not read it again.
        _strip(body)
        body.setdefault("kind", kind)
        member = _Member(body, version, self._keys_of(kind, body))
        objects[at] = member
        self._file(kind, member)
        if before is None:
            return member.keys
        if before.body["metadata"]["uid"] == uid and _content(kind, before.body) == _content(kind, body):
            return ()
        return member.keys | before.keys

    def drop(self, kind: str, body: Mapping[str, Any]) -> Iterable[PoolKey]:
        """It has ended, or carries our labels no more."""
        about = body["metadata"]
        return self._end(kind, (about.get("namespace", ""), about["name"]), about["uid"], _version(about))

    def drop_uids(self, kind: str, uids: set[str], version: str) -> Iterable[PoolKey]:
        """A list of that version did not have them."""
        listed_at = int(version) if version.isdecimal() else None
        gone = [
            (at, member.body["metadata"]["uid"], member.version if listed_at is None else listed_at)
            for at, member in self._kind(kind).objects.items()
            if member.body["metadata"]["uid"] in uids
        ]
        return {key for at, uid, ended in gone for key in self._end(kind, at, uid, ended)}

    def _end(self, kind: str, at: tuple[str, str], uid: str, version: int) -> Iterable[PoolKey]:
        self._gone[uid] = max(version, self._gone.get(uid, -1))
        self._gone.move_to_end(uid)
        while len(self._gone) > GONE_MAX:
            self._gone.popitem(last=False)
        objects = self._kind(kind).objects
        member = objects.get(at)
        if member is None or member.body["metadata"]["uid"] != uid or member.version > version:
            return ()
        del objects[at]
        self._unfile(kind, member)
        return member.keys

    def _kind(self, kind: str) -> _Kind:
        return self._kinds.setdefault(kind, _Kind())

    def _keys_of(self, kind: str, body: Object) -> frozenset[PoolKey]:
        about = body["metadata"]
        namespace = about["namespace"]
        if kind == POOLS.kind:
            return frozenset({PoolKey(namespace, about["name"])})
        if kind == POLICIES.kind:
            return frozenset({PoolKey(namespace, body["spec"]["targetRef"]["name"])})
        # The annotation has the whole name. It may have been changed by hand, the label may not: it is what is filed.
        label = (about.get("labels") or {}).get(POOL_LABEL, "")
        name = (about.get("annotations") or {}).get(POOL_LABEL, "")
        if name and label_value(name) == label:
            return frozenset({PoolKey(namespace, name)})
        pools = self._kind(POOLS.kind).objects
        named = {PoolKey(namespace, pool) for at, pool in pools if at == namespace and label_value(pool) == label}
        return frozenset(named or {PoolKey(namespace, label)})

    def _file(self, kind: str, member: _Member) -> None:
        about = member.body["metadata"]
        if kind == POLICIES.kind:
            for key in member.keys:
                self._policies.setdefault(key, {})[about["uid"]] = member.body
        elif kind != POOLS.kind:
            self._children.setdefault(_drawer(member.body), {})[(kind, about["name"])] = member.body

    def _unfile(self, kind: str, member: _Member) -> None:
        about = member.body["metadata"]
        if kind == POLICIES.kind:
            for key in member.keys:
                _take_out(self._policies, key, about["uid"])
        elif kind != POOLS.kind:
            _take_out(self._children, _drawer(member.body), (kind, about["name"]))


def _drawer(body: Object) -> tuple[str, str]:
    about = body["metadata"]
    return about["namespace"], (about.get("labels") or {}).get(POOL_LABEL, "")


def _take_out(drawers: dict[Any, dict[Any, Object]], drawer: Any, name: Any) -> None:
    found = drawers.get(drawer, {})
    found.pop(name, None)
    if not found:
        drawers.pop(drawer, None)


def _strip(body: Object) -> None:
    """Of what nobody here reads and what is half of an object's memory."""
    about = body["metadata"]
    about.pop("managedFields", None)
    notes = about.get("annotations")
    if notes and LAST_APPLIED in notes:
        del notes[LAST_APPLIED]


def _content(kind: str, body: Object) -> Object:
    """Without what changes with every write, and what we write ourselves: that would make a look of every look."""
    about = {name: value for name, value in body["metadata"].items() if name != "resourceVersion"}
    content = {**body, "metadata": about}
    if kind == POLICIES.kind:
        content.pop("status", None)
    elif kind == POOLS.kind:
        # The gateways' own entries are news.
        parents = (body.get("status") or {}).get("parents") or []
        content["status"] = [entry for entry in parents if entry.get("controllerName") != CONTROLLER]
    return content


def _version(about: Mapping[str, Any]) -> int:
    """Of an object: comparable within one kind, as the API now says and as it always was."""
    version = about.get("resourceVersion", "")
    return int(version) if version.isdecimal() else 0
