"""One real API server for all tests that need one: those of the operator and those of the chart."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "e2e" / "cluster"))

from control_plane import control_plane  # noqa: E402

pytest_plugins = ["left_open"]

SERVED_S = 30.0


@pytest.fixture(scope="session")
def kube_config() -> Iterator[Path]:
    """A kubeconfig of an administrator; our CRDs are served."""
    try:
        server = control_plane()
        path = server.__enter__()
    except (OSError, subprocess.CalledProcessError) as error:
        reason = f"no kube-apiserver: {error}. Set KUBEBUILDER_ASSETS, or see e2e/cluster/build"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    try:
        asyncio.run(_apply_crds(path))
        yield path
    finally:
        server.__exit__(None, None, None)


async def _apply_crds(path: Path) -> None:
    from trimtab_operator.kube import CRDS, Kube, KubeError, Resource

    kube = await Kube.connect(str(path))
    try:
        for file in sorted((ROOT / "crds").glob("*.yaml")):
            body = yaml.safe_load(file.read_text())
            try:
                await kube.create(CRDS, body)
            except KubeError as error:
                if error.reason != "AlreadyExists":
                    raise
            spec = body["spec"]
            version = spec["versions"][0]["name"]
            served = Resource(f"{spec['group']}/{version}", spec["names"]["plural"], spec["names"]["kind"])
            async with asyncio.timeout(SERVED_S):
                while True:
                    try:
                        await kube.list_all(served, "default")
                        break
                    except KubeError as error:
                        if error.status != 404:
                            raise
                    await asyncio.sleep(0.1)
    finally:
        await kube.close()
