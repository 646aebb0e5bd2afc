"""What the sidecar needs of the engine's container to read the model's files: mounts, and the hub's settings.

The one rule: the sidecar sees the same files at the same paths, and can change none of them. What is needed is told by
the paths in the engine's command line and by where the hub's cache lies; where a path is only known to the kubelet, all
volumes that may hold a model are mounted.
"""

import posixpath
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Final

from trimtab_operator.injection.engine_words import EngineWords
from trimtab_operator.injection.environment import Environment
from trimtab_operator.injection.references import names_in
from trimtab_operator.kube import Object

CACHES: Final = ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "TRANSFORMERS_CACHE", "XDG_CACHE_HOME")
"""Variables that say where the hub's cache is, the strongest first."""
HUB_SETTINGS: Final = (
    *CACHES,
    "HOME",
    "HF_ENDPOINT",
    "HF_HUB_OFFLINE",
    "HF_TOKEN",
    "HUGGING_FACE_HUB_TOKEN",
    "MODELSCOPE_CACHE",
    "SGLANG_USE_MODELSCOPE",
    "TRANSFORMERS_OFFLINE",
    "VLLM_CACHE_ROOT",
    "VLLM_USE_MODELSCOPE",
)
"""Variables of the engine that decide which files a model's name stands for."""
PLACES: Final = (*CACHES, "MODELSCOPE_CACHE", "VLLM_CACHE_ROOT")
ROOT_HOME: Final = "/root"
"""The home of engines that run as root; in most images nobody else may look into it."""
NO_MODELS: Final = ("/dev/", "/tmp", "/var/run/secrets/", "/run/secrets/")
"""Below these no model is looked for, unless a path says so."""
OUR_OWN: Final = (
    "/opt/trimtab",
    *("/bin", "/lib", "/lib64", "/usr/bin", "/usr/lib", "/usr/local/bin", "/usr/local/lib"),
    *("/dev", "/etc", "/proc", "/sys"),
    *("/run/secrets/kubernetes.io/serviceaccount", "/var/run/secrets/kubernetes.io/serviceaccount"),
)
"""What the sidecar's program is made of, and where the kubelet mounts something into each container: under a volume
of the engine's, read-only as it is here, the sidecar would not start, and its pod would wait for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelAccess:
    """Parts of the sidecar's container."""

    mounts: tuple[Object, ...]
    env: tuple[Object, ...]
    missing: tuple[str, ...]
    """Paths that lie on no volume, so that only the engine's own container has them."""


def model_access(container: Mapping[str, Any], environment: Environment, words: EngineWords) -> ModelAccess:
    """What the engine in `container` reads, as far as the manifest tells."""
    mounts: list[Object] = [
        mount for mount in container.get("volumeMounts") or () if in_full(str(mount["mountPath"])) not in _ABOVE_OURS
    ]
    named = [words.model, words.flag("tokenizer", "tokenizer-path")]
    paths = [name for name in named if name is not None and name.startswith("/")]
    template = words.flag("chat-template")
    if template is not None and template.startswith("/") and "\n" not in template:
        paths.append(template)
    is_from_hub = words.model is None or any(name is not None and not name.startswith("/") for name in named)
    env: list[Object] = environment.entries(HUB_SETTINGS)
    needed = list(paths)
    if is_from_hub:
        download_dir = words.flag("download-dir")
        place, extra = _cache(mounts, environment)
        needed += [download_dir] if download_dir is not None else [place]
        needed += [value for name in PLACES if (value := environment.value(name)) is not None]
        paths += [download_dir] if download_dir is not None else [place]
        env += extra
    texts = [text for text in (*named, template, *needed) if text is not None]
    is_open = (
        words.model is None or any(any(names_in(text)) for text in texts) or _is_cache_open(environment, is_from_hub)
    )
    chosen = _mounts_for(mounts, needed)
    if is_open:
        there = {mount["mountPath"] for mount in chosen}
        chosen += [
            mount
            for mount in mounts
            if mount["mountPath"] not in there and not mount["mountPath"].startswith(NO_MODELS)
        ]
    missing = () if is_open else tuple(path for path in paths if not _mounts_for(mounts, [path]))
    expressions = [str(mount.get("subPathExpr") or "") for mount in chosen]
    env += environment.entries(name for text in expressions for name in names_in(text))
    return ModelAccess(mounts=_read_only(chosen), env=tuple(_once(env)), missing=missing)


def _cache(mounts: Sequence[Object], environment: Environment) -> tuple[str, list[Object]]:
    """The hub's cache, and what the sidecar must be told to find it, since its home is another."""
    for name in CACHES:
        if (value := environment.value(name)) is not None:
            if name == "TRANSFORMERS_CACHE":
                return value, [{"name": "HF_HUB_CACHE", "value": value}]
            return value, []
        if name in environment:
            return f"$({name})", []
    if (home := environment.value("HOME")) is not None:
        return f"{home}/.cache/huggingface", []
    if "HOME" in environment:
        return "$(HOME)", []
    for mount in mounts:
        path = str(mount["mountPath"]).rstrip("/")
        if path.endswith("/.cache/huggingface/hub"):
            path = path.removesuffix("/hub")
        elif path.endswith("/.cache"):
            path += "/huggingface"
        elif not path.endswith("/.cache/huggingface"):
            continue
        return path, _home_unless(environment, path)
    path = f"{ROOT_HOME}/.cache/huggingface"
    return path, _home_unless(environment, path)


def _home_unless(environment: Environment, path: str) -> list[Object]:
    """A variable of the container's own would hide what whole ConfigMaps say."""
    return [] if environment.sources else [{"name": "HF_HOME", "value": path}]


def _is_cache_open(environment: Environment, is_from_hub: bool) -> bool:
    """Where the cache is may stand in a ConfigMap or Secret."""
    return is_from_hub and bool(environment.sources) and not any(name in environment for name in CACHES)


def _mounts_for(mounts: Iterable[Object], paths: Iterable[str]) -> list[Object]:
    """Of each path: the volume it lies on, and those mounted below it."""
    chosen: list[Object] = []
    all_mounts = list(mounts)
    for path in paths:
        above = [mount for mount in all_mounts if _is_within(path, mount["mountPath"])]
        if above:
            chosen.append(max(above, key=lambda mount: len(PurePosixPath(mount["mountPath"]).parts)))
        chosen += [mount for mount in all_mounts if _is_within(mount["mountPath"], path)]
    return _unique(chosen)


def _is_within(path: str, folder: str) -> bool:
    inner, outer = PurePosixPath(path), PurePosixPath(folder)
    return inner.is_absolute() and ".." not in inner.parts and inner.is_relative_to(outer)


def in_full(path: str) -> PurePosixPath:
    """The place of a mount, as the container runtime reads it."""
    return PurePosixPath(posixpath.normpath("/" + path.lstrip("/")))


_ABOVE_OURS: Final = frozenset(
    place for path in OUR_OWN for place in (PurePosixPath(path), *PurePosixPath(path).parents)
)


def _read_only(mounts: Iterable[Mapping[str, Any]]) -> tuple[Object, ...]:
    """A place for a volume that is mounted in another has to be made in that one, which fails where it is read-only:
    then that one is as it is for the engine."""
    placed = [(mount, in_full(str(mount["mountPath"]))) for mount in mounts]
    outer = {parent for _, place in placed for parent in place.parents}
    found = []
    for mount, place in placed:
        kept = {name: mount[name] for name in ("name", "mountPath", "subPath", "subPathExpr") if mount.get(name)}
        is_as_the_engines = place in outer and not mount.get("readOnly")
        found.append(kept if is_as_the_engines else {**kept, "readOnly": True})
    return tuple(found)


def _unique(mounts: Iterable[Object]) -> list[Object]:
    return list({str(mount["mountPath"]): mount for mount in mounts}.values())


def _once(entries: Iterable[Object]) -> list[Object]:
    return list({str(entry["name"]): entry for entry in entries}.values())
