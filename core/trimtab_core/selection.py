"""Which core runs: the native one (Rust) where it is built, else the reference (Python).

The one rule: both do the same to the last bit, so nobody but the composition roots, the log and a metric cares which
one it is. `TRIMTAB_CORE` decides at the first import: `auto` (the default), `native` (or fail), `reference`.

    from trimtab_core.selection import CORE_NAME, BlockChains, Scheduler, hash_chunks
"""

import importlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from trimtab_core import block_chains, chunks, scheduler
from trimtab_core.errors import CoreUnavailable

if TYPE_CHECKING:
    from trimtab_core.block_chains import BlockChains as BlockChains
    from trimtab_core.chunks import hash_chunks as hash_chunks
    from trimtab_core.scheduler import Scheduler as Scheduler

VARIABLE = "TRIMTAB_CORE"
NATIVE = "native"
REFERENCE = "reference"
CHOICES = ("auto", NATIVE, REFERENCE)
SURFACE = ("BlockChains", "Scheduler", "hash_chunks")


def choose(wanted: str) -> tuple[str, str]:
    """The name of the core to use, and why. Raises `CoreUnavailable` where it cannot be had."""
    if wanted not in CHOICES:
        raise CoreUnavailable(f"{VARIABLE}={wanted}: it is one of {', '.join(CHOICES)}")
    if wanted == REFERENCE:
        return REFERENCE, f"{VARIABLE}={wanted}"
    try:
        native = importlib.import_module("trimtab_core._native")
        if missing := [name for name in SURFACE if not hasattr(native, name)]:
            raise ImportError(f"{native.__file__} is of another version, without {', '.join(missing)}")
    except ImportError as error:
        why = f"the native core is not there ({error}); {_advice()}"
        if wanted == NATIVE:
            raise CoreUnavailable(f"{VARIABLE}={wanted}: {why}") from error
        return REFERENCE, why
    return NATIVE, "it is built" if wanted == "auto" else f"{VARIABLE}={wanted}"


def _advice() -> str:
    """What to do about it. Where cargo was there and failed, setup.py left word."""
    failed = Path(__file__).with_name("_native_failed.txt")
    if failed.exists():
        return f"its build failed: {failed.read_text()}"
    return "install cargo, then `make clean demo` or `pip install .` builds it"


CORE_NAME, CORE_REASON = choose(os.environ.get(VARIABLE) or "auto")

if not TYPE_CHECKING:
    if CORE_NAME == NATIVE:
        from trimtab_core._native import BlockChains, Scheduler, hash_chunks
    else:
        BlockChains, Scheduler, hash_chunks = block_chains.BlockChains, scheduler.Scheduler, chunks.hash_chunks

__all__ = ["CORE_NAME", "CORE_REASON", "BlockChains", "Scheduler", "choose", "hash_chunks"]


if __name__ == "__main__":
    print(f"core: {CORE_NAME} ({CORE_REASON})")
