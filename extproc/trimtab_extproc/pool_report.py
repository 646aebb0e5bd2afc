"""The pool as this replica knows it, in the words of people: for /state and for the gauges of /metrics.

The one rule: everything is read from where it is kept at the moment somebody asks; nothing is copied in between.
"""

import hashlib
from collections.abc import Callable
from typing import Any

from trimtab_core.placement import LoadView
from trimtab_core.scheduler import Scheduler
from trimtab_extproc.endpoint_table import Endpoint, EndpointTable
from trimtab_extproc.fleet_view import FleetView
from trimtab_extproc.reservations import Reservations
from trimtab_extproc.telemetry import EndpointGauges, FleetGauges

FRESH_PAIRS_MAX = 200_000
"""Up to this many pairs in the index, every answer counts them anew."""
INDEX_AGE_MAX_S = 10.0
"""Beyond, an endpoint's chunks are counted at most this often: whoever watches must not slow the choices down."""


class PoolReport:
    """Reads the scheduler, the table and the fleet."""

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        table: EndpointTable,
        fleet: FleetView,
        reservations: Reservations,
        clock: Callable[[], float],
    ) -> None:
        self._scheduler = scheduler
        self._table = table
        self._fleet = fleet
        self._reservations = reservations
        self._clock = clock
        self._counted: dict[str, tuple[float, int, str]] = {}
        """Name to when its chunks were counted, how many they are, and their digest."""

    @property
    def is_ready(self) -> bool:
        """Whether the pool's members are known."""
        return self._fleet.is_ready

    def gauges(self) -> FleetGauges:
        """What /metrics shows."""
        load = self._scheduler.load()
        candidates = self._fleet.view(None).candidates
        index_chunks, index_pairs = self._scheduler.index_size()
        return FleetGauges(
            endpoints=tuple(
                EndpointGauges(
                    name=endpoint.name,
                    requests=int(load.requests[endpoint.slot]),
                    external=int(load.external[endpoint.slot]),
                    queued_tokens=float(load.queued_tokens[endpoint.slot]),
                    prefill_rate=float(load.prefill_rate[endpoint.slot]),
                    is_candidate=endpoint.slot < len(candidates) and bool(candidates[endpoint.slot]),
                )
                for endpoint in self._table.all()
            ),
            index_chunks=index_chunks,
            index_pairs=index_pairs,
            open_reservations=len(self._reservations),
            is_connected=self._fleet.is_connected,
            is_ready=self._fleet.is_ready,
            unsynced_endpoints=sum(self._fleet.is_unsynced(endpoint.name) for endpoint in self._table.all()),
            ignored_endpoints=self._table.ignored_count,
        )

    def pool(self) -> dict[str, Any]:
        """What /state says of the whole."""
        index_chunks, index_pairs = self._scheduler.index_size()
        policy = self._fleet.policy
        return {
            "ready": self._fleet.is_ready,
            "connected": self._fleet.is_connected,
            "policy": policy.policy,
            "policy_reason": policy.reason or None,
            "members": self._fleet.member_count,
            "open_reservations": len(self._reservations),
            "index_chunks": index_chunks,
            "index_pairs": index_pairs,
        }

    def endpoint_names(self) -> list[str]:
        """All that are known, in order."""
        return sorted(endpoint.name for endpoint in self._table.all())

    def endpoint(self, name: str) -> dict[str, Any] | None:
        """What /state says of one endpoint; None if it is not known (any more)."""
        endpoint = self._table.named(name)
        if endpoint is None:
            return None
        view = self._fleet.view(None)
        heartbeat = self._fleet.heartbeat(name)
        is_candidate = endpoint.slot < len(view.candidates) and bool(view.candidates[endpoint.slot])
        index_chunks, index_digest = self._index(endpoint)
        return {
            "endpoint": name,
            "address": endpoint.address,
            "rank": endpoint.rank,
            "member": self._fleet.is_member(name),
            "candidate": is_candidate,
            "state": heartbeat.state if heartbeat is not None else "no heartbeat",
            "approximate": view.approximate_reasons.get(endpoint.slot),
            "unsynced": self._fleet.is_unsynced(name),
            "models": sorted(heartbeat.models) if heartbeat is not None else [],
            **_load(self._scheduler.load(), endpoint),
            "index_chunks": index_chunks,
            "index_digest": index_digest,
        }

    def _index(self, endpoint: Endpoint) -> tuple[int, str]:
        """How many chunks the endpoint holds, and a digest of their hashes."""
        now_s, counted = self._clock(), self._counted.get(endpoint.name)
        _, pairs = self._scheduler.index_size()
        if counted is not None and pairs > FRESH_PAIRS_MAX and now_s - counted[0] < INDEX_AGE_MAX_S:
            return counted[1], counted[2]
        hashes, _ = self._scheduler.kv_export(endpoint.slot)
        digest = hashlib.sha256(hashes.tobytes()).hexdigest()[:16]
        self._counted = {name: entry for name, entry in self._counted.items() if self._table.named(name) is not None}
        self._counted[endpoint.name] = (now_s, len(hashes), digest)
        return len(hashes), digest

    def chunks(self, name: str) -> tuple[list[int], list[int]] | None:
        """The chunks of one endpoint, sorted, and the tokens of each."""
        endpoint = self._table.named(name)
        if endpoint is None:
            return None
        hashes, tokens = self._scheduler.kv_export(endpoint.slot)
        return hashes.tolist(), tokens.tolist()


def _load(load: LoadView, endpoint: Endpoint) -> dict[str, Any]:
    slot = endpoint.slot
    return {
        "requests": int(load.requests[slot]),
        "external": int(load.external[slot]),
        "queued_tokens": round(float(load.queued_tokens[slot]), 1),
        "prefill_rate": round(float(load.prefill_rate[slot]), 1),
    }
