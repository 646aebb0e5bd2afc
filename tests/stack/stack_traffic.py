"""Traffic for a running stack: conversations that go on, of several kinds, while something else is being tested.

The one rule: the traffic never decides whether a test passes; it counts what became of its requests and goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp

WORDS: Final = ("tide", "rudder", "keel", "harbour", "ballast", "compass", "sextant", "anchor", "halyard", "bosun", "é")
TURNS_MAX: Final = 6
"""After that many a conversation is over, and another begins."""
PAUSE_AFTER_FAILURE_S: Final = 0.1


@dataclass(slots=True, kw_only=True)
class TrafficCounts:
    """What became of the requests."""

    finished: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    """Reasons."""
    computed_tokens: int = 0
    """Prompt tokens that no cache had, and generated ones."""
    cached_tokens: int = 0
    endpoints: Counter[str] = field(default_factory=Counter)


class Traffic:
    """`workers` conversations at a time through `url`. `kinds` are fields that a conversation's requests all carry;
    `pause_max_s` is the longest a user thinks before the next turn."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        *,
        seed: int,
        workers: int = 8,
        kinds: Sequence[dict[str, Any]],
        tokens_max: int = 60,
        pause_max_s: float = 0.0,
    ) -> None:
        self.counts = TrafficCounts()
        self._session = session
        self._url = url
        self._rng = random.Random(seed)
        self._workers = workers
        self._kinds = kinds
        self._tokens_max = tokens_max
        self._pause_max_s = pause_max_s
        self._is_over = False

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[TrafficCounts]:
        """Run while the context is open. At its end each worker finishes its request."""
        tasks = [asyncio.ensure_future(self._work()) for _ in range(self._workers)]
        try:
            yield self.counts
            self._is_over = True
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _work(self) -> None:
        rng = random.Random(self._rng.randrange(1 << 30))
        while not self._is_over:
            # Several conversations begin alike, as those of one application do.
            opening = random.Random(rng.randrange(5))
            turns = [" ".join(opening.choices(WORDS, k=60)) + f" {rng.randrange(1 << 30)} "]
            turns[0] += " ".join(rng.choices(WORDS, k=rng.randrange(200)))
            kind = rng.choice(self._kinds)
            for _ in range(rng.randint(1, TURNS_MAX)):
                if self._is_over:
                    return
                answer = await self._ask(turns, kind, max_tokens=rng.randint(1, self._tokens_max))
                if answer is None:
                    await asyncio.sleep(PAUSE_AFTER_FAILURE_S)
                    break
                await asyncio.sleep(rng.uniform(0.0, self._pause_max_s))
                turns += [answer, " ".join(rng.choices(WORDS, k=rng.randrange(1, 60)))]

    async def _ask(self, turns: list[str], kind: dict[str, Any], *, max_tokens: int) -> str | None:
        body = {
            "model": "tiny",
            "messages": [
                {"role": "assistant" if number % 2 else "user", "content": text} for number, text in enumerate(turns)
            ],
            "max_tokens": max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            **kind,
        }
        try:
            async with self._session.post(f"{self._url}/v1/chat/completions", json=body) as response:
                if response.status != 200:
                    self.counts.failed[f"HTTP {response.status}: {(await response.text())[:80]}"] += 1
                    return None
                self.counts.endpoints[response.headers.get("x-trimtab-endpoint", "")] += 1
                return self._read(await response.text())
        except (aiohttp.ClientError, TimeoutError) as error:
            self.counts.failed[type(error).__name__] += 1
            return None

    def _read(self, stream: str) -> str | None:
        events = [line[6:] for line in stream.splitlines() if line.startswith("data: ")]
        if not events or events[-1] != "[DONE]":
            self.counts.failed["the stream ended early"] += 1
            return None
        text = ""
        for event in map(json.loads, events[:-1]):
            for choice in event.get("choices", ()):
                text += choice["delta"].get("content") or ""
            usage = event.get("usage")
            if usage:
                cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
                self.counts.cached_tokens += cached
                self.counts.computed_tokens += usage["prompt_tokens"] - cached + usage["completion_tokens"]
        self.counts.finished += 1
        return text
