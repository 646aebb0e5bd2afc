"""The hotspot detector by example: when it speaks up, what it leaves out, and when it is over. On both cores."""

import random
from typing import Any

import numpy as np
import pytest

from trimtab_core import hotspot_arrivals
from trimtab_core.chunks import hash_chunks
from trimtab_core.hotspot import ALARMS_MAX, IN_CLASS_MIN, SEEN_COUNT, Hotspot, HotspotSettings
from trimtab_core.hotspot_arrivals import ARRIVALS_MAX, PLACES_MAX, PREFIXES_MAX, STEP_CHUNKS, Arrivals
from trimtab_core.placement import Placement, PlacementRequest, Prompt, Rejection
from trimtab_core.scheduler import Scheduler
from trimtab_core.settings import SchedulerSettings

SEED = 3
NO_CHUNKS: Any = np.zeros(0, dtype=np.uint64)
ACTS = HotspotSettings()
TELLS = HotspotSettings(acts=False)


class Pool:
    """A scheduler, a clock, and requests that end as soon as they are placed."""

    def __init__(self, slots: int, settings: HotspotSettings | None) -> None:
        self.scheduler = Scheduler(rng_seed=1, settings=SchedulerSettings())
        self.slots = [self.scheduler.add_slot() for _ in range(slots)]
        self.scheduler.watch_hotspots(settings)
        self.now_s = 0.0
        self.serial = 0

    def hold(self, text: bytes, *slots: int) -> None:
        chain = hash_chunks(text, 0, SEED)
        tokens = (np.arange(len(chain), dtype=np.uint32) + 1) * np.uint32(16)
        for slot in slots:
            self.scheduler.kv_apply(slot, chain, tokens, NO_CHUNKS, self.now_s)

    def ask(self, text: bytes, **changed: Any) -> Placement:
        """One request that begins with `text` and ends as no other does. Its prefill is over at once."""
        self.serial += 1
        whole = text + self.serial.to_bytes(8, "big") * 16
        count = self.scheduler.slot_count
        request = PlacementRequest(
            **{
                "prompts": ((Prompt(chain=hash_chunks(whole, 0, SEED), size_bytes=len(whole)),),),
                "variant_of_slot": np.zeros(count, dtype=np.int8),
                "exact": np.ones(count, dtype=np.bool_),
                "candidates": np.ones(count, dtype=np.bool_),
                "tokens_per_byte": 0.25,
                **changed,
            }
        )
        self.now_s += 0.1
        placement = self.scheduler.place(request, self.now_s)
        assert not isinstance(placement, Rejection), placement
        return placement

    def serve(self, text: bytes, **changed: Any) -> Placement:
        """The same, and its engine holds it from then on."""
        placement = self.ask(text, **changed)
        self.hold(text, placement.slot)
        self.scheduler.first_token(placement.reservation_id, self.now_s)
        self.scheduler.finish(placement.reservation_id, self.now_s)
        return placement

    def others(self, count: int) -> None:
        """Requests that share nothing."""
        for _ in range(count):
            self.serial += 1
            placement = self.ask(random.Random(self.serial).randbytes(64 * 20))
            self.scheduler.finish(placement.reservation_id, self.now_s)

    def hotspots(self) -> tuple[Hotspot, ...]:
        self.scheduler.check_invariants()
        return self.scheduler.hotspots().hotspots


def text(seed: int, chunks: int = 40) -> bytes:
    return random.Random(seed).randbytes(64 * chunks)


DOCUMENT = text(1)


def hot(slots: int = 8, holders: tuple[int, ...] = (0,), settings: HotspotSettings = TELLS) -> Pool:
    """A pool in which one class, held by few, brings half of the arrivals."""
    pool = Pool(slots, settings)
    pool.hold(DOCUMENT, *holders)
    for _ in range(60):
        pool.serve(DOCUMENT)
        pool.others(1)
    return pool


# The first stage


def test_a_class_with_more_arrivals_than_its_holders_share_is_told() -> None:
    pool = hot()
    (hotspot,) = pool.hotspots()
    assert (hotspot.holders, hotspot.others, hotspot.in_class, hotspot.arrivals) == (
        1,
        7,
        59,
        120,
    )  # the first left a mark
    assert not hotspot.is_acted_on
    assert pool.scheduler.hotspots().raised == 1


def test_a_class_is_named_by_the_last_place_that_all_of_it_share() -> None:
    # 40 chunks are common, and places are every 16 chunks.
    (hotspot,) = hot().hotspots()
    assert hotspot.prefix_class == hash_chunks(DOCUMENT, 0, SEED)[2 * STEP_CHUNKS - 1]


def test_nothing_is_said_of_a_few_arrivals() -> None:
    pool = Pool(8, TELLS)
    pool.hold(DOCUMENT, 0)
    for _ in range(IN_CLASS_MIN - 1):
        pool.serve(DOCUMENT)
        pool.others(1)
    assert not pool.hotspots()


def test_nothing_is_said_of_what_chance_does() -> None:
    # 20 of 110 are more than an eighth, and no more than chance brings.
    pool = Pool(8, TELLS)
    pool.hold(DOCUMENT, 0)
    pool.others(90)
    for _ in range(20):
        pool.serve(DOCUMENT)
    assert not pool.hotspots()


def test_enough_holders_carry_a_class() -> None:
    assert not hot(8, holders=(0, 1, 2, 3)).hotspots()


def test_a_prefix_that_nobody_holds_and_one_that_all_hold_are_no_hotspots() -> None:
    assert not hot(4, holders=(0, 1, 2, 3)).hotspots()
    pool = Pool(4, TELLS)
    for _ in range(60):  # each is another model's, say, and nobody computes it
        pool.scheduler.finish(pool.ask(DOCUMENT).reservation_id, pool.now_s)
        pool.others(1)
    assert not pool.hotspots()


@pytest.mark.parametrize("holders", [1, 2, 7])
def test_a_system_prompt_common_to_all_is_no_hotspot(holders: int) -> None:
    pool = Pool(8, TELLS)
    pool.hold(DOCUMENT, *range(holders))
    for _ in range(200):
        pool.serve(DOCUMENT)
        assert not pool.scheduler.hotspots().hotspots


def test_strays_do_not_make_a_common_system_prompt_a_hotspot() -> None:
    pool = Pool(8, TELLS)
    pool.hold(DOCUMENT, 0)
    pool.others(2)
    for _ in range(200):
        pool.serve(DOCUMENT)
    assert not pool.hotspots()


def test_the_class_of_a_request_is_the_deepest_prefix_with_more_than_an_equal_share() -> None:
    pool = Pool(8, TELLS)
    pool.hold(DOCUMENT, *range(8))
    hotter = DOCUMENT + text(2)
    pool.hold(hotter, 5)
    for _ in range(60):
        pool.serve(hotter)
        pool.serve(DOCUMENT)
    (hotspot,) = pool.hotspots()
    assert hotspot.prefix_class == hash_chunks(hotter, 0, SEED)[5 * STEP_CHUNKS - 1]
    assert (hotspot.holders, hotspot.in_class) == (1, 58)


def test_requests_without_any_prompt_are_no_arrivals_and_those_of_unknown_text_are() -> None:
    pool = Pool(4, TELLS)
    pool.ask(DOCUMENT, prompts=())
    assert pool.scheduler.hotspots().arrivals == 0
    pool.ask(DOCUMENT, prompts=((Prompt(chain=NO_CHUNKS, size_bytes=900),),))
    pool.ask(DOCUMENT, prompts=((),))
    assert pool.scheduler.hotspots().arrivals == 2


def test_who_can_only_go_to_one_endpoint_is_counted_and_not_judged() -> None:
    pool = hot()
    for _ in range(9):
        pool.serve(DOCUMENT, candidates=np.array([True]))
    (hotspot,) = pool.hotspots()
    assert (hotspot.others, hotspot.in_class) == (7, 68)


# The second stage


def test_holders_are_left_out_after_twice_their_number_in_a_row_until_enough_hold_the_prefix() -> None:
    pool = hot(settings=TELLS)
    pool.others(20)
    pool.scheduler.watch_hotspots(ACTS)
    first = pool.serve(DOCUMENT)
    assert (first.left_out, first.hotspot) == ((0,), pool.hotspots()[0].prefix_class)
    assert first.slot != 0
    assert first.score[0] == np.inf
    assert first.reason.endswith(", away from a hotspot")
    second = pool.serve(DOCUMENT)
    assert second.left_out == tuple(sorted((0, first.slot)))
    for _ in range(9):
        pool.serve(DOCUMENT)
    # A little less than half of the arrivals are carried by half of the endpoints.
    assert not pool.hotspots()
    after = pool.serve(DOCUMENT)
    assert (after.hotspot, after.left_out) == (None, ())
    chunk = hash_chunks(DOCUMENT, 0, SEED)[-1]
    held = [slot for slot in pool.slots if chunk in pool.scheduler.kv_export(slot)[0]]
    assert len(held) == 4
    assert (pool.scheduler.hotspots().raised, pool.scheduler.hotspots().acted) == (1, 1)


def test_an_endpoint_to_which_the_prefix_is_on_its_way_counts_as_a_holder() -> None:
    pool = hot()
    pool.others(20)
    pool.scheduler.watch_hotspots(ACTS)
    went = [pool.ask(DOCUMENT) for _ in range(4)]  # none of them is prefilled
    assert len({placement.slot for placement in went[:3]}) == 3
    assert went[1].left_out == tuple(sorted((0, went[0].slot)))
    assert not pool.hotspots()


def test_a_class_whose_holders_do_not_win_is_left_alone() -> None:
    pool = hot(settings=TELLS)
    pool.scheduler.report(0, requests=10_000, block_tokens=16, kv_capacity_tokens=0, now_s=pool.now_s)
    pool.scheduler.watch_hotspots(ACTS)
    placement = pool.ask(DOCUMENT)
    assert placement.slot != 0
    assert placement.hotspot is None


def test_settings_that_only_tell_leave_nobody_out() -> None:
    pool = hot(settings=TELLS)
    for _ in range(20):
        assert pool.serve(DOCUMENT).slot == 0
    assert not pool.hotspots()[0].is_acted_on
    assert pool.scheduler.hotspots().acted == 0


def test_acting_ends_when_it_is_switched_off() -> None:
    pool = hot(settings=TELLS)
    pool.scheduler.watch_hotspots(ACTS)
    assert pool.serve(DOCUMENT).hotspot is not None
    pool.scheduler.watch_hotspots(TELLS)
    assert pool.serve(DOCUMENT).hotspot is None
    assert not pool.hotspots()[0].is_acted_on


def test_the_class_is_never_left_without_an_endpoint() -> None:
    pool = hot(settings=TELLS)
    pool.scheduler.watch_hotspots(ACTS)
    for slot in pool.slots[1:]:
        pool.scheduler.report(slot, requests=50, block_tokens=16, kv_capacity_tokens=0, now_s=pool.now_s)
    # All but the holder are at the batch limit: it alone can take the request, and does.
    placement = pool.ask(DOCUMENT, batch_max=20)
    assert (placement.slot, placement.hotspot) == (0, None)
    placement = pool.ask(DOCUMENT, candidates=np.array([True]))
    assert (placement.slot, placement.hotspot) == (0, None)
    assert pool.hotspots()


def test_other_classes_may_go_to_the_holders_all_the_same() -> None:
    pool = hot(settings=TELLS)
    pool.hold(text(9), 0)
    pool.scheduler.watch_hotspots(ACTS)
    assert pool.serve(DOCUMENT).hotspot is not None
    assert pool.serve(text(9)).slot == 0


# The end


def test_an_alarm_is_over_when_its_arrivals_have_left_the_window() -> None:
    pool = hot()
    pool.scheduler.advance(pool.now_s + 59.0)
    assert not pool.hotspots()
    assert 0 < pool.scheduler.hotspots().arrivals < 20
    pool.scheduler.advance(pool.now_s + 61.0)
    view = pool.scheduler.hotspots()
    assert (view.arrivals, view.prefixes) == (0, 0)


def test_between_clearly_above_and_above_an_alarm_stays_as_it_is() -> None:
    pool = hot()
    pool.others(240)
    # 60 of 360 are a sixth: more than an eighth, but not clearly.
    assert len(pool.hotspots()) == 1
    pool.others(140)
    pool.scheduler.advance(pool.now_s)
    assert not pool.hotspots()
    for _ in range(3):
        pool.serve(DOCUMENT)
    assert not pool.hotspots()


def test_endpoints_to_which_no_request_may_go_any_more_are_none_of_the_others() -> None:
    pool = hot()
    awake = np.array([True, True])
    for _ in range(SEEN_COUNT - 1):
        pool.serve(DOCUMENT, candidates=awake)
        pool.others(4)
    (hotspot,) = pool.hotspots()
    assert (hotspot.holders, hotspot.others) == (1, 7)
    pool.others(120)
    for _ in range(2 * SEEN_COUNT):  # half of the arrivals would have to be its own, of two
        pool.serve(DOCUMENT, candidates=awake)
        pool.others(4)
    assert not pool.hotspots()


def test_an_alarm_knows_when_its_last_request_came() -> None:
    pool = hot()
    came_s = pool.now_s - 0.1
    assert pool.hotspots()[0].came_s == came_s
    pool.others(5)
    assert pool.hotspots()[0].came_s == came_s
    pool.serve(DOCUMENT)
    assert pool.hotspots()[0].came_s == pool.now_s


def test_holders_that_go_are_none_any_more() -> None:
    pool = hot(8, holders=(0, 1))
    assert pool.hotspots()[0].holders == 2
    pool.scheduler.remove_slot(1)
    assert pool.scheduler.add_slot() == 1
    assert pool.hotspots()[0].holders == 1
    pool.scheduler.remove_slot(0)
    pool.scheduler.advance(pool.now_s)
    assert not pool.hotspots()


def test_off_it_knows_nothing() -> None:
    pool = hot()
    pool.scheduler.watch_hotspots(None)
    pool.serve(DOCUMENT)
    view = pool.scheduler.hotspots()
    assert (view.hotspots, view.arrivals, view.prefixes, view.raised) == ((), 0, 0, 1)


# In the shadow


@pytest.mark.parametrize("policy", ["round_robin", "least_request"])
def test_another_policy_spreads_the_prefix_and_the_alarm_stays(policy: str) -> None:
    pool = hot()
    for _ in range(40):
        assert pool.serve(DOCUMENT, policy=policy).hotspot is None
        pool.others(1)
    (hotspot,) = pool.hotspots()
    assert (hotspot.holders, hotspot.others) == (1, 7)
    # Back at the product, everybody holds the prefix.
    pool.serve(DOCUMENT)
    if policy == "round_robin":
        assert not pool.hotspots()


def test_in_the_shadow_the_holders_grow_where_the_product_would_have_spread_the_prefix() -> None:
    pool = hot()
    pool.scheduler.report(0, requests=10_000, block_tokens=16, kv_capacity_tokens=0, now_s=pool.now_s)
    for _ in range(2):
        pool.serve(DOCUMENT, policy="round_robin")
    assert pool.hotspots()[0].holders == 2
    for slot in pool.slots:
        pool.scheduler.report(slot, requests=10_000, block_tokens=16, kv_capacity_tokens=0, now_s=pool.now_s)
    for _ in range(4):
        pool.serve(DOCUMENT, policy="round_robin")
    assert pool.hotspots()[0].holders == 2


def test_in_the_shadow_an_alarm_is_over_with_its_arrivals() -> None:
    pool = hot()
    for _ in range(300):
        pool.others(1)
    pool.serve(DOCUMENT, policy="round_robin")
    assert pool.hotspots()
    pool.scheduler.advance(pool.now_s + 60.0)
    assert not pool.hotspots()


# Bounds


def test_no_more_classes_have_alarms_than_the_bound() -> None:
    # With 500 endpoints a seventieth of the arrivals is many times an equal share.
    pool = Pool(500, HotspotSettings(window_s=1e6, acts=False))
    documents = [text(100 + number, 17) for number in range(ALARMS_MAX + 6)]
    for number, document in enumerate(documents):
        pool.hold(document, number)
    for _ in range(25):
        for document in documents:
            pool.scheduler.finish(pool.ask(document).reservation_id, pool.now_s)
    assert len(pool.hotspots()) == ALARMS_MAX


def test_a_prompt_that_comes_once_costs_one_entry_and_a_second_one_shows_what_they_share() -> None:
    arrivals = Arrivals()
    chain = list(range(1, 16 * 50 + 1))
    assert [prefix.depth_chunks for prefix in arrivals.add(chain, 0.0)] == [16]
    assert [prefix.count for prefix in arrivals.add(chain, 0.0)] == [2, *[1] * 49]
    other = chain[: 16 * 30] + [-chunk for chunk in chain[16 * 30 :]]
    assert [prefix.count for prefix in arrivals.add(other, 0.0)] == [3, *[2] * 29, 1]
    arrivals.forget_before(1.0)
    assert (len(arrivals), len(arrivals.prefixes)) == (0, 0)


def test_a_prompt_is_looked_at_to_a_bound_and_in_whole_steps() -> None:
    arrivals = Arrivals()
    assert arrivals.add(list(range(15)), 0.0) == []
    chain = list(range(100, 100 + 16 * PLACES_MAX + 500))
    arrivals.add(chain, 0.0)
    assert len(arrivals.add(chain, 0.0)) == PLACES_MAX


def test_a_window_that_is_full_forgets_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hotspot_arrivals, "ARRIVALS_MAX", 10)
    monkeypatch.setattr(hotspot_arrivals, "PREFIXES_MAX", 30)
    arrivals = Arrivals()
    rng = random.Random(5)
    known = [[rng.getrandbits(60) for _ in range(16 * 12)] for _ in range(4)]
    for step in range(400):
        chain = rng.choice(known)
        cut = 16 * rng.randrange(13)
        arrivals.add(chain[:cut] + [rng.getrandbits(60) for _ in range(16 * 3)], float(step))
        arrivals.check_invariants()
        assert len(arrivals) <= 10
        assert len(arrivals.prefixes) <= 30
    assert len(arrivals) == 10 or len(arrivals.prefixes) > 10


def test_the_bounds_are_what_the_native_core_has() -> None:
    """They are written down twice; that both hold to them is for the test of the two cores side by side."""
    assert (ARRIVALS_MAX, PREFIXES_MAX, PLACES_MAX, STEP_CHUNKS, ALARMS_MAX) == (16_384, 32_768, 128, 16, 64)
