"""A pool's endpoints from its pods. Pure.

The one rule: each target port of a pod that is ready is an endpoint, and each data-parallel rank behind it; a pod that
is being deleted stays as draining until it is gone, so that what it still does is counted. No two endpoints have one
name: where two pods have the same address, the one that lives has it.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from trimtab_operator.membership.pod_view import PORTS_MAX, PodView
from trimtab_state import EndpointSpec, StateSettings

ENDPOINTS_MAX: Final = StateSettings().endpoints_max
"""Of one pool: what pickers follow. Of more, those of pods that live are kept, by address, and the rest is counted."""
UNREADY_REASONS_MAX: Final = 5
LEFT_ALONE_REASONS_MAX: Final = 2
"""They are sentences."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Members:
    """A pool's pods at one moment."""

    endpoints: tuple[EndpointSpec, ...] = ()
    pods_matching: int = 0
    """Pods that the selector matches and that are not over."""
    pods_ready: int = 0
    pods_injected: int = 0
    pods_not_injected: int = 0
    left_alone: Mapping[str, int] = field(default_factory=dict)
    """Why the webhook put no sidecar into some of these: number of pods by reason."""
    pods: frozenset[str] = frozenset()
    """Names of those that the selector matches."""
    other_ports: tuple[int, ...] = ()
    """That pods declare none of whose declared ports is a target port."""
    total: int = 0
    """Endpoints that there would be if every matching pod were ready."""
    left_out: int = 0
    """Endpoints beyond ENDPOINTS_MAX."""
    unready: Mapping[str, int] = field(default_factory=dict)
    """Why matching pods are not ready: number of pods by reason."""

    @property
    def ready(self) -> int:
        """Endpoints that may be chosen."""
        return sum(not endpoint.draining for endpoint in self.endpoints)


def members_of(
    pods: Iterable[PodView],
    ports: tuple[int, ...],
    ranks: int | None,
    *,
    zone_of: Callable[[str], str] = lambda node: "",
) -> Members:
    """`ranks`: behind each port; None: as each pod's engine says. `zone_of`: of a node, empty if it is not known."""
    present = [pod for pod in pods if not pod.is_over]
    living = [pod for pod in present if not pod.is_deleting]
    holder: dict[str, PodView] = {}
    for pod in sorted(present, key=lambda pod: (not pod.is_deleting, pod.is_ready, pod.name)):
        if pod.ip and (pod.is_ready or pod.is_deleting):
            holder[pod.ip] = pod
    kept, found = _kept(
        {ip: len(ports) * max(1, pod.ranks if ranks is None else ranks) for ip, pod in holder.items()},
        first=lambda ip: not holder[ip].is_deleting,
    )
    endpoints: list[EndpointSpec] = []
    for ip in sorted(kept):
        pod, until = holder[ip], len(endpoints) + kept[ip]
        host = f"[{ip}]" if ":" in ip else ip
        for port in ports:
            address = f"{host}:{port}"
            count = pod.ranks if ranks is None else ranks
            for rank in range(count) if count > 1 else (None,):
                if len(endpoints) >= until:
                    break
                endpoints.append(
                    EndpointSpec(
                        name=address if rank is None else f"{address}/{rank}",
                        address=address,
                        rank=rank,
                        pod=pod.name,
                        zone=pod.zone or zone_of(pod.node),
                        engine=pod.engine,
                        gpu=pod.gpu,
                        rtt_s=pod.rtt_s,
                        draining=pod.is_deleting,
                    )
                )
    injected = sum(pod.has_sidecar for pod in living)
    alone = Counter(pod.left_alone for pod in living if pod.left_alone and not pod.has_sidecar)
    return Members(
        endpoints=tuple(endpoints),
        pods_matching=len(living),
        pods_ready=sum(pod.is_ready for pod in living),
        pods_injected=injected,
        pods_not_injected=len(living) - injected,
        left_alone=dict(alone.most_common(LEFT_ALONE_REASONS_MAX)),
        pods=frozenset(pod.name for pod in living),
        other_ports=tuple(sorted({port for pod in living for port in pod.other_ports})[:PORTS_MAX]),
        left_out=found - len(endpoints),
        unready=dict(Counter(pod.unready for pod in living if not pod.is_ready).most_common(UNREADY_REASONS_MAX)),
        total=sum(len(ports) * (pod.ranks if ranks is None else ranks) for pod in living),
    )


def _kept(counts: Mapping[str, int], *, first: Callable[[str], bool]) -> tuple[dict[str, int], int]:
    """Of as many endpoints at each address: how many are kept there, and how many there are."""
    kept: dict[str, int] = {}
    room = ENDPOINTS_MAX
    for ip in sorted(counts, key=lambda ip: (not first(ip), ip)):
        if room <= 0:
            break
        kept[ip] = min(counts[ip], room)
        room -= kept[ip]
    return kept, sum(counts.values())
