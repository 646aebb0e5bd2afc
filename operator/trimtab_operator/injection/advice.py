"""What in a pod will keep its sidecar from knowing the engine's cache, each with the remedy.

The one rule: only what the manifest shows beyond doubt is said; a warning that is wrong teaches people to ignore all.
"""

import json
from typing import Final

from trimtab_operator.injection.engine_words import EngineKind, EngineWords
from trimtab_operator.injection.model_access import ModelAccess
from trimtab_operator.injection.references import names_in

EVENTS_FLAG: Final = "--kv-events-config"
_VLLM_EVENTS: Final = (
    '{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:5557",'
    '"replay_endpoint":"tcp://*:5558","buffer_steps":10000}'
)
_SGLANG_EVENTS: Final = '{"publisher":"zmq","endpoint":"tcp://*:5557","replay_endpoint":"tcp://*:5558"}'
EVENTS_CONFIG: Final[dict[EngineKind, str]] = {"vllm": _VLLM_EVENTS, "sglang": _SGLANG_EVENTS}
EMULATOR: Final = "trimtab_lab.emulator"
"""The demo's engine: it publishes its events unasked, and has flags of its own for them."""
WARNING_CHARS_MAX: Final = 512
"""The API server passes on 4096 characters of all warnings of a request; beyond that it cuts each to 256."""


def advice(
    engine: EngineKind, words: EngineWords, access: ModelAccess, *, container: str, is_root: bool
) -> tuple[str, ...]:
    """Warnings about the engine container named `container`."""
    said = []
    if not words.words:
        said.append(
            f"container {container} has neither command nor args: the sidecar cannot tell its model and its flags; "
            "write them into the pod"
        )
    else:
        said += _events(engine, words, container)
        if engine == "sglang" and not words.has("enable-metrics", "config"):
            said.append(f"container {container} serves no metrics, so its load is not seen; add --enable-metrics")
    said += [
        f"{path} is on no volume of container {container}: the sidecar cannot read it and routing stays approximate; "
        "mount a volume there (an emptyDir will do for a cache)"
        for path in access.missing
    ]
    if is_root and access.mounts:
        paths = ", ".join(str(mount["mountPath"]) for mount in access.mounts)
        said.append(
            f"container {container} runs as root, the sidecar does not: files in {paths} that only root may read are "
            "hidden from it"
        )
    if words.has("ssl-certfile"):
        said.append(
            f"container {container} serves TLS: the sidecar reaches it only if its certificate holds for 127.0.0.1"
        )
    return tuple(f"trimtab: {text}"[:WARNING_CHARS_MAX] for text in said)


def _events(engine: EngineKind, words: EngineWords, container: str) -> list[str]:
    if words.has("config") or (not words.flat and words.words):
        return []  # a file, or a script that cannot be taken apart, may say all of it
    if EMULATOR in words.flat:
        return []
    if words.has("no-enable-prefix-caching", "disable-radix-cache"):
        flag = "--no-enable-prefix-caching" if words.has("no-enable-prefix-caching") else "--disable-radix-cache"
        return [f"container {container} keeps no prefixes: without {flag} requests would go to where their prefix is"]
    value = words.flag("kv-events-config")
    if value is None:
        return [f"container {container} publishes no KV events; add {EVENTS_FLAG} '{EVENTS_CONFIG[engine]}'"]
    if any(names_in(value)) or "$" in value:
        return []
    try:
        config = json.loads(value)
    except ValueError:
        return []
    if not isinstance(config, dict):
        return []
    publisher = config.get("publisher", "zmq" if config.get("enable_kv_cache_events") else None)
    is_off = publisher != "zmq" or (engine == "vllm" and not config.get("enable_kv_cache_events"))
    if is_off:
        return [f"container {container} publishes no KV events; its {EVENTS_FLAG} should be '{EVENTS_CONFIG[engine]}'"]
    if not config.get("replay_endpoint"):
        return [
            f"container {container} lets no KV event be asked for again: one lost message hides its cache for a while; "
            f'add "replay_endpoint":"tcp://*:5558" to {EVENTS_FLAG}'
        ]
    return []
