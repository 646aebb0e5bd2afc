"""The webhook's own process: started, ready, asked by a real API server, and told to stop."""

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
from injection_kubelet import process
from injection_pods import engine, pod
from injection_webhook import Cluster, cluster, eventually, has_sidecar
from valkey_server import free_port


@contextlib.asynccontextmanager
async def webhook_process(made: Cluster, log: Path, health_port: int) -> AsyncIterator[asyncio.subprocess.Process]:
    words = [sys.executable, "-m", "trimtab_operator", "webhook", "--kubeconfig", str(made.kube_config)]
    words += ["--operator-namespace", made.install.namespace, "--bind", "127.0.0.1"]
    words += ["--webhook-port", str(made.port), "--metrics-port", str(health_port)]
    async with process(words, {}, log) as started:
        yield started


async def is_ready(port: int) -> bool:
    try:
        async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}/readyz") as response:
            return response.status == 200
    except aiohttp.ClientError:
        return False


async def test_a_process_serves_until_it_is_told_to_stop_and_then_a_little_longer(
    kube_config: Path, tmp_path: Path
) -> None:
    async with cluster(kube_config) as made:
        namespace = await made.namespace()
        await made.pool(namespace)
        await made.policy(namespace)
        port = free_port()
        async with webhook_process(made, tmp_path / "log", port) as started:
            await eventually(lambda: is_ready(port))
            await made.is_called(namespace, pod(engine("--model", "m")))
            started.send_signal(signal.SIGTERM)

            async def leaves() -> bool:
                return not await is_ready(port)

            await eventually(leaves)
            assert has_sidecar(await made.create(namespace, pod(engine("--model", "m"))))
            async with asyncio.timeout(20):
                assert await started.wait() == 0, (tmp_path / "log").read_text()
        assert not has_sidecar(await made.create(namespace, pod(engine("--model", "m"))))
