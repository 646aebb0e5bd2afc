"""Brings about the objects that a pool is to have: applies what is missing or changed, removes what is not wanted.

The one rule: an object that is not ours is never written to and never deleted, whatever its name; it is reported. This
module must not know what the objects are for.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from trimtab_operator.api.pool import PoolKey
from trimtab_operator.children.labels import APPLIED, installation_of, is_ours
from trimtab_operator.drift import Path, differences, must_be_made_again
from trimtab_operator.kube import KINDS, Kube, KubeError, Object

log = logging.getLogger(__name__)

HPA_MANAGER = "kube-controller-manager"
"""Field manager of a HorizontalPodAutoscaler, which writes through the subresource `scale`."""
REPLICAS: Path = ("spec", "replicas")
Name = tuple[str, str, str]
"""Kind, namespace, name."""


@dataclass(slots=True, kw_only=True)
class ApplyReport:
    """What was done. Objects are named `Kind/name`."""

    changed: list[str] = field(default_factory=list)
    """Made, or put right."""
    recreated: list[str] = field(default_factory=list)
    """Deleted and made again, with the field that could not be changed: `Service/x (spec.clusterIP)`."""
    removed: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)
    """Somebody else's, and in the way: neither read further nor touched."""
    installations: dict[str, str] = field(default_factory=dict)
    """Of the foreign ones that another installation of Trimtab has made: the namespace of its operator."""
    errors: list[str] = field(default_factory=list)
    """`Kind/name: the API server's words`. All else was done all the same."""

    @property
    def is_complete(self) -> bool:
        """Whether everything is as it is to be."""
        return not self.foreign and not self.errors


class ChildApplier:
    """One per operator, which runs in the namespace `installation`.

    It keeps what the API server makes of our objects, to tell that from a change by hand.
    """

    def __init__(self, kube: Kube, installation: str) -> None:
        self._kube = kube
        self._installation = installation
        self._spellings: dict[PoolKey, dict[Name, tuple[str, list[tuple[Path, Any]]]]] = {}
        """By pool and object: what was asked, by its hash, and where the server's answer to it differed."""

    async def sync(
        self, key: PoolKey, owner_uid: str, wanted: Sequence[Object], found: Sequence[Mapping[str, Any]]
    ) -> ApplyReport:
        """Make the pool's children what they are to be. `found`: those that are known to be there, by our labels.

        Raises KubeError where the API server cannot be reached at all; all that it refuses is in the report.
        """
        report = ApplyReport()
        known = {_name(body): body for body in found}
        asked = {_name(body): body for body in wanted}
        for name, body in asked.items():
            try:
                await self._bring_about(key, owner_uid, name, body, known.get(name), report)
            except KubeError as error:
                _note(report, name, error)
        for name, child in known.items():
            if name not in asked and is_ours(child, key, owner_uid, self._installation):
                self._spellings.get(key, {}).pop(name, None)
                await self._remove(name, child, report)
        return report

    async def remove_all(self, key: PoolKey, found: Iterable[Mapping[str, Any]]) -> ApplyReport:
        """Delete the children of a pool that is gone. Raises KubeError where the API server cannot be reached."""
        report = ApplyReport()
        self._spellings.pop(key, None)
        for body in found:
            if is_ours(body, key, "", self._installation):
                await self._remove(_name(body), body, report)
        return report

    async def _bring_about(
        self,
        key: PoolKey,
        owner_uid: str,
        name: Name,
        wanted: Object,
        cached: Mapping[str, Any] | None,
        report: ApplyReport,
    ) -> None:
        if cached is not None and self._is_as_asked(key, name, wanted, cached):
            return
        # What is cached may be behind, and an object without our labels is in no cache of ours.
        live = await self._kube.get(KINDS[name[0]], name[1], name[2])
        if live is None:
            await self._apply(key, name, wanted)
            report.changed.append(_text(name))
            return
        if not is_ours(live, key, owner_uid, self._installation):
            report.foreign.append(_text(name))
            if (other := installation_of(live)) not in ("", self._installation):
                report.installations[_text(name)] = other
            return
        if "deletionTimestamp" in live["metadata"]:
            report.errors.append(f"{_text(name)}: it is being deleted; it is made again once it is gone")
            return
        wanted = _without_what_a_scaler_owns(wanted, live)
        if self._is_as_asked(key, name, wanted, live):
            return
        if (reason := must_be_made_again(wanted, live)) is not None:
            await self._make_again(key, name, wanted, live, reason, report)
            return
        try:
            await self._apply(key, name, wanted, uid=live["metadata"]["uid"])
        except KubeError as error:
            if error.status != HTTPStatus.UNPROCESSABLE_ENTITY:
                raise
            if "immutable" in error.message:
                await self._make_again(key, name, wanted, live, error.message, report)
                return
            await self._overwrite(key, name, wanted, live["metadata"]["uid"])
        report.changed.append(_text(name))

    def _is_as_asked(self, key: PoolKey, name: Name, wanted: Object, live: Mapping[str, Any]) -> bool:
        hash_asked = wanted["metadata"]["annotations"][APPLIED]
        spelled_hash, spellings = self._spellings.get(key, {}).get(name, ("", []))
        tolerated = spellings if spelled_hash == hash_asked else []
        return all(difference in tolerated for difference in differences(wanted, live))

    async def _apply(self, key: PoolKey, name: Name, wanted: Object, *, uid: str | None = None) -> None:
        # With the uid: the very object that was looked at, and none that somebody has made since.
        body = wanted if uid is None else {**wanted, "metadata": {**wanted["metadata"], "uid": uid}}
        answer = await self._kube.apply(body)
        spelling = (wanted["metadata"]["annotations"][APPLIED], differences(wanted, answer))
        self._spellings.setdefault(key, {})[name] = spelling
        log.info("applied %s %s/%s", *name)

    async def _overwrite(self, key: PoolKey, name: Name, wanted: Object, uid: str) -> None:
        """Where what somebody has put beside our fields makes the whole invalid: lists are then ours alone."""
        body: Object = {part: wanted[part] for part in ("spec", "data") if part in wanted}
        body["metadata"] = {"uid": uid}
        await self._kube.merge(KINDS[name[0]], name[1], name[2], body)
        await self._apply(key, name, wanted, uid=uid)

    async def _make_again(
        self,
        key: PoolKey,
        name: Name,
        wanted: Object,
        live: Mapping[str, Any],
        reason: str,
        report: ApplyReport,
    ) -> None:
        log.warning("%s %s/%s is deleted and made again: %s cannot be changed", *name, reason)
        await self._kube.delete(KINDS[name[0]], name[1], name[2], uid=live["metadata"]["uid"])
        report.recreated.append(f"{_text(name)} ({reason})")
        if await self._kube.get(KINDS[name[0]], name[1], name[2]) is not None:
            report.errors.append(f"{_text(name)}: it is being deleted; it is made again once it is gone")
            return
        await self._apply(key, name, wanted)

    async def _remove(self, name: Name, body: Mapping[str, Any], report: ApplyReport) -> None:
        if "deletionTimestamp" in body["metadata"]:
            return
        try:
            if await self._kube.delete(KINDS[name[0]], name[1], name[2], uid=body["metadata"]["uid"]):
                report.removed.append(_text(name))
                log.info("removed %s %s/%s", *name)
        except KubeError as error:
            _note(report, name, error)


def _without_what_a_scaler_owns(wanted: Object, live: Mapping[str, Any]) -> Object:
    """A HorizontalPodAutoscaler's number of replicas holds; one that was set by hand does not."""
    if wanted["kind"] != "Deployment":
        return wanted
    for entry in live["metadata"].get("managedFields", ()):
        fields = entry.get("fieldsV1", {}).get("f:spec", {})
        if entry.get("subresource") == "scale" and entry.get("manager") == HPA_MANAGER and "f:replicas" in fields:
            spec = {name: value for name, value in wanted["spec"].items() if name != "replicas"}
            return {**wanted, "spec": spec}
    return wanted


def _note(report: ApplyReport, name: Name, error: KubeError) -> None:
    if error.status == 0:
        raise error
    log.warning("%s %s/%s: %s", *name, error)
    report.errors.append(f"{_text(name)}: {error}")


def _name(body: Mapping[str, Any]) -> Name:
    return body["kind"], body["metadata"]["namespace"], body["metadata"]["name"]


def _text(name: Name) -> str:
    return f"{name[0]}/{name[2]}"
