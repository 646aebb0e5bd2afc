"""Flags become settings, or a message that names what is wrong."""

import io
import json
import logging
import socket
from pathlib import Path

import pytest

from trimtab_core.chunks import pool_seed
from trimtab_sidecar.json_log import VALUE_CHARS_MAX, log_json
from trimtab_sidecar.pool_access import PoolAccess
from trimtab_sidecar.settings import (
    HOLD_S_MAX,
    SettingsError,
    endpoint_address,
    engine_host,
    hold_s,
    parse_settings,
    script_words,
)
from trimtab_sidecar.sidecar import Sidecar

NEEDED = ["--pool-name", "p", "--pool-namespace", "n", "--endpoint-host", "10.0.0.1"]
ENV = {"TRIMTAB_STORE": "redis://store", "TRIMTAB_SECRET": "secret"}


def test_the_least_that_is_needed_gives_the_defaults() -> None:
    settings = parse_settings(NEEDED, ENV)
    assert settings.engine_urls == ("http://127.0.0.1:8000",)
    assert (settings.engine, settings.kv_events) == ("vllm", None)
    assert settings.access == PoolAccess(store_url="redis://store", seed=pool_seed(b"secret", "n", "p"))
    assert settings.scrape_s == 1.0


def test_the_endpoint_host_may_come_by_the_environment() -> None:
    settings = parse_settings(NEEDED[:4], ENV | {"TRIMTAB_ENDPOINT_HOST": "10.0.0.7"})
    assert settings.endpoint_host == "10.0.0.7"
    with pytest.raises(SettingsError, match="TRIMTAB_ENDPOINT_HOST"):
        parse_settings(NEEDED[:4], ENV)


@pytest.mark.parametrize(
    ("text", "held_s"), [("", 0.0), ("5", 5.0), ("-1", 0.0), ("1e9", HOLD_S_MAX), ("soon", 0.0), ("nan", 0.0)]
)
def test_a_start_that_fails_is_held_as_long_as_the_environment_says(text: str, held_s: float) -> None:
    assert hold_s({"TRIMTAB_HOLD_S": text}) == held_s
    assert hold_s({}) == 0.0


def test_references_in_the_engines_args_are_to_this_process_own_variables() -> None:
    args = ["--model", "$(MODEL)", "--kv-events-config", "$(EVENTS)", "$(UNKNOWN)", "$HOME"]
    env = ENV | {"TRIMTAB_ENGINE_ARGS": json.dumps(args), "MODEL": '/models/a "b"', "EVENTS": '{"topic": "a"}'}
    assert parse_settings(NEEDED, env).engine_args == (
        "--model", '/models/a "b"', "--kv-events-config", '{"topic": "a"}', "$(UNKNOWN)", "$HOME"
    )  # fmt: skip


def test_a_secret_from_a_file_comes_first_and_loses_its_line_end(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"another\n")
    settings = parse_settings([*NEEDED, "--secret-file", str(tmp_path / "secret")], ENV)
    assert settings.access is not None
    assert settings.access.seed == pool_seed(b"another", "n", "p")


def test_several_engines_and_their_args_are_taken() -> None:
    args = ["vllm", "serve", "m", "--kv-events-config", "{}"]
    settings = parse_settings(
        [*NEEDED, "--engine-url", "http://a:1", "--engine-url", "http://a:2", "--engine-args", json.dumps(args)], ENV
    )
    assert settings.engine_urls == ("http://a:1", "http://a:2")
    assert settings.engine_args == tuple(args)


@pytest.mark.parametrize(
    ("more", "env"),
    [
        ([], {"TRIMTAB_SECRET": "s"}),
        ([], {"TRIMTAB_STORE": "redis://store"}),
        (["--secret-file", "/nothing/here"], ENV),
        (["--engine-args", "not json"], ENV),
        (["--engine-args", '{"a": 1}'], ENV),
        (["--scrape-s", "0"], ENV),
        (["--checkpoint-s", "nan"], ENV),
        (["--metrics-port", "99999"], ENV),
        (["--metrics-port", "-2"], ENV),
        (["--engine-url", "ftp://engine:21"], ENV),
        (["--engine-url", "http://engine:99999"], ENV),
    ],
)
def test_what_makes_no_sense_is_refused(more: list[str], env: dict[str, str]) -> None:
    with pytest.raises(SettingsError):
        parse_settings([*NEEDED, *more], env)


@pytest.mark.parametrize(
    ("host", "url", "name"),
    [
        ("10.0.0.1", "http://127.0.0.1:8000", "10.0.0.1:8000"),
        ("10.0.0.1", "http://localhost/", "10.0.0.1:80"),
        ("fd00::1", "http://127.0.0.1:8000", "[fd00::1]:8000"),
        ("[fd00::1]", "https://127.0.0.1", "[fd00::1]:443"),
    ],
)
def test_the_endpoint_is_named_by_the_pods_address_and_the_engines_port(host: str, url: str, name: str) -> None:
    assert endpoint_address(host, url) == name


@pytest.mark.parametrize(("host", "url"), [("pod-1", "http://a:1"), ("10.0.0.1", "http://a:port")])
def test_an_endpoint_that_has_no_name_is_refused(host: str, url: str) -> None:
    with pytest.raises(SettingsError):
        endpoint_address(host, url)


def test_the_engines_host_is_that_of_its_url() -> None:
    assert engine_host("http://[::1]:8000") == "::1"
    assert engine_host("http://localhost:8000") == "localhost"


def test_a_script_in_a_shell_is_taken_apart() -> None:
    script = 'exec vllm serve m --kv-events-config \'{"publisher": "zmq"}\' # the pool\'s'
    assert script_words(["/bin/bash", "-ec", script])[-1] == '{"publisher": "zmq"}'
    assert script_words(["vllm", "serve", "m"]) == ("vllm", "serve", "m")


def test_logs_are_json_lines_with_the_values_that_were_named() -> None:
    stream = io.StringIO()
    root = logging.getLogger()
    before = root.handlers[:], root.level
    try:
        log_json("INFO", stream)
        logging.getLogger("part").info("reached", extra={"engine": "e", "path": Path("/x"), "long": "y" * 9_999})
        try:
            raise ValueError("no")
        except ValueError:
            logging.getLogger("part").exception("failed")
        logging.getLogger("part").debug("not shown")
    finally:
        root.handlers[:], root.level = before
    first, second = map(json.loads, stream.getvalue().splitlines())
    assert (first["message"], first["level"], first["logger"], first["engine"]) == ("reached", "info", "part", "e")
    assert first["path"] == "/x"
    assert len(first["long"]) == VALUE_CHARS_MAX
    assert "ValueError: no" in second["exception"]


@pytest.mark.parametrize("flag", ["--metrics-port", "--checkpoint-dir"])
async def test_what_the_machine_refuses_is_told_by_the_flags_name(flag: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        values = {"--metrics-port": "0", "--checkpoint-dir": str(tmp_path / "folder")}
        wrong = {"--metrics-port": str(taken.getsockname()[1]), "--checkpoint-dir": str(tmp_path / "file" / "folder")}
        words = [word for name in values for word in (name, (wrong if name == flag else values)[name])]
        settings = parse_settings(
            [*NEEDED, "--bind", "127.0.0.1", *words], {**ENV, "TRIMTAB_STORE": "redis://127.0.0.1:1"}
        )
        with pytest.raises(SettingsError, match=f"^{flag} "):
            await Sidecar(settings).run()
