"""A whole picker in the test's own event loop, on a real store, with a pool that the test announces."""

import asyncio
import os
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import aiohttp
from picker_rig import CARD, DIGEST
from waiting import until

from trimtab_extproc.service import Service
from trimtab_extproc.settings import Settings
from trimtab_state import ControlDocument, ControlWriter, EndpointSpec, Heartbeat, PoolKeys, ServedModel, connect

NAMESPACE, POOL, SECRET = "tests", "pool", b"a secret of the tests"
KEYS = PoolKeys(NAMESPACE, POOL)


def picker_settings(store_url: str, **changes: Any) -> Settings:
    """Plaintext, on free loopback ports."""
    fields: dict[str, Any] = {
        "pool_name": POOL,
        "pool_namespace": NAMESPACE,
        "store_url": store_url,
        "secret": SECRET,
        "bind": "127.0.0.1",
        "grpc_port": 0,
        "grpc_health_port": 0,
        "metrics_port": 0,
        "is_secure_serving": False,
        "front": os.environ.get("TRIMTAB_FRONT", "auto"),
        "drain_delay_s": 0.0,
        "drain_timeout_s": 5.0,
    }
    return Settings(**(fields | changes))


class LivePicker:
    """`async with` it: the service runs inside; `service` is the real thing."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.service = Service(settings, rng_seed=7)
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "LivePicker":
        self._task = asyncio.create_task(self.service.run())
        started = asyncio.create_task(self.service.started.wait())
        await asyncio.wait({self._task, started}, return_when=asyncio.FIRST_COMPLETED)
        started.cancel()
        if self._task.done():
            self._task.result()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.service.stop()
        assert self._task is not None
        await self._task

    @property
    def port(self) -> int:
        return self.service.ports["grpc"]

    async def announce(self, endpoints: Sequence[str], **policy: Any) -> None:
        """Tell the pool's members as the operator does, and wait until the picker knows them."""
        store = connect(self.settings.store_url)
        specs = tuple(EndpointSpec(name=name, address=name.partition("/")[0]) for name in endpoints)
        try:
            await ControlWriter(store, KEYS).put(
                ControlDocument(namespace=NAMESPACE, name=POOL, endpoints=specs, **policy)
            )
        finally:
            await store.close()

        async def is_known() -> bool:
            state = await self.get("/state")
            members = {row["endpoint"] for row in state["endpoints"] if row["member"]}
            return bool(state["ready"]) and members == set(endpoints)

        await until(is_known, "the picker knows the pool")

    def make_exact(self, endpoints: Sequence[str]) -> None:
        """As if each had a sidecar with an exact card, which tells first tokens by its KV events."""
        fleet = self.service._fleet
        fleet.on_card(DIGEST, CARD.encode())
        for name in endpoints:
            fleet.on_heartbeat(
                Heartbeat(endpoint=name, epoch="1", block_tokens=16, models={"m": ServedModel(card=DIGEST)})
            )

    async def get(self, path: str) -> Any:
        """JSON from the admin port."""
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"http://127.0.0.1:{self.service.ports['metrics']}{path}") as response,
        ):
            return await response.json()

    async def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples with those labels."""
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"http://127.0.0.1:{self.service.ports['metrics']}/metrics") as response,
        ):
            text = await response.text()
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        lines = [line for line in text.splitlines() if line.split("{")[0] == name and all(w in line for w in wanted)]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)
