"""A scheduler whose endpoints hold known conversations, and prompts whose best endpoint is known beforehand.

The one rule: a decision for another endpoint than the expected one ends the run; a wrong decision has no cost worth
knowing.
"""

import importlib
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from trimtab_core import chunks, scheduler
from trimtab_core.chunks import U64, root_hash
from trimtab_core.extra_terms import ExtraTerms
from trimtab_core.hotspot import HotspotSettings
from trimtab_core.placement import PlacementRequest, Prompt, Rejection
from trimtab_core.settings import SchedulerSettings

SEED = 7
BLOCK_TOKENS = 16
BYTES_PER_TOKEN = 4
TOKENS_PER_CHUNK = chunks.CHUNK_BYTES // BYTES_PER_TOKEN
CHUNKS_PER_ENDPOINT = 60_000
COMMON_TEXTS = 4
PLACED_TEXTS = 64
NO_CHUNKS: U64 = np.empty(0, dtype=np.uint64)


@dataclass(frozen=True, slots=True)
class Core:
    """One implementation."""

    name: str
    scheduler: Callable[..., Any]
    hash_chunks: Callable[[bytes, int, int], U64]


def cores() -> list[Core]:
    """The native core first, where it is built, and the reference."""
    found = [Core("reference", scheduler.Scheduler, chunks.hash_chunks)]
    try:
        native = importlib.import_module("trimtab_core._native")
    except ImportError:
        return found
    return [Core("native", native.Scheduler, native.hash_chunks), *found]


@dataclass(frozen=True, slots=True)
class Case:
    """A prompt and the slots of which one has to be chosen."""

    text: bytes
    expected: frozenset[int]


class Fleet:
    """Each endpoint holds 60k chunks, half of them shared by all. Of the prompts 10 % are held by every endpoint, 72 %
    by one to eight of them at different depths, and 18 % by none.

    `is_all_on`: with the hotspot detector, a limit, and every extra term: weights, experts, round trips, and a
    logarithm that most endpoints' P is above. These are the same for all endpoints, so that the expected ones stay the
    best.
    """

    def __init__(
        self, core: Core, endpoints: int, prompt_bytes: int, rng: random.Random, *, is_all_on: bool = False
    ) -> None:
        self.core = core
        self.endpoints = endpoints
        self.prompt_bytes = prompt_bytes
        self.scheduler = core.scheduler(rng_seed=SEED, settings=SchedulerSettings(block_tokens=BLOCK_TOKENS))
        self.now_s = 0.0
        self.slots = [self.scheduler.add_slot() for _ in range(endpoints)]
        self._rng = rng
        self._root = root_hash(SEED)
        self._common = [rng.randbytes(prompt_bytes) for _ in range(COMMON_TEXTS)]
        self._placed: list[Case] = []
        shared = rng.randbytes(8 * CHUNKS_PER_ENDPOINT // 2)
        for slot in self.slots:
            self.hold(slot, np.frombuffer(shared, dtype=np.uint64))
            self.hold(slot, np.frombuffer(rng.randbytes(8 * CHUNKS_PER_ENDPOINT // 2), dtype=np.uint64))
            for text in self._common:
                self._hold_text(slot, text, len(text))
        for _ in range(PLACED_TEXTS):
            text = rng.randbytes(prompt_bytes)
            holders = rng.sample(self.slots, rng.randint(1, min(8, endpoints)))
            for k, slot in enumerate(holders):
                self._hold_text(slot, text, len(text) * (k + 1) // len(holders))
            self._placed.append(Case(text, frozenset([holders[-1]])))
        self._everybody = frozenset(self.slots)
        self._variant_of_slot = np.zeros(endpoints, dtype=np.int8)
        self._yes = np.ones(endpoints, dtype=np.bool_)
        self._batch_max = 256 if is_all_on else None
        self._extra: ExtraTerms | None = None
        if is_all_on:
            self.scheduler.watch_hotspots(HotspotSettings(window_s=0.5))  # full, so that each arrival lets one go
            self._extra = ExtraTerms(
                weight_milli=4_000,
                expert_factor=np.full(endpoints, 1.3),
                rtt_s=np.full(endpoints, 0.001),
                log_above_tokens=64.0,
            )

    def hold(self, slot: int, hashes: U64) -> None:
        tokens = np.arange(1, len(hashes) + 1, dtype=np.uint32) * np.uint32(TOKENS_PER_CHUNK)
        self.scheduler.kv_apply(slot, hashes, tokens, NO_CHUNKS, 0.0)

    def _hold_text(self, slot: int, text: bytes, depth_bytes: int) -> None:
        self.hold(slot, self.core.hash_chunks(text[:depth_bytes], self._root, SEED))

    def case(self) -> Case:
        chance = self._rng.random()
        if chance < 0.1:
            return Case(self._rng.choice(self._common), self._everybody)
        if chance < 0.82:
            return self._rng.choice(self._placed)
        return Case(self._rng.randbytes(self.prompt_bytes), self._everybody)

    def decide(self) -> float:
        """Microseconds of one decision; its reservation is ended again, outside of the time.

        The text is as a renderer leaves it: just written, so in the processor's caches. The index is not.
        """
        case = self.case()
        text = bytes(bytearray(case.text))
        self.now_s += 0.001
        start = time.perf_counter()
        chain = self.core.hash_chunks(text, self._root, SEED)
        request = PlacementRequest(
            prompts=((Prompt(chain=chain, size_bytes=len(text)),),),
            variant_of_slot=self._variant_of_slot,
            exact=self._yes,
            candidates=self._yes,
            tokens_per_byte=1 / BYTES_PER_TOKEN,
            batch_max=self._batch_max,
            extra=self._extra,
        )
        placement = self.scheduler.place(request, self.now_s)
        spent_us = (time.perf_counter() - start) * 1e6
        if isinstance(placement, Rejection) or placement.slot not in case.expected:
            raise SystemExit(f"wrong choice: {placement} is not one of {sorted(case.expected)[:9]}; no figure is given")
        self.scheduler.finish(placement.reservation_id, self.now_s)
        return spent_us
