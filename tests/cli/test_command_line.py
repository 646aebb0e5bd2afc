"""Wrong flags end with one line that names the flag and says what to do, before anything is started."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest

from trimtab.__main__ import main
from trimtab.demo_plan import RUN_S_MAX, emulated_plan
from trimtab.engine_choice import EngineChoice
from trimtab.errors import UsageError
from trimtab.output_file import check_output_file
from trimtab_extproc.__main__ import main as extproc
from trimtab_sidecar.__main__ import main as sidecar
from trimtab_sidecar.settings import parser as sidecar_parser


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "VERB"),
        (["demo", "--endpoints", "0"], "--endpoints: 0 is not between 1 and 64"),
        (["demo", "--endpoints", "many"], "--endpoints: 'many' is not a whole number"),
        (["local", "--max-model-len", "1k"], "--max-model-len: '1k' is not a whole number"),
        (["demo", "--rate", "-1"], "--rate: -1 is not above zero"),
        (["demo", "--rate", "inf"], "--rate: inf is not above zero"),
        (["demo", "--rate", "nan"], "--rate: nan is not above zero"),
        (["demo", "--rate", "fast"], "--rate: 'fast' is not a number"),
        (["demo", "--rate", "1001"], "--rate: 1001 is above 1000"),
        (["demo", "--rate", "0.01"], "--rate 0.01: "),
        (["demo", "--trace", "/nowhere/trace.jsonl"], "--trace /nowhere/trace.jsonl"),
        (["demo", "--json", "/nowhere/figures.json"], "--json /nowhere/figures.json"),
        (["demo", "--plot", "/nowhere/plot.png"], "--plot /nowhere/plot.png"),
        (["demo", "--engine", "vllm", "--vllm", "/nowhere/vllm"], "--vllm /nowhere/vllm: no such command"),
        (["local", "--vllm", "/bin/true"], "--engine vllm"),
        (["local", "--engine", "tgi"], "--engine"),
        (["local", "--engine", "vllm", "--max-model-len", "100"], "--max-model-len: 100 is not between 1024 and 8192"),
        (["explain", "--last", "0"], "--last: 0 is less than 1"),
        (["explain", "--last", "x"], "--last: 'x' is not a whole number"),
        (["explain", "--nonsense"], "--nonsense. See trimtab explain --help"),
        (["demo", "--nonsense", "1"], "--nonsense 1. See trimtab demo --help"),
        (["demo", "--engine", "tgi"], "See trimtab demo --help"),
        (["demo", "--json", "/"], "--json / is a folder: name a file"),
        (["demo", "--json", "/proc/figures.json"], "--json /proc/figures.json cannot be written"),
        (["demo", "--plot", "/"], "--plot / is a folder: name a file"),
        (["demo", "--plot", "plot.foo"], "--plot plot.foo: the name has to end with one of .png, .svg"),
        (["demo", "--plot", "plot"], "--plot plot: the name has to end with one of .png, .svg"),
    ],
)
def test_a_wrong_flag_is_named(arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("trimtab: ")
    assert error.count("\n") == 1
    assert expected in error
    assert "Traceback" not in error
    assert "value: " not in error, "argparse's own words, which have the name of a function in them"


def test_looking_whether_a_file_can_be_written_leaves_no_trace(tmp_path: Path) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    old.write_text("mine")
    for path in (old, new):
        check_output_file("--json", path)
    assert old.read_text() == "mine"
    assert not new.exists()


def test_the_rate_that_a_refusal_names_is_taken() -> None:
    with pytest.raises(UsageError, match="or more") as refused:
        emulated_plan(trace=None, rate_per_s=0.01, endpoints=2)
    least = float(str(refused.value).partition("Give --rate ")[2].split()[0])
    assert emulated_plan(trace=None, rate_per_s=least, endpoints=2).run_s <= RUN_S_MAX


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--grpc-port", "x"], "--grpc-port: 'x' is not a whole number"),
        (["--exchanges-max", "many"], "--exchanges-max: 'many' is not a whole number"),
        (["--drain-delay", "soon"], "--drain-delay: 'soon' is not a number of seconds"),
        (["--drain-timeout", "nan"], "--drain-timeout: nan is not a number of seconds"),
        (["--nonsense"], "--nonsense. See trimtab-extproc --help"),
        (["--store", "http://x"], "--store (or TRIMTAB_STORE): store URL: scheme 'http' is none of redis"),
    ],
)
def test_a_pickers_wrong_flag_is_named_with_the_same_status(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["trimtab-extproc", *arguments])
    with pytest.raises(SystemExit) as ended:
        extproc()
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("trimtab-extproc: ")
    assert expected in error


def test_a_sidecars_wrong_store_comes_before_its_other_faults(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRIMTAB_SECRET", "s")
    needed = ("--pool-name", "p", "--pool-namespace", "n", "--endpoint-host", "nowhere")
    assert sidecar([*needed, "--store", "http://x"]) == 2
    assert "--store (or TRIMTAB_STORE): store URL: scheme 'http'" in capsys.readouterr().err


def test_every_flag_of_a_sidecar_has_a_word_of_help_and_so_has_drain(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        sidecar(["--help"])
    assert ended.value.code == 0
    assert "trimtab-sidecar drain, with the same flags" in " ".join(capsys.readouterr().out.split())
    assert all(action.help for action in sidecar_parser()._actions)


def test_the_folder_of_a_vllm_is_not_its_command(tmp_path: Path) -> None:
    command = tmp_path / "bin" / "vllm"
    command.parent.mkdir()
    command.write_text("#!/bin/sh\n")
    command.chmod(0o755)
    choice = EngineChoice(engine="vllm", vllm=tmp_path, endpoints=None, context_tokens=4096)
    with pytest.raises(UsageError, match=r"is a folder: give the command, .*/bin/vllm"):
        choice.vllm_command()
    found = EngineChoice(engine="vllm", vllm=command, endpoints=None, context_tokens=4096)
    assert found.vllm_command() == command
    assert found.endpoint_count == 2


def test_real_engines_get_a_cache_in_whole_blocks_for_the_context() -> None:
    flags = EngineChoice(engine="vllm", vllm=None, endpoints=None, context_tokens=1024).vllm_flags()
    options = dict(itertools.pairwise(flags))
    assert options["--max-model-len"] == "1024"
    assert int(options["--block-size"]) % 32 == 0
    assert int(options["--num-gpu-blocks-override"]) * int(options["--block-size"]) > 2 * 1024


def test_help_names_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    for verb in ("demo", "local", "explain"):
        assert verb in text
