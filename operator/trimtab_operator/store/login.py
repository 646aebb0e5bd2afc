"""Store URLs for others: the operator's own, with another login, or with what its files hold written into it.

The one rule: everything else of the URL stays as it was written, TLS, sentinels, database and all.
"""

from pathlib import Path
from typing import Final
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

CA_BYTES_MAX: Final = 64 << 10
"""A larger file of authorities stays a file: an environment variable holds 128 KiB."""
_LOGIN: Final = ("username", "password", "password_file")
_CLIENT_FILES: Final = ("ssl_certfile", "ssl_keyfile")


def with_login(url: str, username: str, password: str) -> str:
    """The same store for another user. Raises OSError for a file of authorities that cannot be read."""
    scheme, netloc, path, query, _ = urlsplit(url)
    hosts = netloc.rpartition("@")[2]
    kept = [(name, value) for name, value in parse_qsl(query, keep_blank_values=True) if name not in _LOGIN]
    login = f"{quote(username, safe='')}:{quote(password, safe='')}"
    return _joined(scheme, f"{login}@{hosts}", path, kept)


def as_given(url: str) -> str:
    """The same login, its password in the URL even where the operator reads it from a file. Raises OSError."""
    scheme, netloc, path, query, _ = urlsplit(url)
    options = parse_qsl(query, keep_blank_values=True)
    kept = [
        ("password", Path(value).read_text(encoding="utf-8").strip()) if name == "password_file" else (name, value)
        for name, value in options
    ]
    return _joined(scheme, netloc, path, kept)


def files_left_out(url: str) -> tuple[str, ...]:
    """Parameters that name files of the operator which whoever gets the URL needs as well, under the same path."""
    names = dict(parse_qsl(urlsplit(url).query))
    return tuple(name for name in ("ssl_ca_certs", *_CLIENT_FILES) if name in names)


def _joined(scheme: str, netloc: str, path: str, options: list[tuple[str, str]]) -> str:
    query = urlencode([_inlined(name, value) for name, value in options], quote_via=quote)
    # By hand, as a socket has an empty host, whose slashes must stay.
    return f"{scheme}://{netloc}{path}{'?' if query else ''}{query}"


def _inlined(name: str, value: str) -> tuple[str, str]:
    if name == "ssl_ca_certs" and (file := Path(value)).stat().st_size <= CA_BYTES_MAX:
        return "ssl_ca_data", file.read_text(encoding="utf-8")
    return name, value
