"""The address of a store, parsed from its URL.

The one rule: a wrong URL is refused here, before any I/O, with the part that is wrong and never with the password.

    redis://[user[:password]@]host[:port][/db]           rediss:// with TLS
    unix:///path/to/socket[?db=0]
    redis+sentinel://[user[:password]@]host[:port],.../SERVICE[/db]
    redis+cluster://[user[:password]@]host[:port],...

`valkey` may stand for `redis`. Query parameters: `username`, `password`, `password_file` (read at each login, so that a
rotated secret is picked up), `db`, `client_name`; `sentinel_username`, `sentinel_password`; with TLS `ssl_ca_certs` (a
file), `ssl_ca_data` (its contents), `ssl_certfile`, `ssl_keyfile`, `ssl_check_hostname`, `ssl_cert_reqs` (`required` or
`none`).
"""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from .errors import ConfigError

Topology = Literal["standalone", "unix", "sentinel", "cluster"]

SCHEMES: dict[str, tuple[Topology, bool]] = {
    "redis": ("standalone", False),
    "rediss": ("standalone", True),
    "unix": ("unix", False),
    "redis+unix": ("unix", False),
    "redis+sentinel": ("sentinel", False),
    "rediss+sentinel": ("sentinel", True),
    "redis+cluster": ("cluster", False),
    "rediss+cluster": ("cluster", True),
}
TLS_PARAMETERS = (
    "ssl_ca_certs",
    "ssl_ca_data",
    "ssl_certfile",
    "ssl_keyfile",
    "ssl_check_hostname",
    "ssl_cert_reqs",
)
PARAMETERS = ("username", "password", "password_file", "db", "client_name", *TLS_PARAMETERS)
SENTINEL_PARAMETERS = ("sentinel_username", "sentinel_password")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreAddress:
    """Where the store is and how to log in."""

    topology: Topology
    hosts: tuple[tuple[str, int], ...] = ()
    """Host and port of the server, the sentinels or the cluster's seeds; empty for a Unix socket."""
    path: str = ""
    """Of the Unix socket."""
    service: str = ""
    """What the sentinels call the master."""
    db: int = 0
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    password_file: Path | None = None
    sentinel_username: str | None = None
    sentinel_password: str | None = field(default=None, repr=False)
    client_name: str | None = None
    tls: bool = False
    ca_certs: str | None = None
    ca_data: str | None = None
    """Certificates of authorities to trust, as PEM; besides `ca_certs`, which names a file."""
    certfile: str | None = None
    keyfile: str | None = None
    check_hostname: bool = True
    verify: bool = True

    def __str__(self) -> str:
        """For logs: no secrets."""
        where = self.path or ",".join(f"[{h}]:{p}" if ":" in h else f"{h}:{p}" for h, p in self.hosts)
        service = f"/{self.service}" if self.service else ""
        return f"{self.topology}{' with TLS' if self.tls else ''} at {where}{service}"


def parse_store_url(url: str) -> StoreAddress:
    """Raises ConfigError."""
    try:
        parts = urlsplit(url)
        query = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=True) if parts.query else []
    except ValueError as error:
        raise ConfigError(f"store URL cannot be parsed: {error}") from None
    scheme = parts.scheme.replace("valkey", "redis", 1)
    if scheme not in SCHEMES:
        raise ConfigError(f"store URL: scheme {parts.scheme!r} is none of {', '.join(SCHEMES)}")
    topology, tls = SCHEMES[scheme]
    options = _options(query, topology, tls)
    userinfo, _, hostlist = parts.netloc.rpartition("@")
    user, has_password, password = userinfo.partition(":")
    password_file = options.get("password_file")
    if password_file is not None and (has_password or "password" in options):
        raise ConfigError("store URL: both a password and password_file")
    service, db = _service_and_db(parts, topology, options.get("db"))
    return StoreAddress(
        topology=topology,
        hosts=() if topology == "unix" else _hosts(hostlist, topology),
        path=unquote(hostlist + parts.path) if topology == "unix" else "",
        service=service,
        db=db,
        username=unquote(user) or options.get("username"),
        password=unquote(password) if has_password else options.get("password"),
        password_file=None if password_file is None else Path(password_file),
        sentinel_username=options.get("sentinel_username"),
        sentinel_password=options.get("sentinel_password"),
        client_name=options.get("client_name"),
        tls=tls,
        ca_certs=options.get("ssl_ca_certs"),
        ca_data=options.get("ssl_ca_data"),
        certfile=options.get("ssl_certfile"),
        keyfile=options.get("ssl_keyfile"),
        check_hostname=_flag(options, "ssl_check_hostname"),
        verify=_verify(options),
    )


def _options(query: list[tuple[str, str]], topology: Topology, tls: bool) -> dict[str, str]:
    options: dict[str, str] = {}
    for name, value in query:
        if name in options:
            raise ConfigError(f"store URL: parameter {name!r} is given twice")
        if name not in PARAMETERS and not (name in SENTINEL_PARAMETERS and topology == "sentinel"):
            raise ConfigError(f"store URL: unknown parameter {name!r}")
        if name in TLS_PARAMETERS and not tls:
            raise ConfigError(f"store URL: parameter {name!r} without TLS (rediss)")
        if not value:
            raise ConfigError(f"store URL: parameter {name!r} is empty")
        options[name] = value
    return options


def _hosts(hostlist: str, topology: Topology) -> tuple[tuple[str, int], ...]:
    hosts = [_host(text, 26379 if topology == "sentinel" else 6379) for text in hostlist.split(",")]
    if topology == "standalone" and len(hosts) > 1:
        raise ConfigError(f"store URL: {len(hosts)} hosts; only redis+sentinel and redis+cluster take several")
    return tuple(hosts)


def _host(text: str, default_port: int) -> tuple[str, int]:
    match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.%]+)\]|([^\[\]:\s]+))(?::([^:]*))?", text)
    if match is None:
        raise ConfigError(f"store URL: host {text!r} is not host, host:port or [ipv6]:port")
    host, port = match[1] or match[2], match[3]
    if port is None:
        return unquote(host), default_port
    if not re.fullmatch(r"[0-9]{1,5}", port) or not 1 <= int(port) <= 65535:
        raise ConfigError(f"store URL: port {port!r} of host {host!r} is not 1 to 65535")
    return unquote(host), int(port)


def _service_and_db(parts: SplitResult, topology: Topology, db_option: str | None) -> tuple[str, int]:
    service, db_text = "", db_option
    path = "" if topology == "unix" else parts.path.strip("/")
    if topology == "unix" and not unquote(parts.netloc.rpartition("@")[2] + parts.path):
        raise ConfigError("store URL: no path of the Unix socket")
    if topology == "sentinel":
        service, _, path = path.partition("/")
        if not service:
            raise ConfigError("store URL: no service name after the sentinels (redis+sentinel://host:port/SERVICE)")
    if path:
        if db_option is not None:
            raise ConfigError("store URL: both a path and the parameter 'db' name a database")
        db_text = path
    if db_text is None:
        return unquote(service), 0
    if not re.fullmatch(r"[0-9]{1,4}", db_text):
        raise ConfigError(f"store URL: database {db_text!r} is not a number")
    if topology == "cluster" and int(db_text) != 0:
        raise ConfigError(f"store URL: database {db_text} in a cluster, which has only 0")
    return unquote(service), int(db_text)


def _flag(options: dict[str, str], name: str) -> bool:
    value = options.get(name, "true").lower()
    if value not in ("true", "false"):
        raise ConfigError(f"store URL: parameter {name!r} is {value!r}, not true or false")
    return value == "true"


def _verify(options: dict[str, str]) -> bool:
    value = options.get("ssl_cert_reqs", "required")
    if value not in ("required", "none"):
        raise ConfigError(f"store URL: parameter 'ssl_cert_reqs' is {value!r}, not required or none")
    return value == "required"
