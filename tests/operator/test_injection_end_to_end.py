"""From a pod that is created to what the pickers hear: the injected container's own command beside an engine."""

import asyncio
import base64
import contextlib
import json
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from injection_kubelet import POD_IP, Kubelet, process
from injection_pods import engine, pod, sidecar_of
from injection_webhook import Cluster, cluster, eventually
from pool_mirror import PoolMirror
from valkey_server import ValkeyProcess, free_port, running

from trimtab_core.model_card import ModelCard
from trimtab_operator.api.pool import PoolKey
from trimtab_operator.children.names import store_secret_name
from trimtab_operator.kube import SECRETS, Object
from trimtab_state.documents import Heartbeat
from trimtab_state.keys import PoolKeys
from trimtab_state.pool_follower import PoolFollower
from trimtab_state.store import connect

TINY_MODEL = Path(__file__).parents[2] / "lab" / "trimtab_lab" / "data" / "tiny_model"
START_S = 30.0


@pytest.fixture(scope="module")
def server() -> Iterator[ValkeyProcess]:
    with running() as server:
        yield server


@pytest.fixture
async def webhook(kube_config: Path) -> AsyncIterator[Cluster]:
    async with cluster(kube_config) as made:
        await made.start()
        yield made


@contextlib.asynccontextmanager
async def emulated_engine(port: int, folder: Path) -> AsyncIterator[None]:
    words = [sys.executable, "-m", "trimtab_lab.emulator", "--port", str(port), "--host", POD_IP]
    words += ["--kv-events-port", str(free_port()), "--kv-replay-port", str(free_port())]
    async with process(words, {}, folder / "engine.log"):
        async with asyncio.timeout(START_S):
            while True:
                try:
                    _, writer = await asyncio.open_connection(POD_IP, port)
                    break
                except OSError:
                    await asyncio.sleep(0.05)
        writer.close()
        yield


@contextlib.asynccontextmanager
async def followed(url: str, key: PoolKey) -> AsyncIterator[PoolMirror]:
    """What a picker of the pool knows."""
    mirror, store = PoolMirror(), connect(url)
    task = asyncio.create_task(PoolFollower(store, PoolKeys(key.namespace, key.name), mirror).run())
    try:
        yield mirror
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await store.close()


async def give_store(made: Cluster, key: PoolKey, url: str) -> None:
    """The Secret that the operator makes beside a pool."""
    values = {"store-url": url, "secret": made.install.pool_secret(key)}
    body = {
        "metadata": {"name": store_secret_name(key.name), "namespace": key.namespace},
        "data": {name: base64.b64encode(value.encode()).decode() for name, value in values.items()},
    }
    await made.kube.create(SECRETS, body)


SHAPES: dict[str, dict[str, Any]] = {
    "flags": {"args": ["--model", "/models/tiny_model", "--served-model-name", "tiny"]},
    "a shell's script and a ConfigMap": {
        "command": ["sh", "-c"],
        "args": ['exec vllm serve "${ROOT}/$NAME" --served-model-name tiny'],
        "env": [
            {"name": "ROOT", "value": "/models"},
            {"name": "NAME", "valueFrom": {"configMapKeyRef": {"name": "model", "key": "name"}}},
        ],
    },
    "a hub's cache": {
        "args": ["--model", "acme/tiny", "--served-model-name", "tiny"],
        "env": [{"name": "HF_HOME", "value": "/models/hub-home"}],
    },
}


@pytest.mark.parametrize("kind", ["Native", "Container"])
@pytest.mark.parametrize("shape", SHAPES)
async def test_the_injected_container_tells_the_pickers_of_its_engine_and_that_it_goes(
    webhook: Cluster, server: ValkeyProcess, tmp_path: Path, shape: str, kind: str
) -> None:
    port = free_port()
    namespace = await webhook.place(ports=(port,), kind=kind)
    key = PoolKey(namespace, "chat")
    await give_store(webhook, key, server.url)
    from trimtab_operator.kube import CONFIG_MAPS

    names = {"metadata": {"name": "model", "namespace": namespace}, "data": {"name": "tiny_model"}}
    await webhook.kube.create(CONFIG_MAPS, names)
    body = pod(
        engine(port=port, **{"args": [], **SHAPES[shape]}, volumeMounts=[{"name": "models", "mountPath": "/models"}]),
        volumes=[{"name": "models", "hostPath": {"path": "/srv/models"}}],
    )
    body["spec"]["containers"][0]["args"] = SHAPES[shape]["args"]
    await webhook.is_called(namespace, body)
    created = await webhook.create(namespace, body)
    container = sidecar_of(created)

    state, models = tmp_path / "state", tmp_path / "models"
    state.mkdir()
    fill(models)
    folders = {"trimtab-sidecar": state, "trimtab-access": tmp_path / "access", "models": models}
    kubelet = Kubelet(webhook.kube, created, folders)
    await kubelet.mount_secrets()
    words, env = await kubelet.command(container)
    endpoint = f"{POD_IP}:{port}"
    async with emulated_engine(port, tmp_path), followed(server.url, key) as mirror:

        def beat() -> Heartbeat | None:
            return mirror.heartbeats.get(endpoint)

        async def serves() -> Heartbeat | None:
            found = beat()
            return found if found is not None and found.state == "serving" and found.approximate is None else None

        async def drains() -> bool:
            found = beat()
            return found is not None and found.state == "draining"

        async with process(words, env, tmp_path / "sidecar.log") as sidecar:
            found = await eventually(serves, within_s=START_S)
            digest = found.models["tiny"].card
            card = ModelCard.decode(mirror.cards[digest])
            assert card.exact, card.reason
            assert await healthy(container)
            hook, hook_env = await kubelet.pre_stop(container)
            async with process(hook, hook_env, tmp_path / "drain.log") as drain:
                assert await drain.wait() == 0, (tmp_path / "drain.log").read_text()
            await eventually(drains)
            sidecar.send_signal(signal.SIGTERM)
            async with asyncio.timeout(5):
                assert await sidecar.wait() == 0
        log = (tmp_path / "sidecar.log").read_text()
        assert not [line for line in log.splitlines() if json.loads(line)["level"] in ("ERROR", "CRITICAL")], log


async def test_the_hook_tells_the_store_itself_where_the_sidecar_is_gone(
    webhook: Cluster, server: ValkeyProcess, tmp_path: Path
) -> None:
    port = free_port()
    namespace = await webhook.place(ports=(port,))
    key = PoolKey(namespace, "chat")
    await give_store(webhook, key, server.url)
    body = pod(engine("--model", "/models/tiny_model", port=port))
    await webhook.is_called(namespace, body)
    created = await webhook.create(namespace, body)
    container = sidecar_of(created)
    state = tmp_path / "state"
    state.mkdir()
    kubelet = Kubelet(webhook.kube, created, {"trimtab-sidecar": state, "trimtab-access": tmp_path / "access"})
    await kubelet.mount_secrets()
    words, env = await kubelet.command(container)
    async with emulated_engine(port, tmp_path), followed(server.url, key) as mirror:

        async def state_is(state: str) -> bool:
            found = mirror.heartbeats.get(f"{POD_IP}:{port}")
            return found is not None and found.state == state

        async with process(words, env, tmp_path / "sidecar.log") as sidecar:
            await eventually(lambda: state_is("serving"), within_s=START_S)
            sidecar.kill()
            await sidecar.wait()
        hook, hook_env = await kubelet.pre_stop(container)
        async with process(hook, hook_env, tmp_path / "drain.log") as drain:
            assert await drain.wait() == 0, (tmp_path / "drain.log").read_text()
        await eventually(lambda: state_is("draining"))


async def test_a_pod_that_starts_before_its_pools_secret_serves_and_is_heard_of_once_that_is_there(
    webhook: Cluster, server: ValkeyProcess, tmp_path: Path
) -> None:
    port = free_port()
    namespace = await webhook.place(ports=(port,))
    key = PoolKey(namespace, "chat")
    body = pod(engine("--model", "/models/tiny_model", port=port))
    await webhook.is_called(namespace, body)
    created = await webhook.create(namespace, body)
    state = tmp_path / "state"
    state.mkdir()
    kubelet = Kubelet(webhook.kube, created, {"trimtab-sidecar": state, "trimtab-access": tmp_path / "access"})
    await kubelet.mount_secrets()
    container = sidecar_of(created)
    words, env = await kubelet.command(container)
    log = tmp_path / "sidecar.log"
    async with emulated_engine(port, tmp_path), process(words, env, log) as sidecar:

        async def is_waiting() -> bool:
            return "waiting for the pool's Secret" in log.read_text() and await healthy(container)

        await eventually(is_waiting, within_s=START_S)
        await give_store(webhook, key, server.url)
        await kubelet.mount_secrets()
        async with followed(server.url, key) as mirror:

            async def serves() -> bool:
                found = mirror.heartbeats.get(f"{POD_IP}:{port}")
                return found is not None and found.state == "serving"

            await eventually(serves, within_s=START_S)
        assert sidecar.returncode is None


async def healthy(container: Object) -> bool:
    """What the liveness probe would hear."""
    import aiohttp

    probe = container["livenessProbe"]["httpGet"]
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://{POD_IP}:{probe['port']}{probe['path']}") as response,
    ):
        return response.status == 200


def fill(models: Path) -> None:
    """The model as a folder, and in a hub's cache as an engine leaves it."""
    models.mkdir()
    (models / "tiny_model").symlink_to(TINY_MODEL)
    repository = models / "hub-home" / "hub" / "models--acme--tiny"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc")
    (repository / "snapshots").mkdir()
    (repository / "snapshots" / "abc").symlink_to(TINY_MODEL)
