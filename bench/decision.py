"""What a decision costs: from the rendered prompt to the reservation, with its hash, exact match, score and samples.

    python bench/decision.py [--json] [--decisions 300] [--endpoints 8,64,512]

Each endpoint holds 60 conversations' chunks, half of them shared by all. Of the prompts 10 % are held by every
endpoint, 72 % by one to eight of them at different depths, and 18 % by none. A prompt's best endpoint is known
beforehand, and a run in which another one is chosen is refused: a wrong decision has no cost worth knowing. Sizes of the fleet take turns
within one process. With `--json` one object a line: row, endpoints, prompt_tokens, core, p50_us, p99_us.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from trimtab_core.chunks import hash_chunks, root_hash
from trimtab_core.scheduler import Placement, PlacementRequest, Prompt, Scheduler, SchedulerSettings

SEED = 7
BLOCK_TOKENS = 16
BYTES_PER_TOKEN = 4
CONVERSATIONS = 60
CHUNKS_PER_CONVERSATION = 1_000
PROMPTS_BYTES = (8_192, 131_072)


@dataclass(frozen=True, slots=True)
class Case:
    """A prompt and the slots of which one has to be chosen."""

    text: bytes
    expected: frozenset[int]


def text_of(rng: random.Random, size_bytes: int) -> bytes:
    return rng.randbytes(size_bytes)


class Fleet:
    """A scheduler whose endpoints hold known conversations, and prompts whose best endpoint is known."""

    def __init__(self, endpoints: int, prompt_bytes: int, rng: random.Random) -> None:
        self.endpoints = endpoints
        self.prompt_bytes = prompt_bytes
        self.scheduler = Scheduler(rng_seed=SEED, settings=SchedulerSettings(block_tokens=BLOCK_TOKENS))
        self._rng = rng
        self._root = root_hash(SEED)
        slots = [self.scheduler.add_slot() for _ in range(endpoints)]
        self._common = [text_of(rng, prompt_bytes) for _ in range(4)]
        self._placed: list[tuple[bytes, frozenset[int]]] = []
        filler = CONVERSATIONS * CHUNKS_PER_CONVERSATION // 2
        shared = rng.randbytes(8 * filler)
        for slot in slots:
            self._hold(slot, np.frombuffer(shared, dtype=np.uint64))
            self._hold(slot, np.frombuffer(rng.randbytes(8 * filler), dtype=np.uint64))
            for text in self._common:
                self._hold_text(slot, text, len(text))
        for _ in range(64):
            text = text_of(rng, prompt_bytes)
            holders = rng.sample(slots, rng.randint(1, min(8, endpoints)))
            depths = [int(len(text) * (k + 1) / len(holders)) for k in range(len(holders))]
            for slot, depth in zip(holders, depths, strict=True):
                self._hold_text(slot, text, depth)
            self._placed.append((text, frozenset([holders[-1]])))
        self.request = PlacementRequest(
            prompts=(),
            variant_of_slot=np.zeros(endpoints, dtype=np.int8),
            exact=np.ones(endpoints, dtype=np.bool_),
            candidates=np.ones(endpoints, dtype=np.bool_),
            tokens_per_byte=1 / BYTES_PER_TOKEN,
        )

    def _hold(self, slot: int, hashes: "np.ndarray[tuple[int], np.dtype[np.uint64]]") -> None:
        tokens = np.arange(1, len(hashes) + 1, dtype=np.uint32) * BLOCK_TOKENS
        self.scheduler.kv_apply(slot, hashes, tokens, np.empty(0, dtype=np.uint64), 0.0)

    def _hold_text(self, slot: int, text: bytes, depth_bytes: int) -> None:
        self._hold(slot, hash_chunks(text[:depth_bytes], self._root, SEED))

    def case(self) -> Case:
        chance = self._rng.random()
        everybody = frozenset(range(self.endpoints))
        if chance < 0.1:
            return Case(self._rng.choice(self._common), everybody)
        if chance < 0.82:
            return Case(*self._rng.choice(self._placed))
        return Case(text_of(self._rng, self.prompt_bytes), everybody)

    def decide(self, case: Case, now_s: float) -> float:
        """Seconds of one decision; its reservation is ended again, outside the time. Raises on a wrong choice."""
        start = time.perf_counter()
        chain = hash_chunks(case.text, self._root, SEED)
        request = PlacementRequest(
            prompts=((Prompt(chain=chain, size_bytes=len(case.text)),),),
            variant_of_slot=self.request.variant_of_slot,
            exact=self.request.exact,
            candidates=self.request.candidates,
            tokens_per_byte=self.request.tokens_per_byte,
        )
        placement = self.scheduler.place(request, now_s)
        spent_s = time.perf_counter() - start
        if not isinstance(placement, Placement) or placement.slot not in case.expected:
            raise SystemExit(f"wrong choice: {placement} is not one of {sorted(case.expected)[:9]}; no figure is given")
        self.scheduler.finish(placement.reservation_id, now_s)
        return spent_s


def rows(endpoint_counts: list[int], decisions: int) -> Iterator[dict[str, object]]:
    for prompt_bytes in PROMPTS_BYTES:
        fleets = [Fleet(count, prompt_bytes, random.Random(SEED)) for count in endpoint_counts]
        spent: list[list[float]] = [[] for _ in fleets]
        for turn in range(decisions + decisions // 10):
            for fleet, times in zip(fleets, spent, strict=True):
                seconds = fleet.decide(fleet.case(), float(turn))
                if turn >= decisions // 10:
                    times.append(seconds * 1e6)
        for fleet, times in zip(fleets, spent, strict=True):
            yield {
                "row": "decision",
                "endpoints": fleet.endpoints,
                "prompt_tokens": prompt_bytes // BYTES_PER_TOKEN,
                "core": "reference",
                "p50_us": round(statistics.median(times), 1),
                "p99_us": round(sorted(times)[int(len(times) * 0.99)], 1),
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--decisions", type=int, default=300)
    parser.add_argument("--endpoints", default="8,64,512", help="sizes of the fleet, comma-separated")
    arguments = parser.parse_args()
    for row in rows([int(n) for n in arguments.endpoints.split(",")], arguments.decisions):
        if arguments.json:
            print(json.dumps(row), flush=True)
        else:
            print(
                f"{row['core']}: {row['prompt_tokens']:>6} tokens, {row['endpoints']:>4} endpoints: "
                f"p50 {row['p50_us']:>9} us, p99 {row['p99_us']:>9} us",
                flush=True,
            )
        sys.stdout.flush()


if __name__ == "__main__":
    main()
