"""An engine whose experts are spread over several devices: how much longer its tokens take, by the experts they go to.

The one rule: a step waits for its slowest device. So it is not how fast an expert is that counts but how much comes
together on the device that has it, for all requests of the step. Pure.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

MIXES_KEPT = 1_024
Mix = tuple[float, ...]
"""How much of some tokens falls on each expert; relative."""


@dataclass(frozen=True, slots=True)
class ExpertParallel:
    """Where the experts of one engine are."""

    device_of: tuple[int, ...]
    """Of each expert; devices are counted from 0, and each has one."""
    speeds: tuple[float, ...]
    """Of each device, relative to an ordinary one."""

    def __post_init__(self) -> None:
        if set(self.device_of) != set(range(len(self.speeds))):
            raise ValueError("every device needs an expert, and every expert a device")
        if min(self.speeds) <= 0:
            raise ValueError("a device that does not move never ends a step")

    def slowdown(self, work: Iterable[tuple[int, Mix | None]]) -> float:
        """How many times longer a step takes than if its tokens were even and every device ordinary. `work`: tokens and
        their mix; None: even."""
        loads = [0.0] * len(self.speeds)
        total = 0
        for tokens, mix in work:
            total += tokens
            for device, share in enumerate(_on_devices(self.device_of, len(self.speeds), mix)):
                loads[device] += tokens * share
        if not total:
            return 1.0
        slowest = max(load / speed for load, speed in zip(loads, self.speeds, strict=True))
        return slowest * len(self.speeds) / total

    def costs(self, mix: Mix) -> tuple[float, ...]:
        """What each expert costs while the engine's tokens are of that mix: the time of the device that has it, in
        parts of what each device would take if all were even and ordinary. This is what an engine can measure, and what
        it would tell its sidecar."""
        loads = _on_devices(self.device_of, len(self.speeds), tuple(mix))
        times = [load / speed * len(self.speeds) for load, speed in zip(loads, self.speeds, strict=True)]
        return tuple(times[device] for device in self.device_of)


@lru_cache(maxsize=MIXES_KEPT)
def _on_devices(device_of: tuple[int, ...], devices: int, mix: Mix | None) -> list[float]:
    """How much of a mix falls on each device."""
    even = 1.0 / len(device_of)
    whole = 1.0 if mix is None else sum(mix)
    loads = [0.0] * devices
    for expert, device in enumerate(device_of):
        loads[device] += even if mix is None else mix[expert] / whole
    return loads
