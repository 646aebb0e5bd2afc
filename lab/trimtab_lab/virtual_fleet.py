"""Several emulated engines side by side in virtual time, with a router in front: hours of traffic in seconds.

The one rule: things happen in order of their times, steps that end before requests that arrive, and the router sees
only what has happened. It holds no clock and draws no numbers, so a run is a function of its requests and its router.
"""

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from trimtab_lab.engine_model import EngineModel
from trimtab_lab.engine_request import EngineRequest, FinishedRequest, Refusal, StepOutcome


class Router(Protocol):
    """A policy under test."""

    def route(self, request: EngineRequest, now_s: float) -> int | None:
        """The engine for a request that has just arrived. None: a `LateRouter` says it later."""

    def on_step(self, engine: int, outcome: StepOutcome) -> None:
        """A step of an engine has ended: its tokens, finished requests and KV events."""


@runtime_checkable
class LateRouter(Router, Protocol):
    """A router that takes its time over some requests."""

    def next_s(self) -> float | None:
        """When the next of the requests that wait for their engine may have it."""

    def decided(self, now_s: float) -> Sequence[tuple[EngineRequest, int]]:
        """The requests that have their engine by now, each told once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    at_s: float
    request: EngineRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A finished request and where it was."""

    engine: int
    finished: FinishedRequest

    @property
    def ttft_s(self) -> float:
        assert self.finished.first_token_s is not None
        return self.finished.first_token_s - self.finished.arrived_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time of the output tokens after the first; None with fewer than two."""
        if self.finished.output_tokens < 2 or self.finished.first_token_s is None:
            return None
        return (self.finished.finished_s - self.finished.first_token_s) / (self.finished.output_tokens - 1)


class FleetError(Exception):
    """A router or a load that cannot be served: an engine that is not there, a request too long for one."""


def run_fleet(engines: Sequence[EngineModel], arrivals: Iterable[Arrival], router: Router) -> list[Served]:
    """Serve all arrivals (in order of time) to the end; what came of them, in order of finishing. Raises FleetError."""
    served: list[Served] = []
    ends: list[tuple[float, int]] = []
    """When the step that each busy engine computes is over."""

    def begin(engine: int, now_s: float) -> None:
        plan = engines[engine].schedule(now_s)
        if plan is not None:
            heapq.heappush(ends, (plan.started_s + plan.duration_s, engine))

    def end_next() -> None:
        now_s, engine = heapq.heappop(ends)
        outcome = engines[engine].complete(now_s)
        router.on_step(engine, outcome)
        served.extend(Served(engine=engine, finished=finished) for finished in outcome.finished)
        begin(engine, now_s)

    def hand_over(request: EngineRequest, engine: int, now_s: float) -> None:
        if not 0 <= engine < len(engines):
            raise FleetError(f"there is no engine {engine}")
        refusal = engines[engine].add(request, now_s)
        if isinstance(refusal, Refusal):
            raise FleetError(f"engine {engine} refused request {request.request_id}: {refusal.value}")
        if not engines[engine].is_stepping:
            begin(engine, now_s)

    late = router if isinstance(router, LateRouter) else None

    def serve_until(until_s: float) -> None:
        while True:
            late_s = late.next_s() if late is not None else None
            if ends and ends[0][0] <= until_s and (late_s is None or ends[0][0] <= late_s):
                end_next()
            elif late is not None and late_s is not None and late_s <= until_s:
                for request, engine in late.decided(late_s):
                    hand_over(request, engine, late_s)
            else:
                return

    for arrival in arrivals:
        serve_until(arrival.at_s)
        engine = router.route(arrival.request, arrival.at_s)
        if engine is not None:
            hand_over(arrival.request, engine, arrival.at_s)
    serve_until(math.inf)
    return served
