"""The chart as a release in the cluster: helm, by whichever of its names is there.

The one rule: the chart's own defaults are what is tested; values given here only say where images are.
"""

import logging
import os
import shutil
from pathlib import Path

from kubectl import run

log = logging.getLogger("e2e")

ROOT = Path(__file__).parents[1]
CHART = ROOT / "charts" / "trimtab"
NAME = "trimtab"
NAMESPACE = "trimtab-system"
INSTALL_TIMEOUT_S = 300
HELMS = ("helm4", "helm", "helm3")


def helm(*words: str) -> str:
    """E2E_HELM names one; else the first that is there."""
    named = os.environ.get("E2E_HELM")
    program = named or next((name for name in HELMS if shutil.which(name)), None)
    assert program is not None, f"no helm: one of {', '.join(HELMS)} is needed"
    return run(program, *words, timeout_s=INSTALL_TIMEOUT_S + 60)


def values() -> list[str]:
    """E2E_VALUES: files, with commas between them."""
    return [word for file in filter(None, os.environ.get("E2E_VALUES", "").split(",")) for word in ("--values", file)]


def install_or_upgrade(*words: str) -> None:
    """As it is in this folder."""
    log.info("helm upgrade --install %s", " ".join(words))
    helm(
        *("upgrade", "--install", NAME, str(CHART), "--namespace", NAMESPACE, "--create-namespace"),
        *(*values(), "--wait", f"--timeout={INSTALL_TIMEOUT_S}s", *words),
    )
