"""Requests to a running stack, and questions to its pickers, for tests."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import aiohttp

from trimtab.probes import get_json
from trimtab.stack import Stack


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came back."""

    status: int
    endpoint: str
    prompt_tokens: int
    cached_tokens: int
    text: str


@dataclass(slots=True, kw_only=True)
class StackClient:
    """One client of one stack."""

    stack: Stack
    session: aiohttp.ClientSession

    async def chat(self, *messages: str, max_tokens: int = 4, stream: bool = False) -> Answer:
        """A chat whose messages are the user's and the assistant's in turn."""
        turns = [
            {"role": "assistant" if number % 2 else "user", "content": text} for number, text in enumerate(messages)
        ]
        body = {"model": "tiny", "messages": turns, "max_tokens": max_tokens, "stream": stream}
        async with self.session.post(f"{self.stack.url}/v1/chat/completions", json=body) as response:
            endpoint = response.headers.get("x-trimtab-endpoint", "")
            if stream or response.status != 200:
                text = await response.text()
                return Answer(status=response.status, endpoint=endpoint, prompt_tokens=0, cached_tokens=0, text=text)
            answer = await response.json()
            usage = answer["usage"]
            return Answer(
                status=200,
                endpoint=endpoint,
                prompt_tokens=usage["prompt_tokens"],
                cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
                text=answer["choices"][0]["message"]["content"] or "",
            )

    async def states(self) -> list[dict[str, Any]]:
        """What each picker that answers knows of the pool."""
        answers = [await get_json(f"{picker.url}/state") for picker in self.stack.pickers]
        return [answer for answer in answers if answer is not None]

    async def quiet(self) -> list[dict[str, Any]]:
        """Wait until no request is open on any picker and all of them know the same; returns what they know."""

        async def is_quiet() -> bool:
            states = await self.states()
            rows = [row for state in states for row in state["endpoints"]]
            return (
                len(states) == len(self.stack.pickers)
                and all(row["requests"] == 0 and row["external"] == 0 for row in rows)
                and all(state["open_reservations"] == 0 and state["connected"] for state in states)
                and len({state["index_digest"] for state in states}) == 1
            )

        await until(is_quiet)
        return await self.states()

    async def chunks(self, endpoint: str) -> list[int]:
        """How many chunks of an endpoint each picker knows."""
        return [
            row["index_chunks"] for s in await self.states() for row in s["endpoints"] if row["endpoint"] == endpoint
        ]

    def engine_number(self, endpoint: str) -> int:
        """N of `engine-N` and `sidecar-N`."""
        return [ports.address for ports in self.stack.engines].index(endpoint) + 1


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Poll; the test's own timeout is the bound."""
    while not await condition():  # noqa: ASYNC110 (processes send no events)
        await asyncio.sleep(0.05)
