"""Traces of LLM requests: when they came, how long they were, and which 512-token blocks of prompt they share.

The one rule: two requests share text exactly as far as their leading block ids are equal, so a trace without any text
still says what a prefix cache can hit. The shipped one is sampled from Mooncake's conversation trace (see
`data/NOTICE.mooncake`): whole sessions of four requests and more, since a slice in time hardly repeats itself.

    python -m trimtab_lab.trace FULL_TRACE.jsonl.gz OUT.jsonl.gz [--sessions N] [--seed S]
"""

import argparse
import gzip
import json
import random
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

TRACE_BLOCK_TOKENS = 512
SHIPPED_TRACE = Path(__file__).parent / "data" / "mooncake_sessions.jsonl.gz"
SESSION_REQUESTS_MIN = 4


class TraceError(Exception):
    """A file that is no trace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    at_s: float
    """Arrival, from the start of the trace."""
    prompt_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...]
    """One id for each block of the prompt; the last block may be short."""
    block_tokens: int = TRACE_BLOCK_TOKENS

    @property
    def session(self) -> int:
        """What tells conversations apart: the second block, since the first (a system prompt) is common to all."""
        return self.block_ids[1] if len(self.block_ids) > 1 else self.block_ids[0]

    @property
    def last_block_tokens(self) -> int:
        return self.prompt_tokens - self.block_tokens * (len(self.block_ids) - 1)


def load_trace(path: Path = SHIPPED_TRACE) -> list[TraceRequest]:
    """Requests of a Mooncake-style JSONL file (gzip or not), in order of arrival. Raises TraceError."""
    raw = path.read_bytes()
    if raw[:2] == b"\x1f\x8b":
        raw = gzip.decompress(raw)
    requests = []
    for number, line in enumerate(raw.splitlines(), start=1):
        try:
            entry = json.loads(line)
            request = TraceRequest(
                at_s=entry["timestamp"] / 1000,
                prompt_tokens=entry["input_length"],
                output_tokens=entry["output_length"],
                block_ids=tuple(entry["hash_ids"]),
            )
        except (ValueError, KeyError, TypeError) as error:
            raise TraceError(f"{path.name}, line {number}: {error}") from error
        if not request.block_ids or not 1 <= request.last_block_tokens <= TRACE_BLOCK_TOKENS:
            raise TraceError(f"{path.name}, line {number}: blocks and length do not agree")
        requests.append(request)
    return sorted(requests, key=lambda request: request.at_s)


def whole_sessions(
    requests: Iterable[TraceRequest],
    *,
    count: int | None = None,
    seed: int = 0,
    requests_min: int = SESSION_REQUESTS_MIN,
) -> list[TraceRequest]:
    """All requests of `count` sessions drawn at random among those of `requests_min` and more; None: of all of them."""
    requests = list(requests)
    sizes = Counter(request.session for request in requests)
    long = [session for session, size in sizes.items() if size >= requests_min]
    drawn = set(long if count is None else random.Random(seed).sample(long, min(count, len(long))))
    return [request for request in requests if request.session in drawn]


def renumbered(requests: Iterable[TraceRequest]) -> list[TraceRequest]:
    """Block ids replaced by 0, 1, ... in order of appearance."""
    numbers: dict[int, int] = {}
    return [
        replace(request, block_ids=tuple(numbers.setdefault(block, len(numbers)) for block in request.block_ids))
        for request in requests
    ]


def shorter(requests: Iterable[TraceRequest], divisor: int) -> list[TraceRequest]:
    """Prompts and outputs of a `divisor`-th of the length, sharing the same blocks (which are shorter as well)."""
    if divisor < 1 or TRACE_BLOCK_TOKENS % divisor:
        raise ValueError(f"the divisor must divide {TRACE_BLOCK_TOKENS}, got {divisor}")
    block_tokens = TRACE_BLOCK_TOKENS // divisor
    return [
        replace(
            request,
            prompt_tokens=block_tokens * (len(request.block_ids) - 1) + -(-request.last_block_tokens // divisor),
            output_tokens=max(1, round(request.output_tokens / divisor)),
            block_tokens=block_tokens,
        )
        for request in requests
    ]


def spread(requests: Iterable[TraceRequest], *, within_s: float = 3.0, seed: int = 0) -> list[TraceRequest]:
    """Arrivals moved back by a random part of `within_s`: the recorder wrote them down in bunches, every 3 s."""
    rng = random.Random(seed)
    moved = [replace(request, at_s=request.at_s + rng.uniform(0.0, within_s)) for request in requests]
    return sorted(moved, key=lambda request: request.at_s)


def at_rate(requests: Sequence[TraceRequest], rate_per_s: float) -> list[TraceRequest]:
    """The same order and rhythm, from 0 s on, compressed or stretched to `rate_per_s` requests a second on average."""
    if rate_per_s <= 0:
        raise ValueError("the rate must be positive")
    if len(requests) < 2:
        return [replace(request, at_s=0.0) for request in requests]
    first_s = requests[0].at_s
    length_s = requests[-1].at_s - first_s
    factor = 0.0 if length_s == 0 else (len(requests) - 1) / rate_per_s / length_s
    return [replace(request, at_s=(request.at_s - first_s) * factor) for request in requests]


def encode_trace(requests: Iterable[TraceRequest]) -> bytes:
    """The gzipped JSONL file of a trace; equal traces give equal bytes."""
    lines = [
        json.dumps(
            {
                "timestamp": round(request.at_s * 1000),
                "input_length": request.prompt_tokens,
                "output_length": request.output_tokens,
                "hash_ids": request.block_ids,
            },
            separators=(",", ":"),
        )
        for request in requests
    ]
    return gzip.compress(("\n".join(lines) + "\n").encode(), 9, mtime=0)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m trimtab_lab.trace", description="Sample whole sessions from a Mooncake-style trace."
    )
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--sessions", type=int, default=None, help="how many; all that are long enough if not given")
    parser.add_argument("--requests-min", type=int, default=SESSION_REQUESTS_MIN)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(sys.argv[1:] if arguments is None else arguments)
    drawn = whole_sessions(
        load_trace(options.source), count=options.sessions, seed=options.seed, requests_min=options.requests_min
    )
    data = encode_trace(renumbered(drawn))
    options.out.write_bytes(data)
    print(f"{len(drawn)} requests of {len({request.session for request in drawn})} sessions, {len(data)} bytes")


if __name__ == "__main__":
    main()
