"""Records what a real vLLM does with a short sequence of requests, for `test_fidelity.py` to hold the emulator to it.

Not a test. Run it against a vLLM 0.32 that serves the tiny model under the name `tiny`, with

    --block-size 32 --num-gpu-blocks-override 64 --max-model-len 1024 --max-num-batched-tokens 256
    --enable-prefix-caching --enable-prompt-tokens-details --enable-lora --lora-modules a1=...
    --kv-events-config '{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:E", ...}'

and VLLM_SERVER_DEV_MODE=1 (for the reset):  python tests/lab/record_vllm.py HTTP_URL tcp://127.0.0.1:E OUT.jsonl.gz
"""

import gzip
import json
import random
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import zmq


def requests(rng: random.Random) -> Iterator[dict[str, Any]]:
    """Prompts of every kind that matters: repeats, whole blocks, growth, branches, adapters, salts, floods."""

    def fresh(count: int) -> list[int]:
        return [rng.randrange(10, 4000) for _ in range(count)]

    base = fresh(200)
    for count in (31, 32, 33, 96, 96, 97, 128, 200, 200):
        yield {"prompt": base[:count]}
    yield {"prompt": base + fresh(100), "max_tokens": 40}
    yield {"prompt": base[:100] + fresh(90), "max_tokens": 33}
    yield {"prompt": base, "cache_salt": "pepper"}
    yield {"prompt": base, "cache_salt": "pepper", "max_tokens": 30}
    yield {"prompt": base, "model": "a1"}
    yield {"prompt": base, "model": "a1", "cache_salt": "pepper"}
    yield {"prompt": base, "model": "a1"}
    yield {"reset": True}
    yield {"prompt": base}
    chat = fresh(64)
    for _ in range(6):
        yield {"prompt": chat, "max_tokens": 50, "continue": True}
        chat = []
    families = [fresh(160) for _ in range(5)]
    for _ in range(60):
        family = rng.choice(families)
        yield {
            "prompt": family[: rng.randrange(20, 160)] + fresh(rng.randrange(0, 400)),
            "max_tokens": rng.randrange(1, 70),
        }
    yield {"prompt": fresh(900), "max_tokens": 60}
    for family in families:
        yield {"prompt": family, "max_tokens": 2}


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        answer: dict[str, Any] = json.load(response)
        return answer


def main(url: str, events: str, out: Path) -> None:
    socket = zmq.Context.instance().socket(zmq.SUB)
    socket.connect(events)
    socket.subscribe(b"")
    time.sleep(1.0)
    lines, so_far = [], []
    for wanted in requests(random.Random(32)):
        entry: dict[str, Any] = dict(wanted)
        if "reset" in wanted:
            urllib.request.urlopen(urllib.request.Request(f"{url}/reset_prefix_cache", b"")).close()
        else:
            if wanted.pop("continue", False):
                entry["prompt"] = wanted["prompt"] = so_far = so_far + wanted["prompt"] + [7, 8, 9]
                entry.pop("continue")
            body = {"model": "tiny", "max_tokens": 1, "ignore_eos": True, "temperature": 0, "return_token_ids": True}
            answer = post(f"{url}/v1/completions", {**body, **wanted})
            entry["output"] = answer["choices"][0]["token_ids"]
            entry["cached_tokens"] = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            so_far = wanted["prompt"] + entry["output"]
        entry["batches"] = []
        while socket.poll(150):
            entry["batches"].append(msgspec.msgpack.decode(socket.recv_multipart()[2])[1])
        lines.append(json.dumps(entry, separators=(",", ":")))
    out.write_bytes(gzip.compress(("\n".join(lines) + "\n").encode(), 9, mtime=0))
    print(f"{len(lines)} entries")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
