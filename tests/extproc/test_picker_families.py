"""A picker that is told of no address is reached over both families: kubelets and gateways take the cluster's own."""

import os
import socket

import pytest
from live_picker import LivePicker, picker_settings
from valkey_server import running

from trimtab.probes import free_ports
from trimtab_extproc.settings import parse_settings

needs_v6 = pytest.mark.skipif(
    not socket.has_dualstack_ipv6() and not os.environ.get("CI"), reason="this machine has no IPv6"
)


def bind_of(*words: str) -> str:
    return parse_settings(["--pool-name=chat", "--store=redis://store", *words], {"TRIMTAB_SECRET": "s"}).bind


def test_an_address_that_is_given_holds() -> None:
    assert bind_of("--bind=10.0.0.1") == "10.0.0.1"


@pytest.mark.parametrize(("has_v6", "expected"), [(True, "::"), (False, "0.0.0.0")])
def test_all_addresses_are_those_that_the_machine_can_have(
    monkeypatch: pytest.MonkeyPatch, has_v6: bool, expected: str
) -> None:
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: has_v6)
    assert bind_of() == bind_of("--bind=") == expected


@needs_v6
async def test_all_three_ports_answer_over_both_families(each_front: str) -> None:
    grpc, health, metrics = free_ports(3)
    ports = {"grpc_port": grpc, "grpc_health_port": health, "metrics_port": metrics}
    with running() as server:
        async with LivePicker(picker_settings(server.url, bind="::", front=each_front, **ports)):
            for host in ("127.0.0.1", "::1"):
                for port in (grpc, health, metrics):
                    with socket.create_connection((host, port), timeout=5):
                        pass
