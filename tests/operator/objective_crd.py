"""The standard's InferenceObjective on the tests' API server: the kind itself, and objects of it."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import yaml
from go_module import object_in
from official_crd import MODULE
from waiting_on import eventually

from trimtab_operator.kube import CRDS, Kube, KubeError, Object
from trimtab_operator.objectives import OBJECTIVES

FILE = Path(__file__).parents[1] / "data" / "crds" / "inferenceobjectives.yaml"
OFFICIAL = "config/crd/bases/inference.networking.x-k8s.io_inferenceobjectives.yaml"


def official_objective_crd() -> dict[str, Any]:
    """Skips, loudly, where there is no Go and no module; in CI it fails."""
    return object_in(MODULE, OFFICIAL)


def our_copy() -> dict[str, Any]:
    body: dict[str, Any] = yaml.safe_load(FILE.read_text())
    return body


@contextlib.asynccontextmanager
async def objective_crd(kube: Kube) -> AsyncIterator[None]:
    """The cluster has the kind meanwhile."""
    body = our_copy()
    await kube.create(CRDS, body)
    try:
        await eventually(lambda: is_served(kube))
        yield
    finally:
        await kube.delete(CRDS, None, body["metadata"]["name"])

        async def is_gone() -> bool:
            return await kube.get(CRDS, None, body["metadata"]["name"]) is None

        await eventually(is_gone)


async def is_served(kube: Kube) -> bool:
    try:
        await kube.list_all(OBJECTIVES, "default")
    except KubeError as error:
        if error.status != 404:
            raise
        return False
    return True


async def put_objective(kube: Kube, namespace: str, called: str, priority: int | None = None, **reference: str) -> None:
    """For the pool `chat`, if nothing else is said."""
    spec: Object = {"poolRef": {"name": "chat"} | reference} | ({} if priority is None else {"priority": priority})
    body = {
        "apiVersion": OBJECTIVES.api_version,
        "kind": OBJECTIVES.kind,
        "metadata": {"name": called, "namespace": namespace},
        "spec": spec,
    }
    await kube.create(OBJECTIVES, body)
