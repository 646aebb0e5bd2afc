"""The whole picker of one process: its parts put together, started and drained.

The one rule: this and `__main__` are the only places that know every part. `run` returns when the process should exit.
"""

import asyncio
import logging
import time
from collections.abc import Callable

from aiohttp import web

from trimtab_core.chunks import pool_seed, seed_digest
from trimtab_core.scheduler import SchedulerSettings
from trimtab_core.selection import CORE_NAME, CORE_REASON, Scheduler
from trimtab_extproc.admin import Admin
from trimtab_extproc.body_budget import BodyBudget
from trimtab_extproc.certificate import server_certificate
from trimtab_extproc.decisions import DecisionLog
from trimtab_extproc.endpoint_table import EndpointTable
from trimtab_extproc.errors import ConfigError
from trimtab_extproc.exchange import ExchangeSettings
from trimtab_extproc.fleet_view import FleetView
from trimtab_extproc.front import Front, FrontSettings, choose, decoder, new_front
from trimtab_extproc.health import Health
from trimtab_extproc.hotspot_metrics import HotspotCollector
from trimtab_extproc.hotspot_watch import HotspotWatch
from trimtab_extproc.offload import Offload
from trimtab_extproc.picker import Picker, PickerSettings
from trimtab_extproc.pool_report import PoolReport
from trimtab_extproc.processor import ExternalProcessor
from trimtab_extproc.reservations import Reservations
from trimtab_extproc.response_directory import ResponseDirectory
from trimtab_extproc.round_trips import RoundTrips
from trimtab_extproc.settings import Settings
from trimtab_extproc.telemetry import Telemetry
from trimtab_state import (
    AlarmWriter,
    LoadPublisher,
    PoolFollower,
    PoolKeys,
    ResponseMap,
    StateUnavailable,
    Store,
    connect,
)
from trimtab_state.peer_placements import PeerPlacements

log = logging.getLogger(__name__)

TICK_S = 0.02
"""How often time passes for the scheduler: prefill fades, speculation expires."""
SWEEP_S = 5.0
"""How often endpoints that nobody names any more are looked for."""
CLOSE_TIMEOUT_S = 2.0
"""How long the last words to the shared state may take."""


class Service:
    """One process's picker. `ports` are known once `started` is set."""

    def __init__(self, settings: Settings, *, rng_seed: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._clock = clock
        self.started = asyncio.Event()
        self.ports: dict[str, int] = {}
        self._stopping = asyncio.Event()

        self._front_name, self._front_reason = choose(settings.front)
        self._store: Store = connect(settings.store_url)
        keys = PoolKeys(settings.pool_namespace, settings.pool_name)
        scheduler = Scheduler(rng_seed=rng_seed, settings=SchedulerSettings())
        self._scheduler = scheduler
        table = EndpointTable(scheduler)
        self._telemetry = Telemetry(
            pool=settings.pool_name,
            pool_namespace=settings.pool_namespace,
            implementation=CORE_NAME,
            front=self._front_name,
        )
        self._responses = ResponseDirectory(ResponseMap(self._store, keys))
        self.reservations = Reservations(
            scheduler=scheduler, table=table, observer=self._telemetry, responses=self._responses
        )
        seed = pool_seed(settings.secret, settings.pool_namespace, settings.pool_name)
        self._fleet = FleetView(
            scheduler=scheduler,
            table=table,
            first_tokens=self.reservations,
            clock=clock,
            seed_digest=seed_digest(seed),
        )
        class_terms = self._fleet.class_terms
        self._round_trips = RoundTrips(addresses=lambda: class_terms.addresses, tell=class_terms.on_round_trips)
        self._publisher = publisher = LoadPublisher(
            self._store,
            keys,
            open_reservations=self.reservations.for_lease,
            on_lease_lost=self._fleet.on_lease_lost,
        )
        self.reservations.load_log = self._publisher
        self._follower = PoolFollower(self._store, keys, self._fleet, own_incarnations=publisher.own_incarnations)
        publisher.reader = self._follower
        decisions = DecisionLog(name_of=lambda slot: None if (found := table.at_slot(slot)) is None else found.name)
        self._offload = Offload()
        self._picker = picker = Picker(
            scheduler=scheduler,
            table=table,
            fleet=self._fleet,
            reservations=self.reservations,
            responses=self._responses,
            offload=self._offload,
            telemetry=self._telemetry,
            decisions=decisions,
            settings=PickerSettings(seed=seed, is_conformance_test=settings.is_conformance_test),
            clock=clock,
            peers=PeerPlacements(publisher, self._follower),
        )
        report = PoolReport(
            scheduler=scheduler, table=table, fleet=self._fleet, reservations=self.reservations, clock=clock
        )
        self._telemetry.watch(report.gauges)
        self._telemetry.watch_counts(self._counts)
        self._telemetry.watch_log_lag(lambda: self._follower.log_lag_s(self._clock()))
        self._telemetry.watch_waiting(lambda: len(picker.waiting))
        self._hotspots = HotspotWatch(
            view=scheduler.hotspots,
            window_s=lambda: self._fleet.policy.hotspot_window_s,
            writer=AlarmWriter(self._store, keys),
            replica=lambda: self._publisher.incarnation,
            clock=clock,
        )
        pool = (settings.pool_name, settings.pool_namespace)
        self._telemetry.registry.register(HotspotCollector(pool, scheduler.hotspots, lambda: self._hotspots.written))
        self._telemetry.watch_replicas(lambda: 1 + len(self._follower.load.peers))
        self._admin = Admin(telemetry=self._telemetry, decisions=decisions, report=report, clock=clock)
        self._processor = ExternalProcessor(
            picker=picker,
            ledger=self.reservations,
            telemetry=self._telemetry,
            settings=ExchangeSettings(
                body_bytes_max=settings.body_bytes_max,
                is_mode_override_allowed=settings.is_mode_override_allowed,
                is_route_cache_cleared=settings.is_route_cache_cleared,
                is_conformance_test=settings.is_conformance_test,
            ),
            budget=BodyBudget(settings.bodies_bytes_max),
            clock=clock,
            decode=decoder(self._front_name),
        )
        self._health = Health()

    def stop(self) -> None:
        """Begin to drain. Call it from the event loop."""
        self._stopping.set()

    async def run(self) -> None:
        """Serve until `stop`, then drain. Raises ConfigError, and whatever ends one of the parts: that is a bug."""
        main, health = await self._listen()
        runner = await self._serve_admin()
        log.info("core: %s (%s)", CORE_NAME, CORE_REASON)
        log.info("front: %s (%s)", self._front_name, self._front_reason)
        log.info("listening: %s", self.ports)
        self.started.set()
        try:
            async with asyncio.TaskGroup() as tasks:
                parts = [
                    tasks.create_task(self._follower.run(), name="follower"),
                    tasks.create_task(self._publisher.run(), name="publisher"),
                    tasks.create_task(self._pass_time(), name="time"),
                    tasks.create_task(self._round_trips.run(), name="round trips"),
                    tasks.create_task(self._hotspots.run(), name="hotspots"),
                ]
                await self._stopping.wait()
                await self._drain(main)
                for part in parts:
                    part.cancel()
        finally:
            await health.stop(0)
            await main.stop(0)
            await runner.cleanup()
            self._offload.close()
            await self._leave()

    async def _listen(self) -> tuple[Front, Front]:
        """The server for gateways, and the one for kubelets, which ask in plaintext."""
        settings = self._settings
        bounds = FrontSettings(
            body_bytes_max=settings.body_bytes_max,
            gathered_bytes_max=settings.bodies_bytes_max,
            exchanges_max=settings.exchanges_max,
        )
        main = new_front(self._front_name, settings=bounds, health=self._health, processor=self._processor)
        health = new_front(self._front_name, settings=FrontSettings(), health=self._health)
        certificate = server_certificate(settings.cert_path) if settings.is_secure_serving else None
        try:
            self.ports["grpc"] = await main.start(settings.bind, settings.grpc_port, certificate)
            self.ports["health"] = await health.start(settings.bind, settings.grpc_health_port, None)
        except OSError as error:
            # Its text names the address, and with it the flag's port.
            await main.stop(0)
            raise ConfigError(f"--grpc-port or --grpc-health-port: cannot listen: {error}; give another one") from error
        return main, health

    async def _serve_admin(self) -> web.AppRunner:
        runner = web.AppRunner(self._admin.application(), access_log=None)
        await runner.setup()
        # By itself a socket of `::` takes IPv6 alone here; without a host there is one for each family.
        host = None if self._settings.bind == "::" else self._settings.bind
        site = web.TCPSite(runner, host, self._settings.metrics_port)
        try:
            await site.start()
        except OSError as error:
            raise ConfigError(f"--metrics-port: cannot listen: {error}; give another one") from error
        self.ports["metrics"] = runner.addresses[0][1]
        return runner

    def _counts(self) -> dict[str, float]:
        """What the shared state's parts have counted, for /metrics."""
        follower = self._follower.counters
        return {
            "sessions": follower.sessions,
            "resyncs": follower.resyncs,
            "kv_entries": follower.kv_entries,
            "load_entries": follower.load_entries,
            "snapshots": follower.snapshots,
            "leases": follower.leases,
            "malformed": follower.malformed,
            "leases_lost": self._publisher.leases_lost,
            "load_dropped": self._publisher.dropped,
        }

    async def _pass_time(self) -> None:
        """Time passes for what has no clock of its own."""
        swept_s = due_s = self._clock()
        while True:
            now_s = self._clock()
            self._telemetry.ticked(late_s=max(0.0, now_s - due_s))
            self.reservations.assumed(self._scheduler.advance(now_s).tolist())
            self._picker.waiting.advance(now_s)
            if now_s - swept_s >= SWEEP_S:
                swept_s = now_s
                self._fleet.sweep(now_s)
                if not self._fleet.is_ready:
                    log.warning("not ready: %s", self._fleet.unready_reason)
            self._health.set_ready(self._fleet.is_ready and not self._stopping.is_set())
            due_s = self._clock() + TICK_S
            await asyncio.sleep(TICK_S)

    async def _drain(self, front: Front) -> None:
        """Say NOT_SERVING, serve on while gateways notice, then let streams finish."""
        self._health.set_ready(False)
        log.info("draining: %d exchanges in flight", self._processor.in_flight_count)
        await asyncio.sleep(self._settings.drain_delay_s)
        await front.stop(self._settings.drain_timeout_s)
        log.info("drained: %d exchanges were cut", self._processor.in_flight_count)

    async def _leave(self) -> None:
        """Tell the others that all our reservations are over."""
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._responses.close()
                await self._publisher.close()
        except (TimeoutError, StateUnavailable):
            log.warning("the shared state could not be told: our lease will expire by itself")
        await self._store.close()
