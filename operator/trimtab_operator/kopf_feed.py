"""kopf as it is used here: it lists and watches some kinds, and tells each event to a sink in our own event loop.

The one rule: it only ever reads. There are no handlers but for events, so kopf has no reason to write; and what it
would send all the same is refused here, before it leaves the process. What kopf cannot recover from ends `run`.

kopf takes every task of its event loop for its own and every signal of the main thread too, so it has a thread and an
event loop to itself. Its lists do not say what has gone meanwhile: the sink is told of every list, and looks itself.
And where one of its parts fails, it waits for others that wait for it: its end is told and brought about from here.
"""

import asyncio
import contextlib
import logging
import ssl
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final, Protocol, cast

import aiohttp
import kopf
from kubernetes.aio.client import Configuration

from trimtab_operator.ending import EndingError
from trimtab_operator.install import MANAGER
from trimtab_operator.kube import PAGE_OBJECTS, Object, Resource, cluster_configuration

log = logging.getLogger(__name__)

PREFIX: Final = "operator.trimtab.dev"
"""Of all that kopf would write, and so of what it takes for its own: with kopf's own prefix it would undo what another
operator built on kopf has written."""
SERVER_S: Final = 300.0
"""The server ends a watch after this long."""
CLIENT_S: Final = 310.0
SILENCE_S: Final = 70.0
"""A watch that says nothing for this long (bookmarks come every minute) is begun again."""
BACKOFFS_S: Final = (0.2, 0.5, 1.0, 2.0, 3.0, *(5.0,) * 60)
"""Between tries, for some five minutes; then the process ends and begins anew."""
LAST_TURNS: Final = 3
"""Of an event loop: an aborted transport is closed by the second."""
STOP_S: Final = 3.0
"""How long kopf's tasks may take to end when they are told to; what is left then is left to the process's end."""
READ_BYTES: Final = 1 << 21


class FeedEndedError(EndingError):
    """kopf has ended by itself: the process ends too, since a new one knows how to begin."""


@dataclass(frozen=True, slots=True)
class Watched:
    """A kind to watch, and the labels to ask the server for."""

    resource: Resource
    label_selector: str = ""


class FeedSink(Protocol):
    """Called in the event loop that runs the feed."""

    def changed(self, resource: Resource, event: str | None, body: Object) -> None:
        """`event`: ADDED, MODIFIED, DELETED, None for an object of a list. The body is the sink's from now on."""

    def listed(self, resource: Resource) -> None:
        """kopf has just listed it: what had gone before that is in no event."""

    def watched(self, resource: Resource) -> None:
        """kopf has begun a watch of it."""


class KopfFeed:
    """Of one process."""

    def __init__(self, watched: Sequence[Watched], sink: FeedSink, *, kubeconfig: str | None = None) -> None:
        self._watched = tuple(watched)
        self._sink = sink
        self._kubeconfig = kubeconfig

    async def run(self, namespaces: Sequence[str]) -> None:
        """Until cancelled; no namespaces: all of them. Raises FeedEndedError."""
        loop = asyncio.get_running_loop()
        failed: asyncio.Future[BaseException | None] = loop.create_future()
        gone: asyncio.Future[None] = loop.create_future()

        def tell(future: "asyncio.Future[Any]", word: BaseException | None = None) -> None:
            with contextlib.suppress(RuntimeError):  # nobody is there any more to be told
                loop.call_soon_threadsafe(_settle, future, word)

        session = _Session(self._watched, self._sink, loop, self._kubeconfig)

        def thread() -> None:
            try:
                _run_in_loop(session.run(namespaces, lambda error: tell(failed, error)))
            except BaseException as error:
                tell(failed, error)
            finally:
                tell(gone)

        threading.Thread(target=thread, name="kopf", daemon=True).start()
        try:
            error = await asyncio.shield(failed)
        finally:
            session.stop()
            await asyncio.wait({gone}, timeout=2 * STOP_S)
        raise FeedEndedError(f"watching has ended: {error}") from error


class _Session:
    """What is on the other thread."""

    def __init__(
        self,
        watched: Sequence[Watched],
        sink: FeedSink,
        home: asyncio.AbstractEventLoop,
        kubeconfig: str | None,
    ) -> None:
        self._watched = watched
        self._sink = sink
        self._home = home
        self._kubeconfig = kubeconfig
        self._stop: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_stopping = threading.Event()
        self._http: list[aiohttp.ClientSession] = []
        self._transports: weakref.WeakSet[asyncio.Transport] = weakref.WeakSet()
        """Of requests that were answered."""

    def stop(self) -> None:
        """From any thread."""
        self._is_stopping.set()
        if self._loop is not None and self._stop is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._stop.set)

    async def run(self, namespaces: Sequence[str], failed: Callable[[BaseException | None], None]) -> None:
        """Until `stop`. `failed` is told when a part of kopf has ended by itself."""
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        if self._is_stopping.is_set():
            return
        with _signals_are_not_missed():
            parts = await kopf.spawn_tasks(
                registry=self._registry(),
                settings=self._settings(),
                clusterwide=not namespaces,
                namespaces=list(namespaces),
                standalone=True,
                # Its own guess asks for the user's name, and a container's user has none.
                identity=cast(Any, MANAGER),
            )
        stop = asyncio.create_task(self._stop.wait())
        try:
            done, _ = await asyncio.wait({stop, *parts}, return_when=asyncio.FIRST_COMPLETED)
            if stop not in done:
                failed(next((task.exception() for task in done if not task.cancelled()), None))
        finally:
            await _end_all()
            await self._hang_up()

    async def _hang_up(self) -> None:
        """Without TLS's goodbye, for which a loop that ends has no time."""
        for transport in self._transports:
            transport.abort()
        for http in self._http:
            if http.connector is not None:
                await http.connector.close(abort_ssl=True)
            await http.close()
        for _ in range(LAST_TURNS):
            await asyncio.sleep(0)

    def _registry(self) -> kopf.OperatorRegistry:
        registry = kopf.OperatorRegistry()
        kopf.on.login(registry=registry)(self._log_in)
        for entry in self._watched:
            group, _, version = entry.resource.api_version.rpartition("/")
            subscribe = kopf.on.event(group, version, entry.resource.plural, registry=registry, id=entry.resource.kind)
            subscribe(self._handler(entry.resource))
        return registry

    def _settings(self) -> kopf.OperatorSettings:
        settings = kopf.OperatorSettings()
        settings.scanning.disabled = True
        settings.posting.enabled = False
        settings.peering.standalone = True
        settings.process.ultimate_exiting_timeout = None  # the main thread sees to the end of the process
        settings.persistence.finalizer = f"{PREFIX}/unused"
        settings.persistence.progress_storage = kopf.AnnotationsProgressStorage(prefix=PREFIX)
        settings.persistence.diffbase_storage = kopf.AnnotationsDiffBaseStorage(prefix=PREFIX)
        settings.watching.server_timeout = int(SERVER_S)  # the API server takes whole seconds only
        settings.watching.client_timeout = CLIENT_S
        settings.watching.inactivity_timeout = SILENCE_S
        settings.watching.chunk_size = PAGE_OBJECTS
        settings.networking.error_backoffs = BACKOFFS_S
        settings.networking.request_timeout = 30.0
        settings.networking.connect_timeout = 10.0
        for entry in self._watched:
            if entry.label_selector:
                group, _, version = entry.resource.api_version.rpartition("/")
                settings.watching.label_selectors[group, version, entry.resource.plural] = entry.label_selector
        return settings

    def _handler(self, resource: Resource) -> Any:
        async def take(event: Any, **_: Any) -> None:
            self._tell(self._sink.changed, resource, event["type"], event["object"])

        return take

    async def _log_in(self, **_: Any) -> kopf.AiohttpSession:
        configuration = await cluster_configuration(self._kubeconfig)
        context: ssl.SSLContext | bool = True
        if configuration.host.startswith("https:"):
            context = ssl.create_default_context(
                cafile=configuration.ssl_ca_cert, cadata=getattr(configuration, "ca_cert_data", None)
            )
            if configuration.disable_strict_ssl_verification:
                context.verify_flags &= ~ssl.VERIFY_X509_STRICT
            if configuration.cert_file:
                context.load_cert_chain(configuration.cert_file, configuration.key_file)
            if not configuration.verify_ssl:
                context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=context),
            middlewares=(_Door(configuration, self),),
            read_bufsize=READ_BYTES,
            trust_env=True,
        )
        self._http.append(session)
        return kopf.AiohttpSession(server=configuration.host, aiohttp_session=session)

    def noticed(self, request: aiohttp.ClientRequest, response: aiohttp.ClientResponse) -> None:
        """A list, as it was at this moment, or a watch is on its way to kopf."""
        if response.connection is not None and response.connection.transport is not None:
            self._transports.add(response.connection.transport)
        path, plural = request.url.path.rsplit("/", 1)
        resource = next(
            (entry.resource for entry in self._watched if entry.resource.plural == plural and _is_of(path, entry)), None
        )
        if resource is None or "continue" in request.url.query:
            return
        self._tell(self._sink.watched if "watch" in request.url.query else self._sink.listed, resource)

    def _tell(self, say: Any, *words: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the process is ending
            self._home.call_soon_threadsafe(say, *words)


class _Door:
    """Every request of kopf's goes through here."""

    def __init__(self, configuration: Configuration, session: _Session) -> None:
        self._configuration = configuration
        self._session = session

    async def __call__(
        self, request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        if request.method != "GET":
            raise RuntimeError(f"kopf was about to write: {request.method} {request.url.path}")
        # Each time: a service account's token is a new one every hour.
        token = await self._configuration.get_api_key_with_prefix("BearerToken", alias="authorization")
        if token:
            request.headers["Authorization"] = token
        if self._configuration.tls_server_name:
            request.server_hostname = self._configuration.tls_server_name
        response = await handler(request)
        if response.status == HTTPStatus.OK:
            self._session.noticed(request, response)
        return response


@contextlib.contextmanager
def _signals_are_not_missed() -> Iterator[None]:
    """kopf warns where it cannot take the process's signals; here the main thread has them, as it should."""

    def is_news(record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith("OS signals are ignored")

    logger = logging.getLogger(kopf.spawn_tasks.__module__)
    logger.addFilter(is_news)
    try:
        yield
    finally:
        logger.removeFilter(is_news)


def _is_of(path: str, entry: Watched) -> bool:
    base = entry.resource.path().rsplit("/", 1)[0]
    return path == base or path.startswith(f"{base}/namespaces/")


def _settle(future: "asyncio.Future[Any]", word: BaseException | None) -> None:
    if not future.done():
        future.set_result(word)


def _run_in_loop(coroutine: Coroutine[Any, Any, None]) -> None:
    """`asyncio.run` would wait without end for a task that does not."""
    loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(coroutine)
    finally:
        loop.close()


async def _end_all() -> None:
    """All other tasks of this event loop: some of kopf's have to be told twice, and some start others on their way."""
    loop = asyncio.get_running_loop()
    until_s = loop.time() + STOP_S
    while (left := asyncio.all_tasks() - {asyncio.current_task()}) and loop.time() < until_s:
        for task in left:
            task.cancel()
        await asyncio.wait(left, timeout=0.5)
