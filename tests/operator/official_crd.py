"""The standard's own CRD file, from its Go module: what ours is held against."""

import hashlib
import json
from typing import Any

from go_module import GoModule, object_in

MODULE = GoModule(
    "sigs.k8s.io/gateway-api-inference-extension", "v1.5.0", "h1:w9Awt60cmI1vM7Y6N81h8wDCBP0WkmxpdI7GKY0v070="
)
FILE = "config/crd/bases/inference.networking.k8s.io_inferencepools.yaml"


def official_pool_crd() -> dict[str, Any]:
    """Skips, loudly, where there is no Go and no module; in CI it fails."""
    return object_in(MODULE, FILE)


def structure(crd: dict[str, Any]) -> dict[str, Any]:
    """All of a CRD that decides anything: without descriptions, and without the status that the server writes."""
    kept = {key: value for key, value in crd.items() if key != "status"}
    bare: dict[str, Any] = _without_descriptions(kept)
    return bare


def digest(crd: dict[str, Any]) -> str:
    text = json.dumps(structure(crd), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def descriptions(node: Any, path: str = "") -> dict[str, str]:
    """Of every schema in it, by path."""
    found: dict[str, str] = {}
    if isinstance(node, dict):
        for key, value in node.items():
            if key == "description" and isinstance(value, str):
                found[path] = value
            found |= descriptions(value, f"{path}.{key}")
    elif isinstance(node, list):
        for index, value in enumerate(node):
            found |= descriptions(value, f"{path}[{index}]")
    return found


def _without_descriptions(node: Any) -> Any:
    if isinstance(node, dict):
        # A property may be named so; its value is then a schema and no text.
        return {
            key: _without_descriptions(value)
            for key, value in node.items()
            if not (key == "description" and isinstance(value, str))
        }
    if isinstance(node, list):
        return [_without_descriptions(item) for item in node]
    return node
