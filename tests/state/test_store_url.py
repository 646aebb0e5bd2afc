"""Addresses of stores: what is understood, and what is refused with the part that is wrong."""

from pathlib import Path

import pytest

from trimtab_state import ConfigError, connect
from trimtab_state.store_url import StoreAddress, parse_store_url


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://host", StoreAddress(topology="standalone", hosts=(("host", 6379),))),
        ("valkey://host:1/2", StoreAddress(topology="standalone", hosts=(("host", 1),), db=2)),
        ("redis://[::1]:7?db=3", StoreAddress(topology="standalone", hosts=(("::1", 7),), db=3)),
        (
            "redis://us%40er:p%3Aw@h",
            StoreAddress(topology="standalone", hosts=(("h", 6379),), username="us@er", password="p:w"),
        ),
        ("redis://:pw@h", StoreAddress(topology="standalone", hosts=(("h", 6379),), password="pw")),
        (
            "redis://h?username=u&password=p&client_name=c",
            StoreAddress(topology="standalone", hosts=(("h", 6379),), username="u", password="p", client_name="c"),
        ),
        (
            "redis://u@h?password_file=/run/secret",
            StoreAddress(topology="standalone", hosts=(("h", 6379),), username="u", password_file=Path("/run/secret")),
        ),
        ("unix:///run/v.sock?db=1", StoreAddress(topology="unix", path="/run/v.sock", db=1)),
        ("valkey+unix:///run/v.sock", StoreAddress(topology="unix", path="/run/v.sock")),
        (
            "redis+sentinel://:pw@a,b:1/main/4?sentinel_password=s",
            StoreAddress(
                topology="sentinel",
                hosts=(("a", 26379), ("b", 1)),
                service="main",
                db=4,
                password="pw",
                sentinel_password="s",
            ),
        ),
        ("redis+cluster://a,[::2]:5", StoreAddress(topology="cluster", hosts=(("a", 6379), ("::2", 5)))),
        (
            "rediss://h?ssl_ca_certs=/ca&ssl_check_hostname=false&ssl_certfile=/c&ssl_keyfile=/k",
            StoreAddress(
                topology="standalone",
                hosts=(("h", 6379),),
                tls=True,
                ca_certs="/ca",
                certfile="/c",
                keyfile="/k",
                check_hostname=False,
            ),
        ),
        (
            "rediss+cluster://h?ssl_cert_reqs=none",
            StoreAddress(topology="cluster", hosts=(("h", 6379),), tls=True, verify=False),
        ),
    ],
)
def test_urls_that_are_understood(url: str, expected: StoreAddress) -> None:
    assert parse_store_url(url) == expected


@pytest.mark.parametrize(
    ("url", "part"),
    [
        ("", "scheme ''"),
        ("http://h", "scheme 'http'"),
        ("redis://", "host ''"),
        ("redis://h:p", "port 'p' of host 'h'"),
        ("redis://h:70000", "port '70000'"),
        ("redis://a,b", "2 hosts"),
        ("redis://a:1:2", "host 'a:1:2'"),
        ("redis://[::1", "cannot be parsed"),
        ("redis://h/x", "database 'x'"),
        ("redis://h/1?db=2", "both a path and the parameter 'db'"),
        ("redis://h?timeout=1", "unknown parameter 'timeout'"),
        ("redis://h?db=1&db=2", "'db' is given twice"),
        ("redis://h?username=", "'username' is empty"),
        ("redis://h?sentinel_password=x", "unknown parameter 'sentinel_password'"),
        ("redis://h?ssl_ca_certs=/x", "'ssl_ca_certs' without TLS"),
        ("rediss://h?ssl_check_hostname=1", "'ssl_check_hostname' is '1'"),
        ("rediss://h?ssl_cert_reqs=maybe", "'ssl_cert_reqs' is 'maybe'"),
        ("redis://:p@h?password_file=/x", "both a password and password_file"),
        ("redis+sentinel://h:1", "no service name"),
        ("redis+cluster://h/1", "database 1 in a cluster"),
        ("unix://", "no path"),
    ],
)
def test_a_wrong_url_is_refused_with_the_part_that_is_wrong(url: str, part: str) -> None:
    with pytest.raises(ConfigError) as refused:
        connect(url)
    assert part in str(refused.value)


def test_passwords_are_never_shown() -> None:
    url = "redis+sentinel://user:hunter2@a/main?sentinel_password=hunter3"
    address = parse_store_url(url)
    assert "hunter" not in str(address) + repr(address)
    assert str(address) == "sentinel at a:26379/main"
    with pytest.raises(ConfigError) as refused:
        connect("redis://:hunter2@h:x")
    assert "hunter2" not in str(refused.value)
