"""The pool as this replica knows it, in the words of people: for /state and for the gauges of /metrics.

The one rule: everything is read from where it is kept at the moment somebody asks; nothing is copied in between.
"""

import hashlib
from collections.abc import Callable
from typing import Any

from trimtab_core.hotspot import Hotspot
from trimtab_core.placement import LoadView
from trimtab_core.scheduler import Scheduler
from trimtab_extproc.endpoint_table import Endpoint, EndpointTable
from trimtab_extproc.fleet_view import FleetView
from trimtab_extproc.model_view import ModelView
from trimtab_extproc.reservations import Reservations
from trimtab_extproc.telemetry import EndpointGauges, FleetGauges
from trimtab_state import Heartbeat

BLOCK_TOKENS_DEFAULT = 16
"""Of an engine that has not said."""
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
        view = self._fleet.view(None)
        index_chunks, index_pairs = self._scheduler.index_size()
        return FleetGauges(
            endpoints=tuple(_gauges(endpoint, load, view, self._fleet) for endpoint in self._table.all()),
            index_chunks=index_chunks,
            index_pairs=index_pairs,
            open_reservations=len(self._reservations),
            oldest_reservation_s=self._reservations.oldest_s(self._clock()),
            policy=self._fleet.policy.policy,
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
            "control_version": self._fleet.control_version,
            "members": self._fleet.member_count,
            "open_reservations": len(self._reservations),
            "index_chunks": index_chunks,
            "index_pairs": index_pairs,
            "hotspots": [_hotspot(hotspot) for hotspot in self._scheduler.hotspots().hotspots],
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
        load = self._scheduler.load()
        gauges = _gauges(endpoint, load, view, self._fleet)
        return {
            "endpoint": name,
            "address": endpoint.address,
            "rank": endpoint.rank,
            "member": self._fleet.is_member(name),
            "candidate": is_candidate,
            "state": gauges.state,
            "approximate": view.approximate_reasons.get(endpoint.slot),
            "unsynced": self._fleet.is_unsynced(name),
            "models": sorted(heartbeat.models) if heartbeat is not None else [],
            **_load(load, endpoint),
            "product": round(gauges.product, 1),
            "reported_requests": gauges.reported_requests,
            "kv_usage": gauges.kv_usage,
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


def _hotspot(hotspot: Hotspot) -> dict[str, Any]:
    return {
        "prefix_class": f"{hotspot.prefix_class:016x}",
        "acted_on": hotspot.is_acted_on,
        "holders": hotspot.holders,
        "others": hotspot.others,
        "in_class": hotspot.in_class,
        "arrivals": hotspot.arrivals,
    }


def _gauges(endpoint: Endpoint, load: LoadView, view: ModelView, fleet: FleetView) -> EndpointGauges:
    slot, heartbeat = endpoint.slot, fleet.heartbeat(endpoint.name)
    requests, external, queued = int(load.requests[slot]), int(load.external[slot]), float(load.queued_tokens[slot])
    block_tokens = (heartbeat.block_tokens if heartbeat is not None else 0) or BLOCK_TOKENS_DEFAULT
    is_candidate = slot < len(view.candidates) and bool(view.candidates[slot])
    return EndpointGauges(
        name=endpoint.name,
        requests=requests,
        external=external,
        queued_tokens=queued,
        prefill_rate=float(load.prefill_rate[slot]),
        product=max(queued, block_tokens) * (int(load.weight_milli[slot]) / 1000 + external + 1),
        weight=int(load.weight_milli[slot]) / 1000 + external,
        round_trip_s=fleet.class_terms.round_trip_s(endpoint),
        is_candidate=is_candidate,
        is_exact=is_candidate and bool(view.exact[slot]),
        state=_state(endpoint, heartbeat, view, fleet),
        reported_requests=None if heartbeat is None else heartbeat.running + heartbeat.waiting,
        kv_usage=None if heartbeat is None else heartbeat.kv_usage,
    )


def _state(endpoint: Endpoint, heartbeat: Heartbeat | None, view: ModelView, fleet: FleetView) -> str:
    """One of a closed set: "not_member" | "draining" | "no_heartbeat" | what the sidecar says."""
    if not fleet.is_member(endpoint.name):
        return "not_member"
    if view.excluded.get(endpoint.slot) == "draining":
        return "draining"
    return "no_heartbeat" if heartbeat is None else heartbeat.state


def _load(load: LoadView, endpoint: Endpoint) -> dict[str, Any]:
    slot = endpoint.slot
    return {
        "requests": int(load.requests[slot]),
        "external": int(load.external[slot]),
        "weight": int(load.weight_milli[slot]) / 1000,
        "queued_tokens": round(float(load.queued_tokens[slot]), 1),
        "prefill_rate": round(float(load.prefill_rate[slot]), 1),
    }
