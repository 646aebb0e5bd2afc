"""The learned index: what it forgets, in which order, and that it stays within the engine's capacity."""

from hypothesis import given
from hypothesis import strategies as st

from trimtab_core.learned_index import LearnedIndex


def learned(index: LearnedIndex, slot: int, chain: list[int]) -> int:
    """Chunks of `chain` that the slot is taken to hold."""
    return next((hit.depth for hit in index.index.deepest(chain, 1 << slot)), 0)


def steps(chain: list[int]) -> list[int]:
    return [16 * (position + 1) for position in range(len(chain))]


def test_the_longest_unused_prompt_goes_first_and_its_end_before_its_head() -> None:
    index = LearnedIndex()
    old, new = [1, 2, 3, 4], [11, 12, 13, 14]
    index.learn(0, old, steps(old), 128)
    index.learn(0, new, steps(new), 128)
    assert (learned(index, 0, old), learned(index, 0, new)) == (4, 4)
    index.learn(0, [21], [16], 128)
    assert (learned(index, 0, old), learned(index, 0, new)) == (3, 4)
    index.learn(0, old[:2], steps(old)[:2], 128)  # used again: the other is the oldest now
    index.learn(0, [31, 32], [16, 32], 128)
    assert learned(index, 0, old) == 2
    assert learned(index, 0, new) == 4 - 1  # chunk 3 of the old prompt went before


def test_samples_stand_for_what_lies_between_them() -> None:
    index = LearnedIndex()
    index.learn(0, [16, 32, 48], [256, 512, 768], 10_000)
    assert index.tokens_held(0) == 768
    index.learn(0, list(range(1, 49)), steps(list(range(48))), 10_000)  # now one by one: not counted twice
    assert index.tokens_held(0) == 768


def test_prompts_in_a_row_are_told_apart_by_falling_counts() -> None:
    index = LearnedIndex()
    index.learn(0, [1, 2, 51, 52], [16, 32, 16, 32], 10_000)
    assert index.tokens_held(0) == 64


def test_prompts_shorter_than_a_block_do_not_grow_it_without_bound() -> None:
    index = LearnedIndex()
    for chunk in range(1000):
        index.learn(0, [chunk], [0], 100)
    assert index.index.pair_count == 100


def test_a_cleared_slot_forgets_and_others_do_not() -> None:
    index = LearnedIndex()
    for slot in (0, 1):
        index.learn(slot, [1, 2], [16, 32], 100)
    index.clear(0)
    index.check_invariants()
    assert (learned(index, 0, [1, 2]), learned(index, 1, [1, 2])) == (0, 2)
    assert index.tokens_held(0) == 0


@given(
    prompts=st.lists(
        st.tuples(st.integers(0, 2), st.lists(st.integers(1, 9), max_size=6, unique=True), st.sampled_from([1, 16])),
        max_size=30,
    ),
    capacity=st.integers(0, 200),
)
def test_it_equals_a_list_in_order_of_use(prompts: list[tuple[int, list[int], int]], capacity: int) -> None:
    index = LearnedIndex()
    model: dict[int, list[tuple[int, int]]] = {}  # slot -> (chunk, cost), the next to forget first
    for slot, chunks, step in prompts:
        index.learn(slot, chunks, [step * (position + 1) for position in range(len(chunks))], capacity)
        order = model.setdefault(slot, [])
        for chunk in reversed(chunks):
            cost = min([step, *(known for other, known in order if other == chunk)])
            order[:] = [pair for pair in order if pair[0] != chunk] + [(chunk, cost)]
        while sum(cost for _, cost in order) > capacity:
            order.pop(0)
        index.check_invariants()
        assert list(index._costs[slot].items()) == order
        assert index.tokens_held(slot) == sum(cost for _, cost in order) <= capacity
