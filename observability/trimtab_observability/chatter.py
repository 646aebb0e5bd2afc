"""Requests as users make them, for a pool that is to be looked at: conversations of several applications, and a few
of each kind that dashboards tell apart.

The one rule: what comes back decides nothing; it is only counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp

MODEL: Final = "tiny"
WORDS: Final = ("tide", "rudder", "keel", "harbour", "ballast", "compass", "sextant", "anchor", "halyard", "bosun", "é")
TURNS_MAX: Final = 6
PAUSE_MAX_S: Final = 0.6
"""Before the next turn of a conversation."""


@dataclass(slots=True, kw_only=True)
class Chatter:
    """`talkers` conversations at a time through `url`. `seed` repeats their texts."""

    session: aiohttp.ClientSession
    url: str
    seed: int
    talkers: int
    applications: int = 6
    """Each has a system prompt of its own."""
    statuses: Counter[int] = field(default_factory=Counter)
    """HTTP statuses of the answers; 0: there was none."""

    @contextlib.asynccontextmanager
    async def going_on(self) -> AsyncIterator[None]:
        """Conversations go on while the context is open."""
        rng = random.Random(self.seed)
        tasks = [asyncio.ensure_future(self._talk(random.Random(rng.getrandbits(64)))) for _ in range(self.talkers)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def burst(self, count: int, *, tokens: int = 40) -> None:
        """As many requests at once."""
        await asyncio.gather(*(self._post("chat/completions", _chat([f"burst {n}"], tokens)) for n in range(count)))

    async def oddities(self, rng: random.Random) -> None:
        """One of each: answers that later requests may name, whose usage pickers see, and a body that is wrong."""
        for _ in range(2):
            new = " ".join(rng.choices(WORDS, k=rng.randint(0, 200)))
            body = {"model": MODEL, "input": " ".join(WORDS * 20) + new, "max_output_tokens": 8}
            await self._post("responses", body)
        await self._post("chat/completions", {"model": MODEL, "messages": "no list", "max_tokens": 1})

    async def _talk(self, rng: random.Random) -> None:
        while True:
            opening = random.Random(rng.randrange(self.applications))
            turns = [" ".join(opening.choices(WORDS, k=150)) + f" {rng.randrange(1 << 30)}"]
            for _ in range(rng.randint(1, TURNS_MAX)):
                if await self._post("chat/completions", _chat(turns, rng.randint(4, 80))) != 200:
                    await asyncio.sleep(PAUSE_MAX_S)
                    break
                await asyncio.sleep(rng.uniform(0.0, PAUSE_MAX_S))
                turns += ["so it is", " ".join(rng.choices(WORDS, k=rng.randint(5, 60)))]
            if rng.random() < 0.1:
                await self.oddities(rng)

    async def _post(self, path: str, body: dict[str, Any]) -> int:
        try:
            async with self.session.post(f"{self.url}/v1/{path}", json=body) as response:
                await response.read()
                self.statuses[response.status] += 1
                return response.status
        except (aiohttp.ClientError, TimeoutError):
            self.statuses[0] += 1
            return 0


def _chat(turns: list[str], tokens: int) -> dict[str, Any]:
    roles = ("user", "assistant")
    messages = [{"role": roles[number % 2], "content": text} for number, text in enumerate(turns)]
    return {"model": MODEL, "messages": messages, "max_tokens": tokens, "stream": True}
