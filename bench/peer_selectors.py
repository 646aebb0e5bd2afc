"""Other selectors on the same prompts, for figures beside `decision.py`: Hugging Face tokenizers on the same text, and
`ai-dynamo-runtime`'s RadixTree (match alone) and SelectionService (select from token ids, and from block hashes).

    BENCH_PEERS=/path/to/venv/bin/python; $BENCH_PEERS bench/peer_selectors.py [--quick] [--tokenizer tokenizer.json]

Runs in an environment of its own with `ai-dynamo-runtime`, `tokenizers`, `pyzmq` and `msgpack`; what is missing is said
and left out. As in `decision.py`, a choice of another endpoint than the expected one ends the run without a figure.
"""

import argparse
import asyncio
import json
import logging
import random
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

SEED = 7
ENDPOINTS = 64
BLOCK_TOKENS = 16
BLOCKS_PER_ENDPOINT = 60_000
TALKS = 64
PROMPTS_TOKENS = (2_048, 32_768)
SETTLE_S = 120.0
Row = dict[str, object]


def row(name: str, core: str, prompt_tokens: int, times_us: list[float]) -> Row:
    times_us.sort()
    return {
        "row": name,
        "endpoints": ENDPOINTS,
        "prompt_tokens": prompt_tokens,
        "core": core,
        "p50_us": round(statistics.median(times_us), 1),
        "p99_us": round(times_us[int(len(times_us) * 0.99)], 1),
    }


class Talks:
    """Prompts as tokens, each held to its end by one endpoint and to half of it by another."""

    def __init__(self, prompt_tokens: int) -> None:
        rng = random.Random(SEED)
        self.prompts = [[rng.randrange(1, 100_000) for _ in range(prompt_tokens)] for _ in range(TALKS)]
        self.holders = [tuple(rng.sample(range(1, ENDPOINTS + 1), 2)) for _ in range(TALKS)]
        self.rng = rng

    def held(self) -> Iterator[tuple[int, list[int]]]:
        """(endpoint, tokens) of all that is held."""
        for tokens, (whole, half) in zip(self.prompts, self.holders, strict=True):
            yield whole, tokens
            yield half, tokens[: len(tokens) // 2]


def named(parent: int | None, blocks: list[Any]) -> Iterator[tuple[int, Any]]:
    """Each block with its name, which stands for all before it as an engine's does."""
    for block in blocks:
        parent = hash((parent, block)) & (1 << 62) - 1
        yield parent, block


def radix_tree(prompt_tokens: int, decisions: int) -> Iterator[Row]:
    from dynamo._core import RadixTree, compute_block_hash_for_seq  # type: ignore[import-not-found]

    talks, tree, number = Talks(prompt_tokens), RadixTree(), 0
    events: list[tuple[int, bytes]] = []

    def stored(endpoint: int, hashes: list[int]) -> None:
        nonlocal number
        parent = None
        for at in range(0, len(hashes), 32):
            names = list(named(parent, hashes[at : at + 32]))
            blocks = [{"block_hash": name, "tokens_hash": block} for name, block in names]
            number += 1
            data = {"stored": {"parent_hash": parent, "blocks": blocks}}
            events.append((endpoint, json.dumps({"event_id": number, "data": data, "dp_rank": 0}).encode()))
            parent = names[-1][0]

    for endpoint in range(1, ENDPOINTS + 1):
        for _ in range(0, BLOCKS_PER_ENDPOINT // 20, 2_000):  # a twentieth: its events are JSON
            stored(endpoint, [talks.rng.getrandbits(63) for _ in range(2_000)])
    for endpoint, tokens in talks.held():
        stored(endpoint, compute_block_hash_for_seq(tokens, BLOCK_TOKENS))
    start = time.perf_counter()
    for endpoint, event in events:
        tree.apply_event(endpoint, event)
    tree.find_matches([1])  # events go to a thread: this waits for it
    spent_s = time.perf_counter() - start
    yield {
        "row": "ingest",
        "core": "dynamo RadixTree.apply_event",
        "batch": 32,
        "fill_chunks_per_s": round(32 * len(events) / spent_s),
    }
    times_us = []
    for _ in range(decisions):
        at = talks.rng.randrange(TALKS)
        hashes = compute_block_hash_for_seq(talks.prompts[at], BLOCK_TOKENS)
        start = time.perf_counter()
        scores = tree.find_matches(hashes).scores
        times_us.append((time.perf_counter() - start) * 1e6)
        best = max(scores, key=scores.__getitem__)
        if (best[0] if isinstance(best, tuple) else best) != talks.holders[at][0]:
            raise SystemExit(f"wrong choice of RadixTree: {best}; no figure is given")
    yield row("match only", "dynamo RadixTree.find_matches", prompt_tokens, times_us)


def signed(number: int) -> int:
    """A u64 as the i64 of the same bits."""
    return number - (1 << 64) if number >> 63 else number


async def selection(prompt_tokens: int, decisions: int) -> list[Row]:
    import msgpack  # type: ignore[import-untyped]
    import zmq
    from dynamo._core import SelectionService, compute_block_hash_for_seq

    talks, context = Talks(prompt_tokens), zmq.Context()
    service = SelectionService(indexer_threads=1)
    voices: dict[int, Any] = {}
    for endpoint in range(1, ENDPOINTS + 1):
        voices[endpoint] = context.socket(zmq.PUB)
        voices[endpoint].setsockopt(zmq.SNDHWM, 0)
        port = voices[endpoint].bind_to_random_port("tcp://127.0.0.1")
        await service.upsert_worker(
            {
                "worker_id": endpoint,
                "endpoint": f"http://127.0.0.1:{40_000 + endpoint}",
                "block_size": BLOCK_TOKENS,
                "kv_events_endpoint": f"tcp://127.0.0.1:{port}",
                "total_kv_blocks": BLOCKS_PER_ENDPOINT,
            }
        )
    await asyncio.sleep(2.0)  # subscriptions
    sequence = dict.fromkeys(voices, 0)
    for endpoint, tokens in talks.held():
        parent = None
        for at in range(0, len(tokens), 512):
            part = tokens[at : at + 512]
            runs = [tuple(part[k : k + BLOCK_TOKENS]) for k in range(0, len(part), BLOCK_TOKENS)]
            blocks = [name for name, _ in named(parent, runs)]
            event = ["BlockStored", blocks, parent, part, BLOCK_TOKENS, None]
            body = msgpack.packb([time.time(), [event], 0])
            voices[endpoint].send_multipart([b"", sequence[endpoint].to_bytes(8, "big"), body])
            sequence[endpoint] += 1
            parent = blocks[-1]
    deadline = time.monotonic() + SETTLE_S
    while True:
        chosen = [(await service.select({"token_ids": tokens}))["worker_id"] for tokens in talks.prompts]
        if chosen == [whole for whole, _ in talks.holders]:
            break
        if time.monotonic() > deadline:
            raise SystemExit("wrong choices of SelectionService; no figure is given")
        await asyncio.sleep(0.5)
    times_us = []
    for _ in range(decisions):
        at = talks.rng.randrange(TALKS)
        request = {"token_ids": talks.prompts[at]}
        start = time.perf_counter()
        answer = await service.select(request)
        times_us.append((time.perf_counter() - start) * 1e6)
        if answer["worker_id"] != talks.holders[at][0]:
            raise SystemExit(f"wrong choice of SelectionService: {answer}; no figure is given")
    rows = [row("decision", "dynamo SelectionService.select", prompt_tokens, times_us)]
    hashed_us = []
    hashes = [[signed(block) for block in compute_block_hash_for_seq(tokens, BLOCK_TOKENS)] for tokens in talks.prompts]
    for _ in range(decisions):
        at = talks.rng.randrange(TALKS)
        # The second list only says which blocks are the same in flight; nothing is booked here.
        request = {"block_hashes": hashes[at], "sequence_hashes": hashes[at], "isl_tokens": prompt_tokens}
        start = time.perf_counter()
        answer = await service.select(request)
        hashed_us.append((time.perf_counter() - start) * 1e6)
        if answer["worker_id"] != talks.holders[at][0]:
            raise SystemExit(f"wrong choice of SelectionService, pre-hashed: {answer}; no figure is given")
    service.shutdown()
    return [*rows, row("decision pre-hashed", "dynamo SelectionService.select", prompt_tokens, hashed_us)]


def tokenizing(path: str, prompt_tokens: int, decisions: int) -> Row:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(path)
    rng = random.Random(SEED)
    words = ["the ", "steers ", "request ", "cache ", "prefix ", "of ", "a ", "small ", "surface ", "token\n"]
    times_us = []
    for _ in range(max(decisions // 20, 3)):
        text = "".join(rng.choices(words, k=prompt_tokens))[: 4 * prompt_tokens]
        start = time.perf_counter()
        tokenizer.encode(text)
        times_us.append((time.perf_counter() - start) * 1e6)
    return row("tokenizing", "tokenizers", prompt_tokens, times_us)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="to see that it works, not for figures")
    parser.add_argument("--tokenizer", help="a tokenizer.json")
    arguments = parser.parse_args()
    logging.disable()
    decisions = 30 if arguments.quick else 400
    for prompt_tokens in PROMPTS_TOKENS:
        parts: list[Any] = [lambda n=prompt_tokens: radix_tree(n, decisions)]
        parts.append(lambda n=prompt_tokens: asyncio.run(selection(n, decisions)))
        if arguments.tokenizer:
            parts.insert(0, lambda n=prompt_tokens: [tokenizing(arguments.tokenizer, n, decisions)])
        for part in parts:
            try:
                for figures in part():
                    print(json.dumps(figures), flush=True)
            except ImportError as error:
                print(f"left out: {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
