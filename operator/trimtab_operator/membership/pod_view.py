"""What the operator keeps of a pod: a few dozen bytes of some eight thousand.

The one rule: a view is made from the object alone and holds nothing of it. What follows from several pods together, or
from the pool, is decided in `endpoints`.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from sys import intern
from typing import Any, Final

from trimtab_operator.api.policy import Sidecar
from trimtab_operator.injection.engine_container import EngineContainer, find_engine
from trimtab_operator.injection.engine_words import read_words
from trimtab_operator.injection.environment import Environment
from trimtab_operator.injection.marks import CONTAINER, LEFT_ALONE_CHARS_MAX, LEFT_ALONE_NOTE

ZONE: Final = "topology.kubernetes.io/zone"
ENGINE: Final = "trimtab.dev/engine"
"""Label or annotation of a pod: `vllm` or `sglang`, where its command does not tell."""
RTT: Final = "trimtab.dev/rtt-milliseconds"
"""Annotation of a pod: the round trip to it, a decimal number."""
RTT_S_MAX: Final = 60.0
ACCELERATORS: Final = ("gpu", "/mig-", "tpu", "gaudi", "npu", "neuron")
"""Extended resources whose name has one of these are shown."""
PORTS_MAX: Final = 8
"""Kept of those that a pod declares in vain."""
RANKS_MAX: Final = 256
RANK_FLAGS: Final = {"vllm": ("data-parallel-size",), "sglang": ("data-parallel-size", "dp-size", "dp")}
ONE_PORT_PER_RANK: Final = (
    "data-parallel-external-lb",
    "data-parallel-multi-port-external-lb",
    "data-parallel-hybrid-lb",
    "data-parallel-rank",
    "data-parallel-start-rank",
)
"""With one of these vLLM serves each rank, or each node's ranks, at a port of its own."""
ONE_PORT_PER_RANK_SHORT: Final = ("-dpe", "-dpm", "-dph", "-dpn", "-dpr")
_SHORT_RANK_FLAG: Final = "-dp"
_BY_ENGINE: Final = {
    "": Sidecar(),
    "vllm": Sidecar(engine="vllm"),
    "sglang": Sidecar(engine="sglang"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PodView:
    """One pod of a pool."""

    name: str
    uid: str
    ip: str
    """Empty until it has one."""
    is_ready: bool
    is_deleting: bool
    is_over: bool
    """It has succeeded or failed: its address may be another's by now."""
    node: str
    zone: str
    """As the pod's labels have it; empty: ask its node."""
    engine: str
    gpu: str
    ranks: int
    """Data-parallel ranks behind each port, as the engine's arguments say."""
    has_sidecar: bool
    left_alone: str
    """Why the webhook put no sidecar into it, as the pod itself tells; empty: it does not."""
    other_ports: tuple[int, ...]
    """That its containers declare, where none of them is a target port: then the pool may have the wrong ones."""
    rtt_s: float | None
    """Round trip to it, as its annotation says."""
    unready: str
    """Why it is not ready, in a word or two; empty where it is."""

    @classmethod
    def of(cls, body: Mapping[str, Any], target_ports: tuple[int, ...]) -> "PodView":
        """From the API's JSON."""
        metadata, spec, status = body["metadata"], body.get("spec", {}), body.get("status", {})
        containers = spec.get("containers") or []
        all_containers = [*containers, *(spec.get("initContainers") or ())]
        notes = {**(metadata.get("annotations") or {}), **(metadata.get("labels") or {})}
        own = _BY_ENGINE.get(notes.get(ENGINE, ""), _BY_ENGINE[""])
        engine, ranks = _engine([c for c in containers if c.get("name") != CONTAINER], target_ports, own)
        return cls(
            name=metadata["name"],
            uid=metadata["uid"],
            ip=status.get("podIP") or "",
            is_ready=any(
                condition.get("type") == "Ready" and condition.get("status") == "True"
                for condition in status.get("conditions") or ()
            ),
            is_deleting="deletionTimestamp" in metadata,
            is_over=status.get("phase") in ("Succeeded", "Failed"),
            # One text for all pods that say the same: a pool's pods differ in little.
            node=intern(spec.get("nodeName") or ""),
            zone=intern((metadata.get("labels") or {}).get(ZONE, "")),
            engine=engine or (own.engine if own.engine != "auto" else ""),
            gpu=intern(_accelerators(containers)),
            ranks=ranks,
            has_sidecar=any(container.get("name") == CONTAINER for container in all_containers),
            left_alone=intern((metadata.get("annotations") or {}).get(LEFT_ALONE_NOTE, "")[:LEFT_ALONE_CHARS_MAX]),
            other_ports=_other_ports([c for c in containers if c.get("name") != CONTAINER], target_ports),
            rtt_s=_rtt_s((metadata.get("annotations") or {}).get(RTT)),
            unready=intern(_why_unready(status)),
        )


def _other_ports(containers: list[Any], target_ports: tuple[int, ...]) -> tuple[int, ...]:
    declared = {port.get("containerPort") for container in containers for port in container.get("ports") or ()}
    return () if declared & set(target_ports) else tuple(sorted(declared - {None})[:PORTS_MAX])


def _rtt_s(text: str | None) -> float | None:
    """None: not said, or nothing that a round trip can be."""
    if text is None or re.fullmatch(r"[0-9]{1,6}(\.[0-9]{1,6})?", text) is None:
        return None
    return min(float(text) / 1000, RTT_S_MAX)


def _engine(containers: list[Any], target_ports: tuple[int, ...], own: Sidecar) -> tuple[str, int]:
    """(engine, ranks behind each port)"""
    found = find_engine(containers, target_ports, own)
    if not isinstance(found, EngineContainer):
        return "", 1
    words = read_words(found.body, Environment(found.body), found.engine)
    is_split = words.has(*ONE_PORT_PER_RANK) or any(w.split("=")[0] in ONE_PORT_PER_RANK_SHORT for w in words.flat)
    if len(target_ports) > 1 or is_split:
        return found.engine, 1
    text = words.flag(*RANK_FLAGS[found.engine]) or _after(words.flat, _SHORT_RANK_FLAG)
    ranks = int(text) if text is not None and text.isdecimal() else 1
    return found.engine, min(max(ranks, 1), RANKS_MAX)


def _after(words: tuple[str, ...], flag: str) -> str | None:
    """The value of the last `-f value` or `-f=value`."""
    found = None
    for word, following in pairwise((*words, "")):
        name, equals, value = word.partition("=")
        if name == flag:
            found = value if equals else following
    return found


def _accelerators(containers: Iterable[Mapping[str, Any]]) -> str:
    """Such as `8x nvidia.com/gpu`."""
    counts: dict[str, int] = {}
    for container in containers:
        wanted = container.get("resources") or {}
        for name, amount in ((wanted.get("limits") or wanted.get("requests")) or {}).items():
            if any(kind in name for kind in ACCELERATORS) and str(amount).isdecimal():
                counts[name] = counts.get(name, 0) + int(amount)
    return ", ".join(f"{count}x {name}" for name, count in sorted(counts.items()) if count)


def _why_unready(status: Mapping[str, Any]) -> str:
    conditions = {condition.get("type"): condition for condition in status.get("conditions") or ()}
    if conditions.get("Ready", {}).get("status") == "True":
        return ""
    if conditions.get("PodScheduled", {}).get("status") == "False":
        return str(conditions["PodScheduled"].get("reason") or "not scheduled")
    for container in [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]:
        state = container.get("state") or {}
        if (waiting := state.get("waiting")) is not None:
            return str(waiting.get("reason") or "waiting")
    return (
        "readiness probe has not succeeded" if status.get("phase") == "Running" else str(status.get("phase") or "new")
    )
