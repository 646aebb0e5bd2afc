"""Block chains: engine blocks to chunks, against a literal model and by example."""

from typing import Any

import numpy as np
import pytest
from block_chains_model import ModelChains
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from native_core import native, needs_native

from trimtab_core.block_chains import BlockChains, ChunkChanges
from trimtab_core.chunks import hash_chunks, root_hash
from trimtab_core.errors import DataError
from trimtab_core.token_table import TokenTable

SEED = 99
# Pieces chosen so that the same bytes have several tokenisations, blocks end inside chunks, and one block ends several.
PIECES: list[bytes | None] = [b"a" * 16, b"a" * 32, b"a" * 64, b"b" * 48, b"", None, b"c" * 200, b"a"]
TABLE = TokenTable.from_pieces(PIECES)
ROOTS = [root_hash(SEED), root_hash(SEED, "adapter"), root_hash(SEED, None, "salt")]
PLACES = [("GPU", 0), ("CPU", 0), ("GPU", 1)]
BLOCK_TOKENS = 3
RUNS = st.one_of(
    # One, two or three chunks of the same letter in a block: the same bytes with quite different counts.
    st.sampled_from([[0, 0, 1], [1, 1, 2], [2, 4, 4], [2, 2, 2], [1, 1, 4]]),
    st.lists(st.sampled_from([0, 1, 2, 3, 4, 5, 6, 7, 77]), min_size=3, max_size=3),
)


def u64(values: Any) -> Any:
    return np.array(list(values), dtype=np.uint64)


def u32(values: Any) -> Any:
    return np.array(list(values), dtype=np.uint32)


class Follower:
    """Applies drained changes, as an endpoint's index elsewhere does."""

    def __init__(self) -> None:
        self.chunks: dict[int, int] = {}

    def apply(self, changes: ChunkChanges) -> None:
        if changes.cleared:
            self.chunks.clear()
        for chunk in changes.removed.tolist():
            del self.chunks[chunk]  # a removal of what was never told would raise
        for chunk, tokens in zip(changes.added.tolist(), changes.tokens.tolist(), strict=True):
            assert self.chunks.get(chunk) != tokens  # only changes are told
            self.chunks[chunk] = tokens


def published(chains: BlockChains) -> dict[int, int]:
    hashes, tokens = chains.chunks()
    assert len(set(hashes.tolist())) == len(hashes)
    return dict(zip(hashes.tolist(), tokens.tolist(), strict=True))


class ChainsMachine(RuleBasedStateMachine):
    """Random events, valid and not: what comes out equals the model after each of them."""

    chains: Any = BlockChains

    def __init__(self) -> None:
        super().__init__()
        self.real = self.chains(TABLE, SEED)
        self.model = ModelChains(PIECES, SEED)
        self.follower = Follower()
        self.names: dict[tuple[Any, ...], int] = {}  # an engine's hash stands for parent, tokens and root

    def name(self, parent: int | None, run: list[int], root: int) -> int:
        key = (parent, root if parent is None else None, tuple(run))
        return self.names.setdefault(key, 2**63 + len(self.names))

    @rule(
        data=st.data(),
        runs=st.lists(RUNS, min_size=1, max_size=4),
        short=st.integers(0, 2),
        root=st.sampled_from(ROOTS),
        place=st.sampled_from(PLACES),
    )
    def store(self, data: st.DataObject, runs: list[list[int]], short: int, root: int, place: tuple[str, int]) -> None:
        parents: list[int | None] = [None, None, 12345, *self.names.values()]
        parent = data.draw(st.sampled_from(parents))
        runs = [*runs[:-1], runs[-1][: BLOCK_TOKENS - short]]
        names, before = [], parent
        for run in runs:
            before = self.name(before, run, root)
            names.append(before)
        self.real.store(
            parent=parent,
            blocks=u64(names),
            tokens=u32(token for run in runs for token in run),
            block_tokens=BLOCK_TOKENS,
            root=root,
            medium=place[0],
            group=place[1],
        )
        self.model.store(parent, names, runs, root, place)

    @precondition(lambda self: self.names)
    @rule(data=st.data(), place=st.sampled_from(PLACES))
    def store_again(self, data: st.DataObject, place: tuple[str, int]) -> None:
        (parent, root, run), name = data.draw(st.sampled_from(sorted(self.names.items(), key=lambda item: item[1])))
        root = root or ROOTS[0]
        self.real.store(
            parent=parent,
            blocks=u64([name]),
            tokens=u32(run),
            block_tokens=BLOCK_TOKENS,
            root=root,
            medium=place[0],
            group=place[1],
        )
        self.model.store(parent, [name], [list(run)], root, place)

    @precondition(lambda self: self.names)
    @rule(data=st.data(), place=st.sampled_from(PLACES))
    def offload(self, data: st.DataObject, place: tuple[str, int]) -> None:
        names = data.draw(st.lists(st.sampled_from([*self.names.values(), 777]), max_size=3))
        self.real.store(
            parent=None,
            blocks=u64(names),
            tokens=u32([]),
            block_tokens=0,
            root=ROOTS[0],
            medium=place[0],
            group=place[1],
        )
        self.model.store(None, names, [], ROOTS[0], place)

    @precondition(lambda self: self.names)
    @rule(data=st.data(), place=st.sampled_from(PLACES))
    def remove(self, data: st.DataObject, place: tuple[str, int]) -> None:
        names = data.draw(st.lists(st.sampled_from([*self.names.values(), 777]), min_size=1, max_size=4))
        self.real.remove(blocks=u64(names), medium=place[0], group=place[1])
        self.model.remove(names, place)

    @rule(chance=st.integers(0, 3))
    def clear(self, chance: int) -> None:
        if chance == 0:
            self.real.clear()
            self.model.clear()

    @rule()
    def unpublish(self) -> None:
        self.real.unpublish()
        self.model.unpublish()

    @rule()
    def drain(self) -> None:
        self.follower.apply(self.real.drain())
        assert self.follower.chunks == self.model.chunks()
        assert self.real.drain().is_empty()

    @rule()
    def restart(self) -> None:
        dumped = self.real.dump()
        self.follower.apply(self.real.drain())
        self.real = self.chains.load(TABLE, SEED, dumped)
        assert self.real.drain().is_empty()
        assert self.real.dump() == dumped

    @invariant()
    def equals_the_model(self) -> None:
        self.real.check_invariants()
        assert published(self.real) == self.model.chunks()
        assert self.real.chunk_count == len(self.model.chunks())
        assert self.real.block_count == len(self.model.held())
        assert self.real.unconfirmed_count == len(self.model.since)
        assert self.real.dropped_unknown_parent == self.model.dropped["parent"]
        assert self.real.dropped_unknown_token == self.model.dropped["token"]


class NativeChainsMachine(ChainsMachine):
    chains = native("BlockChains")


RUN = settings(max_examples=80, stateful_step_count=30, deadline=None)
ChainsMachine.TestCase.settings = NativeChainsMachine.TestCase.settings = RUN

TestBlockChainsEqualTheirModel = ChainsMachine.TestCase
TestNativeBlockChainsEqualTheModel = needs_native(NativeChainsMachine.TestCase)


def chains_with(runs: list[list[int]], *, root: int = ROOTS[0]) -> BlockChains:
    """Blocks 1, 2, 3, ... in a row."""
    chains = BlockChains(TABLE, SEED)
    extend(chains, None, range(1, len(runs) + 1), runs, root=root)
    return chains


def extend(chains: BlockChains, parent: int | None, names: Any, runs: list[list[int]], root: int = ROOTS[0]) -> None:
    chains.store(
        parent=parent,
        blocks=u64(names),
        tokens=u32(token for run in runs for token in run),
        block_tokens=max(map(len, runs)),
        root=root,
    )


def test_a_chunk_belongs_to_the_block_that_holds_its_last_byte_and_counts_in_whole_blocks() -> None:
    # 200 bytes in the first block (chunks 0, 1, 2 end in it), 200 in the second (3, 4, 5 do).
    chains = chains_with([[6], [6]])
    chain = hash_chunks(b"c" * 400, ROOTS[0], SEED).tolist()
    assert published(chains) == {chain[0]: 0, chain[1]: 0, chain[2]: 1, chain[3]: 1, chain[4]: 1, chain[5]: 2}
    chains.remove(blocks=u64([2]))
    assert published(chains) == {chain[0]: 0, chain[1]: 0, chain[2]: 1}


def test_a_short_last_block_counts_its_own_tokens() -> None:
    chains = BlockChains(TABLE, SEED)
    chains.store(parent=None, blocks=u64([1, 2]), tokens=u32([0, 0, 0, 0, 1, 1]), block_tokens=4, root=ROOTS[0])
    assert sorted(published(chains).values()) == [4, 6]


def test_two_tokenisations_of_the_same_bytes_keep_the_smallest_count_and_each_its_reference() -> None:
    chains = chains_with([[2]])
    extend(chains, None, [9], [[0, 0, 1]])  # the same 64 bytes in three tokens
    (chunk,) = hash_chunks(b"a" * 64, ROOTS[0], SEED).tolist()
    assert published(chains) == {chunk: 1}
    chains.drain()
    chains.remove(blocks=u64([1]))
    changes = chains.drain()
    assert (changes.added.tolist(), changes.tokens.tolist(), changes.removed.tolist()) == ([chunk], [3], [])
    extend(chains, None, [1], [[2]])
    changes = chains.drain()
    assert (changes.added.tolist(), changes.tokens.tolist(), changes.removed.tolist()) == ([chunk], [1], [])
    chains.remove(blocks=u64([1]))
    chains.remove(blocks=u64([9]))
    assert published(chains) == {}


def test_a_larger_count_that_goes_changes_nothing() -> None:
    chains = chains_with([[2]])
    extend(chains, None, [9], [[0, 0, 1]])
    chains.drain()
    chains.remove(blocks=u64([9]))
    assert chains.drain().is_empty()


def test_lora_name_and_salt_keep_chains_apart() -> None:
    kinds = [set(published(chains_with([[6]], root=root))) for root in ROOTS]
    assert len(set().union(*kinds)) == sum(map(len, kinds)) == 9


def test_a_chunk_that_came_and_went_is_in_no_drain() -> None:
    chains = chains_with([[6]])
    chains.remove(blocks=u64([1]))
    assert chains.drain().is_empty()


def test_a_known_descendant_confirms_all_its_ancestors_after_a_gap() -> None:
    chains = chains_with([[2], [2], [2], [2]])
    before = published(chains)
    chains.unpublish()
    assert published(chains) == {}
    assert chains.block_count == 0
    extend(chains, 3, [50], [[3]])
    kept = hash_chunks(b"a" * 192, ROOTS[0], SEED).tolist()
    assert set(published(chains)) == set(kept)
    assert set(kept) < set(before)
    assert chains.unconfirmed_count == 1


def test_an_offload_medium_confirms_no_ancestor() -> None:
    chains = chains_with([[2], [2]])
    chains.unpublish()
    chains.store(parent=1, blocks=u64([2]), tokens=u32([]), block_tokens=0, root=ROOTS[0], medium="CPU")
    assert len(published(chains)) == 1


def test_a_confirmed_ancestor_is_not_confirmed_twice() -> None:
    chains = chains_with([[2]])
    chains.store(parent=None, blocks=u64([1]), tokens=u32([]), block_tokens=0, root=ROOTS[0], medium="CPU")
    chains.unpublish()
    for child in (50, 51):  # each shows that block 1 is on the GPU; whether it is on the CPU too, nobody says
        extend(chains, 1, [child], [[child % 2]])
    chains.remove(blocks=u64([1]))
    assert chains.block_count == 2
    assert chains.unconfirmed_count == 1


def test_what_was_set_aside_in_one_gap_is_not_forgotten_in_the_next() -> None:
    chains = chains_with([[2]])
    chains.store(parent=None, blocks=u64([1]), tokens=u32([]), block_tokens=0, root=ROOTS[0], medium="CPU")
    for _ in range(2):
        chains.unpublish()
        extend(chains, None, [1], [[2]])
    chains.unpublish()
    chains.remove(blocks=u64([1]))
    assert chains.unconfirmed_count == 1  # on the CPU it may still be


def test_after_a_clear_the_bound_of_unconfirmed_blocks_starts_anew() -> None:
    chains = chains_with([[2]] * 20)
    chains.clear()
    for cycle in range(10):
        extend(chains, None, [100 + cycle], [[cycle % 4]])
        chains.unpublish()
    assert chains.unconfirmed_count == 1


def test_gaps_without_end_do_not_grow_the_map() -> None:
    chains = BlockChains(TABLE, SEED)
    for cycle in range(50):
        extend(chains, None, range(100 * cycle, 100 * cycle + 10), [[cycle % 4]] * 10)
        chains.unpublish()
        chains.check_invariants()
        assert chains.unconfirmed_count <= 10


def test_a_block_whose_tokens_do_not_match_its_size_is_dropped_and_counted() -> None:
    chains = BlockChains(TABLE, SEED)
    for tokens in (5, 4, 2):
        chains.store(parent=None, blocks=u64([1, 2]), tokens=u32([0] * tokens), block_tokens=2, root=ROOTS[0])
    assert chains.block_count == 2  # four tokens fit
    assert chains.dropped_malformed == 4


def test_bytes_and_tokens_seen_count_new_blocks_only() -> None:
    chains = chains_with([[2], [1]])
    extend(chains, None, [1, 2], [[2], [1]])
    assert (chains.bytes_seen, chains.tokens_seen) == (96, 2)


def test_a_checkpoint_of_another_pool_model_or_with_damage_is_refused() -> None:
    chains = chains_with([[2], [6]])
    dumped = chains.dump()
    assert published(BlockChains.load(TABLE, SEED, dumped)) == published(chains)
    other_table = TokenTable.from_pieces([*PIECES[:-1], b"z"])
    damaged = bytearray(dumped)
    damaged[len(damaged) // 2] ^= 1
    for table, seed, data in (
        (TABLE, SEED + 1, dumped),
        (other_table, SEED, dumped),
        (TABLE, SEED, bytes(damaged)),
        (TABLE, SEED, dumped[:-1]),
        (TABLE, SEED, b""),
    ):
        with pytest.raises(DataError):
            BlockChains.load(table, seed, data)
