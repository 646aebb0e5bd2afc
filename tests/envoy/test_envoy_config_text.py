"""What the configuration says, without running it; and Envoy's own verdict on it."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import envoy
import pytest

from trimtab_operator.envoy.config import bootstrap_json
from trimtab_operator.envoy.front import DnsHosts, EnvoyFront, FrontError, Hosts, StaticHosts, parse_socket

ENVOY = Path(envoy.__file__).parent / "_bin" / "envoy"
FRONT = EnvoyFront(listen_port=10000, admin_port=10001)
STATIC = StaticHosts(addresses=("127.0.0.1:8000", "[::1]:8001/3"))
DNS = DnsHosts(name="pool.team.svc.cluster.local", ports=(8000, 8001))
PICKERS = StaticHosts(addresses=("127.0.0.1:9002", "127.0.0.1:9012"))
EVERYTHING = replace(
    FRONT,
    stats_port=10002,
    access_log=True,
    show_endpoint=True,
    picker_tls=True,
    picker_health_port=9003,
    pool_http2=True,
    fail_open=False,
)


@pytest.mark.parametrize("front", [FRONT, EVERYTHING], ids=["defaults", "everything set"])
@pytest.mark.parametrize("pool", [STATIC, DNS], ids=["static", "dns"])
@pytest.mark.parametrize(
    "pickers", [PICKERS, DnsHosts(name="picker.svc", ports=(9002,)), None], ids=["two", "dns", "none"]
)
def test_the_real_envoy_accepts_the_configuration(
    front: EnvoyFront, pool: Hosts, pickers: Hosts | None, tmp_path: Path
) -> None:
    path = tmp_path / "bootstrap.json"
    path.write_text(bootstrap_json(front, pool=pool, pickers=pickers))
    done = subprocess.run(
        [ENVOY, "--mode", "validate", "-l", "warning", "-c", path], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "eprecated" not in done.stderr


def test_the_same_input_gives_the_same_text() -> None:
    first = bootstrap_json(EVERYTHING, pool=STATIC, pickers=PICKERS)
    assert first == bootstrap_json(EVERYTHING, pool=STATIC, pickers=PICKERS)


def test_without_pickers_nothing_of_them_is_left() -> None:
    text = bootstrap_json(FRONT, pool=STATIC, pickers=None)
    assert "ext_proc" not in text
    assert "override_host" not in text
    assert [c["name"] for c in json.loads(text)["staticResources"]["clusters"]] == ["pool"]


def test_the_admin_api_is_on_loopback_even_when_the_listener_is_not() -> None:
    front = replace(FRONT, listen_address="0.0.0.0", stats_port=10002)
    document = json.loads(bootstrap_json(front, pool=STATIC, pickers=PICKERS))
    assert document["admin"]["address"]["socketAddress"]["address"] == "127.0.0.1"


def test_ranks_of_one_pod_are_one_host() -> None:
    hosts = StaticHosts(addresses=("10.0.0.1:8000/0", "10.0.0.1:8000/1", "10.0.0.1:8001"))
    assert hosts.sockets() == (("10.0.0.1", 8000), ("10.0.0.1", 8001))


@pytest.mark.parametrize(
    ("address", "expected"),
    [("10.0.0.1:80", ("10.0.0.1", 80)), ("[fe80::1]:80/7", ("fe80::1", 80)), ("127.0.0.1:65535", ("127.0.0.1", 65535))],
)
def test_addresses_are_read(address: str, expected: tuple[str, int]) -> None:
    assert parse_socket(address) == expected


@pytest.mark.parametrize("address", ["pod:80", "10.0.0.1", "10.0.0.1:0", "10.0.0.1:99999", "10.0.0.1:x", ""])
def test_what_is_no_address_is_refused_by_name(address: str) -> None:
    with pytest.raises(FrontError, match=address or "''"):
        parse_socket(address)


def test_settings_without_sense_are_refused() -> None:
    with pytest.raises(FrontError, match="listen_port"):
        replace(FRONT, listen_port=0)
    with pytest.raises(FrontError, match="timeouts"):
        replace(FRONT, message_timeout_s=0)
    with pytest.raises(FrontError, match="at least one port"):
        DnsHosts(name="x", ports=())
