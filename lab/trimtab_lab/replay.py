"""An open-loop client: sends a trace's requests at their times, whatever becomes of those before, and measures each.

The one rule: a request is sent when the trace says, never later because another one is slow; how late it left anyway is
measured too, and a run that was late says nothing about the server. Times are of this process's monotonic clock.

    python -m trimtab_lab.replay http://127.0.0.1:8080 [--requests N] [--rate R] [--divisor D] [--out results.jsonl]
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from trimtab_lab.trace import SHIPPED_TRACE, TraceRequest, at_rate, load_trace, shorter, spread, whole_sessions
from trimtab_lab.trace_text import TraceText
from trimtab_lab.vocabulary import Vocabulary

IN_FLIGHT_MAX = 4096
"""Requests open at once; those beyond it are counted as failed rather than sent late."""
ENDPOINT_HEADERS = ("x-trimtab-endpoint", "x-gateway-destination-endpoint-served", "x-gateway-destination-endpoint")
"""Response headers that tell which endpoint served, best first."""
SCHEDULER_HEADER = "x-trimtab-scheduler-us"
"""Response header with the time of the scheduling decision in microseconds, where a gateway adds it."""


class RequestResult(msgspec.Struct, frozen=True, kw_only=True):
    """What one request saw. Times in seconds; None where it never got that far."""

    index: int
    due_s: float
    late_s: float
    """How long after its time it was sent."""
    ttft_s: float | None
    tpot_s: float | None
    """Mean time per output token after the first; None with fewer than two."""
    total_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    endpoint: str
    """Empty if nobody told."""
    decision_s: float | None
    status: int
    """HTTP status; 0: no answer at all."""
    error: str = ""

    @property
    def is_ok(self) -> bool:
        return not self.error


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    total: int
    sent: int
    finished: int
    failed: int
    elapsed_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySettings:
    url: str
    """Where the OpenAI API is, without `/v1`."""
    model: str = "tiny"
    timeout_s: float = 300.0
    """After that a request has failed."""
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sending:
    """One request, ready to go."""

    due_s: float
    body: bytes


def chat_sendings(requests: Iterable[TraceRequest], text: TraceText, *, model: str = "tiny") -> list[Sending]:
    """Streaming chats for a trace, each made to answer with as many tokens as the trace says."""
    encode = msgspec.json.Encoder().encode
    return [
        Sending(
            due_s=request.at_s,
            body=encode(
                {
                    "model": model,
                    "messages": text.messages(request),
                    "max_tokens": request.output_tokens,
                    "ignore_eos": True,
                    "temperature": 0,
                    "stream": True,
                    "stream_options": {"include_usage": True},
                }
            ),
        )
        for request in requests
    ]


async def replay(
    sendings: Sequence[Sending],
    settings: ReplaySettings,
    *,
    on_progress: Callable[[Progress], None] | None = None,
) -> list[RequestResult]:
    """Send everything at its time; the results in the order of sending. Never raises for what a server does."""
    run = _Run(settings, total=len(sendings), on_progress=on_progress)
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=30.0)
    timeout = aiohttp.ClientTimeout(total=settings.timeout_s)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, headers=settings.headers) as session:
        return await run.everything(session, sorted(sendings, key=lambda sending: sending.due_s))


class _Run:
    def __init__(self, settings: ReplaySettings, *, total: int, on_progress: Callable[[Progress], None] | None) -> None:
        self._url = f"{settings.url.rstrip('/')}/v1/chat/completions"
        self._total = total
        self._on_progress = on_progress
        self._sent = self._finished = self._failed = 0
        self._started_s = 0.0

    async def everything(self, session: aiohttp.ClientSession, sendings: list[Sending]) -> list[RequestResult]:
        self._started_s = time.monotonic()
        tasks: list[asyncio.Task[RequestResult]] = []
        try:
            for index, sending in enumerate(sendings):
                wait_s = self._started_s + sending.due_s - time.monotonic()
                if wait_s > 0:
                    await asyncio.sleep(wait_s)
                tasks.append(asyncio.create_task(self._one(session, index, sending)))
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    async def _one(self, session: aiohttp.ClientSession, index: int, sending: Sending) -> RequestResult:
        sent_s = time.monotonic()
        self._sent += 1
        reading = _Reading()
        if self._sent - self._finished > IN_FLIGHT_MAX:
            reading.error = f"more than {IN_FLIGHT_MAX} requests in flight"
        else:
            await self._read(session, sending, reading)
        ended_s = time.monotonic()
        tpot_s = None
        if reading.first_s is not None and reading.output_tokens > 1:
            tpot_s = (reading.last_s - reading.first_s) / (reading.output_tokens - 1)
        result = RequestResult(
            index=index,
            due_s=sending.due_s,
            late_s=max(0.0, sent_s - self._started_s - sending.due_s),
            ttft_s=None if reading.first_s is None else reading.first_s - sent_s,
            tpot_s=tpot_s,
            total_s=ended_s - sent_s,
            prompt_tokens=reading.prompt_tokens,
            cached_tokens=reading.cached_tokens,
            output_tokens=reading.output_tokens,
            endpoint=reading.endpoint,
            decision_s=reading.decision_s,
            status=reading.status,
            error=reading.error,
        )
        self._finished += 1
        self._failed += not result.is_ok
        if self._on_progress is not None:
            self._on_progress(
                Progress(
                    total=self._total,
                    sent=self._sent,
                    finished=self._finished,
                    failed=self._failed,
                    elapsed_s=ended_s - self._started_s,
                )
            )
        return result

    async def _read(self, session: aiohttp.ClientSession, sending: Sending, reading: "_Reading") -> None:
        try:
            async with session.post(
                self._url, data=sending.body, headers={"Content-Type": "application/json"}
            ) as response:
                reading.headers(response)
                if response.status != 200:
                    reading.error = f"HTTP {response.status}: {(await response.text())[:200]}"
                    return
                async for line in response.content:
                    reading.line(line)
        except TimeoutError:
            reading.error = "timeout"
        except (aiohttp.ClientError, ValueError) as error:  # ValueError: a line too long to be an event
            reading.error = f"{type(error).__name__}: {error}"
        if not reading.error and not reading.is_done:
            reading.error = "the stream ended early"
        elif not reading.error and reading.first_s is None:
            reading.error = "no token came"


class _Reading:
    """One streamed answer as it comes in."""

    __slots__ = (
        "cached_tokens",
        "decision_s",
        "endpoint",
        "error",
        "first_s",
        "is_done",
        "last_s",
        "output_tokens",
        "prompt_tokens",
        "status",
    )  # fmt: skip

    def __init__(self) -> None:
        self.status = self.prompt_tokens = self.cached_tokens = self.output_tokens = 0
        self.endpoint = self.error = ""
        self.first_s: float | None = None
        self.last_s = 0.0
        self.decision_s: float | None = None
        self.is_done = False

    def headers(self, response: aiohttp.ClientResponse) -> None:
        self.status = response.status
        self.endpoint = next((response.headers[name] for name in ENDPOINT_HEADERS if name in response.headers), "")
        decision = response.headers.get(SCHEDULER_HEADER, "")
        if decision.replace(".", "", 1).isdigit():
            self.decision_s = float(decision) / 1e6

    def line(self, line: bytes) -> None:
        if not line.startswith(b"data: "):
            return
        if line.startswith(b"data: [DONE]"):
            self.is_done = True
        elif b'"usage":{' in line or line.startswith(b'data: {"error"'):
            self._usage_or_error(line[6:])
        elif b'"choices":[{' in line:
            self.last_s = time.monotonic()
            if self.first_s is None:
                self.first_s = self.last_s
            if b'"finish_reason":"abort"' in line:
                self.error = "aborted by the engine"

    def _usage_or_error(self, data: bytes) -> None:
        try:
            value: dict[str, Any] = msgspec.json.decode(data)
        except msgspec.DecodeError:
            self.error = "not JSON in the stream"
            return
        if "error" in value:
            self.error = f"in the stream: {str(value['error'])[:200]}"
            return
        usage = value["usage"]
        self.prompt_tokens = usage["prompt_tokens"]
        self.output_tokens = usage["completion_tokens"]
        self.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


def main(arguments: Sequence[str] | None = None) -> None:
    from trimtab_lab.report import summarise, table

    parser = argparse.ArgumentParser(prog="python -m trimtab_lab.replay", description="Replay a trace against a URL.")
    add = parser.add_argument
    add("url")
    add("--trace", type=Path, default=SHIPPED_TRACE)
    add("--model", default="tiny")
    add("--requests", type=int, default=None, help="only the first so many")
    add("--sessions", type=int, default=None, help="only so many whole sessions, drawn at random")
    add("--seed", type=int, default=0)
    add("--rate", type=float, default=4.0, help="requests a second on average")
    add("--divisor", type=int, default=8, help="lengths divided by this")
    add("--timeout", type=float, default=300.0)
    add("--out", type=Path, default=None, help="JSON lines of results")
    options = parser.parse_args(sys.argv[1:] if arguments is None else arguments)
    requests = whole_sessions(load_trace(options.trace), count=options.sessions, seed=options.seed, requests_min=1)
    requests = spread(requests, seed=options.seed)[: options.requests]
    requests = at_rate(shorter(requests, options.divisor), options.rate)
    sendings = chat_sendings(requests, TraceText(Vocabulary()), model=options.model)

    def show(progress: Progress) -> None:
        print(
            f"\r{progress.finished}/{progress.total} done, {progress.sent - progress.finished} in flight, "
            f"{progress.failed} failed, {progress.elapsed_s:.0f} s",
            end="",
            file=sys.stderr,
            flush=True,
        )

    settings = ReplaySettings(url=options.url, model=options.model, timeout_s=options.timeout)
    results = asyncio.run(replay(sendings, settings, on_progress=show))
    print(file=sys.stderr)
    if options.out is not None:
        options.out.write_bytes(msgspec.json.Encoder().encode_lines(results))
    print(table({"all": summarise(results)}))


if __name__ == "__main__":
    main()
