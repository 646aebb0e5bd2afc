"""The sidecar put into a pod: a pure function from the pod to a JSON patch.

The one rule: called again, it changes nothing that is right already, and puts right what another webhook broke. A
webhook built on older types drops `restartPolicy` of init containers, and the pod with it; one that rewrites images or
amounts has its reasons, and is left its way.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from trimtab_operator.api.policy import PolicySpec
from trimtab_operator.api.pool import Pool
from trimtab_operator.injection.advice import advice
from trimtab_operator.injection.engine_container import EngineContainer, find_engine
from trimtab_operator.injection.engine_words import read_words
from trimtab_operator.injection.environment import Environment
from trimtab_operator.injection.marks import (
    ACCESS_VOLUME,
    CONTAINER,
    DIGEST_NOTE,
    ENGINE,
    EVICTABLE_VOLUMES_NOTE,
    HOME_VOLUME,
    IMAGE_NOTE,
    INJECTED,
    INSTALL,
    LEFT_ALONE_CHARS_MAX,
    LEFT_ALONE_NOTE,
    METRICS_PORT_NAME,
    MIRROR_NOTE,
    STATE_VOLUME,
)
from trimtab_operator.injection.model_access import model_access
from trimtab_operator.injection.outcome import MARKED, Injection, Skip
from trimtab_operator.injection.pod_bounds import NOTES_BYTES_MAX, beyond_bounds, notes_bytes
from trimtab_operator.injection.sidecar_container import needs_home, runs_as_root, sidecar_container
from trimtab_operator.install import Install
from trimtab_operator.kube import Object

LISTS: Final = ("initContainers", "containers")
_KEYED: Final = {"env": "name", "volumeMounts": "mountPath", "ports": "containerPort"}
"""Lists of a container that other webhooks add to, and what tells their entries apart."""


def inject(
    pod: Mapping[str, Any],
    pool: Pool,
    spec: PolicySpec,
    install: Install,
    secret_name: str,
    *,
    has_native: bool = True,
) -> Injection | Skip:
    """The patch that gives `pod` the sidecar of `pool`; `secret_name`: the Secret with its way into the store.

    `has_native`: the cluster knows init containers that restart. One that does not would refuse the pod, or wait for
    the sidecar's end.
    """
    pod_spec, notes = pod["spec"], pod["metadata"].get("annotations") or {}
    if (skip := beyond_bounds(pod_spec)) is not None:
        return skip
    if MIRROR_NOTE in notes:
        return Skip("mirror_pod", "the node runs it by itself")
    if (pod_spec.get("os") or {}).get("name") == "windows":
        return Skip("windows", "there is no sidecar for Windows")
    found = {kind: _index(pod_spec.get(kind) or ()) for kind in LISTS}
    has_sidecar = any(at is not None for at in found.values())
    if DIGEST_NOTE not in notes and has_sidecar:
        return Skip("own_sidecar", f"the pod brings a container {CONTAINER} of its own")
    if has_sidecar and notes.get(INSTALL, install.namespace) != install.namespace:
        return Skip("other_installation", f"the sidecar is of the installation in namespace {notes[INSTALL]}")
    store_access: Object = {"name": ACCESS_VOLUME, "secret": {"secretName": secret_name, "optional": True}}
    if (taken := _taken_volume(pod_spec, store_access, is_ours=DIGEST_NOTE in notes)) is not None:
        return Skip("no_room", f"the pod has a volume {taken} of its own, which is not what ours is; name it otherwise")
    is_native = spec.sidecar.kind == "Native" and has_native
    others = {kind: [c for c in pod_spec.get(kind) or () if c.get("name") != CONTAINER] for kind in LISTS}
    engine = find_engine(others["containers"], pool.target_ports, spec.sidecar)
    if isinstance(engine, Skip):
        return engine
    said = notes.get(ENGINE) or (pod["metadata"].get("labels") or {}).get(ENGINE)
    if spec.sidecar.engine == "auto" and (said == "vllm" or said == "sglang"):
        engine = EngineContainer(body=engine.body, engine=said)
    environment = Environment(engine.body)
    words = read_words(engine.body, environment, engine.engine)
    access = model_access(engine.body, environment, words)
    wanted = sidecar_container(
        pod_spec,
        engine,
        words,
        environment,
        access,
        pool=pool,
        spec=spec,
        install=install,
        others=[*others["initContainers"], *others["containers"]],
        is_native=is_native,
    )
    patch = _Patch()
    folders = [STATE_VOLUME, *([HOME_VOLUME] if needs_home(access) else [])]
    _put_container(patch, pod, wanted, found, home="initContainers" if is_native else "containers")
    # No bound of its size: a volume that outgrows one has its whole pod evicted, the engine too.
    volumes = [*({"name": folder, "emptyDir": {}} for folder in folders), store_access]
    patch.append_missing(("spec", "volumes"), pod_spec.get("volumes"), volumes)
    for at, volume in enumerate(pod_spec.get("volumes") or ()):
        if volume.get("name") == ACCESS_VOLUME and not _is_same_secret(volume, store_access):
            # Copied from a pod of another pool.
            patch.operations.append({"op": "replace", "path": _path("spec", "volumes", at), "value": store_access})
    pull_secrets = [{"name": name} for name in install.image_pull_secrets]
    patch.append_missing(("spec", "imagePullSecrets"), pod_spec.get("imagePullSecrets"), pull_secrets)
    patch.entries(("metadata", "labels"), pod["metadata"].get("labels"), {INJECTED: "true"})
    evictable = [name for name in (notes.get(EVICTABLE_VOLUMES_NOTE) or "").split(",") if name]
    marks = {
        IMAGE_NOTE: wanted["image"],
        DIGEST_NOTE: _digest(wanted),
        INSTALL: install.namespace,
        EVICTABLE_VOLUMES_NOTE: ",".join([*evictable, *(name for name in folders if name not in evictable)]),
    }
    if (size_bytes := notes_bytes({**notes, **marks})) > NOTES_BYTES_MAX:
        text = f"with ours the pod's annotations would have {size_bytes} bytes, of {NOTES_BYTES_MAX} that they may have"
        return Skip("too_large", text)
    patch.entries(("metadata", "annotations"), pod["metadata"].get("annotations"), marks)
    if LEFT_ALONE_NOTE in notes:
        patch.operations.append({"op": "remove", "path": _path("metadata", "annotations", LEFT_ALONE_NOTE)})
    warnings = advice(
        engine.engine,
        words,
        access,
        container=str(engine.body.get("name")),
        is_root=runs_as_root(pod_spec, engine.body),
    )
    return Injection(patch=patch.operations, warnings=warnings)


def left_alone(pod: Mapping[str, Any], skip: Skip) -> list[Object]:
    """The patch that has the pod itself tell why; empty where it does so, need not, or has no room for it."""
    if skip.reason not in MARKED:
        return []
    notes = pod["metadata"].get("annotations") or {}
    mark = {LEFT_ALONE_NOTE: skip.text[:LEFT_ALONE_CHARS_MAX]}
    if notes_bytes({**notes, **mark}) > NOTES_BYTES_MAX:
        return []
    patch = _Patch()
    patch.entries(("metadata", "annotations"), notes, mark)
    return patch.operations


def _put_container(
    patch: "_Patch", pod: Mapping[str, Any], wanted: Object, found: Mapping[str, int | None], *, home: str
) -> None:
    pod_spec, notes = pod["spec"], pod["metadata"].get("annotations") or {}
    for kind in LISTS:
        at = found[kind]
        if at is not None and kind != home:
            patch.operations.append({"op": "remove", "path": _path("spec", kind, at)})
    at = found[home]
    if at is None:
        patch.append(("spec", home), pod_spec.get(home), wanted)
        return
    present = pod_spec[home][at]
    is_unchanged = notes.get(DIGEST_NOTE) == _digest(wanted)
    mended = _mended(present, wanted, is_unchanged=is_unchanged, image_then=str(notes.get(IMAGE_NOTE)))
    # A volume that another webhook has taken away cannot stay mounted.
    volumes = {
        STATE_VOLUME,
        HOME_VOLUME,
        ACCESS_VOLUME,
        *(volume.get("name") for volume in pod_spec.get("volumes") or ()),
    }
    mended["volumeMounts"] = [mount for mount in mended["volumeMounts"] if mount.get("name") in volumes]
    if mended != present:
        patch.operations.append({"op": "replace", "path": _path("spec", home, at), "value": mended})


def _mended(present: Object, wanted: Object, *, is_unchanged: bool, image_then: str) -> Object:
    """`present`, with what `wanted` says and it lacks; where the wish has changed, with all of it.

    An image that somebody rewrote (to a mirror) stays, and so does what was added.
    """
    mended = dict(present)
    for name, value in wanted.items():
        if name in _KEYED:
            there = present.get(name) or []
            if name == "ports" and not is_unchanged:
                # Of ours there is one; its number may be another now.
                there = [port for port in there if port.get("name") != METRICS_PORT_NAME]
            mended[name] = _merged(there, value, _KEYED[name], ours_first=not is_unchanged)
        elif name in ("image", "imagePullPolicy"):
            if present.get("image") == image_then and not is_unchanged:
                mended[name] = value
        elif name == "restartPolicy" or name not in present or not is_unchanged:
            mended[name] = value
    if "restartPolicy" not in wanted:
        mended.pop("restartPolicy", None)
    return mended


def _merged(present: Sequence[Object], wanted: Sequence[Object], key: str, *, ours_first: bool) -> list[Object]:
    """Both, by key; of two entries ours counts where the wish has changed, else the one that is there."""
    ours = {entry[key]: entry for entry in wanted}
    kept = [ours[entry[key]] if ours_first and entry.get(key) in ours else entry for entry in present]
    there = {entry.get(key) for entry in present}
    return [*kept, *(entry for name, entry in ours.items() if name not in there)]


def _taken_volume(pod_spec: Mapping[str, Any], store_access: Object, *, is_ours: bool) -> str | None:
    """A volume that has one of our names and is not what ours is. `is_ours`: they were put in by a webhook of ours."""
    for volume in pod_spec.get("volumes") or ():
        name = volume.get("name")
        if name in (STATE_VOLUME, HOME_VOLUME) and "emptyDir" not in volume:
            return str(name)
        if name == ACCESS_VOLUME and not is_ours and not _is_same_secret(volume, store_access):
            return str(name)
    return None


def _is_same_secret(volume: Mapping[str, Any], wanted: Object) -> bool:
    """Whatever the API server has put in besides."""
    return bool(wanted["secret"].items() <= (volume.get("secret") or {}).items())


def _digest(wanted: Object) -> str:
    return hashlib.sha256(json.dumps(wanted, sort_keys=True).encode()).hexdigest()[:16]


def _index(containers: Sequence[Mapping[str, Any]]) -> int | None:
    return next((at for at, container in enumerate(containers) if container.get("name") == CONTAINER), None)


def _path(*parts: str | int) -> str:
    return "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in parts)


class _Patch:
    """JSON patch operations. Lists are appended to, so that nothing of theirs can be lost."""

    def __init__(self) -> None:
        self.operations: list[Object] = []
        self._made: set[str] = set()

    def append(self, place: tuple[str, str], present: Sequence[object] | None, value: object) -> None:
        path = _path(*place)
        if not present and path not in self._made:
            self._made.add(path)
            self.operations.append({"op": "add", "path": path, "value": [value]})
        else:
            self.operations.append({"op": "add", "path": f"{path}/-", "value": value})

    def append_missing(
        self, place: tuple[str, str], present: Sequence[Mapping[str, Any]] | None, wanted: Sequence[Object]
    ) -> None:
        there = {entry.get("name") for entry in present or ()}
        for value in wanted:
            if value["name"] not in there:
                self.append(place, present, value)

    def entries(self, place: tuple[str, str], present: Mapping[str, str] | None, wanted: Mapping[str, str]) -> None:
        if not present:
            self.operations.append({"op": "add", "path": _path(*place), "value": dict(wanted)})
            return
        for name, value in wanted.items():
            if present.get(name) != value:
                self.operations.append({"op": "add", "path": _path(*place, name), "value": value})
