"""The rendered pods as processes: picker and Envoy run with exactly what their Deployments say, beside a real sidecar,
a real store and an emulated engine, as the pool's own user. Only addresses and ports are adapted."""

import asyncio
import base64
import os
import re
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import envoy
import grpc
import grpc.aio
import pytest
from child_objects import container, install, named, on_this_machine, policy
from child_objects import pool as pool_of
from grpc_health.v1 import health_pb2, health_pb2_grpc
from valkey_server import ValkeyProcess, running
from waiting_on import eventually

import trimtab_lab
from trimtab.commands import LOOPBACK, POOL_NAME, POOL_NAMESPACE, EnginePorts, emulator_argv, sidecar_argv
from trimtab.probes import free_ports, http_ok
from trimtab.processes import Supervisor
from trimtab_operator.children.desired import desired
from trimtab_operator.kube import Object
from trimtab_operator.store.access import StoreAccessManager
from trimtab_operator.store.pool_user import user_name
from trimtab_state import AlarmWriter, ControlDocument, ControlWriter, EndpointSpec, PoolKeys, ResponseMap, connect
from trimtab_state.documents import Alarm

MODEL_DIR = Path(trimtab_lab.__file__).parent / "data" / "tiny_model"
KEYS = PoolKeys(POOL_NAMESPACE, POOL_NAME)
PICKER, ENVOY = f"trimtab-{POOL_NAME}", f"trimtab-{POOL_NAME}-envoy"


def environment(of: Object, bodies: list[Object]) -> dict[str, str]:
    """A container's environment as a kubelet would fill it in."""
    env = {}
    for entry in of["env"]:
        if (source := entry.get("valueFrom")) is not None:
            reference = source["secretKeyRef"]
            data = named(bodies, "Secret", reference["name"])["data"]
            env[entry["name"]] = base64.b64decode(data[reference["key"]]).decode()
        else:
            env[entry["name"]] = entry["value"]
    return env


async def health(port: int, service: str) -> bool:
    """What a kubelet's gRPC probe would say."""
    async with grpc.aio.insecure_channel(f"{LOOPBACK}:{port}") as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        try:
            answer = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=2)
        except grpc.aio.AioRpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


class Pod:
    """A picker of the rendered Deployment on this machine."""

    def __init__(self, bodies: list[Object]) -> None:
        self.container = container(named(bodies, "Deployment", PICKER))
        self.env = environment(self.container, bodies)
        self.ports: dict[int, int] = {}
        moved = free_ports(2)
        grpc_port, *others = [port["containerPort"] for port in self.container["ports"]]
        self.ports = {grpc_port: grpc_port, **dict(zip(others, moved, strict=True))}

    @property
    def argv(self) -> list[str]:
        (program,) = self.container["command"]
        words = [str(Path(sys.executable).parent / program), *self.container["args"]]
        for old, new in self.ports.items():
            words = [re.sub(rf"^(--(?:grpc-health|metrics)-port)={old}$", rf"\1={new}", word) for word in words]
        return [*words, f"--bind={LOOPBACK}"]

    async def is_ready(self) -> bool:
        check = self.container["readinessProbe"]["grpc"]
        return await health(self.ports[check["port"]], check["service"])

    async def is_alive(self) -> bool:
        get = self.container["livenessProbe"]["httpGet"]
        return await http_ok(f"http://{LOOPBACK}:{self.ports[get['port']]}{get['path']}")()

    async def page(self, path: str) -> Any:
        port = self.ports[self.container["ports"][2]["containerPort"]]
        async with aiohttp.ClientSession() as session, session.get(f"http://{LOOPBACK}:{port}{path}") as response:
            return await response.json()


async def refusals(server: ValkeyProcess) -> bytes:
    return server.command("ACL", "LOG")


@pytest.mark.stack
@pytest.mark.parametrize("is_tls", [True, False], ids=["tls", "plaintext"])
async def test_the_rendered_pods_serve_a_request_as_the_pools_own_user(tmp_path: Path, is_tls: bool) -> None:
    with running(password="of-the-operator") as server:
        # Nobody waits for what the picker does at its end.
        async with Supervisor(log_dir=tmp_path / "logs", stop_grace_s=0.5) as supervisor:
            await _serves(server, supervisor, tmp_path, is_tls=is_tls)


async def _serves(server: ValkeyProcess, supervisor: Supervisor, tmp_path: Path, *, is_tls: bool) -> None:
    engine_port, events, replay, metrics, picker_port, *fronts = free_ports(8)
    engine = EnginePorts(http=engine_port, kv_events=events, kv_replay=replay, sidecar_metrics=metrics)
    settings = install(store_url=server.url)
    operator = connect(server.url)
    manager = StoreAccessManager(operator, settings)
    pool = pool_of(
        POOL_NAME,
        POOL_NAMESPACE,
        targetPorts=[{"number": engine_port}],
        endpointPickerRef={"name": PICKER, "port": {"number": picker_port}},
    )
    access = await manager.ensure(pool.key)
    assert access.is_own_user
    spec = policy({"picker": {"tls": is_tls, "streamSecondsMax": 20}})
    bodies = desired(pool, spec, settings, access)
    pod = Pod(bodies)
    await supervisor.start("picker", pod.argv, env=pod.env)
    await eventually(pod.is_alive, within_s=60)
    assert not await pod.is_ready()
    assert not await health(pod.ports[picker_port], "readiness")

    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    argv = emulator_argv(engine, model_dir=MODEL_DIR, engine_flags=())
    await supervisor.start("engine", argv, ready=http_ok(f"{engine.url}/health"))
    sidecar = sidecar_argv(engine, store=access.url, model_dir=MODEL_DIR, checkpoint_dir=checkpoint, engine_argv=argv)
    secret = {"TRIMTAB_SECRET": access.secret}
    await supervisor.start("sidecar", sidecar, env=secret)
    control = ControlWriter(operator, KEYS)
    endpoints = (EndpointSpec(name=engine.address, address=engine.address),)
    await control.put(ControlDocument(namespace=KEYS.namespace, name=KEYS.name, endpoints=endpoints))

    async def is_exact() -> bool:
        rows = (await pod.page("/state"))["endpoints"]
        return any(row["candidate"] and not row["approximate"] and not row["unsynced"] for row in rows)

    await eventually(pod.is_ready, within_s=60)
    await supervisor.guard(eventually(is_exact, within_s=60))

    ports = dict(zip((8080, 9901, 9902), fronts, strict=True))
    config = tmp_path / "envoy.json"
    config.write_text(on_this_machine(named(bodies, "ConfigMap", ENVOY)["data"]["envoy.json"], ports))
    envoy_container = container(named(bodies, "Deployment", ENVOY))
    binary = Path(envoy.__file__).parent / "_bin" / "envoy"
    words = [word.replace("/etc/envoy/envoy.json", str(config)) for word in envoy_container["args"]]
    get = envoy_container["readinessProbe"]["httpGet"]
    ready = http_ok(f"http://{LOOPBACK}:{ports[get['port']]}{get['path']}")
    await supervisor.start("envoy", [binary, *words], ready=ready)

    async with aiohttp.ClientSession(f"http://{LOOPBACK}:{ports[8080]}") as session:

        async def is_chosen() -> Any:
            body = {"model": "tiny", "messages": [{"role": "user", "content": "hello " * 60}], "max_tokens": 4}
            async with session.post("/v1/chat/completions", json=body) as response:
                assert response.status == 200, await response.text()
            return (await pod.page("/decisions"))["decisions"]

        (decision, *_) = await eventually(is_chosen, within_s=60)
        assert decision["endpoint"] == engine.address
        # The second time the sidecar has told what the engine holds.
        await eventually(lambda: _has_hit(is_chosen), within_s=60)

    # What a pool's parts send seldom.
    store = connect(access.url)
    responses = ResponseMap(store, KEYS)
    await responses.put("resp_1", engine.address)
    assert await ResponseMap(store, KEYS).get("resp_1") == engine.address
    await AlarmWriter(store, KEYS).write(Alarm(prefix_class="00000000000000ff"))
    await store.close()
    drain = await asyncio.create_subprocess_exec(
        *map(str, [*sidecar[:3], "drain", *sidecar[3:]]), env={**os.environ, **secret}
    )
    assert await drain.wait() == 0

    async def is_draining() -> bool:
        return not any(row["candidate"] for row in (await pod.page("/state"))["endpoints"])

    await eventually(is_draining, within_s=60)
    assert await refusals(server) == b"*0\r\n", "the store has refused something"

    # The pool's user is gone: as far as the picker can tell the store is away, and that is no reason to end it.
    await manager.drop(pool.key)
    assert user_name(pool.key).encode() not in server.command("ACL", "USERS")

    async def is_cut_off() -> bool:
        return not (await pod.page("/state"))["connected"]

    await eventually(is_cut_off, within_s=60)
    assert await pod.is_alive()
    assert await pod.is_ready()
    await manager.ensure(pool.key)
    await eventually(lambda: _negated(is_cut_off), within_s=60)

    await operator.close()


async def _has_hit(ask: Callable[[], Awaitable[Any]]) -> bool:
    return any(row["hit_tokens"] > 0 for row in (await ask())[0]["endpoints"])


async def _negated(ask: Callable[[], Awaitable[bool]]) -> bool:
    return not await ask()
