"""What can be set about the process: flags and environment, parsed once into one frozen object.

The one rule: nothing else reads flags or the environment. Flags of other endpoint pickers that mean nothing here are
refused by name, with what to do instead.
"""

import argparse
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from trimtab_extproc.errors import ConfigError
from trimtab_state import ConfigError as StateConfigError
from trimtab_state.store_url import parse_store_url

_ONE_DASH = re.compile(r"-[a-zA-Z][a-zA-Z-]")
FRONTS = ("auto", "native", "grpcio")
LOG_LEVELS = ("debug", "info", "warning", "error")

FOREIGN_FLAGS: Mapping[str, str] = {
    "config-file": "there are no plugins to configure; a SchedulingPolicy sets what can be set",
    "config-text": "there are no plugins to configure; a SchedulingPolicy sets what can be set",
    "pool-group": "only inference.networking.k8s.io pools are served; leave it out",
    "endpoint-selector": "endpoints come from the pool by way of the operator; leave it out",
    "endpoint-target-ports": "endpoints come from the pool by way of the operator; leave it out",
    "total-queued-requests-metric": "engine metrics are read by the sidecar; leave it out",
    "total-running-requests-metric": "engine metrics are read by the sidecar; leave it out",
    "kv-cache-usage-percentage-metric": "engine metrics are read by the sidecar; leave it out",
    "lora-info-metric": "LoRA adapters are told by the sidecar; leave it out",
    "cache-info-metric": "the block size is told by the sidecar; leave it out",
    "refresh-metrics-interval": "engines are not scraped from here; leave it out",
    "refresh-prometheus-metrics-interval": "metrics are made when they are asked for; leave it out",
    "metrics-staleness-threshold": "heartbeats have a time to live of their own; leave it out",
    "model-server-metrics-port": "engines are not scraped from here; leave it out",
    "model-server-metrics-path": "engines are not scraped from here; leave it out",
    "model-server-metrics-scheme": "engines are not scraped from here; leave it out",
    "model-server-metrics-https-insecure-skip-verify": "engines are not scraped from here; leave it out",
    "ha-enable-leader-election": "replicas share their state and all serve; leave it out",
    "enable-pprof": "leave it out",
    "tracing": "leave it out",
    "health-checking": "health is always served, on both ports; leave it out",
    "metrics-endpoint-auth": "protect the metrics port with a NetworkPolicy; leave it out",
    "zap-encoder": "logs are always JSON; leave it out",
    "zap-log-level": "use --log-level",
    "v": "use --log-level debug",
}
RENAMED_FLAGS: Mapping[str, str] = {
    "poolname": "pool-name",
    "poolnamespace": "pool-namespace",
    "grpcport": "grpc-port",
    "grpchealthport": "grpc-health-port",
    "metricsport": "metrics-port",
    "secureserving": "secure-serving",
    "certpath": "cert-path",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One process."""

    pool_name: str
    """The InferencePool's name."""
    pool_namespace: str
    """Its namespace. Default `default`."""
    store_url: str
    """The shared state: a Redis URL (`redis://`, `rediss://`, `unix://`, `redis+sentinel://`, `redis+cluster://`)."""
    secret: bytes
    """The install's secret, which keys the hashes of prompts. The same in all processes."""
    bind: str = "0.0.0.0"
    """Address of the three ports; `::` takes IPv4 as well. Without the flag: all of both families, as far as the
    machine has them."""
    grpc_port: int = 9002
    """ext_proc. 0: any free port; which one is in the log."""
    grpc_health_port: int = 9003
    """gRPC health, always in plaintext, for kubelets."""
    metrics_port: int = 9090
    """HTTP: /metrics, /decisions, /state, /healthz."""
    is_secure_serving: bool = True
    """TLS on the ext_proc port, as gateways expect. Default: true."""
    cert_path: Path | None = None
    """A folder with tls.crt and tls.key; none: a self-signed certificate."""
    is_mode_override_allowed: bool = False
    """The gateway's ext_proc filter has allow_mode_override. Default: false."""
    is_route_cache_cleared: bool = False
    """Ask for a new route after the choice. Default: false."""
    is_conformance_test: bool = False
    """Obey the header `test-epp-endpoint-selection`. For conformance tests only: clients choose their endpoint then."""
    body_bytes_max: int = 64 << 20
    """The largest request body; a larger one gets 413. Default: 64 MiB."""
    bodies_bytes_max: int = 512 << 20
    """All request bodies together that are held until their ends have come; beyond it, 429. Default: 512 MiB."""
    exchanges_max: int = 16_384
    """HTTP exchanges in flight at once; more are left to the gateway's failureMode."""
    drain_delay_s: float = 1.0
    """After SIGTERM: how long new streams are still served while gateways notice NOT_SERVING."""
    drain_timeout_s: float = 60.0
    """After that: how long streams in flight may take to finish before they are cut."""
    front: str = "auto"
    """The gRPC server: auto (native where it is built) | native | grpcio."""
    log_level: str = "info"
    """debug | info | warning | error."""


def parse_settings(arguments: Sequence[str], environment: Mapping[str, str]) -> Settings:
    """The settings of a command line. Raises ConfigError; `--help` prints and exits."""
    # Go's flags may have one dash as well as two.
    arguments = [f"-{argument}" if _ONE_DASH.match(argument) else argument for argument in arguments]
    _refuse_foreign(arguments)
    options = _parser().parse_args(arguments)
    store_url = options.store or environment.get("TRIMTAB_STORE", "")
    if not store_url:
        raise ConfigError("--store (or TRIMTAB_STORE) is missing: the shared state's URL")
    try:
        parse_store_url(store_url)
    except StateConfigError as error:
        raise ConfigError(f"--store (or TRIMTAB_STORE): {error}") from error
    if not options.pool_name:
        raise ConfigError("--pool-name is missing")
    return Settings(
        pool_name=options.pool_name,
        pool_namespace=options.pool_namespace,
        store_url=store_url,
        secret=_secret(options.secret_file, environment),
        bind=options.bind or _everywhere(),
        grpc_port=options.grpc_port,
        grpc_health_port=options.grpc_health_port,
        metrics_port=options.metrics_port,
        is_secure_serving=options.secure_serving,
        cert_path=options.cert_path,
        is_mode_override_allowed=options.allow_mode_override,
        is_route_cache_cleared=options.clear_route_cache,
        is_conformance_test=options.conformance_test_mode,
        body_bytes_max=options.body_bytes_max,
        bodies_bytes_max=options.bodies_bytes_max,
        exchanges_max=options.exchanges_max,
        drain_delay_s=options.drain_delay,
        drain_timeout_s=options.drain_timeout,
        front=_front(options.front or environment.get("TRIMTAB_FRONT", "") or FRONTS[0]),
        log_level=options.log_level,
    )


class _Parser(argparse.ArgumentParser):
    """Errors are ConfigErrors, which the caller reports."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}. See {self.prog} --help")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="trimtab-extproc",
        description="Trimtab's endpoint picker: an Envoy external processor.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--pool-name", default="", help="name of the InferencePool")
    add("--pool-namespace", default="default", help="its namespace (default: default)")
    add("--store", default="", metavar="URL", help="the shared state's URL [TRIMTAB_STORE]")
    add("--secret-file", type=Path, metavar="FILE", help="file with the install's secret [TRIMTAB_SECRET: the secret]")
    add("--bind", default="", metavar="ADDRESS", help="address to listen on (default: all, of IPv4 and IPv6)")
    add("--grpc-port", type=_port, default=9002, help="ext_proc (default: 9002)")
    add("--grpc-health-port", type=_port, default=9003, help="gRPC health (default: 9003)")
    add("--metrics-port", type=_port, default=9090, help="HTTP /metrics, /decisions, /state (default: 9090)")
    _add_switch(parser, "--secure-serving", default=True, text="TLS on the ext_proc port")
    add("--cert-path", type=Path, metavar="DIR", help="folder with tls.crt and tls.key (default: self-signed)")
    _add_switch(parser, "--allow-mode-override", default=False, text="the gateway allows mode_override: use it")
    _add_switch(parser, "--clear-route-cache", default=False, text="ask for a new route after the choice")
    _add_switch(parser, "--conformance-test-mode", default=False, text="clients may choose endpoints: tests only")
    add("--body-bytes-max", type=_positive, default=64 << 20, help="largest request body (default: 64 MiB)")
    add("--bodies-bytes-max", type=_positive, default=512 << 20, help="all bodies held at once (default: 512 MiB)")
    add("--exchanges-max", type=_positive, default=16_384, help="exchanges in flight at once (default: 16384)")
    add("--drain-delay", type=_seconds, default=1.0, metavar="S", help="seconds to serve on after SIGTERM (default: 1)")
    add("--drain-timeout", type=_seconds, default=60.0, metavar="S", help="seconds for streams to finish (default: 60)")
    add("--front", default="", metavar="|".join(FRONTS), help="gRPC server (default: auto) [TRIMTAB_FRONT]")
    add("--log-level", type=str.lower, choices=LOG_LEVELS, default="info", help="default: info")
    return parser


def _add_switch(parser: argparse.ArgumentParser, flag: str, *, default: bool, text: str) -> None:
    """`--flag`, `--flag=true` and `--flag=false`, as in Go."""
    parser.add_argument(
        flag,
        type=_boolean,
        nargs="?",
        const=True,
        default=default,
        metavar="true|false",
        help=f"{text} (default: {str(default).lower()})",
    )


def _boolean(text: str) -> bool:
    if text.lower() in ("true", "1", "t"):
        return True
    if text.lower() in ("false", "0", "f"):
        return False
    raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")


def _port(text: str) -> int:
    port = _whole_number(text)
    if not 0 <= port <= 65535:
        raise argparse.ArgumentTypeError(f"{text} is no port: give 0 to 65535")
    return port


def _positive(text: str) -> int:
    number = _whole_number(text)
    if number <= 0:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return number


def _whole_number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def _seconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds") from None
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds from 0 on")
    return number


def _refuse_foreign(arguments: Sequence[str]) -> None:
    for argument in arguments:
        if not argument.startswith("-"):
            continue
        name = argument.lstrip("-").partition("=")[0]
        plain = name.lower().replace("-", "")
        if name in FOREIGN_FLAGS:
            raise ConfigError(f"--{name} is another endpoint picker's flag: {FOREIGN_FLAGS[name]}")
        if plain in RENAMED_FLAGS and argument.partition("=")[0] != f"--{RENAMED_FLAGS[plain]}":
            raise ConfigError(f"{argument.partition('=')[0]} is spelled --{RENAMED_FLAGS[plain]} here")


def _front(name: str) -> str:
    if name not in FRONTS:
        raise ConfigError(f"--front (or TRIMTAB_FRONT): {name!r} is none of {', '.join(FRONTS)}")
    return name


def _everywhere() -> str:
    return "::" if socket.has_dualstack_ipv6() else "0.0.0.0"


def _secret(file: Path | None, environment: Mapping[str, str]) -> bytes:
    if file is not None:
        try:
            secret = file.read_bytes().strip()
        except OSError as error:
            raise ConfigError(f"--secret-file: {error}") from error
    else:
        secret = environment.get("TRIMTAB_SECRET", "").encode().strip()
    if not secret:
        raise ConfigError("--secret-file (or TRIMTAB_SECRET) is missing or empty: the install's secret")
    return secret
