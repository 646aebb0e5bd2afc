"""How busy this machine is: a demo on a full machine measures the machine, and starts are slow there.

Its one rule: where the system does not say, the answer is None and never a guess.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Self

_STAT = Path("/proc/stat")


@dataclass(frozen=True, slots=True)
class CpuTimes:
    """Jiffies of all cores since boot."""

    busy: int
    total: int

    @classmethod
    def now(cls) -> Self | None:
        """None where there is no /proc."""
        try:
            words = _STAT.read_text().splitlines()[0].split()
        except OSError:
            return None
        # user nice system idle iowait irq softirq steal; guest times are in user's already.
        values = [int(word) for word in words[1:9]]
        return cls(sum(values) - values[3] - values[4], sum(values))


def load_text() -> str | None:
    """How many want this machine's cores right now, in words."""
    try:
        load = os.getloadavg()[0]
    except (AttributeError, OSError):
        return None
    return f"the machine's load is {load:.0f} on {os.cpu_count() or 1} cores"


def busy_share(before: CpuTimes | None, after: CpuTimes | None) -> float | None:
    """Share of all cores' time that was used in between, 0 to 1."""
    if before is None or after is None or after.total <= before.total:
        return None
    return (after.busy - before.busy) / (after.total - before.total)
