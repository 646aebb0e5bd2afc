"""The zones of nodes, for pods that do not carry their zone themselves (Kubernetes before 1.35).

The one rule: a zone is for people and for later; it is never waited for, and a refusal is no error.
"""

import logging
from typing import Final

from trimtab_operator.kube import NODES, Kube, KubeError
from trimtab_operator.membership.pod_view import ZONE

logger = logging.getLogger(__name__)

NODES_MAX: Final = 10_000
"""Nodes remembered; beyond it all are forgotten and asked for again."""
FORBIDDEN: Final = 403


class Zones:
    """One per operator."""

    def __init__(self, kube: Kube) -> None:
        self._kube = kube
        self._zones: dict[str, str] = {}
        self._is_refused = False

    def of(self, node: str) -> str:
        """What is known now."""
        return self._zones.get(node, "")

    async def learn(self, nodes: set[str]) -> bool:
        """Ask for those that are not known. True: something new is known."""
        unknown = sorted(node for node in nodes if node and node not in self._zones)
        if not unknown or self._is_refused:
            return False
        if len(self._zones) > NODES_MAX:
            self._zones.clear()
        for node in unknown:
            try:
                body = await self._kube.get(NODES, None, node)
            except KubeError as error:
                if error.status == FORBIDDEN:
                    self._is_refused = True
                    logger.warning("zones are not shown: nodes may not be read: %s", error)
                return False
            labels = {} if body is None else body["metadata"].get("labels") or {}
            self._zones[node] = labels.get(ZONE, "")
        return any(self._zones[node] for node in unknown)
