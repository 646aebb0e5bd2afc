"""A client of the tests' API server, and a namespace of its own for each test."""

import secrets
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

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
