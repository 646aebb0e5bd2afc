"""What the parts of the core do: KV changes into the index, engine blocks to chunks, memory.

    python bench/core_parts.py [--quick]

One JSON object a line. Each part checks its result before it says a figure.
"""

import argparse
import json
import random
import resource
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from decision_fleet import NO_CHUNKS, SEED, Core, cores

from trimtab_core import selection
from trimtab_core.block_chains import BlockChains
from trimtab_core.settings import SchedulerSettings
from trimtab_core.token_table import TokenTable

Row = dict[str, object]
NO_TOKENS = np.empty(0, dtype=np.uint32)


def ingest(core: Core, endpoints: int, per_endpoint: int, batch: int) -> Iterator[Row]:
    """Fill `endpoints` with chunks, half of them shared, batch by batch in random order; then take and give some."""
    rng = np.random.default_rng(SEED)
    pool = core.scheduler(rng_seed=SEED, settings=SchedulerSettings())
    slots = [pool.add_slot() for _ in range(endpoints)]
    shared = rng.integers(1, 2**64, per_endpoint // 2, dtype=np.uint64)
    counts = np.arange(1, batch + 1, dtype=np.uint32) * np.uint32(16)
    places: list[tuple[int, Any]] = []
    for slot in slots:
        own = np.concatenate([shared, rng.integers(1, 2**64, per_endpoint - len(shared), dtype=np.uint64)])
        places += [(slot, own[at : at + batch].copy()) for at in range(0, per_endpoint, batch)]
    random.Random(SEED).shuffle(places)
    # Copied in the order of use, as a log's reader makes them one after the other.
    batches = [(slot, hashes.copy(), counts[: len(hashes)]) for slot, hashes in places]
    start = time.perf_counter()
    for slot, hashes, tokens in batches:
        pool.kv_apply(slot, hashes, tokens, NO_CHUNKS, 0.0)
    filled_s = time.perf_counter() - start
    if pool.index_size()[1] != endpoints * per_endpoint:
        raise SystemExit("the index does not hold what it was given; no figure is given")
    turned = batches[: len(batches) // 4]
    start = time.perf_counter()
    for slot, hashes, tokens in turned:
        pool.kv_apply(slot, NO_CHUNKS, NO_TOKENS, hashes, 0.0)
        pool.kv_apply(slot, hashes, tokens, NO_CHUNKS, 0.0)
    turned_s = time.perf_counter() - start
    yield {
        "row": "ingest",
        "core": core.name,
        "endpoints": endpoints,
        "batch": batch,
        "fill_chunks_per_s": round(endpoints * per_endpoint / filled_s),
        "remove_and_add_chunks_per_s": round(2 * sum(len(hashes) for _, hashes, _ in turned) / turned_s),
    }
    if hasattr(pool, "index_bytes") and batch > 1:
        figure = round(pool.index_bytes() / pool.index_size()[1], 1)
        yield {"row": "memory", "core": core.name, "endpoints": endpoints, "bytes_per_pair": figure}


def blocks(name: str, chains_of: Any, count: int) -> Row:
    """A sidecar's map: events of 4 blocks of 16 tokens; with `count` blocks held, as many go as come."""
    table = TokenTable.from_pieces([bytes([n % 251]) * 4 for n in range(150_000)])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    chains = chains_of(table, SEED)
    rng = np.random.default_rng(SEED)
    events = [
        (np.arange(4 * n + 1, 4 * n + 5, dtype=np.uint64), rng.integers(0, 150_000, 64, dtype=np.uint32))
        for n in range(2 * count // 4)
    ]
    start = time.perf_counter()
    for n, (names, tokens) in enumerate(events):
        parent = None if n % 128 == 0 else int(names[0]) - 1
        chains.store(parent=parent, blocks=names, tokens=tokens, block_tokens=16, root=3)
        if n >= count // 4:
            chains.remove(blocks=events[n - count // 4][0])
        if n % 16 == 0:
            chains.drain()
    spent_s = time.perf_counter() - start
    if (chains.block_count, chains.chunk_count) != (count, count):
        raise SystemExit("the map does not hold what it was given; no figure is given")
    return {
        "row": "blocks",
        "core": name,
        "blocks_held": count,
        "stored_blocks_per_s": round(2 * count / spent_s),
        "process_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
        "of_it_before_mib": round(before / 1024, 1),
    }


def rows(*, quick: bool) -> Iterator[Row]:
    size = 3_000 if quick else 60_000
    kinds: list[tuple[str, Any]] = [("reference", BlockChains)]
    if selection.CORE_NAME == "native":
        kinds.insert(0, ("native", selection.BlockChains))
    for name, kind in kinds:
        yield blocks(name, kind, size)
    for core in cores():
        if core.name == "native":
            yield from ingest(core, 64, size, 32)
            yield from ingest(core, 512, size // 4, 32)
            yield from ingest(core, 512, size // 60, 1)
        else:
            yield from ingest(core, 64, size // 20, 32)
            yield from ingest(core, 64, size // 60, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="to see that it works, not for figures")
    for figures in rows(quick=parser.parse_args().quick):
        print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
