"""The hop: what a picker adds to a request. Envoy with it minus Envoy without, in one run, beside the reference picker.

    python bench/hop.py [--seconds 10] [--rounds 3] [--row NAME] [--json FILE] [--no-peer]

Rows: 2 KB chats at 150 and at 500 requests/s, and 400 KB chats at 10 requests/s, 80 % of each seen before, and all new.
Open loop (vegeta), 8 backends that answer at once, one picker process each. Sides take turns within a round, so that
noise meets all of them; medians over the rounds are given, and A against A shows the noise. A side counts only if every
request succeeded and our picker placed each of them. CPU per request is that of the picker's own process.

Our picker has everything on that it has in a pool: a store, heartbeats, an exact model card and the backends' KV index.
Sides: `direct` (no picker), `trimtab` (our Envoy configuration), `trimtab_streamed` (our picker behind a gateway with
streamed bodies, as the reference picker is made for), `reference`.
"""

import argparse
import base64
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import urllib.request
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / folder) for folder in ("bench", "bench/peers/gie_picker", "e2e/cluster")]

import hop_envoy
from hop_pool import BenchPool
from peer import build, reference_picker
from processes import cpu_s, processes

BACKENDS = [f"127.0.1.{i + 1}" for i in range(8)]
BACKEND_PORT = 8000
COMMON_PREFIXES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One kind of load. `shared`: the part of each prompt that other prompts begin with too."""

    name: str
    rate: int
    prompt_bytes: int
    shared: float


ROWS = (
    Row(name="2 KB, half seen before, calm", rate=150, prompt_bytes=2_000, shared=0.5),
    Row(name="2 KB, half seen before", rate=500, prompt_bytes=2_000, shared=0.5),
    Row(name="400 KB, 80 % seen before", rate=10, prompt_bytes=400_000, shared=0.8),
    Row(name="400 KB, all new", rate=10, prompt_bytes=400_000, shared=0.0),
)


def text(size_bytes: int, rng: random.Random) -> str:
    """Words of a fixed vocabulary, so that the text is neither random bytes nor one word again and again."""
    words: list[str] = []
    length = 0
    while length < size_bytes:
        word = f"w{rng.randrange(5000):x}"
        words.append(word)
        length += len(word) + 1
    return " ".join(words)[:size_bytes]


def common_prefixes(row: Row) -> list[str]:
    return [text(int(row.prompt_bytes * row.shared), random.Random(i)) for i in range(COMMON_PREFIXES)]


def write_targets(row: Row, port: int, seed: int, count: int, path: Path) -> None:
    """vegeta's targets: `count` chats, prompts that begin with a common prefix and go on alone."""
    rng, prefixes = random.Random(seed), common_prefixes(row)
    with path.open("w") as f:
        for _ in range(count):
            prompt = rng.choice(prefixes) + text(row.prompt_bytes - int(row.prompt_bytes * row.shared), rng)
            body = json.dumps({"model": "m", "messages": [{"role": "user", "content": prompt}]}).encode()
            target = {
                "method": "POST",
                "url": f"http://127.0.0.1:{port}/v1/chat/completions",
                "header": {"content-type": ["application/json"]},
                "body": base64.b64encode(body).decode(),
            }
            f.write(json.dumps(target) + "\n")


def attack(vegeta: Path, row: Row, port: int, seconds: int, seed: int, folder: Path) -> dict[str, Any]:
    """One open-loop run. Raises RuntimeError unless every request succeeded."""
    targets = folder / "targets.jsonl"
    write_targets(row, port, seed, min(row.rate * seconds, 800), targets)
    run = subprocess.run(
        [vegeta, "attack", "-format=json", f"-targets={targets}", f"-rate={row.rate}", f"-duration={seconds}s",
         "-max-workers=400"],
        check=True, capture_output=True,
    )  # fmt: skip
    report = subprocess.run([vegeta, "report", "-type=json"], input=run.stdout, check=True, capture_output=True)
    result: dict[str, Any] = json.loads(report.stdout)
    if result["success"] != 1:
        raise RuntimeError(f"{row.name}: requests failed: {result['status_codes']} {result['errors'][:3]}")
    return result


def placed(metrics_port: int) -> float:
    """Decisions of our picker so far that chose by P-token x BS."""
    with urllib.request.urlopen(f"http://127.0.0.1:{metrics_port}/metrics", timeout=5) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("trimtab_decisions_total{"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    p50_ms: float
    p95_ms: float
    p99_ms: float
    cpu_ms_per_request: float


def measure(sides: dict[str, tuple[int, int | None]], rounds: int, seconds: int, vegeta: Path, folder: Path,
            pool: BenchPool, wanted: str) -> list[dict[str, Any]]:  # fmt: skip
    """`sides`: name -> (port, picker's process id). One result for each row."""
    results = []
    for row in [row for row in ROWS if wanted in row.name]:
        pool.hold(common_prefixes(row))
        samples: dict[str, list[Sample]] = {name: [] for name in sides}
        for number in range(rounds + 1):  # the first round warms up and is not counted
            for name, (port, pid) in sides.items():
                cpu_before = cpu_s(pid) if pid else 0.0
                placed_before = placed(pool.metrics_port)
                report = attack(vegeta, row, port, 3 if number == 0 else seconds, number * 101 + len(name), folder)
                cpu_ms = ((cpu_s(pid) if pid else 0.0) - cpu_before) * 1000 / report["requests"]
                if name.startswith("trimtab") and placed(pool.metrics_port) - placed_before < report["requests"]:
                    raise RuntimeError(f"{row.name}, {name}: some requests were not placed by the picker")
                if number > 0:
                    latencies = report["latencies"]
                    samples[name].append(
                        Sample(
                            p50_ms=latencies["50th"] / 1e6,
                            p95_ms=latencies["95th"] / 1e6,
                            p99_ms=latencies["99th"] / 1e6,
                            cpu_ms_per_request=cpu_ms,
                        )
                    )
                print(f"  {row.name}: round {number}/{rounds}: {name}", file=sys.stderr, flush=True)
        results.append(summarise(row, samples))
        print(table(results[-1]), flush=True)
    return results


def summarise(row: Row, samples: dict[str, list[Sample]]) -> dict[str, Any]:
    """Medians over the rounds; hops against `direct`; ratios of ours to the reference's."""
    median = {
        name: {
            key: statistics.median(getattr(s, key) for s in rounds)
            for key in ("p50_ms", "p95_ms", "p99_ms", "cpu_ms_per_request")
        }
        for name, rounds in samples.items()
    }
    hop = {
        name: {key: values[key] - median["direct"][key] for key in ("p50_ms", "p95_ms", "p99_ms")}
        | {"cpu_ms_per_request": values["cpu_ms_per_request"]}
        for name, values in median.items()
        if name not in ("direct", "direct_again")
    }
    noise = {key: abs(median["direct_again"][key] - median["direct"][key]) for key in ("p50_ms", "p95_ms", "p99_ms")}
    ratio = {
        name: {key: values[key] / hop["reference"][key] for key in values}
        for name, values in hop.items()
        if "reference" in hop and name != "reference"
    }
    return {"row": row.name, "rate": row.rate, "latency": median, "hop": hop, "noise": noise, "ratio": ratio,
            "rounds": {name: [asdict(s) for s in rounds] for name, rounds in samples.items()}}  # fmt: skip


def table(result: dict[str, Any]) -> str:
    lines = [f"{result['row']}, {result['rate']} requests/s", f"  {'':18}{'p50':>8}{'p95':>8}{'p99':>8}  CPU/request"]
    lines += [
        f"  hop {name:14}{v['p50_ms']:8.2f}{v['p95_ms']:8.2f}{v['p99_ms']:8.2f} ms {v['cpu_ms_per_request']:8.2f} ms"
        for name, v in result["hop"].items()
    ]
    lines += [
        f"  x   {name:14}{v['p50_ms']:8.2f}{v['p95_ms']:8.2f}{v['p99_ms']:8.2f}    {v['cpu_ms_per_request']:8.2f}"
        for name, v in result["ratio"].items()
    ]
    noise = result["noise"]
    lines.append(f"  A against A       {noise['p50_ms']:8.2f}{noise['p95_ms']:8.2f}{noise['p99_ms']:8.2f} ms")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=int, default=10, help="length of one run")
    parser.add_argument("--rounds", type=int, default=3, help="counted rounds")
    parser.add_argument("--json", type=Path, help="write the results there")
    parser.add_argument("--row", default="", help="only rows whose name contains this")
    parser.add_argument("--no-peer", action="store_true", help="leave out the reference picker")
    arguments = parser.parse_args()
    vegeta = build() / "vegeta"
    with tempfile.TemporaryDirectory(prefix="trimtab-hop-") as temporary, contextlib.ExitStack() as stack:
        folder = Path(temporary)
        group = stack.enter_context(processes(folder))
        pool = stack.enter_context(BenchPool(group, folder, [f"{a}:{BACKEND_PORT}" for a in BACKENDS]))
        envoy, behind = pool.envoy, (BACKENDS, BACKEND_PORT)
        group.start("backends", [*envoy, "--config-yaml", hop_envoy.backends(BACKENDS, BACKEND_PORT)])
        direct = pool.front(group, "direct", with_picker=False)
        sides: dict[str, tuple[int, int | None]] = {"direct": (direct, None)}
        sides["trimtab"] = (pool.front(group, "trimtab", with_picker=True), pool.picker_pid)
        streamed, streamed_reference, peer_grpc, peer_health, peer_metrics = pool.ports(5)
        group.start(
            "streamed", [*envoy, "--config-yaml", hop_envoy.streaming_gateway(streamed, pool.grpc_port, *behind)]
        )
        sides["trimtab_streamed"] = (streamed, pool.picker_pid)
        if not arguments.no_peer:
            pid = stack.enter_context(reference_picker(BACKENDS, peer_grpc, peer_health, peer_metrics))
            group.start(
                "reference",
                [*envoy, "--config-yaml", hop_envoy.streaming_gateway(streamed_reference, peer_grpc, *behind)],
            )
            sides["reference"] = (streamed_reference, pid)
        sides["direct_again"] = (direct, None)
        pool.await_ready()
        group.check()
        results = measure(sides, arguments.rounds, arguments.seconds, vegeta, folder, pool, arguments.row)
        group.check()
    document = {"benchmark": "hop", "cpus": os.cpu_count(), "backends": len(BACKENDS), "rows": results}
    if arguments.json:
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
