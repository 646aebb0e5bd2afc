"""A real Envoy in front of toy upstreams, with the picker under test as its external processor."""

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

import aiohttp
import envoy
from waiting import until

from trimtab_operator.envoy.config import bootstrap_json
from trimtab_operator.envoy.front import EnvoyFront, StaticHosts

BINARY = Path(envoy.__file__).parent / "_bin" / "envoy"
TYPE = "type.googleapis.com/envoy."
BODY_BYTES_MAX = 64 << 20


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


OURS = "OURS"
"""In place of a mode: the configuration that the operator makes."""


def processing_mode(mode: str) -> dict[str, str]:
    """As gateways set it: everything streamed both ways; or buffered, no response bodies."""
    is_duplex = mode == "FULL_DUPLEX_STREAMED"
    return {
        "request_header_mode": "SEND",
        "response_header_mode": "SEND",
        "request_body_mode": mode,
        "response_body_mode": "FULL_DUPLEX_STREAMED" if is_duplex else "NONE",
        "request_trailer_mode": "SEND" if is_duplex else "SKIP",
        "response_trailer_mode": "SEND",
    }


def front_config(
    *,
    listen_port: int,
    admin_port: int,
    picker_port: int,
    upstreams: list[str],
    mode: str,
    is_mode_override_allowed: bool = False,
    subset: list[str] | None = None,
    is_picker_tls: bool = False,
    is_failure_allowed: bool = False,
    is_retrying: bool = True,
) -> dict[str, Any]:
    """The bootstrap. `subset`: what a gateway's metadata allows."""
    if mode == OURS:
        front = EnvoyFront(
            listen_port=listen_port, admin_port=admin_port, picker_tls=is_picker_tls, fail_open=is_failure_allowed,
            body_bytes_max=BODY_BYTES_MAX, message_timeout_s=10.0, retries_max=2 if is_retrying else 0,
        )  # fmt: skip
        hosts, pickers = StaticHosts(addresses=tuple(upstreams)), StaticHosts(addresses=(f"127.0.0.1:{picker_port}",))
        ours: dict[str, Any] = json.loads(bootstrap_json(front, pool=hosts, pickers=pickers))
        if subset is not None:
            manager = ours["staticResources"]["listeners"][0]["filterChains"][0]["filters"][0]["typedConfig"]
            manager["httpFilters"].insert(0, _subset_filter(subset))
        return ours
    ext_proc: dict[str, Any] = {
        "@type": TYPE + "extensions.filters.http.ext_proc.v3.ExternalProcessor",
        "grpc_service": {"envoy_grpc": {"cluster_name": "picker"}},
        "message_timeout": "10s",
        "failure_mode_allow": is_failure_allowed,
        "processing_mode": processing_mode(mode),
        "allow_mode_override": is_mode_override_allowed,
        "response_attributes": ["upstream.address"],
        "metadata_options": {
            "forwarding_namespaces": {"untyped": ["envoy.lb", "envoy.lb.subset_hint"]},
            "receiving_namespaces": {"untyped": ["envoy.lb"]},
        },
    }
    filters: list[dict[str, Any]] = [
        {"name": "envoy.filters.http.ext_proc", "typed_config": ext_proc},
        {
            "name": "envoy.filters.http.router",
            "typed_config": {"@type": TYPE + "extensions.filters.http.router.v3.Router"},
        },
    ]
    if subset is not None:
        filters.insert(0, _subset_filter(subset))
    retry_policy = {"retry_on": "connect-failure", "num_retries": 2}
    manager = {
        "@type": TYPE + "extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "front",
        "http_protocol_options": {"enable_trailers": True},
        "route_config": {
            "virtual_hosts": [
                {
                    "name": "pool",
                    "domains": ["*"],
                    "routes": [
                        {
                            "match": {"prefix": "/"},
                            "route": {
                                "cluster": "pool",
                                "timeout": "0s",
                                **({"retry_policy": retry_policy} if is_retrying else {}),
                            },
                        }
                    ],
                }
            ]
        },
        "http_filters": filters,
    }
    round_robin = {
        "typed_extension_config": {
            "name": "round_robin",
            "typed_config": {"@type": TYPE + "extensions.load_balancing_policies.round_robin.v3.RoundRobin"},
        }
    }
    override = {
        "@type": TYPE + "extensions.load_balancing_policies.override_host.v3.OverrideHost",
        "override_host_sources": [
            {"metadata": {"key": "envoy.lb", "path": [{"key": "x-gateway-destination-endpoint"}]}},
            {"header": "x-gateway-destination-endpoint"},
        ],
        "fallback_policy": {"policies": [round_robin]},
    }
    limits = {"thresholds": [{"max_connections": 9999, "max_pending_requests": 9999, "max_requests": 9999}]}
    http2 = {
        "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
            "@type": TYPE + "extensions.upstreams.http.v3.HttpProtocolOptions",
            "explicit_http_config": {"http2_protocol_options": {}},
        }
    }
    picker: dict[str, Any] = {
        "name": "picker",
        "type": "STATIC",
        "circuit_breakers": limits,
        "typed_extension_protocol_options": http2,
        "load_assignment": _assignment("picker", [f"127.0.0.1:{picker_port}"]),
    }
    if is_picker_tls:
        tls = {
            "@type": TYPE + "extensions.transport_sockets.tls.v3.UpstreamTlsContext",
            "common_tls_context": {"alpn_protocols": ["h2"]},
        }
        picker["transport_socket"] = {"name": "envoy.transport_sockets.tls", "typed_config": tls}
    return {
        "admin": {"address": _address("127.0.0.1", admin_port)},
        "static_resources": {
            "listeners": [
                {
                    "name": "front",
                    "address": _address("127.0.0.1", listen_port),
                    "per_connection_buffer_limit_bytes": BODY_BYTES_MAX,
                    "filter_chains": [{"filters": [{"name": "http", "typed_config": manager}]}],
                }
            ],
            "clusters": [
                {
                    "name": "pool",
                    "type": "STATIC",
                    "circuit_breakers": limits,
                    "load_balancing_policy": {
                        "policies": [{"typed_extension_config": {"name": "override_host", "typed_config": override}}]
                    },
                    "load_assignment": _assignment("pool", upstreams),
                },
                picker,
            ],
        },
    }


def _subset_filter(subset: list[str]) -> dict[str, Any]:
    """A filter that does what a gateway's own metadata would."""
    value = {"x-gateway-destination-endpoint-subset": subset}
    config = {
        "@type": TYPE + "extensions.filters.http.set_metadata.v3.Config",
        "metadata": [{"metadata_namespace": "envoy.lb.subset_hint", "value": value}],
    }
    return {"name": "envoy.filters.http.set_metadata", "typed_config": config}


def _address(host: str, port: int) -> dict[str, Any]:
    return {"socket_address": {"address": host, "port_value": port}}


def _assignment(name: str, addresses: list[str]) -> dict[str, Any]:
    hosts = [address.rsplit(":", 1) for address in addresses]
    endpoints = [{"endpoint": {"address": _address(host, int(port))}} for host, port in hosts]
    return {"cluster_name": name, "endpoints": [{"lb_endpoints": endpoints}]}


class FrontEnvoy:
    """One Envoy process."""

    def __init__(self, directory: Path, **options: Any) -> None:
        self.listen_port, self.admin_port = free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.listen_port}"
        self._directory = directory
        self._config = front_config(listen_port=self.listen_port, admin_port=self.admin_port, **options)
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Until it takes requests."""
        config, output = self._directory / "front.json", self._directory / "front.log"
        config.write_text(json.dumps(self._config))
        with output.open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                BINARY, "-c", config, "--concurrency", "1", "--use-dynamic-base-id", "-l", "warning",
                stdout=log, stderr=log,
            )  # fmt: skip
        async with aiohttp.ClientSession() as session:

            async def is_ready() -> bool:
                assert self._process is not None
                assert self._process.returncode is None, output.read_text()[-4000:]
                try:
                    async with session.get(f"http://127.0.0.1:{self.admin_port}/ready") as response:
                        return response.status == 200
                except aiohttp.ClientConnectionError:
                    return False

            await until(is_ready, "Envoy is ready")

    async def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            await self._process.wait()
            self._process = None
