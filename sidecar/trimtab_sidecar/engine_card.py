"""The model card of one engine, kept up to date.

The one rule: nobody waits for a card but for the first try at the first one. A card is made again whenever the engine
may be another one (another process, other names, other blocks); until then, and where the making fails, the card at
hand stands, which is more likely right than none. An engine that answers but not the probes has a card with a reason.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Hashable

from trimtab_core.model_card import ModelCard
from trimtab_sidecar.card_process import CardError, CardRequest, card_from_child
from trimtab_sidecar.probes import EngineUnreachable

logger = logging.getLogger(__name__)

RETRY_MIN_S = 2.0
"""Pause before a card whose making failed is tried again; it doubles with each failure, since a try costs a process."""
RETRY_MAX_S = 60.0


class EngineCard:
    """`on_card` is called with the card before, if any, and the new one."""

    def __init__(self, on_card: Callable[[ModelCard | None, ModelCard], None]) -> None:
        self.card: ModelCard | None = None
        self.digest = ""
        """The card's name; empty while there is none."""
        self.packed = b""
        self._on_card = on_card
        self._made_of: Hashable = None
        self._again_s = math.inf
        self._retry_s = RETRY_MIN_S
        self._task: asyncio.Task[None] | None = None

    async def follow(self, tasks: asyncio.TaskGroup, request: CardRequest, *made_of: Hashable) -> None:
        """Have a card of `request` that is no older than the last change of `made_of`."""
        key = (request, made_of)
        if self._made_of == key and time.monotonic() < self._again_s:
            return
        if self.card is None:
            await self._make(request)
        elif self._task is None or self._task.done():
            self._task = tasks.create_task(self._make(request))
        else:
            return
        self._made_of = key

    async def _make(self, request: CardRequest) -> None:
        try:
            card = await card_from_child(request)
            self._again_s, self._retry_s = math.inf, RETRY_MIN_S
        except (CardError, EngineUnreachable) as error:
            self._again_s = time.monotonic() + self._retry_s
            self._retry_s = min(self._retry_s * 2, RETRY_MAX_S)
            logger.warning("no model card", extra={"engine": request.base_url, "error": str(error)})
            card = self.card or ModelCard(block_tokens=request.block_tokens, reason=f"no card could be made: {error}")
            if card is self.card:
                return
        before, self.card = self.card, card
        self.digest, self.packed = card.digest(), card.encode()
        logger.info(
            "model card made",
            extra={"engine": request.base_url, "card": self.digest[:12], "exact": card.exact, "reason": card.reason},
        )
        self._on_card(before, card)
