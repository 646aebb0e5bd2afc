"""The webhook's process: caches, certificate, HTTPS for the API server, and plain HTTP for kubelet and Prometheus.

The one rule: it holds nothing that another replica would miss. It is ready once it knows the pools and has a
certificate, and from then on answers from what it knows, whatever becomes of the API server. Told to stop, it says so
first and serves on for a moment, while API servers find the other replicas.
"""

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Final

from aiohttp import web

from trimtab_operator.health import metrics_page
from trimtab_operator.injection.admission import Admission, NotAReviewError
from trimtab_operator.injection.authority import life_of
from trimtab_operator.injection.certificate_secret import pair_in
from trimtab_operator.injection.certificates import SECRET_NAME
from trimtab_operator.injection.pool_book import PoolBook
from trimtab_operator.injection.served_certificate import CertificateUnusableError, ServedCertificate
from trimtab_operator.injection.webhook_configuration import PATH
from trimtab_operator.injection.webhook_metrics import WebhookMetrics
from trimtab_operator.install import Install
from trimtab_operator.kube import POLICIES, POOLS, SECRETS, Kube, KubeError, Object
from trimtab_operator.listening import METRICS_FLAG, WEBHOOK_FLAG, listen
from trimtab_operator.object_watch import ObjectWatch, Sink

logger = logging.getLogger(__name__)

BODY_BYTES_MAX: Final = 8 << 20
"""A review is a pod (at most 1.5 MiB in the store) and what surrounds it; a larger one is refused, the pod is not."""
NATIVE_SINCE: Final = (1, 29)
"""Version of Kubernetes that knows init containers that restart, without being told to."""
VERSION_RETRY_S: Final = 1.0
BODY_S: Final = 1.0
"""A body that takes longer is not waited for."""
KEEP_ALIVE_S: Final = 120.0
"""Longer than API servers keep an idle connection (90 s), so that they close it: one that is closed here while a
request is under way would cost that pod its sidecar."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookSettings:
    """What a webhook process is told at its start."""

    install: Install
    bind: str | None = None
    """None: all addresses."""
    port: int = 9443
    """HTTPS; 0: any free one."""
    health_port: int = 8080
    """HTTP: /healthz, /readyz, /metrics; 0: any free one."""
    certificate_secret: str = SECRET_NAME
    """In the install's namespace."""
    namespaces: tuple[str, ...] = ()
    """Where pools are looked for; empty: everywhere."""
    drain_s: float = 10.0
    """How long it serves on after it was told to stop."""
    rng_seed: int | None = None
    """Of the pauses between retries; None: from the system."""


class WebhookServer:
    """One replica. `ready` is set and cleared by what it knows."""

    def __init__(self, settings: WebhookSettings, kube: Kube) -> None:
        self._settings = settings
        self.book = PoolBook(settings.install.namespace)
        self.metrics = WebhookMetrics()
        self.port = 0
        """Where HTTPS is served, once it is."""
        self.health_port = 0
        self._certificate = ServedCertificate()
        self._admission = Admission(self.book, settings.install)
        self._is_stopping = False
        self._kube = kube
        self._version_known = asyncio.Event()
        rng = random.Random(settings.rng_seed)
        self._watches = [
            ObjectWatch(
                kube,
                SECRETS,
                settings.install.namespace,
                Sink(put=self._use_secret, drop=self._lost_secret),
                rng=rng,
                field_selector=f"metadata.name={settings.certificate_secret}",
            )
        ]
        for namespace in settings.namespaces or (None,):
            pools = Sink(put=self.book.put_pool, drop=self.book.drop_pool)
            policies = Sink(put=self.book.put_policy, drop=self.book.drop_policy)
            self._watches.append(ObjectWatch(kube, POOLS, namespace, pools, rng=rng))
            self._watches.append(ObjectWatch(kube, POLICIES, namespace, policies, rng=rng))

    @property
    def is_ready(self) -> bool:
        is_synced = all(watch.synced.is_set() for watch in self._watches) and self._version_known.is_set()
        return is_synced and self._certificate.pair is not None and not self._is_stopping

    async def run(self, stop: asyncio.Event) -> None:
        """Until `stop` is set. Raises ListenError where a port is taken."""
        async with self._served(), asyncio.TaskGroup() as tasks:
            watching = [tasks.create_task(watch.run()) for watch in self._watches]
            watching.append(tasks.create_task(self._ask_version()))
            await stop.wait()
            self._is_stopping = True
            logger.info("ending", extra={"serving_on_s": self._settings.drain_s})
            await asyncio.sleep(self._settings.drain_s)
            for task in watching:
                task.cancel()

    async def _ask_version(self) -> None:
        while True:
            try:
                self._admission.has_native = await self._kube.version() >= NATIVE_SINCE
                break
            except KubeError as error:
                logger.warning("the API server does not tell its version", extra={"error": str(error)})
            await asyncio.sleep(VERSION_RETRY_S)
        if not self._admission.has_native:
            logger.warning("sidecars are ordinary containers: init containers that restart need Kubernetes 1.29")
        self._version_known.set()

    @contextlib.asynccontextmanager
    async def _served(self) -> AsyncIterator[None]:
        settings = self._settings
        async with contextlib.AsyncExitStack() as stack:
            for app, flag, port, context in (
                (self._health_app(), METRICS_FLAG, settings.health_port, None),
                (self._webhook_app(), WEBHOOK_FLAG, settings.port, self._certificate.context),
            ):
                runner = web.AppRunner(app, access_log=None, keepalive_timeout=KEEP_ALIVE_S)
                await runner.setup()
                stack.push_async_callback(runner.cleanup)
                served = await listen(runner, settings.bind, port, flag=flag, tls=context)
                if context is None:
                    self.health_port = served
                else:
                    self.port = served
            logger.info("webhook served", extra={"port": self.port, "health_port": self.health_port})
            yield

    # The API server's side.

    def _webhook_app(self) -> web.Application:
        app = web.Application(client_max_size=BODY_BYTES_MAX)
        app.router.add_post(PATH, self._review)
        return app

    async def _review(self, request: web.Request) -> web.Response:
        try:
            async with asyncio.timeout(BODY_S):
                data = await request.read()
            with self.metrics.timed():
                answer = self._admission.answer(data)
        except (NotAReviewError, TimeoutError) as error:
            # The API server takes any answer but a review as a failure, and failures are ignored.
            self.metrics.count_error()
            logger.warning("no admission review", extra={"error": str(error) or type(error).__name__})
            return web.Response(status=400, text="no AdmissionReview\n")
        self.metrics.count(answer)
        if answer.outcome in ("injected", "error") or answer.warnings:
            about = {
                "pod": answer.pod,
                "pool": str(answer.pool or ""),
                "reason": answer.reason,
                "warnings": answer.warnings,
            }
            logger.info(answer.outcome, extra=about)
        return web.json_response(answer.body)

    # The cluster's side.

    def _health_app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/readyz", self._readyz)
        app.router.add_get("/metrics", self._metrics)
        return app

    async def _healthz(self, request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _readyz(self, request: web.Request) -> web.Response:
        return web.Response(text="ok\n") if self.is_ready else web.Response(status=503, text="not ready\n")

    async def _metrics(self, request: web.Request) -> web.Response:
        self.metrics.ready.set(self.is_ready)
        self.metrics.pools.set(self.book.pool_count)
        return metrics_page(request, self.metrics.registry)

    # The certificate's side.

    def _use_secret(self, body: Object) -> None:
        pair = pair_in(body)
        try:
            if pair is None:
                raise CertificateUnusableError("tls.crt or tls.key is missing")
            if self._certificate.use(pair):
                _, end_s = life_of(pair.certificate)
                self.metrics.expires.set(end_s)
                logger.info("certificate in use", extra={"expires_s": end_s})
        except (CertificateUnusableError, ValueError) as error:
            logger.error("certificate not usable, the one before it goes on", extra={"error": str(error)})

    def _lost_secret(self, namespace: str, name: str) -> None:
        logger.warning("the certificate's Secret is gone, the one in use goes on")


async def run(settings: WebhookSettings, kube: Kube, stop: asyncio.Event) -> None:
    """The webhook until `stop` is set. Raises OSError where a port is taken."""
    await WebhookServer(settings, kube).run(stop)
