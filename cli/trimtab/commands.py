"""The command lines of everything that a local stack is made of.

Its one rule: pure functions from ports and settings to argument lists, so that what runs can be read and tested. It
must not start anything.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

LOOPBACK: Final = "127.0.0.1"
MODEL_NAME: Final = "tiny"
POOL_NAMESPACE: Final = "default"
POOL_NAME: Final = "demo"
_POOL: Final = ("--pool-name", POOL_NAME, "--pool-namespace", POOL_NAMESPACE)

Argv = list[str | Path]


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePorts:
    """Ports of one engine and its sidecar."""

    http: int
    kv_events: int
    kv_replay: int
    sidecar_metrics: int

    @property
    def address(self) -> str:
        """The endpoint's name and address."""
        return f"{LOOPBACK}:{self.http}"

    @property
    def url(self) -> str:
        """Where the engine answers without Envoy in front."""
        return f"http://{self.address}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PickerPorts:
    """Ports of one picker."""

    grpc: int
    health: int
    metrics: int

    @property
    def url(self) -> str:
        """Its page for people: /decisions, /state, /metrics."""
        return f"http://{LOOPBACK}:{self.metrics}"


def valkey_argv(binary: Path, *, port: int, directory: Path) -> Argv:
    """A store that keeps nothing on disk."""
    return [
        binary,
        *("--port", str(port), "--bind", LOOPBACK, "--dir", str(directory)),
        *("--save", "", "--appendonly", "no", "--daemonize", "no"),
    ]


def emulator_argv(ports: EnginePorts, *, model_dir: Path, engine_flags: Sequence[str]) -> Argv:
    """An emulated vLLM."""
    return [
        *(sys.executable, "-m", "trimtab_lab.emulator", "--host", LOOPBACK, "--port", str(ports.http)),
        *("--kv-events-port", str(ports.kv_events), "--kv-replay-port", str(ports.kv_replay)),
        *("--model-name", MODEL_NAME, "--model-dir", str(model_dir), *engine_flags),
    ]


def vllm_argv(ports: EnginePorts, *, vllm: Path, model_dir: Path, engine_flags: Sequence[str]) -> Argv:
    """A real vLLM on the CPU, publishing its KV events."""
    kv_events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{ports.kv_events}",
        "replay_endpoint": f"tcp://{LOOPBACK}:{ports.kv_replay}",
        "topic": f"kv@{ports.address}@{MODEL_NAME}",
        "buffer_steps": 10_000,
    }
    return [
        vllm,
        *("serve", str(model_dir), "--served-model-name", MODEL_NAME, "--host", LOOPBACK, "--port", str(ports.http)),
        *("--enforce-eager", "--enable-prefix-caching", "--kv-events-config", json.dumps(kv_events), *engine_flags),
    ]


def sidecar_argv(
    ports: EnginePorts, *, store: str, model_dir: Path, checkpoint_dir: Path, engine_argv: Sequence[str | Path]
) -> Argv:
    """The sidecar beside one engine; it reads the engine's own command line, as it does in a pod."""
    return [
        *(sys.executable, "-m", "trimtab_sidecar", *_POOL, "--endpoint-host", LOOPBACK, "--engine", "vllm"),
        *("--engine-url", ports.url, "--engine-args", json.dumps([str(word) for word in engine_argv])),
        *("--model-dir", model_dir, "--store", store, "--checkpoint-dir", checkpoint_dir),
        *("--metrics-port", str(ports.sidecar_metrics), "--bind", LOOPBACK),
    ]


def picker_argv(ports: PickerPorts, *, store: str) -> Argv:
    """One ext_proc replica, in plaintext, for an Envoy that allows mode overrides."""
    return [
        *(sys.executable, "-m", "trimtab_extproc", *_POOL, "--store", store, "--bind", LOOPBACK),
        *("--grpc-port", str(ports.grpc), "--grpc-health-port", str(ports.health)),
        *("--metrics-port", str(ports.metrics), "--secure-serving=false", "--allow-mode-override=true"),
        *("--drain-delay", "0", "--drain-timeout", "2"),
    ]


def envoy_argv(binary: Path, *, config: Path) -> Argv:
    """One Envoy. Two workers are more than a demo needs, and let tests see what differs between workers."""
    return [binary, "-c", config, "--concurrency", "2", "--use-dynamic-base-id", "--log-level", "warning"]
