"""Which core runs: what was asked for, what is there, and what is said about it."""

import os
import subprocess
import sys

import pytest
from native_core import needs_native

from trimtab_core import selection
from trimtab_core.errors import CoreUnavailable


def chosen(wanted: str) -> str:
    """The classes that another process gets."""
    program = "from trimtab_core.selection import *; print(CORE_NAME, Scheduler.__module__, BlockChains.__module__)"
    environment = os.environ | {selection.VARIABLE: wanted}
    run = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    return run.stdout.strip()


def test_the_reference_is_used_where_it_is_asked_for() -> None:
    assert chosen("reference") == "reference trimtab_core.scheduler trimtab_core.block_chains"


@needs_native
@pytest.mark.parametrize("wanted", ["", "auto", "native"])
def test_the_native_core_is_used_where_it_is_built(wanted: str) -> None:
    assert chosen(wanted) == "native trimtab_core._native trimtab_core._native"


def test_without_the_native_core_the_reference_is_used_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trimtab_core._native", None)
    name, why = selection.choose("auto")
    assert name == "reference"
    assert "the native core is not there" in why
    with pytest.raises(CoreUnavailable, match="TRIMTAB_CORE=native"):
        selection.choose("native")


def test_a_native_core_of_another_version_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trimtab_core._native", pytest)  # a module without any of it
    name, why = selection.choose("auto")
    assert name == "reference"
    assert "another version" in why


def test_an_unknown_wish_is_refused() -> None:
    with pytest.raises(CoreUnavailable, match="fast"):
        selection.choose("fast")
