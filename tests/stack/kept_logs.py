"""The logs of a stack's processes are kept where a test of it failed: a stack that ends well takes its own with it."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def logs_kept_on_failure(request: pytest.FixtureRequest, log_dir: Path) -> Iterator[None]:
    """Inside the stack's own context. The copy is beside the logs, in `logs-of-failure`."""
    failed_before = request.session.testsfailed
    yield
    if request.session.testsfailed > failed_before:
        kept = log_dir.with_name("logs-of-failure")
        kept.mkdir(exist_ok=True)
        for log in log_dir.rglob("*.log"):
            shutil.copy(log, kept / log.name)
