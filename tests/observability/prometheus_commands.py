"""Prometheus's own commands, or a loud skip: where the environment says CI, their absence is a failure."""

import os
import shutil

import pytest


def command(name: str) -> str:
    """Where it is."""
    found = shutil.which(name)
    if found is not None:
        return found
    reason = f"there is no `{name}`: apt-get install prometheus"
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


def promtool() -> str:
    return command("promtool")
