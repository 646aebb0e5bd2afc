"""Which container of a pod runs the engine, and which engine it is.

The one rule: what the policy says comes first, then the pool's target port, then looks. In doubt there is none, and the
reason names the field that would settle it.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from trimtab_operator.api.policy import Sidecar
from trimtab_operator.injection.engine_words import EngineKind
from trimtab_operator.injection.outcome import Skip
from trimtab_operator.kube import Object

FIELD: Final = "spec.sidecar.engineContainer of the SchedulingPolicy"
_RUNS: Final = re.compile(r"(^|[\s/=;&|('\"])(vllm(\.entrypoints[\w.]*)?|sglang(\.[\w.]+)?)(?=$|[\s;&|)'\"])")
_IMAGE: Final = re.compile(r"(^|[/_.-])(vllm|sglang)($|[/:@_.-])")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineContainer:
    """The container, as in the pod's `containers`."""

    body: Object
    engine: EngineKind


def find_engine(containers: Sequence[Object], target_ports: Sequence[int], sidecar: Sidecar) -> EngineContainer | Skip:
    """`containers`: of the pod, without our own."""
    if sidecar.engine_container:
        named = [container for container in containers if container.get("name") == sidecar.engine_container]
        if not named:
            names = ", ".join(str(container.get("name")) for container in containers)
            return Skip(
                "no_engine", f"no container is named {sidecar.engine_container}, as in {FIELD} (there: {names})"
            )
        return _found(named[0], sidecar)
    running = [container for container in containers if _runs_engine(container)]
    listening = [container for container in containers if _ports(container) & set(target_ports)]
    # A proxy in front of the engine may have the target port.
    if listening and not (len(running) == 1 and running[0] not in listening and not any(map(_looks, listening))):
        return _found(next((container for container in listening if _looks(container)), listening[0]), sidecar)
    for candidates in (running, [container for container in containers if _looks(container)], containers):
        if len(candidates) == 1:
            return _found(candidates[0], sidecar)
        if candidates is not containers and candidates:
            break
    ports = ", ".join(map(str, target_ports))
    return Skip("no_engine", f"cannot tell which container is the engine: none has port {ports}; set {FIELD}")


def _found(container: Object, sidecar: Sidecar) -> EngineContainer:
    if sidecar.engine != "auto":
        return EngineContainer(body=container, engine=sidecar.engine)
    told = _RUNS.findall(_command(container)) or _IMAGE.findall(str(container.get("image", "")))
    is_sglang = bool(told) and all("sglang" in groups[1] for groups in told)
    return EngineContainer(body=container, engine="sglang" if is_sglang else "vllm")


def _looks(container: Mapping[str, Any]) -> bool:
    return _runs_engine(container) or _IMAGE.search(str(container.get("image", ""))) is not None


def _runs_engine(container: Mapping[str, Any]) -> bool:
    return _RUNS.search(_command(container)) is not None


def _command(container: Mapping[str, Any]) -> str:
    return "\n".join(map(str, [*(container.get("command") or ()), *(container.get("args") or ())]))


def _ports(container: Mapping[str, Any]) -> set[int]:
    return {port["containerPort"] for port in container.get("ports") or () if "containerPort" in port}
