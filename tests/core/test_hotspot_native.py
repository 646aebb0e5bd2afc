"""The hotspot detectors of both cores over the same histories: alarms, what is left out, counts, and their bounds."""

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
from core_pair import scheduler_pair
from native_core import needs_native

from trimtab_core.errors import UnknownSlot
from trimtab_core.extra_terms import ExtraTerms
from trimtab_core.hotspot import HotspotSettings
from trimtab_core.hotspot_arrivals import ARRIVALS_MAX, PREFIXES_MAX, STEP_CHUNKS
from trimtab_core.placement import PlacementRequest, Prompt, Rejection
from trimtab_core.settings import SchedulerSettings

pytestmark = needs_native

NO_CHUNKS: Any = np.zeros(0, dtype=np.uint64)


def chain_of(name: int, chunks: int) -> Any:
    return np.random.default_rng(name).integers(1, 2**63, chunks, dtype=np.uint64)


class History:
    """A random life of a pool in which some classes bring most of the arrivals, for some time each."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.pair: Any = scheduler_pair(rng_seed=seed, settings=SchedulerSettings())
        for _ in range(rng.choice([2, 5, 12, 70])):
            self.pair.add_slot()
        self.now_s = 0.0
        self.seen: Counter[str] = Counter()
        common = chain_of(seed, 40)
        # Families: a common beginning, documents below it, and deeper ones below those.
        self.chains = []
        for name in range(6):
            document = np.concatenate([common[: rng.choice([0, 16, 40])], chain_of(100 + name, rng.choice([20, 90]))])
            self.chains += [document, np.concatenate([document[:70], chain_of(200 + name, 48)])]
        self.hot = rng.sample(range(len(self.chains)), 2)
        self.policy = "product"
        self.asleep = 0
        self.open: list[int] = []
        self.pair.watch_hotspots(HotspotSettings(window_s=20.0))

    def chain(self) -> Any:
        rng = self.rng
        if rng.random() < 0.2:
            return chain_of(rng.getrandbits(40), rng.choice([3, 30, 200]))
        chosen = rng.choice(self.hot) if rng.random() < 0.75 else rng.randrange(len(self.chains))
        return np.concatenate([self.chains[chosen], chain_of(rng.getrandbits(40), rng.choice([0, 5, 40]))])

    def request(self) -> PlacementRequest:
        rng, slots = self.rng, self.pair.slot_count
        prompts = tuple(
            tuple(
                Prompt(chain=chain, size_bytes=64 * len(chain) + 9)
                for chain in (self.chain() for _ in range(rng.choice([1, 1, 1, 1, 0, 2])))
            )
            for _ in range(rng.choice([1, 1, 1, 1, 1, 0, 2]))
        )
        share = rng.choice([1.0, 1.0, 1.0, 0.6, 0.2])
        asleep = self.asleep
        return PlacementRequest(
            prompts=prompts,
            variant_of_slot=np.array([rng.choice([0, 0, 0, 0, 1, -1]) for _ in range(slots)], dtype=np.int8),
            exact=np.array([rng.random() < 0.9 for _ in range(slots)], dtype=np.bool_),
            candidates=np.array([rng.random() < share and n >= asleep for n in range(slots)], dtype=np.bool_),
            tokens_per_byte=0.25,
            cache_reads=rng.random() < 0.98,
            policy=self.policy,
            batch_max=rng.choice([None] * 7 + [2]),
            is_again=rng.random() < 0.1,
            batch=rng.choice([1] * 9 + [4]),
            extra=rng.choice([None] * 5 + [self.extra()]),
        )

    def extra(self) -> ExtraTerms:
        rng, slots = self.rng, self.pair.slot_count

        def column(low: float, high: float) -> Any:
            return rng.choice([None, np.array([rng.uniform(low, high) for _ in range(rng.choice([slots, slots - 1]))])])

        return ExtraTerms(
            weight_milli=rng.choice([1, 1_000, 4_000, 1_000_000]),
            expert_factor=column(0.5, 2.0),
            rtt_s=column(0.0, 0.2),
            log_above_tokens=rng.choice([0.0, 1.0, 300.0]),
        )

    def step(self) -> None:
        rng, pair = self.rng, self.pair
        self.now_s += rng.choice([0.0, 0.01, 0.05, 0.2])
        chance = rng.random()
        if chance < 0.70:
            placement = pair.place(self.request(), self.now_s)
            if not isinstance(placement, Rejection):
                self.open.append(placement.reservation_id)
                self.seen["left out"] += placement.hotspot is not None
        elif chance < 0.80:
            chain = rng.choice(self.chains)
            chain = chain[: rng.choice([16, 33, len(chain)])]
            tokens = np.arange(1, len(chain) + 1, dtype=np.uint32) * np.uint32(16)
            slot = rng.randrange(pair.slot_count) if rng.random() < 0.4 else rng.randrange(min(2, pair.slot_count))
            try:
                if rng.random() < 0.7:
                    pair.kv_apply(slot, chain, tokens, NO_CHUNKS, self.now_s)
                else:
                    pair.kv_apply(slot, NO_CHUNKS, tokens[:0], chain, self.now_s)
            except UnknownSlot:
                self.seen["unknown slot"] += 1
        elif chance < 0.97:
            for _ in range(min(3, len(self.open))):
                reservation_id = self.open.pop(rng.randrange(len(self.open)))
                pair.first_token(reservation_id, self.now_s)
                pair.finish(reservation_id, self.now_s)
        else:
            self.change(rng.randrange(8))
        pair.advance(self.now_s)
        view = pair.hotspots()
        self.seen["alarms"] += len(view.hotspots)
        self.seen["in the shadow"] += len(view.hotspots) if self.policy != "product" else 0
        self.seen["acted on"] += sum(hotspot.is_acted_on for hotspot in view.hotspots)
        self.seen["most"] = max(self.seen["most"], len(view.hotspots))

    def change(self, what: int) -> None:
        rng, pair = self.rng, self.pair
        if what < 2:
            self.policy = rng.choice(["product"] * 4 + ["round_robin", "least_request"])
        elif what == 2:
            pair.watch_hotspots(
                rng.choice([None, HotspotSettings(window_s=5.0), HotspotSettings(window_s=20.0, acts=False)])
            )
            pair.watch_hotspots(HotspotSettings(window_s=20.0, acts=rng.random() < 0.8))
        elif what == 3:
            self.hot = rng.sample(range(len(self.chains)), 2)
            self.asleep = rng.choice([0, 0, 0, 1])
        elif what == 4:
            self.now_s += rng.choice([5.0, 30.0])
        elif what == 5:
            pair.add_slot()
        elif what == 6 and pair.slot_count > 2:
            try:
                pair.remove_slot(rng.randrange(pair.slot_count))
            except UnknownSlot:
                self.seen["unknown slot"] += 1
        else:
            pair.check_invariants()


def test_both_cores_tell_the_same_and_leave_out_the_same() -> None:
    seen: Counter[str] = Counter()
    for seed in range(12):
        history = History(seed)
        for _ in range(700):
            history.step()
        history.pair.check_invariants()
        seen += history.seen
    # Else the histories would show nothing.
    assert min(seen["alarms"], seen["in the shadow"], seen["acted on"], seen["left out"]) > 50, seen
    assert seen["most"] > 12, seen


@pytest.mark.parametrize("is_long", [False, True])
def test_both_cores_hold_to_the_same_bounds(is_long: bool) -> None:
    """Short prompts that come once fill the window, long ones that come twice the prefixes."""
    pair: Any = scheduler_pair(rng_seed=1, settings=SchedulerSettings())
    pair.add_slot()
    pair.watch_hotspots(HotspotSettings(window_s=1e9))
    chunks = 2048 if is_long else STEP_CHUNKS
    arrivals = 700 if is_long else ARRIVALS_MAX + 500
    rng = np.random.default_rng(5)
    chain: Any = NO_CHUNKS
    for number in range(arrivals):
        if number % 2 == 0 or not is_long:
            chain = rng.integers(1, 2**63, chunks, dtype=np.uint64)
        request = PlacementRequest(
            prompts=((Prompt(chain=chain, size_bytes=64 * chunks),),),
            variant_of_slot=np.zeros(1, dtype=np.int8) - 1,
            exact=np.ones(1, dtype=np.bool_),
            candidates=np.ones(1, dtype=np.bool_),
            tokens_per_byte=0.25,
        )
        placement = pair.place(request, float(number))
        pair.finish(placement.reservation_id, float(number))
    view = pair.hotspots()
    if is_long:
        assert PREFIXES_MAX - 256 < view.prefixes <= PREFIXES_MAX
        assert view.arrivals < arrivals
    else:
        assert (view.arrivals, view.prefixes) == (ARRIVALS_MAX, ARRIVALS_MAX)
    pair.check_invariants()
