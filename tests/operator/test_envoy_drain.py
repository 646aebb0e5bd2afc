"""A real Envoy whose pod goes: clients are told to leave, streams finish, and then nothing holds the pod any more."""

import asyncio
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import envoy
import pytest
from aiohttp import web
from child_objects import container, named, objects, on_this_machine, pool

from trimtab.commands import LOOPBACK
from trimtab.probes import free_ports, http_ok
from trimtab.processes import Supervisor
from trimtab_operator.kube import Object


@dataclass
class Front:
    """An Envoy of a rendered Deployment, its companion, and an engine that streams until the test says so."""

    url: str
    drain_url: str
    begin: list[str]
    supervisor: Supervisor
    finish: asyncio.Event = field(default_factory=asyncio.Event)

    async def pre_stop(self) -> None:
        """What the kubelet runs in the companion."""
        process = await asyncio.create_subprocess_exec(sys.executable, *self.begin)
        assert await process.wait() == 0


@asynccontextmanager
async def engine(finish: asyncio.Event) -> AsyncIterator[int]:
    async def quick(_: web.Request) -> web.Response:
        return web.Response(text="quick")

    async def stream(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"first ")
        await finish.wait()
        await response.write(b"last")
        return response

    application = web.Application()
    application.add_routes([web.get("/quick", quick), web.get("/stream", stream)])
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, LOOPBACK, 0).start()
    try:
        yield runner.addresses[0][1]
    finally:
        finish.set()
        await runner.cleanup()


def _words(of: Object, ports: dict[int, int]) -> list[str]:
    words = [*of["command"][1:], *of["args"], "--settle=0"]
    for old, new in ports.items():
        words = [re.sub(rf"([=:]){old}$", rf"\g<1>{new}", word) for word in words]
    return [word.replace("$(POD_IP)", LOOPBACK) for word in words]


@pytest.fixture
async def front(tmp_path: Path) -> AsyncIterator[Front]:
    finish = asyncio.Event()
    async with engine(finish) as engine_port, Supervisor(log_dir=tmp_path / "logs") as supervisor:
        ports = dict(zip((8080, 9901, 9902, 9903), free_ports(4), strict=True))
        spec: Object = {"picker": {"streamSecondsMax": 60, "tls": False}}
        bodies = objects(spec, of=pool(targetPorts=[{"number": engine_port}]))
        deployment = named(bodies, "Deployment", "trimtab-chat-envoy")
        (companion,) = deployment["spec"]["template"]["spec"]["initContainers"]
        config = tmp_path / "envoy.json"
        text = named(bodies, "ConfigMap", "trimtab-chat-envoy")["data"]["envoy.json"]
        config.write_text(on_this_machine(text, ports))
        binary = Path(envoy.__file__).parent / "_bin" / "envoy"
        words = [word.replace("/etc/envoy/envoy.json", str(config)) for word in container(deployment)["args"]]
        await supervisor.start("envoy", [binary, *words], ready=http_ok(f"http://{LOOPBACK}:{ports[9902]}/ready"))
        hook = container(deployment)["lifecycle"]["preStop"]["httpGet"]
        url = f"http://{LOOPBACK}:{ports[hook['port']]}"
        words = [sys.executable, *_words(companion, ports)]
        await supervisor.start("drain", words, ready=http_ok(f"{url}{companion['livenessProbe']['httpGet']['path']}"))
        begin = companion["lifecycle"]["preStop"]["exec"]["command"]
        yield Front(
            url=f"http://{LOOPBACK}:{ports[8080]}",
            drain_url=url + hook["path"],
            begin=[word.replace(":9901", f":{ports[9901]}") for word in begin[1:]],
            supervisor=supervisor,
            finish=finish,
        )


async def _get(session: aiohttp.ClientSession, url: str) -> tuple[str, bool]:
    """Text, and whether the server asks for the connection's end."""
    async with session.get(url) as response:
        return await response.text(), response.headers.get("connection") == "close"


async def test_streams_finish_before_envoy_may_go(front: Front) -> None:
    async with aiohttp.ClientSession() as session, session.get(f"{front.url}/stream") as response:
        assert await response.content.read(6) == b"first "
        assert await _get(session, f"{front.url}/quick") == ("quick", False)
        waiting = asyncio.create_task(_get(session, front.drain_url))
        await front.pre_stop()
        # Clients that still come are served, and told to leave.
        assert await _get(session, f"{front.url}/quick") == ("quick", True)
        for _ in range(3):
            # The companion asks twice a second, so it has looked meanwhile.
            done, _pending = await asyncio.wait({waiting}, timeout=0.6)
            assert not done
        front.finish.set()
        assert await response.text() == "last"
        assert (await waiting)[0] == "drained\n"


async def test_a_stranger_who_asks_for_drained_drains_nothing(front: Front) -> None:
    async with aiohttp.ClientSession() as session:
        waiting = [asyncio.create_task(_get(session, front.drain_url)) for _ in range(12)]
        done, pending = await asyncio.wait(waiting, timeout=1.5)
        assert {task.result()[0] for task in done} == {"too many wait already\n"}
        assert len(pending) == 8
        assert await _get(session, f"{front.url}/quick") == ("quick", False)
        await front.pre_stop()
        assert {text for text, _ in await asyncio.gather(*pending)} == {"drained\n"}


async def test_without_envoy_nobody_is_waited_for(front: Front) -> None:
    front.supervisor.kill("envoy")
    async with aiohttp.ClientSession() as session:
        assert (await _get(session, front.drain_url))[0] == "gone\n"
    process = await asyncio.create_subprocess_exec(sys.executable, *front.begin, stderr=asyncio.subprocess.PIPE)
    _, said = await process.communicate()
    assert process.returncode == 1
    assert b"envoy-drain: " in said
