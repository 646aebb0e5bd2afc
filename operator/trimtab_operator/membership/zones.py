"""The zones of nodes, for pods that do not carry their zone themselves (Kubernetes before 1.35).

The one rule: a zone is for people and for later; it is never waited for, and a refusal is no error.
"""

import asyncio
import logging
import math
from typing import Final

from trimtab_operator.kube import NODES, Kube, KubeError
from trimtab_operator.membership.pod_view import ZONE

logger = logging.getLogger(__name__)

NODES_MAX: Final = 10_000
"""Nodes remembered; beyond it all are forgotten and asked for again."""
FORBIDDEN: Final = 403
REFUSED_S: Final = 300.0
"""How long nodes are left alone after a refusal: somebody may give us the right to read them meanwhile."""


class Zones:
    """One per operator."""

    def __init__(self, kube: Kube) -> None:
        self._kube = kube
        self._zones: dict[str, str] = {}
        self._ask_at_s = -math.inf

    def of(self, node: str) -> str:
        """What is known now."""
        return self._zones.get(node, "")

    async def learn(self, nodes: set[str]) -> bool:
        """Ask for those that are not known. True: something new is known, also where others could not be asked for."""
        now_s = asyncio.get_running_loop().time()
        unknown = sorted(node for node in nodes if node and node not in self._zones)
        if not unknown or now_s < self._ask_at_s:
            return False
        if len(self._zones) > NODES_MAX:
            self._zones.clear()
        is_new = False
        for node in unknown:
            try:
                body = await self._kube.get(NODES, None, node)
            except KubeError as error:
                if error.status == FORBIDDEN:
                    is_news, self._ask_at_s = self._ask_at_s == -math.inf, now_s + REFUSED_S
                    level = logging.WARNING if is_news else logging.DEBUG
                    logger.log(level, "zones are not shown: nodes may not be read: %s", error)
                break
            labels = {} if body is None else body["metadata"].get("labels") or {}
            self._zones[node] = labels.get(ZONE, "")
            is_new |= bool(self._zones[node])
        return is_new
