"""One real API server for all of the operator's tests, and a namespace of its own for each of them."""

import asyncio
import os
import secrets
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import yaml

from trimtab_operator.kube import CRDS, NAMESPACES, Kube, KubeError, Resource

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "e2e" / "cluster"))

from control_plane import control_plane  # noqa: E402

SERVED_S = 30.0
TLS_GOODBYE_S = 0.3


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


@pytest.fixture
async def kube(kube_config: Path) -> AsyncIterator[Kube]:
    client = await Kube.connect(str(kube_config))
    yield client
    await client.close()
    # TLS connections that were closed, here or by the test, need a moment to say goodbye; else they are left open.
    await asyncio.sleep(TLS_GOODBYE_S)


@pytest.fixture
async def namespace(kube: Kube) -> str:
    """A fresh one."""
    name = f"test-{secrets.token_hex(5)}"
    await kube.create(NAMESPACES, {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    return name


async def _apply_crds(path: Path) -> None:
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
                while not await _is_served(kube, served):  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
    finally:
        await kube.close()


async def _is_served(kube: Kube, resource: Resource) -> bool:
    try:
        await kube.list_all(resource, "default")
    except KubeError as error:
        if error.status == 404:
            return False
        raise
    return True
