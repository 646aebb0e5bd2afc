"""What a sidecar is told at its start, parsed once.

The one rule: flags come from the command line, secrets from files or the environment, and both end here as one frozen
object; nothing else reads either.
"""

import argparse
import ipaddress
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from trimtab_sidecar.pool_access import AccessError, AccessFolder, PoolAccess, pool_access

ENGINES = ("vllm", "sglang")
PORT_MAX = 65_535
HOLD_S_MAX = 60.0
_REFERENCE = re.compile(r"\$\(([A-Za-z_][A-Za-z0-9_.-]*)\)")


class SettingsError(ValueError):
    """A flag is missing or makes no sense: say so and stop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SidecarSettings:
    """Times in seconds."""

    pool_name: str
    pool_namespace: str
    endpoint_host: str
    """The pod's IP, as the pool's endpoints are named."""
    engine: Literal["vllm", "sglang"]
    engine_urls: tuple[str, ...]
    """One for each engine process in the pod; each port is an endpoint."""
    engine_args: tuple[str, ...]
    """The engine container's command and args."""
    model_dir: Path | None
    """The model's files; None: what the engine's args name, in the hub's cache."""
    api_key: str | None
    """The engine's own, where it wants one."""
    access: PoolAccess | None
    """None: `access_folder` has it, or will have it."""
    access_folder: AccessFolder | None
    """The pool's Secret, where it is mounted."""
    checkpoint_dir: Path | None
    """None: no checkpoint, and no socket for `drain`."""
    metrics_port: int
    bind: str
    """Address that the sidecar's own metrics are served at."""
    kv_events: str | None = None
    """ZMQ address to receive events at; None: as the engine tells."""
    kv_replay: str | None = None
    kv_topic: str = ""
    kv_bind: bool = False
    """The engine connects to `kv_events`, so the sidecar binds it."""
    ranks: int = 1
    """Data-parallel ranks behind `kv_events`."""
    scrape_s: float = 1.0
    """How often the engine's metrics are read while it is busy."""
    scrape_idle_s: float = 3.0
    """The longest pause between two reads while nothing changes."""
    heartbeat_s: float = 1.0
    models_s: float = 5.0
    """How often the engine is asked what it serves: adapters come and go at run time."""
    checkpoint_s: float = 5.0
    """The least time between two checkpoints."""
    tail_check_s: float = 5.0
    """The least time between two questions whether the last events were missed, while the engine works silently."""
    log_level: str = "INFO"


def parse_settings(arguments: Sequence[str], env: Mapping[str, str]) -> SidecarSettings:
    """Settings from a command line. Raises SettingsError; `--help` and unknown flags end the process, as usual."""
    flags = parser().parse_args(arguments)
    host = flags.endpoint_host or env.get("TRIMTAB_ENDPOINT_HOST")
    if not host:
        raise SettingsError("no endpoint host: give --endpoint-host or TRIMTAB_ENDPOINT_HOST")
    folder = flags.access_dir and AccessFolder(
        folder=flags.access_dir, namespace=flags.pool_namespace, name=flags.pool_name
    )
    access = None if folder else _given_access(flags, env)
    seconds = {
        name: getattr(flags, name)
        for name in ("scrape_s", "scrape_idle_s", "heartbeat_s", "models_s", "checkpoint_s", "tail_check_s")
    }
    for name, value in seconds.items():
        if not 0 < value < 3_600:
            raise SettingsError(f"--{name.replace('_', '-')} {value}: give seconds above 0 and below 3600")
    if not -1 <= flags.metrics_port <= PORT_MAX:
        raise SettingsError(
            f"--metrics-port {flags.metrics_port}: give 1 to {PORT_MAX}, 0 for any free one, -1 for none"
        )
    engine_urls = tuple(flags.engine_url or ("http://127.0.0.1:8000",))
    for url in engine_urls:
        if not url.startswith(("http://", "https://")):
            raise SettingsError(f"--engine-url {url} is no http:// or https:// URL")
        endpoint_address(host, url)
    return SidecarSettings(
        pool_name=flags.pool_name,
        pool_namespace=flags.pool_namespace,
        endpoint_host=host,
        engine=flags.engine,
        engine_urls=engine_urls,
        engine_args=engine_words(flags.engine_args or env.get("TRIMTAB_ENGINE_ARGS", ""), env),
        model_dir=flags.model_dir,
        api_key=env.get("TRIMTAB_ENGINE_API_KEY") or env.get("VLLM_API_KEY") or None,
        access=access,
        access_folder=folder,
        checkpoint_dir=flags.checkpoint_dir,
        metrics_port=flags.metrics_port,
        bind=flags.bind,
        kv_events=flags.kv_events,
        kv_replay=flags.kv_replay,
        kv_topic=flags.kv_topic,
        kv_bind=flags.kv_bind,
        ranks=flags.ranks,
        log_level=flags.log_level.upper(),
        **seconds,
    )


def parser() -> argparse.ArgumentParser:
    defaults = SidecarSettings.__dataclass_fields__
    parser = argparse.ArgumentParser(
        prog="trimtab-sidecar",
        usage="trimtab-sidecar [drain] --pool-name NAME --pool-namespace NAMESPACE --endpoint-host IP [flags]",
        description="Beside each engine: tells the pool's pickers its KV cache and load.",
        epilog="trimtab-sidecar drain, with the same flags: ask the running sidecar to take this pod's endpoints out "
        "of the choice, and end once the pickers are told (for a preStop hook; needs --checkpoint-dir).",
    )
    add = parser.add_argument
    add("--pool-name", required=True, metavar="NAME", help="name of the InferencePool")
    add("--pool-namespace", required=True, metavar="NAMESPACE", help="its namespace")
    add("--endpoint-host", metavar="IP", help="the pod's IP, as the pool's endpoints are named [TRIMTAB_ENDPOINT_HOST]")
    add("--engine", choices=ENGINES, default="vllm", help="which engine it is (default: vllm)")
    add(
        "--engine-url",
        action="append",
        metavar="URL",
        help="base URL of an engine in this pod; repeat for several (default: http://127.0.0.1:8000)",
    )
    add("--engine-args", help="the engine container's command and args, as a JSON list [TRIMTAB_ENGINE_ARGS]")
    add("--model-dir", type=Path, help="the model's files (default: as the engine's args say)")
    add("--store", help="URL of the shared state [TRIMTAB_STORE]")
    add("--secret-file", type=Path, help="the install's secret [TRIMTAB_SECRET holds the secret itself]")
    add(
        "--access-dir",
        type=Path,
        metavar="DIR",
        help="in place of both: the pool's Secret, mounted; it may come later, and change",
    )
    add("--checkpoint-dir", type=Path, help="a folder that outlives this container (an emptyDir)")
    add("--metrics-port", type=int, default=9091, help="own metrics; 0: a free port; -1: none (default: 9091)")
    add("--bind", default="", help="address of the metrics port (default: all, of IPv4 and IPv6)")
    add("--kv-events", help="ZMQ address of rank 0's events (default: as the engine tells)")
    add("--kv-replay", help="ZMQ address of rank 0's replay")
    add("--kv-topic", default="", help="take events of ZMQ topics that begin so only (default: all)")
    add("--kv-bind", action="store_true", help="bind --kv-events, since the engine connects to it")
    add("--ranks", type=int, default=1, help="data-parallel ranks behind --kv-events (default: 1)")
    for name, text in (
        ("scrape_s", "between two reads of a busy engine's metrics"),
        ("scrape_idle_s", "between two reads of an idle engine's metrics, at most"),
        ("heartbeat_s", "between two heartbeats"),
        ("models_s", "between two questions which models the engine serves"),
        ("checkpoint_s", "between two checkpoints, at least"),
        ("tail_check_s", "between two looks for missed last events, at least"),
    ):
        default = defaults[name].default
        add(
            f"--{name.replace('_', '-')}",
            type=float,
            default=default,
            metavar="S",
            help=f"seconds {text} (default: {default:g})",
        )
    add("--log-level", default="INFO", choices=("DEBUG", "INFO", "WARNING", "ERROR"), help="default: INFO")
    return parser


def engine_words(text: str, env: Mapping[str, str]) -> tuple[str, ...]:
    """The engine's command line from a JSON list.

    References to variables, `$(NAME)`, that this process has too are put in here: whoever wrote the list could not know
    their values, and a value with a quote in it would have broken the JSON.
    """
    if not text.strip():
        return ()
    try:
        words = json.loads(text)
    except json.JSONDecodeError as error:
        raise SettingsError("--engine-args is no JSON list") from error
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise SettingsError("--engine-args is no JSON list of texts")
    return tuple(_REFERENCE.sub(lambda found: env.get(found[1], found[0]), word) for word in words)


def script_words(words: Sequence[str]) -> tuple[str, ...]:
    """`words`, or those of the script in `sh -c "..."`."""
    if len(words) >= 3 and words[1].startswith("-") and "c" in words[1] and words[0].endswith("sh"):
        try:
            return tuple(shlex.split(words[2], comments=True))
        except ValueError:
            return tuple(words)
    return tuple(words)


def hold_s(env: Mapping[str, str]) -> float:
    """How long a start that failed is held before the process ends [TRIMTAB_HOLD_S].

    A native sidecar that ends at once may never be seen running, and then its pod's other containers wait.
    """
    try:
        return min(max(0.0, float(env.get("TRIMTAB_HOLD_S") or 0)), HOLD_S_MAX)
    except ValueError:
        return 0.0


def endpoint_address(host: str, engine_url: str) -> str:
    """`ip:port` of the endpoint that the engine at `engine_url` is."""
    try:
        port = urlsplit(engine_url).port or (443 if engine_url.startswith("https:") else 80)
    except ValueError as error:
        raise SettingsError(f"--engine-url {engine_url}") from error
    bare = host.strip("[]")
    try:
        is_v6 = ipaddress.ip_address(bare).version == 6
    except ValueError as error:
        raise SettingsError(f"--endpoint-host {host} is no IP address") from error
    return f"[{bare}]:{port}" if is_v6 else f"{bare}:{port}"


def engine_host(engine_url: str) -> str:
    """The host that the engine is reached at, for its other ports."""
    return urlsplit(engine_url).hostname or "127.0.0.1"


def _given_access(flags: argparse.Namespace, env: Mapping[str, str]) -> PoolAccess:
    store = flags.store or env.get("TRIMTAB_STORE")
    if not store:
        raise SettingsError("no store: give --access-dir, --store or TRIMTAB_STORE")
    secret = _secret(flags.secret_file, env)
    try:
        return pool_access(store, secret, namespace=flags.pool_namespace, name=flags.pool_name)
    except AccessError as error:
        raise SettingsError(f"--store (or TRIMTAB_STORE): {error}") from error


def _secret(path: Path | None, env: Mapping[str, str]) -> bytes:
    if path is not None:
        try:
            secret = path.read_bytes().strip()
        except OSError as error:
            raise SettingsError(f"--secret-file: {error.strerror}") from error
    else:
        secret = env.get("TRIMTAB_SECRET", "").encode().strip()
    if not secret:
        raise SettingsError("no secret: give --access-dir, --secret-file or TRIMTAB_SECRET")
    return secret
