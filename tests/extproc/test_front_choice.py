"""Which gRPC server is used, and what is said where the native one is not there."""

import sys
from pathlib import Path

import pytest

from trimtab_extproc import front
from trimtab_extproc.errors import ConfigError


@pytest.fixture
def without_native(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if it had not been built."""
    monkeypatch.setitem(sys.modules, "trimtab_extproc._front", None)


def test_the_native_one_where_it_is_built() -> None:
    pytest.importorskip("trimtab_extproc._front")
    assert front.choose("auto") == ("native", "it is built")
    assert front.choose("native")[0] == "native"


def test_the_librarys_where_it_is_asked_for() -> None:
    assert front.choose("grpcio") == ("grpcio", "asked for")


@pytest.mark.usefixtures("without_native")
def test_without_a_native_one_the_librarys_with_the_reason() -> None:
    name, reason = front.choose("auto")
    assert name == "grpcio"
    assert "install cargo" in reason


@pytest.mark.usefixtures("without_native")
def test_asking_for_a_native_one_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="TRIMTAB_FRONT"):
        front.choose("native")


@pytest.mark.usefixtures("without_native")
def test_a_build_that_failed_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "_front_failed.txt").write_text("no linker")
    monkeypatch.setattr(front, "__file__", str(tmp_path / "front.py"))
    assert "no linker" in front.choose("auto")[1]
