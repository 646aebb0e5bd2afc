"""The native core for tests that run against it beside the reference, and the mark for those that run against it alone.

The one rule: where it is not built its tests are skipped, and say so; a machine without cargo tests the reference.
"""

import importlib
from types import ModuleType
from typing import Any

import pytest


def _find() -> ModuleType | None:
    try:
        return importlib.import_module("trimtab_core._native")
    except ImportError:
        return None


NATIVE = _find()
needs_native = pytest.mark.skipif(NATIVE is None, reason="the native core is not built")


def native(name: str) -> Any:
    """A class or function of the native core; None where it is not built."""
    return getattr(NATIVE, name, None)
