"""What goes into an emulated engine and what comes out of it: requests, steps, finished requests, counters.

The one rule: plain values, times in seconds of whatever clock the caller uses. No behaviour.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from trimtab_lab.expert_parallel import Mix
from trimtab_lab.kv_events import KvEvent
from trimtab_lab.token_chain import LoraAdapter


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class Refusal(StrEnum):
    """Why a request was not taken. A value, since the caller answers it."""

    TOO_LONG = "too_long"
    """Prompt and output together exceed the engine's longest context."""
    QUEUE_FULL = "queue_full"
    DUPLICATE = "duplicate"
    """A request of that id is in the engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    request_id: str
    prompt: Sequence[int]
    output: Sequence[int]
    """The tokens it will generate, at least one. Decided before it starts, so that a run repeats."""
    finish_reason: FinishReason = FinishReason.LENGTH
    """What is reported after the last of them."""
    lora: LoraAdapter | None = None
    cache_salt: str | None = None
    reads_cache: bool = True
    """False: computes all of its prompt, as `prompt_logprobs` asks for; its blocks become reusable all the same."""
    prefill_only: bool = False
    """True: no token is sampled; done when the prompt is computed (embeddings)."""
    experts: Mix | None = None
    """Of a mixture-of-experts model: which experts its tokens go to; None: all alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRequest:
    request_id: str
    reason: FinishReason
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    """Prompt tokens found in the prefix cache when it was first scheduled."""
    arrived_s: float
    scheduled_s: float | None
    """Start of the first step that computed some of it; None if it never was."""
    first_token_s: float | None
    finished_s: float
    preemptions: int
    tokens_requested: int
    """Output tokens it had asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewToken:
    request_id: str
    token: int
    is_first: bool
    cached_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """A step that has been scheduled and is being computed."""

    started_s: float
    duration_s: float
    prefill_tokens: int
    decode_requests: int
    preempted: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """A step that is over; all of it happens at `ended_s`."""

    started_s: float
    duration_s: float
    ended_s: float
    prefill_tokens: int
    decode_requests: int
    preempted: tuple[str, ...]
    new_tokens: tuple[NewToken, ...]
    finished: tuple[FinishedRequest, ...]
    kv_events: tuple[KvEvent, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Gauges and counters since the epoch began, as an engine's metrics show them."""

    running: int
    waiting: int
    kv_usage: float
    cache_queries_tokens: int
    cache_hits_tokens: int
    preemptions: int
    prompt_tokens: int
    """Prompt tokens of requests whose prefill is over, cached ones included."""
    prompt_tokens_cached: int
    output_tokens: int
