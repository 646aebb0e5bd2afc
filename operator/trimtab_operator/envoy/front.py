"""What can be set on the Envoy in front of one pool, and where its pool and its pickers are.

Its one rule: plain frozen values, checked when they are made; `envoy_config` turns them into Envoy's own objects.
It must not know Envoy's configuration language, Kubernetes or the network.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Final

BODY_BYTES_MAX: Final = 32 * 1024 * 1024
"""Default bound of one request body: 32 MiB, some eight million tokens of text. Above it the client gets 413."""

CONNECTION_BUFFER_BYTES: Final = 1024 * 1024
"""Flow-control window of a connection: above it Envoy stops reading until the other side has taken some."""


class FrontError(ValueError):
    """A setting or an address that cannot be used: fix the value that it names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticHosts:
    """A fixed list of addresses, `ip:port` or `[ipv6]:port`. A rank (`/3`) is dropped: ranks share their pod's port."""

    addresses: tuple[str, ...]

    def sockets(self) -> tuple[tuple[str, int], ...]:
        """(ip, port) pairs in order, each once. Raises FrontError for an address that is not one."""
        return tuple(dict.fromkeys(parse_socket(address) for address in self.addresses))


@dataclass(frozen=True, slots=True, kw_only=True)
class DnsHosts:
    """Every address behind a DNS name, as of a headless Service; each port of each address is a host of its own."""

    name: str
    ports: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.name or not self.ports:
            raise FrontError("a DNS cluster needs a name and at least one port")


Hosts = StaticHosts | DnsHosts


def parse_socket(address: str) -> tuple[str, int]:
    """`10.0.0.1:8000`, `[::1]:8000` or either with a `/rank` -> (ip, port). Raises FrontError otherwise."""
    host, _, port_text = address.split("/", 1)[0].rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    try:
        ip = ipaddress.ip_address(host)
        port = int(port_text)
    except ValueError as error:
        raise FrontError(f"not an ip:port address: {address!r}") from error
    if not 0 < port < 65536:
        raise FrontError(f"port out of range: {address!r}")
    return str(ip), port


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvoyFront:
    """Settings of one Envoy. Times in seconds, sizes in bytes."""

    listen_port: int
    """Where clients connect."""
    listen_address: str = "127.0.0.1"
    """`::` takes connections over IPv4 as well."""
    admin_port: int
    """Envoy's admin API; always on loopback, because it can change and stop the process."""
    stats_port: int | None = None
    """A second listener with only /ready and /stats/prometheus, for probes and scrapers. None: not opened."""
    fail_open: bool = True
    """A picker that is down or too slow costs the good choice, not the request. False: such a request gets 5xx."""
    message_timeout_s: float = 1.0
    """How long one answer of a picker may take; a picker needs some milliseconds. After it, `fail_open` decides."""
    shown_headers: tuple[str, ...] = ()
    """Request headers, in lower case, by which the pickers decide besides those that they are always told of."""
    picker_health_port: int | None = None
    """Port of the picker's gRPC health service where it is not the picker's own port."""
    picker_health_service: str = "envoy.service.ext_proc.v3.ExternalProcessor"
    """Name that the health check asks for; SERVING means ready to choose."""
    picker_tls: bool = False
    """Speak TLS to the pickers. Their certificate is self-signed, so it is not verified."""
    pool_http2: bool = False
    """The engines speak cleartext HTTP/2 (`appProtocol: kubernetes.io/h2c`)."""
    body_bytes_max: int = BODY_BYTES_MAX
    """Largest request body; all of it is held until the picker has chosen. Above: 413, also when failing open."""
    upload_timeout_s: float = 300.0
    """How long a client may take to send its request. Answers have no time limit: a stream may live for hours."""
    connect_timeout_s: float = 1.0
    """How long a TCP connection to an engine or a picker may take before the next one is tried."""
    retries_max: int = 2
    """Further endpoints to try when one refuses, resets or answers 503 before its response has begun."""
    streams_max: int = 100_000
    """Concurrent requests to the pool and to the pickers, each. Above: 503 (pool), or no good choice (pickers)."""
    downstream_connections_max: int = 50_000
    """Client connections. Above: new ones are closed at once."""
    access_log: bool = False
    """One JSON line per request on standard output, with the endpoint that served it."""
    show_endpoint: bool = False
    """Add `x-trimtab-endpoint` to responses. It tells clients addresses inside the cluster: for demos and tests."""

    def __post_init__(self) -> None:
        for name in ("listen_port", "admin_port"):
            if not 0 < getattr(self, name) < 65536:
                raise FrontError(f"{name} out of range: {getattr(self, name)}")
        if self.retries_max < 0 or self.body_bytes_max < 1 or self.streams_max < 1:
            raise FrontError("retries_max, body_bytes_max and streams_max must not be negative or zero")
        if min(self.message_timeout_s, self.upload_timeout_s, self.connect_timeout_s) <= 0:
            raise FrontError("timeouts must be above zero")
