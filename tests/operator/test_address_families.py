"""Clusters whose own family is IPv6: what listens in pods is reached over it, and over IPv4 all the same."""

import asyncio
import os
import socket
import subprocess
import sys
from pathlib import Path

import aiohttp
import envoy
import pytest
from child_objects import ACCESS, container, install, named, on_this_machine, policy, pool
from control_plane import free_ports
from prometheus_client import CollectorRegistry
from waiting_on import eventually

from trimtab.probes import http_ok
from trimtab.processes import Supervisor
from trimtab_operator.children.desired import desired
from trimtab_operator.health import Health
from trimtab_operator.kube import Object
from trimtab_operator.listening import ListenError
from trimtab_operator.settings import install_of, parse_settings

needs_v6 = pytest.mark.skipif(
    not socket.has_dualstack_ipv6() and not os.environ.get("CI"), reason="this machine has no IPv6"
)


def bodies(address: str) -> list[Object]:
    return desired(pool(), policy({"picker": {"tls": False}}), install(listen_address=address), ACCESS)


@pytest.mark.parametrize(
    ("host", "expected"),
    [("10.96.0.1", "0.0.0.0"), ("fd00:10::1", "::"), ("[fd00::1]", "::"), ("api.example", "0.0.0.0"), ("", "0.0.0.0")],
)
def test_the_family_is_that_of_the_api_servers_own_service(host: str, expected: str) -> None:
    environment = {"TRIMTAB_STORE": "redis://store", "POD_NAMESPACE": "x", "KUBERNETES_SERVICE_HOST": host}
    assert install_of(parse_settings([], environment), b"secret").listen_address == expected


@needs_v6
async def test_an_envoy_of_an_ipv6_cluster_answers_over_both_families(tmp_path: Path) -> None:
    found = bodies("::")
    config = tmp_path / "envoy.json"
    ports = dict(zip((8080, 9901, 9902), free_ports(3), strict=True))
    config.write_text(on_this_machine(named(found, "ConfigMap", "trimtab-chat-envoy")["data"]["envoy.json"], ports))
    binary = Path(envoy.__file__).parent / "_bin" / "envoy"
    args = container(named(found, "Deployment", "trimtab-chat-envoy"))["args"]
    words = [str(config) if word.endswith("envoy.json") else word for word in args]
    async with Supervisor(log_dir=tmp_path) as supervisor, aiohttp.ClientSession() as session:
        await supervisor.start("envoy", [binary, *words], ready=http_ok(f"http://127.0.0.1:{ports[9902]}/ready"))
        for host in ("127.0.0.1", "[::1]"):
            async with session.get(f"http://{host}:{ports[9902]}/ready") as response:
                assert response.status == 200, host
            async with session.get(f"http://{host}:{ports[8080]}/v1/models") as response:
                assert response.status == 503, "there are no engines"


@needs_v6
async def test_the_companion_of_an_envoy_listens_on_an_ipv6_pods_address() -> None:
    (port,) = free_ports(1)
    words = ["-m", "trimtab_operator.envoy.drain", "serve", "--bind=::1", f"--port={port}"]
    process = await asyncio.create_subprocess_exec(sys.executable, *words)
    try:
        async with aiohttp.ClientSession() as session:

            async def answer() -> str:
                try:
                    async with session.get(f"http://[::1]:{port}/healthz") as response:
                        return await response.text()
                except aiohttp.ClientError:
                    assert process.returncode is None, "it has ended"
                    return ""

            assert await eventually(answer) == "alive\n"
        process.terminate()
        assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_a_companion_whose_port_is_taken_names_the_flag() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        words = ["-m", "trimtab_operator.envoy.drain", "serve", "--bind=127.0.0.1", f"--port={port}"]
        process = await asyncio.create_subprocess_exec(sys.executable, *words, stderr=asyncio.subprocess.PIPE)
        _, said = await process.communicate()
    assert process.returncode == 1
    assert f"--port {port}: ".encode() in said
    assert b"Traceback" not in said


@needs_v6
async def test_the_operators_own_page_answers_over_both_families() -> None:
    health = Health(age_s=lambda: 0.0, waits_for=lambda: "", registry=CollectorRegistry())
    (port,) = free_ports(1)
    async with health.served(None, port), aiohttp.ClientSession() as session:
        for host in ("127.0.0.1", "[::1]"):
            async with session.get(f"http://{host}:{port}/healthz") as response:
                assert response.status == 200


@pytest.mark.parametrize(("bind", "flag"), [("127.0.0.1", "--metrics-port"), ("192.0.2.1", "--bind")])
async def test_a_port_or_an_address_that_cannot_be_had_is_told_by_its_flag(bind: str, flag: str) -> None:
    health = Health(age_s=lambda: 0.0, waits_for=lambda: "", registry=CollectorRegistry())
    said = f"^{flag}: cannot listen: .*; give another one$"
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ListenError, match=said):
        async with health.served(bind, taken.getsockname()[1]):
            pass


def test_an_operator_and_a_webhook_whose_ports_are_taken_name_the_flag(kube_config: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for command, flag in (("run", "--metrics-port"), ("webhook", "--metrics-port"), ("webhook", "--webhook-port")):
            words = [sys.executable, "-m", "trimtab_operator", command, "--kubeconfig", str(kube_config)]
            words += ["--operator-namespace", "default", "--store", "redis://127.0.0.1:1", "--bind", "127.0.0.1"]
            ports = {"--metrics-port": "0", "--webhook-port": "0", flag: str(port)}
            words += [word for pair in ports.items() for word in pair]
            ran = subprocess.run(words, capture_output=True, text=True, timeout=60)
            assert ran.returncode == 1
            assert f"ending: {flag}: cannot listen: " in ran.stderr
            assert "Traceback" not in ran.stderr
