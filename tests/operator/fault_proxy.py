"""A proxy in front of a real API server that breaks what it is told to break, and keeps a record of every call.

The one rule: what it does not break it passes on unchanged, so that all answers but the faults are the real server's.
"""

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import yaml
from aiohttp import web

PASSED_ON = ("Authorization", "Accept", "Content-Type")
BACK = ("Content-Type", "Retry-After")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One request."""

    method: str
    path: str
    query: dict[str, str]
    at_s: float

    @property
    def is_watch(self) -> bool:
        return "watch" in self.query

    @property
    def is_list(self) -> bool:
        return self.method == "GET" and not self.is_watch and self.path.rsplit("/", 1)[-1] in PLURALS


PLURALS = {
    "inferencepools", "schedulingpolicies", "services", "configmaps", "deployments", "poddisruptionbudgets", "pods",
}  # fmt: skip


@dataclass(slots=True, kw_only=True)
class _Fault:
    matches: Callable[[Call], bool]
    status: int
    headers: dict[str, str]
    left: int


@dataclass(slots=True, eq=False)
class _Watch:
    """One that is open."""

    plural: str
    response: web.StreamResponse
    transport: asyncio.Transport
    end: asyncio.Event = field(default_factory=asyncio.Event)


class FaultProxy:
    """`kubeconfig` leads here. Use it as `async with fault_proxy(...)`."""

    def __init__(self, server: str, context: ssl.SSLContext, session: aiohttp.ClientSession) -> None:
        self.kubeconfig = Path()
        self.calls: list[Call] = []
        self.answers: list[tuple[Call, int]] = []
        """Calls that the real server has answered, and its status."""
        self._server = server
        self._context = context
        self._session = session
        self._faults: list[_Fault] = []
        self._hangs: Callable[[Call], bool] = lambda call: False
        self._released = asyncio.Event()
        self._watches: set[_Watch] = set()
        self._is_mute = False
        self._runner: web.AppRunner | None = None
        self.port = 0

    # Faults.

    def refuse(
        self, matches: Callable[[Call], bool], *, status: int, times: int = 1, headers: dict[str, str] | None = None
    ) -> None:
        """The next so many calls that match."""
        self._faults.append(_Fault(matches=matches, status=status, headers=headers or {}, left=times))

    def hang(self, matches: Callable[[Call], bool]) -> None:
        """Calls that match are not answered until `release`."""
        self._released.clear()
        self._hangs = matches

    def release(self) -> None:
        self._hangs = lambda call: False
        self._released.set()

    def mute(self) -> None:
        """Nothing comes through open watches any more, and what would have is lost; they stay open."""
        self._is_mute = True

    def drop_watches(self) -> None:
        """Cut all that are open, in the middle of it. New ones are whole."""
        self._is_mute = False
        for watch in list(self._watches):
            watch.transport.abort()
            watch.end.set()

    async def say(self, plural: str, status: int) -> None:
        """An ERROR event in each open watch of that plural, which then ends."""
        self._is_mute = False
        event = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": "from the test"}
        event |= {"reason": "Expired" if status == 410 else "InternalError", "code": status}  # type: ignore[dict-item]
        line = json.dumps({"type": "ERROR", "object": event}).encode() + b"\n"
        for watch in [watch for watch in self._watches if watch.plural == plural]:
            await watch.response.write(line)
            watch.end.set()

    async def go_down(self) -> None:
        """Nobody listens at the port, and all connections are cut."""
        assert self._runner is not None
        self.drop_watches()
        await self._runner.cleanup()
        self._runner = None

    async def come_back(self) -> None:
        """At the same port."""
        app = web.Application(client_max_size=1 << 24)
        app.router.add_route("*", "/{path:.*}", self._pass_on)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", self.port, reuse_address=True).start()
        self.port = runner.addresses[0][1]
        self._runner = runner

    # The record.

    def open_watches(self, plural: str) -> int:
        return sum(watch.plural == plural for watch in self._watches)

    def writes(self) -> list[Call]:
        return [call for call in self.calls if call.method not in ("GET", "HEAD")]

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        now_s = asyncio.get_running_loop().time()
        call = Call(method=request.method, path=request.path, query=dict(request.query), at_s=now_s)
        self.calls.append(call)
        if self._hangs(call):
            await self._released.wait()
        for fault in self._faults:
            if fault.left and fault.matches(call):
                fault.left -= 1
                return web.Response(status=fault.status, headers=fault.headers, text="from the test")
        headers = {name: request.headers[name] for name in PASSED_ON if name in request.headers}
        url = self._server + request.path_qs
        async with self._session.request(
            request.method, url, headers=headers, data=await request.read() or None, ssl=self._context
        ) as answer:
            self.answers.append((call, answer.status))
            kept = {name: answer.headers[name] for name in BACK if name in answer.headers}
            if not call.is_watch or answer.status != 200:
                return web.Response(status=answer.status, headers=kept, body=await answer.read())
            return await self._stream(request, call, answer, kept)

    async def _stream(
        self, request: web.Request, call: Call, answer: aiohttp.ClientResponse, headers: dict[str, str]
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers=headers)
        await response.prepare(request)
        assert isinstance(request.transport, asyncio.Transport)
        watch = _Watch(call.path.rsplit("/", 1)[-1], response, request.transport)
        self._watches.add(watch)
        end = asyncio.ensure_future(watch.end.wait())
        try:
            while not watch.end.is_set():
                line = asyncio.ensure_future(answer.content.readline())
                await asyncio.wait({line, end}, return_when=asyncio.FIRST_COMPLETED)
                if not line.done():
                    line.cancel()
                    break
                if not (data := line.result()):
                    break
                if not self._is_mute:
                    await response.write(data)
        except (ConnectionError, aiohttp.ClientError):
            pass  # either side has left
        finally:
            end.cancel()
            self._watches.discard(watch)
        return response


@contextlib.asynccontextmanager
async def fault_proxy(kube_config: Path, folder: Path) -> AsyncIterator[FaultProxy]:
    """In front of that kubeconfig's server; its own kubeconfig is in `folder`."""
    config: dict[str, Any] = yaml.safe_load(kube_config.read_text())  # noqa: ASYNC240 (a small file)
    cluster = config["clusters"][0]["cluster"]
    context = ssl.create_default_context(cafile=cluster["certificate-authority"])
    context.check_hostname = False  # the certificate is for `kubernetes`, the address is loopback
    limits = aiohttp.ClientTimeout(total=None, sock_connect=10)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=limits, connector=connector, read_bufsize=1 << 21) as session:
        proxy = FaultProxy(cluster["server"], context, session)
        await proxy.come_back()
        config["clusters"][0]["cluster"] = {"server": f"http://127.0.0.1:{proxy.port}"}
        proxy.kubeconfig = folder / "kubeconfig-proxy"
        proxy.kubeconfig.write_text(yaml.safe_dump(config))
        try:
            yield proxy
        finally:
            proxy.release()
            if proxy._runner is not None:
                await proxy.go_down()
