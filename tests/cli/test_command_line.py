"""Wrong flags end with one line that names the flag and says what to do, before anything is started."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from trimtab.__main__ import main
from trimtab.engine_choice import EngineChoice
from trimtab.errors import UsageError


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "VERB"),
        (["demo", "--endpoints", "0"], "--endpoints: 0 is not between 1 and 64"),
        (["demo", "--endpoints", "many"], "--endpoints"),
        (["demo", "--rate", "-1"], "--rate: -1 is not above zero"),
        (["demo", "--rate", "inf"], "--rate"),
        (["demo", "--trace", "/nowhere/trace.jsonl"], "--trace /nowhere/trace.jsonl"),
        (["demo", "--json", "/nowhere/figures.json"], "--json /nowhere/figures.json"),
        (["demo", "--plot", "/nowhere/plot.png"], "--plot /nowhere/plot.png"),
        (["demo", "--engine", "vllm", "--vllm", "/nowhere/vllm"], "--vllm /nowhere/vllm: no such command"),
        (["local", "--vllm", "/bin/true"], "--engine vllm"),
        (["local", "--engine", "tgi"], "--engine"),
        (["local", "--engine", "vllm", "--max-model-len", "100"], "--max-model-len: 100 is not between 1024 and 8192"),
        (["explain", "--last", "0"], "--last: 0 is less than 1"),
        (["explain", "--nonsense"], "--nonsense"),
    ],
)
def test_a_wrong_flag_is_named(arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("trimtab: ")
    assert expected in error


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
