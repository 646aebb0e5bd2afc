"""The whole operator of one process: its parts put together, started and stopped.

The one rule: this and `__main__` are the only places that know every part. A part that dies ends the process, and a
process that comes back finds everything it needs in the cluster and in the store.
"""

import asyncio
import logging
import random
import time
from collections.abc import Coroutine
from typing import Any, Final

from trimtab_operator.api.policy_crd import CRD_NAME, revision_problem
from trimtab_operator.health import Health
from trimtab_operator.injection.certificates import CertificateKeeper
from trimtab_operator.injection.webhook_configuration import WebhookAddress
from trimtab_operator.install import Install
from trimtab_operator.install_secret import install_secret
from trimtab_operator.kube import CRDS, NAMESPACES, Kube, KubeError
from trimtab_operator.leader import Leadership
from trimtab_operator.reconcile import PoolReconciler
from trimtab_operator.settings import Settings, install_of
from trimtab_operator.steady_clock import SteadyClock
from trimtab_operator.telemetry import Telemetry
from trimtab_operator.watches import Watches
from trimtab_operator.work_queue import PoolQueue
from trimtab_state import connect

log = logging.getLogger(__name__)

LEASE_NAME: Final = "trimtab-operator"
CRD_CHECK_S: Final = 600.0
START_RETRY_S: Final = 2.0
DRAIN_S: Final = 10.0
"""How long the looks in hand may take to finish after `stop`."""
CLOSE_S: Final = 5.0


class Service:
    """One replica. `started` is set once it leads and knows the cluster."""

    def __init__(self, settings: Settings, *, rng: random.Random) -> None:
        self.started = asyncio.Event()
        self._settings = settings
        self._rng = rng
        self._stopping = asyncio.Event()
        self._telemetry = Telemetry()

    def stop(self) -> None:
        """Finish what is in hand, give the Lease back, and end. Call it from the event loop."""
        self._stopping.set()

    async def run(self) -> None:
        """Until `stop`. Raises whatever ends a part, and OSError where the port is taken."""
        settings = self._settings
        kube = await Kube.connect(settings.kubeconfig)
        watches = Watches(kube, rng=self._rng, kubeconfig=settings.kubeconfig)
        queue = PoolQueue(rng=self._rng, is_known=watches.is_known, observer=self._telemetry)
        leader = Leadership(
            kube,
            namespace=settings.namespace,
            name=LEASE_NAME,
            identity=f"{settings.identity}_{self._rng.getrandbits(64):016x}",
            clock=time.monotonic,
            rng=self._rng,
        )
        health = Health(
            age_s=queue.stands_still_s,
            # A replica that waits for its turn is as ready as the one that works.
            waits_for=lambda: watches.waits_for if leader.is_held or not settings.elects_leader else "",
            registry=self._telemetry.registry,
        )
        self._telemetry.watch(
            depth=lambda: queue.depth, age_s=queue.age_s, leads=lambda: leader.is_held or not settings.elects_leader
        )
        try:
            async with health.served(settings.bind, settings.metrics_port) as port:
                log.info("metrics at port %d", port)
                await self._until_stopped(self._lead(kube, watches, queue, leader, health), queue)
        finally:
            try:
                async with asyncio.timeout(CLOSE_S):
                    await leader.release()
                    await kube.close()
            except TimeoutError:
                log.warning("the Lease could not be given back in time")

    async def _until_stopped(self, work: Coroutine[Any, Any, None], queue: PoolQueue) -> None:
        """Ends the work when `stop` is called, once what is in hand is finished; raises what it raises."""
        task = asyncio.ensure_future(work)
        stop = asyncio.ensure_future(self._stopping.wait())
        await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if not task.done():
            log.info("ending")
            drained = asyncio.ensure_future(queue.drain(DRAIN_S))
            # A Lease that is lost meanwhile ends the work at once.
            await asyncio.wait({task, drained}, return_when=asyncio.FIRST_COMPLETED)
            drained.cancel()
            task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            if not self._stopping.is_set():
                raise

    async def _lead(self, kube: Kube, watches: Watches, queue: PoolQueue, leader: Leadership, health: Health) -> None:
        settings = self._settings
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(health.beat())
            if settings.elects_leader:
                await leader.acquire()
                tasks.create_task(leader.keep())
            install = await self._install(kube)
            store = connect(settings.store_url)
            reconciler = PoolReconciler(
                kube=kube,
                store=store,
                install=install,
                watches=watches,
                queue=queue,
                telemetry=self._telemetry,
                clock=SteadyClock(),
                rng=self._rng,
            )
            self._telemetry.watch_cluster(
                refusals=lambda: kube.refusals,
                watches=lambda: watches.starts,
                lists=lambda: watches.lists,
                crd_differs=lambda: bool(reconciler.crd_problem),
            )
            keeper = self._certificate_keeper(kube)
            try:
                async with asyncio.TaskGroup() as work:
                    work.create_task(watches.run(queue, settings.namespaces))
                    work.create_task(self._check_crd(kube, reconciler))
                    if keeper is not None:
                        work.create_task(keeper.run())
                    await watches.synced.wait()
                    work.create_task(reconciler.run())
                    work.create_task(queue.run(reconciler.reconcile))
                    self.started.set()
                    log.info("operating; pools: %d", len(watches.keys()))
            finally:
                try:
                    await reconciler.close()
                finally:
                    await store.close()

    async def _install(self, kube: Kube) -> Install:
        settings = self._settings
        while True:
            try:
                secret = await install_secret(kube, namespace=settings.namespace, name=settings.secret_name)
                # What people agree on as a cluster's identity: this namespace is never made again.
                cluster = await kube.get(NAMESPACES, None, "kube-system")
                return install_of(settings, secret, "" if cluster is None else cluster["metadata"]["uid"])
            except KubeError as error:
                log.warning("the installation is not known yet: %s", error)
                await asyncio.sleep(START_RETRY_S)

    def _certificate_keeper(self, kube: Kube) -> CertificateKeeper | None:
        settings = self._settings
        if settings.certificate_mode is None:
            return None
        keeper = CertificateKeeper(
            kube,
            settings.namespace,
            mode=settings.certificate_mode,
            secret_name=settings.certificate_secret,
            makes_configuration=settings.makes_webhook_configuration,
            address=WebhookAddress(
                namespace=settings.namespace,
                service=settings.webhook_service,
                url=settings.webhook_url,
                cluster_domain=settings.cluster_domain,
            ),
        )
        self._telemetry.watch_certificate(lambda: keeper.state.expires_s or 0.0)
        return keeper

    async def _check_crd(self, kube: Kube, reconciler: PoolReconciler) -> None:
        """Helm never brings a CRD up to date: see whether somebody has."""
        while True:
            try:
                body = await kube.get(CRDS, None, CRD_NAME)
                annotations = None if body is None else body["metadata"].get("annotations") or {}
                reconciler.crd_problem = revision_problem(annotations) or ""
            except KubeError as error:
                log.debug("the CRD's revision could not be read: %s", error)
            await asyncio.sleep(CRD_CHECK_S)
