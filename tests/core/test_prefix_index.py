"""The prefix index, and the claims built on the same map, against plain dictionaries."""

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from trimtab_core.chunk_owners import slots_in
from trimtab_core.hit import Hit, all_slots, deeper
from trimtab_core.prefix_index import LOG_SLACK, PrefixIndex
from trimtab_core.sample_index import SampleIndex

SLOTS = st.integers(0, 70)  # beyond one machine word
CHUNKS = st.integers(0, 12).map(lambda n: (n * 0x9E37_79B9_7F4A_7C15) % 2**64)
TOKENS = st.sampled_from([0, 16, 16, 16, 32, 2**32 - 1])


def u64(values: Any) -> Any:
    return np.array(list(values), dtype=np.uint64)


def u32(values: Any) -> Any:
    return np.array(list(values), dtype=np.uint32)


def by_slot(hits: list[Hit]) -> dict[int, tuple[int, int]]:
    """The hits slot by slot; a slot that appears twice fails."""
    spread = [(slot, (hit.depth, hit.tokens)) for hit in hits for slot in slots_in(hit.slots)]
    assert len(dict(spread)) == len(spread)
    return dict(spread)


def walked(held: dict[int, int], chain: list[int]) -> tuple[int, int] | None:
    """What one slot holds of a chain, literally."""
    depth = 0
    while depth < len(chain) and chain[depth] in held:
        depth += 1
    return (depth, held[chain[depth - 1]]) if depth else None


class IndexMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.real = PrefixIndex()
        self.model: dict[int, dict[int, int]] = {}

    @rule(slot=SLOTS, added=st.lists(st.tuples(CHUNKS, TOKENS), max_size=8), removed=st.lists(CHUNKS, max_size=4))
    def apply(self, slot: int, added: list[tuple[int, int]], removed: list[int]) -> None:
        self.real.apply(slot, u64(c for c, _ in added), u32(t for _, t in added), u64(removed))
        held = self.model.setdefault(slot, {})
        for chunk in removed:
            held.pop(chunk, None)
        held.update(added)

    @rule(slot=SLOTS)
    def clear(self, slot: int) -> None:
        self.real.clear(slot)
        self.model.pop(slot, None)

    @rule(chain=st.lists(CHUNKS, max_size=8), slots=st.sets(SLOTS))
    def walk(self, chain: list[int], slots: set[int]) -> None:
        expected = {slot: walked(self.model.get(slot, {}), chain) for slot in slots}
        hits = self.real.walk(chain, sum(1 << slot for slot in slots))
        assert by_slot(hits) == {slot: hit for slot, hit in expected.items() if hit}
        assert [hit.depth for hit in hits] == sorted(hit.depth for hit in hits)

    @invariant()
    def equals_the_model(self) -> None:
        self.real.check_invariants()
        for slot, held in self.model.items():
            hashes, tokens = self.real.export(slot)
            assert list(zip(hashes.tolist(), tokens.tolist(), strict=True)) == sorted(held.items())
        assert self.real.pair_count == sum(map(len, self.model.values()))
        assert len(self.real) == len(set().union(*self.model.values())) if self.model else len(self.real) == 0


IndexMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


TestPrefixIndexEqualsItsModel = IndexMachine.TestCase


@given(
    pairs=st.dictionaries(st.tuples(CHUNKS, SLOTS), TOKENS, max_size=30),
    chain=st.lists(CHUNKS, max_size=10),
    slots=st.sets(SLOTS),
    shallowest=st.integers(0, 4),
)
def test_the_deepest_sample_is_found_for_each_slot(
    pairs: dict[tuple[int, int], int], chain: list[int], slots: set[int], shallowest: int
) -> None:
    index = SampleIndex()
    for (chunk, slot), tokens in pairs.items():
        index.set(chunk, slot, tokens)
    expected = {}
    for slot in slots:
        depths = [k + 1 for k, chunk in enumerate(chain) if (chunk, slot) in pairs and k + 1 > shallowest]
        if depths:
            expected[slot] = (max(depths), pairs[chain[max(depths) - 1], slot])
    assert by_slot(index.deepest(chain, sum(1 << slot for slot in slots), shallowest)) == expected


def hit_lists() -> st.SearchStrategy[list[Hit]]:
    """Lists of hits over slots 0 to 9 in which no slot appears twice."""
    ends = st.dictionaries(st.integers(0, 9), st.tuples(st.integers(1, 4), st.sampled_from([16, 32])))
    return ends.map(
        lambda of_slot: [
            Hit(*end, sum(1 << slot for slot, other in of_slot.items() if other == end))
            for end in sorted(set(of_slot.values()))
        ]
    )


@given(one=hit_lists(), other=hit_lists())
def test_of_two_hits_the_deeper_one_counts_and_never_fewer_tokens(one: list[Hit], other: list[Hit]) -> None:
    mine, theirs = by_slot(one), by_slot(other)
    expected = dict(mine)
    for slot, (depth, tokens) in theirs.items():
        if slot not in mine:
            expected[slot] = (depth, tokens)
        elif depth > mine[slot][0]:
            expected[slot] = (depth, max(tokens, mine[slot][1]))
    merged = deeper(one, other)
    assert by_slot(merged) == expected
    assert all_slots(merged) == sum(1 << slot for slot in expected)


def test_a_hole_ends_the_hit_whatever_lies_behind_it() -> None:
    index = PrefixIndex()
    index.apply(0, u64(range(1, 101)), u32(range(16, 1616, 16)), u64([]))
    index.apply(0, u64([]), u32([]), u64([41]))
    assert by_slot(index.walk(list(range(1, 101)), 1)) == {0: (40, 640)}


def test_a_slots_log_stays_in_proportion_to_what_the_slot_holds() -> None:
    index = PrefixIndex()
    for cycle in range(200):
        chunks = u64(range(1000 * cycle, 1000 * cycle + 500))
        index.apply(3, chunks, u32([16] * 500), u64([]))
        index.apply(3, u64([]), u32([]), chunks)
        assert len(index._logs[3]) <= LOG_SLACK + 2 * 500
    assert (len(index), index.pair_count) == (0, 0)
