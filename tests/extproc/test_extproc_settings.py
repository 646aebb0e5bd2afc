"""Flags and environment, and the flags of other pickers."""

from pathlib import Path

import pytest

from trimtab_extproc.errors import ConfigError
from trimtab_extproc.settings import FOREIGN_FLAGS, Settings, parse_settings

ENVIRONMENT = {"TRIMTAB_STORE": "redis://127.0.0.1/0", "TRIMTAB_SECRET": "secret\n"}


def parsed(*arguments: str) -> Settings:
    return parse_settings(["--pool-name", "pool", *arguments], ENVIRONMENT)


def test_the_defaults_are_those_of_the_endpoint_picker_protocol() -> None:
    settings = parsed()
    assert (settings.grpc_port, settings.grpc_health_port, settings.metrics_port) == (9002, 9003, 9090)
    assert settings.is_secure_serving
    assert settings.pool_namespace == "default"
    assert not settings.is_conformance_test
    assert not settings.is_mode_override_allowed


def test_a_secret_file_comes_before_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_bytes(b" from the file \n")
    assert parsed().secret == b"secret"
    assert parsed("--secret-file", str(file)).secret == b"from the file"


@pytest.mark.parametrize(
    ("arguments", "is_secure"),
    [(("--secure-serving=false",), False), (("--secure-serving",), True), (("--secure-serving", "true"), True)],
)
def test_switches_read_as_in_go(arguments: tuple[str, ...], is_secure: bool) -> None:
    assert parsed(*arguments).is_secure_serving is is_secure


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("--grpc-port", "x"), "--grpc-port"),
        (("--grpc-port", "70000"), "70000"),
        (("--secure-serving=maybe",), "maybe"),
        (("--secret-file", "/nonexistent/secret"), "--secret-file"),
        (("--drain-timeout", "-1"), "--drain-timeout"),
        (("--never-heard-of",), "--never-heard-of"),
        (("--body-bytes-max", "0"), "0 is not positive"),
        (("--config-file", "x.yaml"), "SchedulingPolicy"),
        (("--grpcPort=9002",), "--grpc-port"),
        (("-v", "4"), "--log-level debug"),
    ],
)
def test_a_flag_that_cannot_be_used_is_named(arguments: tuple[str, ...], part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        parsed(*arguments)


@pytest.mark.parametrize("name", sorted(FOREIGN_FLAGS))
def test_another_pickers_flag_says_what_to_do_instead(name: str) -> None:
    for spelled in (f"--{name}", f"-{name}=x"):
        with pytest.raises(ConfigError, match="another endpoint picker's flag"):
            parsed(spelled)


@pytest.mark.parametrize(
    ("environment", "part"),
    [({"TRIMTAB_SECRET": "s"}, "--store"), ({"TRIMTAB_STORE": "redis://x"}, "--secret-file")],
)
def test_what_is_missing_is_named(environment: dict[str, str], part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        parse_settings(["--pool-name", "pool"], environment)


def test_one_dash_is_as_good_as_two() -> None:
    settings = parse_settings(["-pool-name", "pool", "-grpc-port=1234"], ENVIRONMENT)
    assert (settings.pool_name, settings.grpc_port) == ("pool", 1234)


def test_a_pool_name_is_needed() -> None:
    with pytest.raises(ConfigError, match="--pool-name"):
        parse_settings([], ENVIRONMENT)


def test_the_front_is_chosen_by_flag_before_environment() -> None:
    assert parsed().front == "auto"
    assert parsed("--front", "grpcio").front == "grpcio"
    required = ["--pool-name", "pool"]
    assert parse_settings(required, ENVIRONMENT | {"TRIMTAB_FRONT": "native"}).front == "native"
    assert parse_settings([*required, "--front=grpcio"], ENVIRONMENT | {"TRIMTAB_FRONT": "native"}).front == "grpcio"
    with pytest.raises(ConfigError, match="--front"):
        parsed("--front", "h3")
