"""An emulated engine and a sidecar as real processes, and a follower that hears what the sidecar says of it."""

import asyncio
import contextlib
import json
import os
import secrets
import signal
import socket
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from pool_mirror import PoolMirror
from sidecar_captures import TINY_MODEL, tiny_table
from zmq_engine import until

from trimtab_core.chunks import hash_chunks, pool_seed, root_hash
from trimtab_state.documents import Heartbeat
from trimtab_state.keys import PoolKeys
from trimtab_state.pool_follower import PoolFollower
from trimtab_state.store import connect

SECRET = "a secret of these tests"
NAMESPACE, POOL = "ns", "pool"
SEED = pool_seed(SECRET.encode(), NAMESPACE, POOL)
TABLE = tiny_table()
LINE_S = 30.0
PORTS = range(18_000, 32_000)
"""Below those that the system gives to outgoing connections, so that none of them takes a port before its server."""


def free_ports(count: int) -> list[int]:
    """`count` ports in a row that nobody listens on."""
    while True:
        first = secrets.choice(PORTS)
        with contextlib.suppress(OSError, OverflowError), contextlib.ExitStack() as stack:
            for port in range(first, first + count):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return list(range(first, first + count))


@contextlib.asynccontextmanager
async def process(*words: str, log: Path, stdout: int | None = None) -> AsyncIterator[Process]:
    """A process that is killed at the end if it still runs."""
    env = os.environ | {"TRIMTAB_SECRET": SECRET}
    with log.open("ab") as output:
        started = await asyncio.create_subprocess_exec(*words, stdout=stdout or output, stderr=output, env=env)
    try:
        yield started
    finally:
        if started.returncode is None:
            started.kill()
        await started.wait()


class Pod:
    """One emulated engine with its sidecar, in a pool of its own in the store at `store_url`."""

    def __init__(self, store_url: str, directory: Path, http: aiohttp.ClientSession) -> None:
        self.store_url = store_url
        self.directory = directory
        self.http = http
        self.mirror = PoolMirror()
        self.url = ""
        self.metrics_port = 0
        self.sidecar: Process | None = None
        self._stack = contextlib.AsyncExitStack()

    async def start_engine(self, *flags: str, ranks: int = 1) -> None:
        """HTTP, and for each rank events and replay, on free ports."""
        port, *ports = free_ports(1 + 2 * ranks)
        words = [sys.executable, "-m", "trimtab_lab.emulator", "--port", str(port), "--speed", "50"]
        words += ["--kv-events-port", str(ports[0]), "--kv-replay-port", str(ports[ranks]), "--num-gpu-blocks", "200"]
        words += ["--data-parallel-size", str(ranks), "--answer-tokens", "1:40", "--max-model-len", "800"]
        words += flags
        engine = await self._stack.enter_async_context(process(*words, log=self.directory / "engine.log", stdout=PIPE))
        assert engine.stdout is not None
        async with asyncio.timeout(LINE_S):
            assert await engine.stdout.readline(), (self.directory / "engine.log").read_text()
        self.engine = engine
        self.port, self.ports = port, ports
        self.url = f"http://127.0.0.1:{port}"

    def sidecar_words(self, *more: str) -> list[str]:
        words = ["--pool-name", POOL, "--pool-namespace", NAMESPACE, "--endpoint-host", "127.0.0.1"]
        words += ["--engine-url", self.url, "--model-dir", str(TINY_MODEL), "--store", self.store_url]
        words += ["--checkpoint-dir", str(self.directory / "checkpoints"), "--metrics-port", str(self.metrics_port)]
        return [*words, "--bind", "127.0.0.1", "--scrape-s", "0.1", "--scrape-idle-s", "0.2", "--heartbeat-s", "0.2",
                "--models-s", "0.2", "--checkpoint-s", "0.2", "--tail-check-s", "0.2", *more]  # fmt: skip

    async def start_sidecar(self, *more: str) -> Process:
        (self.metrics_port,) = free_ports(1)
        words = [sys.executable, "-m", "trimtab_sidecar", *self.sidecar_words(*more)]
        self.sidecar = await self._stack.enter_async_context(process(*words, log=self.directory / "sidecar.log"))
        return self.sidecar

    async def drain(self) -> int:
        words = [sys.executable, "-m", "trimtab_sidecar", "drain", *self.sidecar_words()]
        async with process(*words, log=self.directory / "drain.log") as drain:
            return await drain.wait()

    async def terminate(self) -> int:
        assert self.sidecar is not None
        self.sidecar.send_signal(signal.SIGTERM)
        return await self.sidecar.wait()

    async def follow(self) -> None:
        store = connect(self.store_url)
        self._stack.push_async_callback(store.close)
        task = asyncio.create_task(PoolFollower(store, PoolKeys(NAMESPACE, POOL), self.mirror).run())

        async def stop() -> None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

        self._stack.push_async_callback(stop)

    async def close(self) -> None:
        await self._stack.aclose()

    def endpoint(self, rank: int | None = None) -> str:
        return f"127.0.0.1:{self.port}" + ("" if rank is None else f"/{rank}")

    def heartbeat(self, rank: int | None = None) -> Heartbeat | None:
        return self.mirror.heartbeats.get(self.endpoint(rank))

    async def serves(self, rank: int | None = None) -> Heartbeat:
        await until(lambda: (beat := self.heartbeat(rank)) is not None and beat.state == "serving")
        beat = self.heartbeat(rank)
        assert beat is not None
        return beat

    async def chat(self, text: str, *, rank: int | None = None, **more: Any) -> Any:
        body = {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": 40} | more
        headers = {} if rank is None else {"X-data-parallel-rank": str(rank)}
        async with self.http.post(f"{self.url}/v1/chat/completions", json=body, headers=headers) as response:
            assert response.status == 200, await response.text()
            return await response.json()

    async def lab(self, page: str) -> Any:
        async with self.http.post(f"{self.url}/lab/{page}") as response:
            assert response.status == 200, await response.text()
            return await response.json()

    async def live_chunks(self, rank: int = 0) -> dict[int, int]:
        """What the engine's cache holds, told by the engine itself."""
        async with self.http.get(f"{self.url}/lab/cache") as response:
            page = (await response.json())["ranks"][rank]
        return chunks_of(page["chains"], page["block_tokens"])

    async def agrees(self, rank: int | None = None) -> int:
        """Wait until followers hold what the engine holds; returns the number of chunks."""
        live: dict[int, int] = {}
        for _ in range(2_000):
            live = await self.live_chunks(rank or 0)
            if self.mirror.chunks.get(self.endpoint(rank)) == live:
                return len(live)
            await asyncio.sleep(0.01)
        held = self.mirror.chunks.get(self.endpoint(rank)) or {}
        raise AssertionError(
            f"{len(held)} chunks are told, {len(live)} live, {len(held.items() & live.items())} in both"
        )

    async def own_metrics(self) -> dict[str, float]:
        """The sidecar's metrics without labels, summed over its endpoints."""
        async with self.http.get(f"http://127.0.0.1:{self.metrics_port}/metrics") as response:
            lines = (await response.text()).splitlines()
        sums: dict[str, float] = {}
        for line in lines:
            if not line.startswith("#"):
                name, value = line.split("{")[0], float(line.rsplit(" ", 1)[1])
                sums[name.removeprefix("trimtab_sidecar_")] = sums.get(name, 0.0) + value
        return sums

    def logs(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.directory / "sidecar.log").read_text().splitlines()]


def chunks_of(chains: Sequence[dict[str, Any]], block_tokens: int) -> dict[int, int]:
    """Hash -> tokens of every whole-block prefix of the chains, block by block from the text alone."""
    claimed: dict[int, int] = {}
    for chain in chains:
        ids = np.array(chain["tokens"], dtype=np.uint32)
        hashes = hash_chunks(TABLE.bytes_of(ids), root_hash(SEED, chain["lora_name"], chain["cache_salt"]), SEED)
        at = 0
        for end in range(block_tokens, len(ids) + 1, block_tokens):
            whole = len(TABLE.bytes_of(ids[:end])) // 64
            for index in range(at, whole):
                tokens = end if index == whole - 1 else end - block_tokens
                chunk = int(hashes[index])
                claimed[chunk] = min(claimed.get(chunk, tokens), tokens)
            at = whole
    return claimed
