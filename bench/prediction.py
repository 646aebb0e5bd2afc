"""Predicted hit against the engine's own count, request by request, over the shipped trace, on a whole stack.

    python bench/prediction.py [--json FILE] [--requests N] [--rates 5,10,15] [--seconds 50] [--no-replicas]

1. `one_by_one`: the whole trace, each request sent when the one before has been answered.
2. `under_load`: open loop at each rate. `why` compares with the engine's cache as its events would show it without any
   delay. Predictions off by more than two blocks: `events_on_their_way` (at the decision the engine held what the
   picker did not know yet), `stored_before_it_ran` (a sibling's prefill ended before the engine took the request up),
   `evicted_before_it_ran`, and `claimed_in_vain` (speculative chunks that were not there yet when the engine looked,
   or whose tokens were guessed wrong). Of all requests: `picker_behind`, the share where the engine held more at the
   decision than was predicted, and `index_without_delay`, what the events alone would have got within two blocks
   had they taken no time: less than the picker, since speculation also knows what is still being prefilled.
3. `replicas`: mean time to first token with two pickers and with one, same requests, same rate, runs taking turns.

Requests are joined by their x-request-id, which Envoy, the picker's decision and the emulated engine's answer share.
"""

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

sys.path.insert(0, str(Path(__file__).resolve().parent))

from cache_timeline import CacheTimeline, EventRecorder, chain_of, token_table

from trimtab.commands import LOOPBACK
from trimtab.demo_plan import BLOCK_TOKENS, LENGTH_DIVISOR, SEED, emulated_plan
from trimtab.stack import MODEL_DIR, Stack, StackSettings, running
from trimtab_lab.replay import Sending, chat_sendings
from trimtab_lab.trace import load_trace, shorter, spread
from trimtab_lab.trace_text import TraceText
from trimtab_lab.vocabulary import Vocabulary

ENDPOINTS = 4
TOLERANCE_TOKENS = 2 * BLOCK_TOKENS
ONE_BY_ONE_SPEED = "16"
"""Emulated hardware so fast that the trace takes minutes, and not faster: speculative chunks live for real seconds, and
a cache that is turned over within those is none that a model could have."""
REASONS = ("events_on_their_way", "stored_before_it_ran", "evicted_before_it_ran", "claimed_in_vain")
DECISIONS_POLL_S = 2.0
"""The pickers remember 256 decisions each."""


@dataclass(slots=True, kw_only=True)
class Request:
    """One request, and what came out."""

    prompt: str
    request_id: str = ""
    endpoint: str = ""
    ttft_s: float | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    predicted_tokens: int | None = None
    """None: nobody decided, or the decision was not kept."""
    decided_endpoint: str = ""
    decided_at_s: float = 0.0
    error: str = ""

    @property
    def off_tokens(self) -> int:
        assert self.predicted_tokens is not None
        return self.predicted_tokens - self.cached_tokens


@dataclass(slots=True, kw_only=True)
class Run:
    """Requests through one stack."""

    stack: Stack
    session: aiohttp.ClientSession
    requests: list[Request] = field(default_factory=list)
    decisions: dict[str, tuple[dict[str, Any], float]] = field(default_factory=dict)

    async def send(self, sending: Sending, prompt: str) -> None:
        request = Request(prompt=prompt)
        self.requests.append(request)
        started_s = time.monotonic()
        try:
            async with self.session.post(
                f"{self.stack.url}/v1/chat/completions",
                data=sending.body,
                headers={"Content-Type": "application/json"},
            ) as response:
                request.endpoint = response.headers.get("x-trimtab-endpoint", "")
                if response.status != 200:
                    request.error = f"HTTP {response.status}"
                    return
                async for line in response.content:
                    if not line.startswith(b"data: {"):
                        continue
                    if request.ttft_s is None:
                        request.ttft_s = time.monotonic() - started_s
                    if b'"usage":{' in line or not request.request_id:
                        self._read(request, json.loads(line[6:]))
        except aiohttp.ClientError as error:
            request.error = type(error).__name__

    def _read(self, request: Request, event: dict[str, Any]) -> None:
        request.request_id = event["id"].removeprefix("chatcmpl-")
        usage = event.get("usage")
        if usage:
            request.prompt_tokens = usage["prompt_tokens"]
            request.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0

    async def read_decisions(self) -> None:
        for picker in self.stack.pickers:
            async with self.session.get(f"{picker.url}/decisions", params={"count": 256}) as response:
                page, now_s = json.loads(await response.read()), time.time()
            for decision in page["decisions"]:
                self.decisions.setdefault(decision["request_id"], (decision, now_s - decision["age_s"]))

    async def keep_reading_decisions(self) -> None:
        while True:
            await asyncio.sleep(DECISIONS_POLL_S)
            await self.read_decisions()

    def join(self) -> None:
        for request in self.requests:
            found = self.decisions.get(request.request_id)
            if found is None:
                continue
            decision, request.decided_at_s = found
            request.decided_endpoint = decision["endpoint"]
            row = next(row for row in decision["endpoints"] if row["endpoint"] == decision["endpoint"])
            request.predicted_tokens = row["hit_tokens"]

    def judged(self) -> list[Request]:
        """Requests whose prediction can be compared: answered, and served where it was decided."""
        return [
            request
            for request in self.requests
            if not request.error
            and request.predicted_tokens is not None
            and request.endpoint == request.decided_endpoint
        ]


def summary(run: Run) -> dict[str, Any]:
    """The distribution of predicted minus counted."""
    judged = run.judged()
    off = [request.off_tokens / BLOCK_TOKENS for request in judged]
    size = sorted(map(abs, off))
    ttft = [request.ttft_s for request in run.requests if request.ttft_s is not None]
    return {
        "requests": len(run.requests),
        "failed": sum(bool(request.error) for request in run.requests),
        "judged": len(judged),
        "exact": share(value == 0 for value in off),
        "within_one_block": share(value <= 1 for value in size),
        "within_two_blocks": share(value <= 2 for value in size),
        "predicted_too_much": share(value > 2 for value in off),
        "predicted_too_little": share(value < -2 for value in off),
        "off_blocks": {f"p{p}": round(size[int(p / 100 * (len(size) - 1))], 2) for p in (50, 90, 95, 99, 100)},
        "predicted_tokens": sum(request.predicted_tokens or 0 for request in judged),
        "counted_tokens": sum(request.cached_tokens for request in judged),
        "prompt_tokens": sum(request.prompt_tokens for request in judged),
        "ttft_mean_s": round(statistics.fmean(ttft), 4),
        "ttft_p99_s": round(sorted(ttft)[int(0.99 * (len(ttft) - 1))], 4),
    }


def share(values: Any) -> float:
    counted = list(map(bool, values))
    return round(sum(counted) / max(len(counted), 1), 4)


def reasons(run: Run, recorder: EventRecorder) -> dict[str, Any]:
    """What the engines held at each decision, and why predictions were off by more than two blocks."""
    table = token_table(MODEL_DIR)
    timelines = {endpoint: CacheTimeline(frames, table) for endpoint, frames in recorder.frames.items()}
    found: Counter[str] = Counter()
    judged = run.judged()
    undelayed_right = behind = 0
    for request in judged:
        assert request.predicted_tokens is not None
        most = (request.prompt_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        held = timelines[request.endpoint].hit_tokens(
            chain_of(request.prompt), at_s=request.decided_at_s, tokens_max=most
        )
        undelayed_right += abs(held - request.cached_tokens) <= TOLERANCE_TOKENS
        behind += held > request.predicted_tokens
        if request.off_tokens < -TOLERANCE_TOKENS:
            is_late = held > request.predicted_tokens + TOLERANCE_TOKENS
            found["events_on_their_way" if is_late else "stored_before_it_ran"] += 1
        elif request.off_tokens > TOLERANCE_TOKENS:
            was_held = held >= request.predicted_tokens - TOLERANCE_TOKENS
            found["evicted_before_it_ran" if was_held else "claimed_in_vain"] += 1
    return {
        "off_by_more_than_two_blocks": sum(found.values()),
        **{name: found[name] for name in REASONS},
        "picker_behind": round(behind / max(len(judged), 1), 4),
        "index_without_delay": round(undelayed_right / max(len(judged), 1), 4),
    }


async def one_by_one(sendings: Sequence[tuple[Sending, str]], engine_flags: tuple[str, ...]) -> dict[str, Any]:
    flags = (*engine_flags, "--speed", ONE_BY_ONE_SPEED)
    async with running(StackSettings(endpoints=ENDPOINTS, pickers=2, engine_flags=flags)) as stack, client() as session:
        run = Run(stack=stack, session=session)
        for number, (sending, prompt) in enumerate(sendings, start=1):
            await run.send(sending, prompt)
            if number % 100 == 0:
                await run.read_decisions()
                print(f"\r{number}/{len(sendings)}", end="", file=sys.stderr, flush=True)
        print(file=sys.stderr)
        await run.read_decisions()
    run.join()
    return summary(run)


async def under_load(
    sendings: Sequence[tuple[Sending, str]], engine_flags: tuple[str, ...], *, pickers: int
) -> dict[str, Any]:
    settings = StackSettings(endpoints=ENDPOINTS, pickers=pickers, engine_flags=engine_flags)
    async with running(settings) as stack, client() as session:
        recorder = EventRecorder({ports.address: f"tcp://{LOOPBACK}:{ports.kv_events}" for ports in stack.engines})
        run = Run(stack=stack, session=session)
        reader = asyncio.ensure_future(run.keep_reading_decisions())
        try:
            await asyncio.sleep(1.0)  # subscriptions have no acknowledgement
            started_s, tasks = time.monotonic(), []
            for sending, prompt in sendings:
                await asyncio.sleep(max(0.0, started_s + sending.due_s - time.monotonic()))
                tasks.append(asyncio.ensure_future(run.send(sending, prompt)))
            await asyncio.gather(*tasks)
            await run.read_decisions()
            run.join()
            return {**summary(run), "why": reasons(run, recorder)}
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
            await recorder.close()


def client() -> aiohttp.ClientSession:
    timeout = aiohttp.ClientTimeout(total=300.0)
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout)


def with_prompts(sendings: Sequence[Sending], vocabulary: Vocabulary) -> list[tuple[Sending, str]]:
    """Each with the text that the engine makes of it."""
    return [
        (sending, vocabulary.render_chat(json.loads(sending.body)["messages"], add_generation_prompt=True))
        for sending in sorted(sendings, key=lambda sending: sending.due_s)
    ]


async def measured(options: argparse.Namespace) -> dict[str, Any]:
    vocabulary = Vocabulary()
    figures: dict[str, Any] = {"endpoints": ENDPOINTS, "block_tokens": BLOCK_TOKENS, "length_divisor": LENGTH_DIVISOR}
    flags = emulated_plan(trace=None, rate_per_s=None, endpoints=ENDPOINTS).engine_flags
    trace = shorter(spread(load_trace(), seed=SEED), LENGTH_DIVISOR)[: options.requests]
    whole = with_prompts(chat_sendings(trace, TraceText(vocabulary, seed=SEED)), vocabulary)
    if whole:
        figures["one_by_one"] = show("one by one", await one_by_one(whole, flags))
    figures["under_load"] = []
    for rate in options.rates:
        run = await under_load(at_rate(rate, options.seconds, vocabulary), flags, pickers=2)
        figures["under_load"].append({"rate_per_s": rate, **show(f"{rate:g}/s", run)})
    if options.replicas:
        rate = options.rates[len(options.rates) // 2]
        means: dict[int, list[float]] = {1: [], 2: []}
        for pickers in (1, 2, 2, 1):
            run = await under_load(at_rate(rate, options.seconds, vocabulary), flags, pickers=pickers)
            means[pickers].append(show(f"{pickers} pickers", run)["ttft_mean_s"])
        one, two = statistics.fmean(means[1]), statistics.fmean(means[2])
        figures["replicas"] = {
            "rate_per_s": rate,
            "ttft_mean_s": {"one": means[1], "two": means[2]},
            "two_to_one": round(two / one, 4),
        }
    return figures


def at_rate(rate: float, seconds: float, vocabulary: Vocabulary) -> list[tuple[Sending, str]]:
    plan = emulated_plan(trace=None, rate_per_s=rate, endpoints=ENDPOINTS)
    return [pair for pair in with_prompts(plan.sendings, vocabulary) if pair[0].due_s <= seconds]


def show(title: str, figures: dict[str, Any]) -> dict[str, Any]:
    print(f"{title}: {json.dumps(figures)}", file=sys.stderr, flush=True)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the figures here; default: standard output")
    parser.add_argument(
        "--requests", type=int, default=None, help="of the trace, one by one; 0: leave it out; default: all"
    )
    parser.add_argument(
        "--rates", type=lambda text: [float(rate) for rate in text.split(",")], default=[5.0, 10.0, 15.0]
    )
    parser.add_argument("--seconds", type=float, default=50.0, help="length of each run under load")
    parser.add_argument("--no-replicas", dest="replicas", action="store_false", help="leave the third part out")
    options = parser.parse_args()
    text = json.dumps(asyncio.run(measured(options)), indent=1) + "\n"
    if options.json is None:
        print(text, end="")
    else:
        options.json.write_text(text)


if __name__ == "__main__":
    main()
