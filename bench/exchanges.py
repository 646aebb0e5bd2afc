"""Exchanges per second of one picker process, and the CPU of each, beside the gRPC library's server.

    python bench/exchanges.py [--seconds 8] [--rounds 3] [--buffered] [--json FILE]

A gateway in a process of its own (Rust, `extproc/native/trimtab-front/examples/exchanges.rs`) keeps 32 exchanges of
2 KB chats in progress on one connection, as our own Envoy does: the whole request in one message, its answer, then the
stream's end. `--buffered`: as others do: headers, whole body, response headers, each answered before the next. The
picker has everything on that it has in a pool (see `hop_pool`). Fronts take turns. A run counts only if every exchange
was answered in full and the picker placed all of them.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / folder) for folder in ("bench", "bench/peers/gie_picker", "e2e/cluster")]

from envoy.config.core.v3 import base_pb2
from envoy.extensions.filters.http.ext_proc.v3 import processing_mode_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc
from hop import ROWS, common_prefixes, placed, text
from hop_pool import BenchPool
from processes import cpu_s, processes

from trimtab_operator.envoy.ext_proc import USUAL_UNTOLD

CRATE = ROOT / "extproc" / "native"
FRONTS = ("native", "grpcio")
ENDPOINTS = [f"127.0.1.{number + 1}:8000" for number in range(8)]
CONCURRENCY = 32
CHATS = 400
WARM_UP_S = 2


def client() -> Path:
    """The gateway's program, built."""
    command = ["cargo", "build", "--release", "--locked", "--quiet", "--example", "exchanges"]
    subprocess.run(command, check=True, cwd=CRATE)
    return CRATE / "target" / "release" / "examples" / "exchanges"


def framed(message: Any) -> bytes:
    data: bytes = message.SerializeToString()
    return b"\0" + len(data).to_bytes(4, "big") + data


def header_map(**headers: str) -> Any:
    pairs = [
        base_pb2.HeaderValue(key=name.replace("_", "-"), raw_value=text.encode()) for name, text in headers.items()
    ]
    return base_pb2.HeaderMap(headers=pairs)


def write_scripts(folder: Path, *, is_whole: bool) -> list[Path]:
    """The messages of each exchange as Envoy sends them; half of each prompt is a common one."""
    row, rng, files = ROWS[0], random.Random(1), []
    prefixes = common_prefixes(row)
    mode = processing_mode_pb2.ProcessingMode
    for number in range(CHATS):
        prompt = rng.choice(prefixes) + text(row.prompt_bytes - int(row.prompt_bytes * row.shared), rng)
        body = json.dumps({"model": "m", "messages": [{"role": "user", "content": prompt}]}).encode()
        request = header_map(
            host="127.0.0.1:8000", user_agent="Go-http-client/1.1", content_length=str(len(body)),
            content_type="application/json", accept_encoding="gzip", x_forwarded_proto="http",
            x_request_id=f"00000000-0000-4000-8000-{number:012x}",
        )  # fmt: skip
        for name, value in ((":method", "POST"), (":path", "/v1/chat/completions"), (":scheme", "http")):
            request.headers.add(key=name, raw_value=value.encode())
        response = header_map(content_type="application/json", server="envoy", content_length="213")
        response.headers.add(key=":status", raw_value=b"200")
        served = ext_proc.ProcessingRequest(response_headers=ext_proc.HttpHeaders(headers=response))
        attributes = served.attributes["envoy.filters.http.ext_proc"]
        attributes.fields["upstream.address"].string_value = ENDPOINTS[number % len(ENDPOINTS)]
        messages: tuple[Any, ...] = (
            ext_proc.ProcessingRequest(
                request_headers=ext_proc.HttpHeaders(headers=request),
                protocol_config=ext_proc.ProtocolConfiguration(
                    request_body_mode=mode.BUFFERED, response_body_mode=mode.NONE
                ),
            ),
            ext_proc.ProcessingRequest(request_body=ext_proc.HttpBody(body=body, end_of_stream=True)),
            served,
        )
        if is_whole:
            messages = (whole(messages[1], number),)
        file = folder / f"{number}.exchange"
        file.write_bytes(b"".join(map(framed, messages)))
        files.append(file)
    return files


def whole(message: Any, number: int) -> Any:
    """The body with what our own Envoy tells of the headers."""
    mode = processing_mode_pb2.ProcessingMode
    message.protocol_config.request_body_mode, message.protocol_config.response_body_mode = mode.BUFFERED, mode.NONE
    told = {
        "request.method": "POST",
        "request.path": "/v1/chat/completions",
        "request.id": f"00000000-0000-4000-8000-{number:012x}",
        "request.headers['content-type']": "application/json",
        USUAL_UNTOLD: USUAL_UNTOLD,
    }
    fields = message.attributes["envoy.filters.http.ext_proc"].fields
    for name, value in told.items():
        fields[name].string_value = value
    return message


def run(program: Path, pool: BenchPool, seconds: float, files: list[Path]) -> dict[str, float]:
    """One run. Raises RuntimeError where the picker did not place every exchange."""
    cpu_before, placed_before = cpu_s(pool.picker_pid), placed(pool.metrics_port)
    command = [program, str(pool.grpc_port), str(CONCURRENCY), str(seconds), *map(str, files)]
    result: dict[str, float] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    cpu_ms = 1000 * (cpu_s(pool.picker_pid) - cpu_before)
    if placed(pool.metrics_port) - placed_before != result["exchanges"]:
        raise RuntimeError("some exchanges were not placed by the picker")
    return {
        "exchanges_per_s": result["exchanges"] / result["seconds"],
        "cpu_ms_per_exchange": cpu_ms / result["exchanges"],
        "p50_ms": result["p50_ms"],
        "p99_ms": result["p99_ms"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=8, help="length of one run")
    parser.add_argument("--rounds", type=int, default=3, help="counted rounds")
    parser.add_argument("--json", type=Path, help="write the results there")
    parser.add_argument("--buffered", action="store_true", help="headers, body, response headers one after another")
    arguments = parser.parse_args()
    program = client()
    results: dict[str, list[dict[str, float]]] = {front: [] for front in FRONTS}
    with tempfile.TemporaryDirectory(prefix="trimtab-exchanges-") as temporary:
        folder = Path(temporary)
        files = write_scripts(folder, is_whole=not arguments.buffered)
        for _ in range(arguments.rounds):
            for front in FRONTS:
                # One at a time: a store and a picker that only wait have their timers too.
                with processes(folder) as group, BenchPool(group, folder, ENDPOINTS, front=front) as pool:
                    pool.await_ready()
                    pool.hold(common_prefixes(ROWS[0]))
                    run(program, pool, WARM_UP_S, files)
                    results[front].append(run(program, pool, arguments.seconds, files))
                    group.check()
                print(f"  {front}: {results[front][-1]}", file=sys.stderr, flush=True)
    median = {
        front: {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}
        for front, rounds in results.items()
    }
    print(f"one process, {CONCURRENCY} exchanges of 2 KB chats at once")
    for front, values in median.items():
        print(
            f"  {front:8}{values['exchanges_per_s']:8.0f} exchanges/s {values['cpu_ms_per_exchange']:6.2f} ms CPU each"
            f"   p50 {values['p50_ms']:.1f} ms, p99 {values['p99_ms']:.1f} ms"
        )
    if arguments.json:
        document = {"benchmark": "exchanges", "cpus": os.cpu_count(), "concurrency": CONCURRENCY, "rows": median,
                    "rounds": results}  # fmt: skip
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
