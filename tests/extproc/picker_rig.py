"""A picker over a real scheduler, with virtual time, a load log that is a list, and no store."""

import json
from typing import Any

import numpy as np

from trimtab_core.chunks import U32, U64, pool_seed
from trimtab_core.model_card import ModelCard
from trimtab_core.scheduler import Scheduler, SchedulerSettings
from trimtab_extproc.confirmation import Peers
from trimtab_extproc.decisions import DecisionLog
from trimtab_extproc.endpoint_table import EndpointTable
from trimtab_extproc.events import Placed, Refused
from trimtab_extproc.fleet_view import FleetView
from trimtab_extproc.offload import Offload
from trimtab_extproc.picker import Picker, PickerSettings
from trimtab_extproc.replies import Decide
from trimtab_extproc.reservations import Reservations
from trimtab_extproc.response_directory import ResponseDirectory
from trimtab_extproc.telemetry import Telemetry
from trimtab_state import ControlDocument, EndpointSpec, Heartbeat, Policy, ServedModel

SEED = pool_seed(b"secret", "tests", "pool")
TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}<assistant>"
CARD = ModelCard(template=TEMPLATE, tools_template=TEMPLATE, exact=True, reason="")
DIGEST = CARD.digest()


class WrittenLog:
    """The load log as a list of what was told."""

    def __init__(self) -> None:
        self.entries: list[tuple[Any, ...]] = []
        self.weights: list[int] = []
        """Of what was reserved."""

    def reserve(
        self,
        reservation_id: int,
        endpoint: str,
        p_tokens: int,
        batch: int,
        sample_hashes: U64,
        sample_tokens: U32,
        weight_milli: int,
    ) -> None:
        self.entries.append(("reserve", reservation_id, endpoint, p_tokens, batch))
        self.weights.append(weight_milli)

    def first_token(self, reservation_id: int) -> None:
        self.entries.append(("first_token", reservation_id))

    def moved(self, reservation_id: int, endpoint: str) -> None:
        self.entries.append(("moved", reservation_id, endpoint))

    def finished(self, reservation_id: int) -> None:
        self.entries.append(("finished", reservation_id))


class RememberedResponses:
    """A response map without a store."""

    def __init__(self) -> None:
        self.known: dict[str, str] = {}

    async def put(self, response_id: str, endpoint: str) -> None:
        self.known[response_id] = endpoint

    async def get(self, response_id: str) -> str | None:
        return self.known.get(response_id)


class PickerRig:
    """All parts of a decision, each within reach of a test."""

    def __init__(self, *, is_conformance_test: bool = False, peers: Peers | None = None) -> None:
        self.now_s = 100.0
        self.scheduler = Scheduler(rng_seed=3, settings=SchedulerSettings())
        self.table = EndpointTable(self.scheduler)
        self.telemetry = Telemetry(pool="pool", pool_namespace="tests", implementation="test")
        self.stored = RememberedResponses()
        self.responses = ResponseDirectory(self.stored)
        self.reservations = Reservations(
            scheduler=self.scheduler, table=self.table, observer=self.telemetry, responses=self.responses
        )
        self.log = WrittenLog()
        self.reservations.load_log = self.log
        self.fleet = FleetView(
            scheduler=self.scheduler, table=self.table, first_tokens=self.reservations, clock=lambda: self.now_s
        )
        self.decisions = DecisionLog(name_of=self.name_of)
        self.offload = Offload()
        self.picker = Picker(
            scheduler=self.scheduler,
            table=self.table,
            fleet=self.fleet,
            reservations=self.reservations,
            responses=self.responses,
            offload=self.offload,
            telemetry=self.telemetry,
            decisions=self.decisions,
            settings=PickerSettings(seed=SEED, is_conformance_test=is_conformance_test),
            clock=lambda: self.now_s,
            peers=peers,
        )

    def name_of(self, slot: int) -> str | None:
        endpoint = self.table.at_slot(slot)
        return None if endpoint is None else endpoint.name

    def announce(self, *names: str, policy: Policy | None = None, is_beating: bool = True) -> None:
        """The pool's members; `is_beating`: each serves model "m" with an exact card."""
        specs = tuple(EndpointSpec(name=name, address=name.partition("/")[0]) for name in names)
        self.fleet.on_control(
            ControlDocument(namespace="tests", name="pool", endpoints=specs, policy=policy or Policy())
        )
        self.fleet.on_card(DIGEST, CARD.encode())
        if is_beating:
            for name in names:
                self.beat(name)
        self.fleet.on_connected(True)

    def beat(self, name: str, **fields: Any) -> None:
        """One heartbeat."""
        defaults: dict[str, Any] = {"epoch": "1", "models": {"m": ServedModel(card=DIGEST)}, "block_tokens": 16}
        self.fleet.on_heartbeat(Heartbeat(endpoint=name, **(defaults | {"kv_capacity_tokens": 100_000} | fields)))

    def hold(self, name: str, chain: U64) -> None:
        """The endpoint's engine has this prefix in its cache, at 16 tokens a chunk."""
        tokens = np.arange(16, 16 * len(chain) + 1, 16, dtype=np.uint32)
        self.fleet.on_kv_replace(name, chain, tokens)

    async def ask(self, request: Decide | None = None) -> Placed | Refused:
        """One decision."""
        return await self.picker.pick(request or chat())

    async def place(self, request: Decide | None = None) -> Placed:
        """One decision that must come out well."""
        placed = await self.ask(request)
        assert isinstance(placed, Placed), placed
        return placed

    def finish(self, placed: Placed) -> None:
        """The exchange is over."""
        self.reservations.finished(placed.reservation_id, now_s=self.now_s)

    def requests(self) -> dict[str, int]:
        """Requests on each endpoint."""
        load = self.scheduler.load()
        return {endpoint.name: int(load.requests[endpoint.slot]) for endpoint in self.table.all()}

    def last(self) -> dict[str, Any]:
        """The last decision as people see it."""
        return self.decisions.to_json(now_s=self.now_s, count=1)[0]

    def count(self, name: str, **labels: str) -> float:
        """The value of a counter, summed over the labels that are not given."""
        total = 0.0
        for family in self.telemetry.registry.collect():
            for sample in family.samples:
                if sample.name == name and labels.items() <= sample.labels.items():
                    total += sample.value
        return total


def chat(text: str = "hello", *, model: str | None = "m", **fields: Any) -> Decide:
    """A chat completion of one message; `headers` and `subset` go to the request itself."""
    headers = {":method": "POST", ":path": "/v1/chat/completions"} | fields.pop("headers", {})
    subset = fields.pop("subset", None)
    body = {"messages": [{"role": "user", "content": text}]} | ({"model": model} if model else {}) | fields
    return Decide(headers=headers, body=json.dumps(body).encode(), subset=subset, is_body_known=True)
