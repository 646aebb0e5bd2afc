"""What `trimtab demo` sends to which engines: a trace cut and scaled so that two replays fit into minutes.

Its one rule: lengths shrink, prices rise by as much. A prompt of a sixteenth of the length costs the emulated engine
what the whole one would, so queues and caches behave as under the full trace while this machine's CPU moves a sixteenth
of the bytes. Pure: it starts nothing.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from trimtab.errors import UsageError
from trimtab_lab.replay import Sending, chat_sendings
from trimtab_lab.trace import (
    SHIPPED_TRACE,
    TRACE_BLOCK_TOKENS,
    TraceError,
    TraceRequest,
    at_rate,
    load_trace,
    shorter,
    spread,
    whole_sessions,
)
from trimtab_lab.trace_text import TraceText
from trimtab_lab.vocabulary import Vocabulary

ARM_S: Final = 50.0
"""Length of one replay: with two of them, and starts and ends, the demo is done in three minutes."""
RUN_S_MAX: Final = 1800.0
"""Both replays together: a rate that takes longer is more likely a slip than a wish."""
REQUESTS_MIN: Final = 20
REQUESTS_MAX: Final = 20_000
SEED: Final = 20
"""Draws the sessions and spreads arrivals: the same in every run, so that runs can be compared."""

LENGTH_DIVISOR: Final = 16
SPEED: Final = 4.0
"""Emulated hardware is this much faster than one data-centre GPU, so that more requests fit into a replay."""
RATE_PER_ENGINE: Final = 2.5
"""Requests a second for each emulated engine: busy, but round robin can just about keep up."""
RATE_PER_CORE_MAX: Final = 10.0
"""Requests a second for each core of this machine that the demo asks for by itself; `--rate` may ask for more."""
KV_TOKENS: Final = 400_000
"""KV cache of one engine in tokens of full length: an 8-billion-parameter model on one 80 GB GPU."""
BLOCK_TOKENS: Final = 16
CONTEXT_TOKENS: Final = 131_072
"""Longest prompt and answer, of full length."""
STEP_TOKENS: Final = 8192
"""Tokens of full length that an engine computes in one step at most."""

REAL_RATE_PER_ENGINE: Final = 2.0
"""Requests a second for each real engine, which shares this machine's cores with everything else."""
REAL_OUTPUT_TOKENS_MAX: Final = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoPlan:
    """Everything about the replays that is the same for both."""

    sendings: tuple[Sending, ...]
    rate_per_s: float
    sessions: int
    divisor: int
    engine_flags: tuple[str, ...]

    @property
    def length_s(self) -> float:
        """When the last request is sent."""
        return self.sendings[-1].due_s

    @property
    def run_s(self) -> float:
        """How long both replays send, one after the other."""
        return 2 * self.length_s


def emulated_plan(*, trace: Path | None, rate_per_s: float | None, endpoints: int) -> DemoPlan:
    """For emulated engines. Raises UsageError about the trace or the rate."""
    rate = rate_per_s or min(RATE_PER_ENGINE * endpoints, RATE_PER_CORE_MAX * (os.cpu_count() or 1))
    requests = _at_rate(shorter(_load(trace), LENGTH_DIVISOR), rate)
    flags = (
        *("--prompt-divisor", str(LENGTH_DIVISOR), "--speed", str(SPEED), "--block-size", str(BLOCK_TOKENS)),
        *("--num-gpu-blocks", str(KV_TOKENS // LENGTH_DIVISOR // BLOCK_TOKENS)),
        *("--max-model-len", str(CONTEXT_TOKENS // LENGTH_DIVISOR)),
        *("--max-num-batched-tokens", str(STEP_TOKENS // LENGTH_DIVISOR)),
    )
    return _plan(requests, rate, divisor=LENGTH_DIVISOR, engine_flags=flags)


def real_plan(
    *, trace: Path | None, rate_per_s: float | None, endpoints: int, context_tokens: int, engine_flags: tuple[str, ...]
) -> DemoPlan:
    """For real engines with a small context: the longest prompts are left out, the others scaled until they fit."""
    rate = rate_per_s or REAL_RATE_PER_ENGINE * endpoints
    room = context_tokens - REAL_OUTPUT_TOKENS_MAX - 64
    requests = _load(trace)
    lengths = sorted(request.prompt_tokens for request in requests)
    fits = lengths[int(0.95 * (len(lengths) - 1))]
    divisor = next(d for d in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512) if fits / d <= room or d == TRACE_BLOCK_TOKENS)
    scaled = [request for request in shorter(requests, divisor) if request.prompt_tokens <= room]
    cut = [replace(request, output_tokens=min(request.output_tokens, REAL_OUTPUT_TOKENS_MAX)) for request in scaled]
    return _plan(_at_rate(cut, rate), rate, divisor=divisor, engine_flags=engine_flags)


def _load(trace: Path | None) -> list[TraceRequest]:
    """The trace, its sessions whole and in an order of their own where there are more than fit."""
    path = trace or SHIPPED_TRACE
    try:
        requests = load_trace(path)
    except OSError as error:
        raise UsageError(
            f"--trace {path}: {error.strerror}. Name a .jsonl or .jsonl.gz file, or leave it out"
        ) from error
    except (TraceError, EOFError) as error:
        raise UsageError(
            f"--trace {path}: {error}. Each line is a JSON object with timestamp (ms), input_length, output_length and "
            f"hash_ids (one for each {TRACE_BLOCK_TOKENS} tokens of the prompt)"
        ) from error
    if len(requests) < REQUESTS_MIN:
        raise UsageError(f"--trace {path}: {len(requests)} requests are too few, at least {REQUESTS_MIN} are needed")
    return spread(requests, seed=SEED)


def _at_rate(requests: list[TraceRequest], rate_per_s: float) -> list[TraceRequest]:
    """As many whole sessions as fit into one replay at that rate, or the first part of the trace if there are none."""
    wanted = max(REQUESTS_MIN, min(round(rate_per_s * ARM_S), REQUESTS_MAX, len(requests)))
    sessions = len({request.session for request in requests})
    low, high = 1, sessions
    while low < high:
        middle = (low + high + 1) // 2
        if len(whole_sessions(requests, count=middle, seed=SEED, requests_min=1)) <= wanted:
            low = middle
        else:
            high = middle - 1
    drawn = whole_sessions(requests, count=low, seed=SEED, requests_min=1)
    return at_rate(drawn if len(drawn) >= wanted // 2 else requests[:wanted], rate_per_s)


def _plan(requests: Sequence[TraceRequest], rate: float, *, divisor: int, engine_flags: tuple[str, ...]) -> DemoPlan:
    plan = DemoPlan(
        sendings=tuple(chat_sendings(requests, TraceText(Vocabulary(), seed=SEED))),
        rate_per_s=rate,
        sessions=len({request.session for request in requests}),
        divisor=divisor,
        engine_flags=engine_flags,
    )
    if plan.run_s > RUN_S_MAX:
        raise UsageError(
            f"--rate {rate:g}: {len(plan.sendings)} requests, sent twice, would take {plan.run_s / 60:.0f} minutes; "
            f"{RUN_S_MAX / 60:g} are the most. Give --rate {1.1 * rate * plan.run_s / RUN_S_MAX:.2g} or more"
        )
    return plan
