"""What each engine had cached at any moment, from its own events, for judging predictions afterwards.

The one rule: an event counts from the moment the engine says it happened, with no way to travel. So the difference
between a hit here and a picker's hit is what was still on its way, or what the picker assumed of requests in flight.
"""

import asyncio
import json
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from pathlib import Path

import zmq
import zmq.asyncio

from trimtab_core.chunks import hash_chunks, root_hash
from trimtab_core.token_table import TokenTable
from trimtab_sidecar import vllm_events
from trimtab_sidecar.cached_prefixes import CachedPrefixes
from trimtab_sidecar.token_pieces import read_token_pieces

SEED = 0
"""The chunks here meet nobody else's."""
Change = tuple[float, int, int | None]
"""Time, chunk, its tokens from then on (None: gone)."""


class EventRecorder:
    """Listens to the engines' KV events and keeps the frames. Open it before the first request."""

    def __init__(self, events: Mapping[str, str]) -> None:
        """`events`: endpoint to the address of its PUB socket."""
        self.frames: dict[str, list[bytes]] = {endpoint: [] for endpoint in events}
        self._context = zmq.asyncio.Context()
        self._tasks = [asyncio.ensure_future(self._listen(*item)) for item in events.items()]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._context.destroy(linger=0)

    async def _listen(self, endpoint: str, address: str) -> None:
        socket = self._context.socket(zmq.SUB)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        socket.connect(address)
        while True:
            parts = await socket.recv_multipart()
            self.frames[endpoint].append(parts[-1])


class CacheTimeline:
    """The chunks of one engine over time."""

    def __init__(self, frames: Iterable[bytes], table: TokenTable) -> None:
        self._history: dict[int, tuple[list[float], list[int | None]]] = {}
        prefixes = CachedPrefixes(table, SEED)
        held: set[int] = set()
        for frame in frames:
            batch = vllm_events.decode(frame)
            prefixes.apply(batch)
            changes = prefixes.drain()
            gone = set(held) if changes.cleared else set(changes.removed.tolist())
            added = dict(zip(changes.added.tolist(), changes.tokens.tolist(), strict=True))
            for chunk in gone - added.keys():
                self._note(batch.time_s, chunk, None)
            for chunk, tokens in added.items():
                self._note(batch.time_s, chunk, tokens)
            held = (held - gone) | added.keys()

    def hit_tokens(self, chain: list[int], *, at_s: float, tokens_max: int) -> int:
        """The prefix held at a time, in tokens."""
        hit = 0
        for chunk in chain:
            times, tokens = self._history.get(chunk, ([], []))
            at = bisect_right(times, at_s) - 1
            held = tokens[at] if at >= 0 else None
            if held is None:
                break
            hit = held
        return min(hit, tokens_max)

    def _note(self, time_s: float, chunk: int, tokens: int | None) -> None:
        times, counts = self._history.setdefault(chunk, ([], []))
        times.append(time_s)
        counts.append(tokens)


def token_table(model_dir: Path) -> TokenTable:
    """The bytes of the model's tokens."""
    return read_token_pieces(json.loads((model_dir / "tokenizer.json").read_text())).table


def chain_of(prompt: str) -> list[int]:
    """A prompt's chunks, as `CacheTimeline` names them."""
    chain: list[int] = hash_chunks(prompt.encode(), root_hash(SEED), SEED).tolist()
    return chain
