"""What a pool takes in the store: the real packed forms in a real Valkey, each kept at its bound.

    python bench/store_memory.py [--json FILE]

These are the figures behind the chart's `store.valkey.sizing` (docs/install.md): bytes for each chunk of an endpoint's
snapshot, and MiB for a pool's logs when they are full.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests")]

import numpy as np
from valkey_server import ValkeyProcess

from trimtab_state import PoolKeys, Store, connect
from trimtab_state.kv_codec import KvEntry, KvSnapshot, encode_entry, encode_snapshot
from trimtab_state.load_codec import LoadEntry, LoadKind, LoadOperation, encode_load_entry
from trimtab_state.response_map import ResponseMap
from trimtab_state.settings import StateSettings

SETTINGS = StateSettings()
SEED = 1
MIB = 2**20
ENDPOINT = "10.240.113.205:8000"
EPOCH = "0123456789abcdef"
SNAPSHOT_CHUNKS = (20_000, 60_000, 87_381, 240_000)
"""One of them a little over a size class of the allocator, which is the worst for it."""
RESERVES_PER_ENTRY = 5
"""500 requests a second, in windows of 10 ms."""
SAMPLES = 32
"""Of a prompt with 8,000 tokens that are new: 512 chunks, one in 16."""


async def used(store: Store) -> int:
    info = await store.execute("INFO", "memory")
    return int(info["used_memory"])


async def measure(store: Store) -> dict[str, float]:
    rng = np.random.default_rng(SEED)
    keys = PoolKeys("models", "chat")
    # What is deleted is to be gone when the next figure is taken.
    await store.execute("CONFIG", "SET", "lazyfree-lazy-user-del", "no")
    figures: dict[str, float] = {"empty_mib": await used(store) / MIB}

    def chunks(count: int) -> tuple[np.ndarray, np.ndarray]:
        return rng.integers(0, 2**63, count, dtype=np.uint64), rng.integers(0, 2**31, count).astype(np.uint32)

    worst = 0.0
    for count in SNAPSHOT_CHUNKS:
        key = keys.kv_snapshot(f"{ENDPOINT}/{count}")
        await store.execute("SET", key, encode_snapshot(KvSnapshot(1, 1, EPOCH, *chunks(count))))
        worst = max(worst, await store.execute("MEMORY", "USAGE", key) / count)
    figures["snapshot_bytes_per_chunk"] = worst

    before, per_entry = await used(store), SETTINGS.kv_chunks_per_entry_max
    for sequence in range(1, SETTINGS.kv_log_entries_max + 101):
        added, tokens = chunks(per_entry)
        entry = encode_entry(KvEntry(ENDPOINT, 1, sequence, EPOCH, False, added, tokens, added[:0]))
        await store.execute("XADD", keys.kv_log, "MAXLEN", "~", SETTINGS.kv_log_entries_max, "*", "b", entry)
    figures["kv_log_full_mib"] = (await used(store) - before) / MIB
    await store.execute("DEL", keys.kv_log)

    before = await used(store)
    for sequence in range(1, SETTINGS.load_log_entries_max + 101):
        operations = [
            LoadOperation(LoadKind.RESERVE, sequence * 10 + index, ENDPOINT, 8_000, 1, *chunks(SAMPLES))
            for index in range(RESERVES_PER_ENTRY)
        ]
        entry = encode_load_entry(LoadEntry(1, sequence, operations))
        await store.execute("XADD", keys.load_log, "MAXLEN", "~", SETTINGS.load_log_entries_max, "*", "b", entry)
    figures["load_log_at_500_per_s_mib"] = (await used(store) - before) / MIB
    await store.execute("DEL", keys.load_log)

    before = await used(store)
    responses, count = ResponseMap(store, keys, settings=SETTINGS), 20_000
    for number in range(count):
        await responses.put(f"resp_{number:032x}", ENDPOINT)
    figures["responses_full_mib"] = (await used(store) - before) / count * SETTINGS.responses_max / MIB
    return figures


async def run() -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        server = ValkeyProcess(Path(folder))
        await asyncio.to_thread(server.start)
        store = connect(server.url)
        try:
            return await measure(store)
        finally:
            await store.close()
            server.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    figures = asyncio.run(run())
    for name, value in figures.items():
        print(f"{name:28} {value:8.1f}")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
