"""A client of the tests' API server, a namespace of its own for each test, and what stands in it."""

import secrets
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from operator_parts import DeclaredPool
from operator_rig import OperatorRig, operator_rig
from valkey_server import ValkeyProcess

from trimtab_operator.kube import NAMESPACES, Kube


@pytest.fixture
async def kube(kube_config: Path) -> AsyncIterator[Kube]:
    client = await Kube.connect(str(kube_config))
    yield client
    await client.close()


@pytest.fixture
async def namespace(kube: Kube) -> str:
    """A fresh one."""
    name = f"test-{secrets.token_hex(5)}"
    await kube.create(NAMESPACES, {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    return name


@pytest.fixture
def cluster(kube: Kube, kube_config: Path, namespace: str) -> DeclaredPool:
    return DeclaredPool(kube, kube_config, namespace)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ValkeyProcess]:
    """A store that the test may stop and start."""
    process = ValkeyProcess(tmp_path)
    process.start()
    yield process
    process.kill()


@pytest.fixture
async def rig(kube: Kube, kube_config: Path, namespace: str, tmp_path: Path) -> AsyncIterator[OperatorRig]:
    """All parts, real, around one pool."""
    async with operator_rig(kube, kube_config, namespace, tmp_path) as rig:
        yield rig
        assert not rig.node.errors
