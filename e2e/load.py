"""Conversations through a front, by OpenAI's own client: runs in the cluster, beside what it measures.

    python load.py --url http://FRONT/v1 --stop-file F --talkers 8 [--streams 4 --stream-tokens 400]

`--talkers` talk until the stop file is there: each has a conversation of its own that grows turn by turn, streamed and
not streamed by turns. `--streams` are long answers that begin at once, each once. The client repeats nothing, so every
error is one. A line of JSON every second, the last of them with all that happened.
"""

import argparse
import asyncio
import json
import time
import uuid
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import openai

FAILURES_KEPT = 20
TOLD_EVERY_S = 1.0
AFTER_FAILURE_S = 0.2
LOAD = uuid.uuid4().hex
"""In each conversation, so that none of an earlier load is cached."""


@dataclass
class Tally:
    requests: int = 0
    streamed: int = 0
    open_streams: int = 0
    """Of the long ones."""
    whole_streams: int = 0
    failed: int = 0
    failures: list[str] = field(default_factory=list)
    slowest_s: float = 0.0
    kinds: Counter[str] = field(default_factory=Counter)
    started: float = field(default_factory=time.monotonic)

    def fail(self, what: str, error: object) -> None:
        self.failed += 1
        self.kinds[type(error).__name__] += 1
        if len(self.failures) < FAILURES_KEPT:
            self.failures.append(f"{time.monotonic() - self.started:.1f}s {what}: {error!r:.300}")


async def answer(client: openai.AsyncOpenAI, messages: list[dict[str, str]], *, tokens: int, is_streamed: bool) -> str:
    """Raises what the client raises, and ValueError for an answer that is not whole."""
    asked: dict[str, Any] = {
        "model": "tiny",
        "messages": messages,
        "max_tokens": tokens,
        "extra_body": {"ignore_eos": True},
    }
    if not is_streamed:
        choice = (await client.chat.completions.create(**asked)).choices[0]
        text, reason = choice.message.content or "", choice.finish_reason
    else:
        text, reason = "", None
        async for chunk in await client.chat.completions.create(**asked, stream=True):
            if chunk.choices:
                text += chunk.choices[0].delta.content or ""
                reason = chunk.choices[0].finish_reason or reason
    if reason not in ("stop", "length") or not text:
        raise ValueError(f"an answer that is not whole: {reason=}, {len(text)} characters")
    return text


def is_over(stop_file: Path) -> bool:
    return stop_file.exists()


async def talk(client: openai.AsyncOpenAI, number: int, tally: Tally, stop_file: Path) -> None:
    turn = 0
    messages: list[dict[str, str]] = []
    while not is_over(stop_file):
        if turn % 6 == 0:
            messages = [
                {"role": "system", "content": f"Conversation {number}.{turn}. " + "You answer at length. " * 40}
            ]
        messages.append({"role": "user", "content": f"Turn {turn}: what comes next?"})
        is_streamed, began = turn % 2 == 0, time.monotonic()
        try:
            text = await answer(client, messages, tokens=12, is_streamed=is_streamed)
        except (openai.OpenAIError, ValueError) as error:
            tally.fail(f"talker {number}, turn {turn}", error)
            text = "?"
            await asyncio.sleep(AFTER_FAILURE_S)
        tally.requests += 1
        tally.streamed += is_streamed
        tally.slowest_s = max(tally.slowest_s, time.monotonic() - began)
        messages.append({"role": "assistant", "content": text})
        turn += 1


async def stream(client: openai.AsyncOpenAI, number: int, tally: Tally, tokens: int) -> None:
    messages = [{"role": "user", "content": f"Tell long story number {LOAD}.{number}."}]
    tally.open_streams += 1
    try:
        await answer(client, messages, tokens=tokens, is_streamed=True)
        tally.whole_streams += 1
    except (openai.OpenAIError, ValueError) as error:
        tally.fail(f"stream {number}", error)
    finally:
        tally.open_streams -= 1


async def tell(tally: Tally) -> None:
    while True:
        print(json.dumps(asdict(tally)), flush=True)
        await asyncio.sleep(TOLD_EVERY_S)


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", required=True)
    parser.add_argument("--stop-file", type=Path, required=True)
    parser.add_argument("--talkers", type=int, default=6)
    parser.add_argument("--streams", type=int, default=0)
    parser.add_argument("--stream-tokens", type=int, default=1000)
    options = parser.parse_args()
    tally = Tally()
    async with openai.AsyncOpenAI(base_url=options.url, api_key="none", max_retries=0, timeout=120.0) as client:
        telling = asyncio.create_task(tell(tally))
        talkers = [talk(client, number, tally, options.stop_file) for number in range(options.talkers)]
        streams = [stream(client, number, tally, options.stream_tokens) for number in range(options.streams)]
        await asyncio.gather(*talkers, *streams)
        telling.cancel()
    print(json.dumps(asdict(tally)), flush=True)


asyncio.run(main())
