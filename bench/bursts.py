"""Bursts of new prompts at several real pickers at once: how many meet on one endpoint, and what avoiding that costs.

    python bench/bursts.py [--bursts 200] [--rounds 3] [--pickers 4]

Real picker processes on a real store, a gateway's messages to each over gRPC, 8 KB chats that nobody has seen before.
Rows, with confirmed placement and without (the pickers take turns, a round each):

- `at_once`: one request for each endpoint in the same moment, each at another picker; `met`: requests that were sent to
  an endpoint that another one of the burst has;
- `bursts`: two for each endpoint within 5 ms at pickers drawn at random; `met`: those beyond two on one endpoint;
- `alone`: one request at a time, from the gateway's message to the answer: what the confirmation costs.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / folder) for folder in ("bench", "bench/peers/gie_picker", "e2e/cluster")]

import grpc.aio
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc
from exchanges import whole
from hop import text
from hop_pool import BenchPool
from processes import processes

METHOD = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
ENDPOINTS = [f"127.0.1.{number + 1}:8000" for number in range(4)]
PROMPT_BYTES = 8_192
BURST_S = 0.005
REST_S = 0.05
"""Between two bursts: until all have heard that the last one is over."""
UNCONFIRMED = (
    "-c",
    "import runpy, trimtab_extproc.confirmation as c; c.CONFIRM_TOKENS_MIN = 1 << 60; "
    "runpy.run_module('trimtab_extproc', run_name='__main__')",
)


class Gateway:
    """Asks pickers, and keeps the streams until they are let go."""

    def __init__(self, channels: list[grpc.aio.Channel], rng: random.Random) -> None:
        self._asking = [channel.stream_stream(METHOD) for channel in channels]
        self._rng = rng
        self._number = 0
        self._streams: list[grpc.aio.StreamStreamCall] = []

    async def ask(self, picker: int, after_s: float = 0.0) -> tuple[str, float]:
        """The endpoint, and the seconds that it took."""
        self._number += 1
        body = {"model": "m", "messages": [{"role": "user", "content": text(PROMPT_BYTES, self._rng)}]}
        message = ext_proc.ProcessingRequest(
            request_body=ext_proc.HttpBody(body=json.dumps(body).encode(), end_of_stream=True)
        )
        data = whole(message, self._number).SerializeToString()
        stream = self._asking[picker]()
        self._streams.append(stream)
        await asyncio.sleep(after_s)
        sent_s = time.perf_counter()
        await stream.write(data)
        answer = await stream.read()
        took_s = time.perf_counter() - sent_s
        found = ext_proc.ProcessingResponse.FromString(answer)
        headers = found.request_body.response.header_mutation.set_headers
        named = {header.header.key: header.header.raw_value.decode() for header in headers}
        return named["x-gateway-destination-endpoint"].split(",")[0], took_s

    async def let_go(self) -> None:
        for stream in self._streams:
            stream.cancel()
        self._streams.clear()
        await asyncio.sleep(REST_S)


def met(endpoints: list[str], fair: int) -> int:
    return sum(max(0, count - fair) for count in Counter(endpoints).values())


async def measured(ports: list[int], bursts: int, seed: int) -> dict[str, list[float]]:
    rng = random.Random(seed)
    channels = [grpc.aio.insecure_channel(f"127.0.0.1:{port}") for port in ports]
    gateway, rows = Gateway(channels, rng), {"at_once": [], "bursts": [], "alone": [], "busy": []}
    count = len(ENDPOINTS)
    for number in range(bursts + 5):
        found = await asyncio.gather(*(gateway.ask(n % len(ports)) for n in range(count)))
        await gateway.let_go()
        both = [(rng.randrange(len(ports)), rng.uniform(0.0, BURST_S)) for _ in range(2 * count)]
        pairs = await asyncio.gather(*(gateway.ask(*each) for each in both))
        await gateway.let_go()
        _, alone_s = await gateway.ask(rng.randrange(len(ports)))
        await gateway.let_go()
        if number >= 5:  # connections and caches are warm
            rows["at_once"].append(met([endpoint for endpoint, _ in found], 1))
            rows["bursts"].append(met([endpoint for endpoint, _ in pairs], 2))
            rows["busy"].append(statistics.mean(took_s for _, took_s in pairs))
            rows["alone"].append(alone_s)
    for channel in channels:
        await channel.close()
    return rows


def confirmations(port: int) -> Counter[str]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        lines = answer.read().decode().splitlines()
    found: Counter[str] = Counter()
    for line in lines:
        if line.startswith("trimtab_confirmations_total"):
            found[line.split('result="')[1].split('"')[0]] += int(float(line.rsplit(" ", 1)[1]))
    return found


def run(pickers: int, bursts: int, seed: int, code: tuple[str, str]) -> tuple[dict[str, list[float]], Counter[str]]:
    with tempfile.TemporaryDirectory() as name, processes(Path(name)) as group:
        pool = BenchPool(group, Path(name), ENDPOINTS)
        # The pool's own one is not asked: it runs as it is shipped.
        others = [(pool.ports(1)[0], pool.ports(1)[0], pool.ports(1)[0]) for _ in range(pickers)]
        for number, ports in enumerate(others):
            pool.picker(group, f"picker{number}", ports, code)
        with pool:
            pool.await_ready()
            time.sleep(4)  # the others too, and they have heard of each other
            group.check()
            rows = asyncio.run(measured([ports[0] for ports in others], bursts, seed))
            counts: Counter[str] = Counter()
            for _, _, port in others:
                counts += confirmations(port)
    return rows, counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bursts", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pickers", type=int, default=4)
    options = parser.parse_args()
    sides = {"confirmed": ("-m", "trimtab_extproc"), "unconfirmed": UNCONFIRMED}
    for number in range(options.rounds):
        for side, code in sides.items():
            rows, counts = run(options.pickers, options.bursts, number, code)
            requests = {"at_once": len(ENDPOINTS), "bursts": 2 * len(ENDPOINTS)}
            alone = sorted(rows["alone"])
            print(
                json.dumps({
                    "row": side,
                    **{f"{row}_met": round(statistics.mean(rows[row]) / n, 4) for row, n in requests.items()},
                    "burst_mean_ms": round(statistics.mean(rows["busy"]) * 1000, 2),
                    "alone_p50_ms": round(alone[len(alone) // 2] * 1000, 3),
                    "alone_p95_ms": round(alone[int(len(alone) * 0.95)] * 1000, 3),
                    "confirmations": dict(counts),
                }),
                flush=True,
            )  # fmt: skip


if __name__ == "__main__":
    main()
