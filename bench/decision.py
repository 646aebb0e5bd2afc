"""What a decision costs: from the rendered prompt to the reservation, with its hash, exact match, score and samples.

    python bench/decision.py [--json] [--quick] [--cores native,reference]

Rows: `decision` (64 endpoints) and `all on` (the same with hotspot detector, limit and every extra term; the two take
turns in one process), `growth` (8 and 512 endpoints taking turns likewise), `while_ingesting` (KV changes stream in at
100 k chunks/s), `while_growing` (the table doubles, and the time of the KV change just before is in the decision's, as
if it had come at that change's beginning; 64 and 512 endpoints), `stall` (what one change of 50 chunks, and clearing
one endpoint, cost at most). Each row is the median of several runs, and `noise` says how far the runs' medians lie
apart. With `--json` one object a line.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator

import numpy as np
from decision_fleet import BYTES_PER_TOKEN, NO_CHUNKS, SEED, TOKENS_PER_CHUNK, Core, Fleet, cores

PROMPTS_BYTES = (8_192, 131_072)
RUNS = 5
DECISIONS_PER_S = 1_000
INGEST_CHUNKS_PER_S = 100_000
INGEST_BATCH_CHUNKS = 50
CLEARS_CHECKED = 4
Row = dict[str, object]


def row(name: str, fleet: Fleet, runs: list[list[float]]) -> Row:
    medians = [statistics.median(times) for times in runs]
    everything = sorted(time_us for times in runs for time_us in times)
    return {
        "row": name,
        "endpoints": fleet.endpoints,
        "prompt_tokens": fleet.prompt_bytes // BYTES_PER_TOKEN,
        "core": fleet.core.name,
        "p50_us": round(statistics.median(medians), 1),
        "p99_us": round(everything[int(len(everything) * 0.99)], 1),
        "min_us": round(everything[0], 1),
        "noise": round(max(medians) / min(medians) - 1, 2),
    }


def measure(fleets: list[Fleet], decisions: int, between: Callable[[Fleet], float]) -> list[list[list[float]]]:
    """Times by fleet and run; the fleets take turns. What `between` answers is added: time that a decision waits."""
    spent: list[list[list[float]]] = [[[] for _ in range(RUNS)] for _ in fleets]
    for fleet in fleets:
        for _ in range(decisions // RUNS):
            fleet.decide()
    for run in range(RUNS):
        for _ in range(decisions // RUNS):
            for fleet, runs in zip(fleets, spent, strict=True):
                waited_us = between(fleet)
                runs[run].append(waited_us + fleet.decide())
    return spent


def nothing(_: Fleet) -> float:
    """An idle log."""
    return 0.0


class Ingest:
    """So many KV changes before each decision as come in meanwhile at 100 k chunks/s: half of them go again later."""

    def __init__(self, rng: random.Random, *, grows: bool) -> None:
        self._rng = rng
        self._grows = grows
        self._last: list[tuple[int, np.ndarray[tuple[int], np.dtype[np.uint64]]]] = []
        self._tokens = np.arange(1, INGEST_BATCH_CHUNKS + 1, dtype=np.uint32) * np.uint32(TOKENS_PER_CHUNK)
        self.spent_us: list[float] = []
        """Of each change."""

    def __call__(self, fleet: Fleet) -> float:
        """Microseconds of the last change, where the table grows; else 0."""
        count = INGEST_CHUNKS_PER_S // DECISIONS_PER_S // INGEST_BATCH_CHUNKS
        if self._grows:
            count *= 20
        for _ in range(count):
            slot = self._rng.choice(fleet.slots)
            hashes = np.frombuffer(self._rng.randbytes(8 * INGEST_BATCH_CHUNKS), dtype=np.uint64)
            start = time.perf_counter()
            fleet.scheduler.kv_apply(slot, hashes, self._tokens, NO_CHUNKS, fleet.now_s)
            self.spent_us.append((time.perf_counter() - start) * 1e6)
            if not self._grows:
                self._last.append((slot, hashes))
                if len(self._last) > 1_000:
                    slot, gone = self._last.pop(0)
                    fleet.scheduler.kv_apply(slot, NO_CHUNKS, self._tokens[:0], gone, fleet.now_s)
        return self.spent_us[-1] if self._grows else 0.0


def stall(fleet: Fleet, changes_us: list[float]) -> Row:
    """The longest changes so far, and what it costs to clear an endpoint; every other one is cleared."""
    changes = sorted(changes_us)
    before = fleet.scheduler.index_size()[1]
    clears, gone = [], 0
    for slot in fleet.slots[::2]:
        held = len(fleet.scheduler.kv_export(slot)[0]) if slot < CLEARS_CHECKED else 0
        pairs = fleet.scheduler.index_size()[1]
        start = time.perf_counter()
        fleet.scheduler.kv_clear(slot)
        clears.append((time.perf_counter() - start) * 1e6)
        gone += pairs - fleet.scheduler.index_size()[1]
        if held and pairs - fleet.scheduler.index_size()[1] != held:
            raise SystemExit("a cleared endpoint took others' chunks along; no figure is given")
    if before - gone != fleet.scheduler.index_size()[1]:
        raise SystemExit("the index is miscounted; no figure is given")
    return {
        "row": "stall",
        "endpoints": fleet.endpoints,
        "core": fleet.core.name,
        "change_p50_us": round(statistics.median(changes), 1),
        "change_p999_us": round(changes[int(len(changes) * 0.999)], 1),
        "change_max_us": round(changes[-1], 1),
        "clear_p50_us": round(statistics.median(clears), 1),
        "clear_max_us": round(max(clears), 1),
    }


def rows(core: Core, decisions: int) -> Iterator[Row]:
    for prompt_bytes in PROMPTS_BYTES:
        rng = random.Random(SEED)
        fleet = Fleet(core, 64, prompt_bytes, rng)
        both = [fleet, Fleet(core, 64, prompt_bytes, random.Random(SEED), is_all_on=True)]
        for name, each, runs in zip(("decision", "all on"), both, measure(both, decisions, nothing), strict=True):
            yield row(name, each, runs)
        del both
        if core.name == "reference":
            continue  # hundreds of endpoints are gigabytes in Python's dicts, and the targets are the native core's
        yield row("while_ingesting", fleet, measure([fleet], decisions, Ingest(rng, grows=False))[0])
        growing = Ingest(rng, grows=True)
        yield row("while_growing", fleet, measure([fleet], decisions, growing)[0])
        yield stall(fleet, growing.spent_us)
        del fleet
        fleets = [Fleet(core, count, prompt_bytes, random.Random(SEED)) for count in (8, 512)]
        for each, runs in zip(fleets, measure(fleets, decisions, nothing), strict=True):
            yield row("growth", each, runs)
        growing = Ingest(rng, grows=True)
        yield row("while_growing", fleets[1], measure(fleets[1:], decisions, growing)[0])
        yield stall(fleets[1], growing.spent_us)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--quick", action="store_true", help="to see that it works, not for figures")
    parser.add_argument("--cores", default="native,reference", help="which ones, comma-separated")
    arguments = parser.parse_args()
    for core in cores():
        if core.name in arguments.cores.split(","):
            decisions = 50 if arguments.quick else 300 if core.name == "reference" else 2_000
            for figures in rows(core, decisions):
                words = "  ".join(f"{name} {value}" for name, value in figures.items())
                print(json.dumps(figures) if arguments.json else words, flush=True)


if __name__ == "__main__":
    main()
