"""The native core against the reference on the same histories: state, look-ups, choices, ids, arrays and errors."""

import inspect
import random
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from core_pair import ChainsPair, scheduler_pair
from hypothesis import given, settings
from hypothesis import strategies as st
from native_core import native, needs_native
from test_block_chains import ChainsMachine
from test_scheduler_model import SchedulerMachine

from trimtab_core import block_chains, chunks, scheduler
from trimtab_core.errors import DataError, UnknownSlot
from trimtab_core.extra_terms import ExtraTerms
from trimtab_core.placement import PlacementRequest, Prompt, Rejection
from trimtab_core.settings import SchedulerSettings
from trimtab_core.token_table import TokenTable

pytestmark = needs_native

SEED = 2024
NO_CHUNKS: Any = np.zeros(0, dtype=np.uint64)
NO_TOKENS: Any = np.zeros(0, dtype=np.uint32)


class SchedulerPairMachine(SchedulerMachine):
    scheduler = staticmethod(scheduler_pair)


SchedulerPairMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestSchedulersAreEqual = needs_native(SchedulerPairMachine.TestCase)


class ChainsPairMachine(ChainsMachine):
    chains = ChainsPair


ChainsPairMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestBlockChainsAreEqual = needs_native(ChainsPairMachine.TestCase)


class PoolHistory:
    """A long random life of a pool of up to 140 slots: long prompts, several renderings, peers, engines that
    restart."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.settings = SchedulerSettings(
            kv_capacity_tokens=4_000,
            speculative_chunks_max=self.rng.choice([600, 4_000]),
            reservations_max=self.rng.choice([12, 100_000]),
        )
        self.pair: Any = scheduler_pair(rng_seed=seed * 2**61 + 5, settings=self.settings)
        self.now_s = 0.0
        self.texts = [self.text(k) for k in range(9)]
        self.slots = [self.pair.add_slot() for _ in range(self.rng.choice([1, 3, 66, 130]))]
        self.ids: list[int] = []

    def text(self, k: int) -> bytes:
        """Conversations in three families, with common beginnings of different lengths."""
        rng = random.Random(k % 3)
        common = rng.randbytes(64 * 30)
        return common[: 64 * (10 + 5 * (k // 3))] + random.Random(100 + k).randbytes(64 * 90)

    def prompt(self) -> Prompt:
        rng = self.rng
        text = rng.choice(self.texts)
        text = text[: rng.choice([0, 63, 64, 1000, 3000, rng.randrange(len(text)), len(text)])]
        if rng.random() < 0.3:
            text += rng.randbytes(rng.randrange(900))
        chain = chunks.hash_chunks(text, 0, SEED)
        size = len(text) + rng.choice([0, 0, 0, 5_000])  # only the head is known of some
        return Prompt(chain=chain, size_bytes=size, tokens=rng.choice([None, None, size // 4, 0]))

    def request(self) -> PlacementRequest:
        rng, count = self.rng, self.pair.slot_count
        slots = max(0, count + rng.choice([0, 0, 0, -1, 3]))
        variants = rng.choice([1, 1, 1, 2, 3])
        prompts = tuple(
            tuple(self.prompt() for _ in range(rng.choice([variants, variants, rng.randrange(variants + 1)])))
            for _ in range(rng.choice([1, 1, 1, 1, 0, 2, 3]))
        )
        share = rng.choice([1.0, 0.8, 0.2])
        return PlacementRequest(
            prompts=prompts,
            variant_of_slot=np.array([rng.randrange(-1, variants) for _ in range(slots)], dtype=np.int8),
            exact=np.array([rng.random() < 0.7 for _ in range(slots)], dtype=np.bool_),
            candidates=np.array([rng.random() < share for _ in range(slots)], dtype=np.bool_),
            tokens_per_byte=rng.choice([0.25, 0.2713]),
            batch=rng.choice([1, 1, 1, 2, 5, 16_384]),
            cache_reads=rng.random() < 0.9,
            policy=rng.choice(["product", "product", "product", "round_robin", "least_request"]),
            batch_max=rng.choice([None, None, None, 3, 100_000]),
            is_again=rng.random() < 0.1,
            extra=rng.choice([None, self.extra()]),
        )

    def extra(self) -> ExtraTerms:
        rng, count = self.rng, self.pair.slot_count

        def column(low: float, high: float) -> Any:
            values = [rng.uniform(low, high) for _ in range(max(0, count + rng.choice([0, 0, -1, 3])))]
            return rng.choice([None, np.array(values), np.repeat(values, 2)[::2]])

        return ExtraTerms(
            weight_milli=rng.choice([1000, 250, 4000, 1, 333, 1_000_000]),
            expert_factor=rng.choice([column(0.3, 3.0), column(0.001, 100.0)]),
            rtt_s=rng.choice([column(0.0, 0.2), column(0.0, 60.0)]),
            log_above_tokens=rng.choice([0.0, 1.0, 64.0, 333.3, 2_000.0, 2.0**53]),
        )

    def held(self) -> tuple[Any, Any]:
        rng = self.rng
        chain = chunks.hash_chunks(rng.choice(self.texts), 0, SEED)
        start = rng.choice([0, 0, rng.randrange(len(chain))])
        end = rng.choice([len(chain), rng.randrange(start, len(chain) + 1)])
        tokens = (np.arange(start, end, dtype=np.uint32) + 1) * np.uint32(rng.choice([16, 16, 16, 15, 2**22]))
        return chain[start:end], tokens

    def slot(self) -> int:
        return self.rng.choice([*range(self.pair.slot_count), *self.slots, -1, self.pair.slot_count, 2**31])

    def reservation(self) -> int:
        return self.rng.choice([*self.ids[-30:], 0, 2**63])

    def step(self) -> None:
        rng, pair = self.rng, self.pair
        self.now_s += rng.choice([0.0, 0.001, 0.02, 0.3])
        kind = rng.choices(range(12), weights=[30, 12, 8, 12, 6, 6, 12, 3, 1, 2, 6, 1])[0]
        with suppress(UnknownSlot):  # raised by both
            self.do(kind)
        if rng.random() < 0.03:
            pair.check_invariants()
            pair.load()
            pair.open_reservations()
            pair.replicas()
            for slot in range(pair.slot_count):
                for look in (pair.kv_export, pair.learned_export):
                    with suppress(UnknownSlot):
                        look(slot)

    def do(self, kind: int) -> None:
        rng, pair, now_s = self.rng, self.pair, self.now_s
        if kind == 0:
            answer = pair.place(self.request(), now_s)
            if not isinstance(answer, Rejection):
                self.ids.append(answer.reservation_id)
        elif kind == 1:
            removed = self.held()[0] if rng.random() < 0.4 else NO_CHUNKS
            pair.kv_apply(self.slot(), *self.held(), removed[::3], now_s)
        elif kind == 2:
            pair.first_token(self.reservation(), now_s)
        elif kind == 3:
            pair.finish(self.reservation(), now_s)
        elif kind == 4:
            pair.move(self.reservation(), self.slot(), now_s)
        elif kind == 5:
            pair.advance(now_s)
        elif kind == 6:
            self.peer()
        elif kind == 7:
            pair.kv_replace(self.slot(), *self.held(), now_s)
        elif kind == 8:
            pair.kv_clear(self.slot())
        elif kind == 9:
            slot = self.slot()
            pair.remove_slot(slot)
            if rng.random() < 0.7:
                pair.add_slot()
        elif kind == 10:
            pair.report(
                self.slot(),
                requests=rng.choice([rng.randrange(9), rng.randrange(9), 1 << 24]),
                block_tokens=rng.choice([0, 16, 16, 32, 7]),
                kv_capacity_tokens=rng.choice([0, 900, 20_000]),
                now_s=now_s,
            )
        else:
            pair.peer_drop(rng.choice([7, 8, 2**64 - 1]), now_s)

    def peer(self) -> None:
        rng, pair, now_s = self.rng, self.pair, self.now_s
        incarnation, number = rng.choice([7, 8, 2**64 - 1]), rng.randrange(1, 40)
        kind = rng.choice(["reserve", "reserve", "reserve", "first", "move", "finish"])
        if kind == "reserve":
            hashes, tokens = self.held()
            step = rng.choice([4, 16])
            samples = hashes[step - 1 :: step], tokens[step - 1 :: step]
            pair.peer_reserve(
                incarnation,
                number,
                self.slot(),
                rng.choice([0, 700]),
                rng.choice([1, 1, 3, 1 << 24]),
                *samples,
                now_s,
                *rng.choice([[], [1000], [2500], [1_000_000]]),
            )
        elif kind == "first":
            pair.peer_first_token(incarnation, number, now_s)
        elif kind == "move":
            pair.peer_move(incarnation, number, self.slot(), now_s)
        else:
            pair.peer_finish(incarnation, number, now_s)


@pytest.mark.parametrize("seed", range(12))
def test_long_lives_of_large_pools_are_equal(seed: int) -> None:
    history = PoolHistory(seed)
    for _ in range(250):
        history.step()
    history.pair.check_invariants()


@given(text=st.binary(max_size=2_000), root=st.integers(0, 2**64 - 1), seed=st.integers(0, 2**64 - 1))
def test_chains_of_chunks_are_equal(text: bytes, root: int, seed: int) -> None:
    given_chain = native("hash_chunks")(text, root, seed)
    assert given_chain.dtype == np.uint64
    assert given_chain.tolist() == chunks.hash_chunks(text, root, seed).tolist()


@pytest.mark.parametrize(
    "arrays", [(NO_CHUNKS, np.ones(1, dtype=np.uint32)), (np.ones(2, dtype=np.uint64), np.ones(1, dtype=np.uint32))]
)
def test_hashes_and_counts_of_different_lengths_are_refused_by_both(arrays: tuple[Any, Any]) -> None:
    for one in (scheduler.Scheduler, native("Scheduler")):
        pool = one(rng_seed=1, settings=SchedulerSettings())
        pool.add_slot()
        with pytest.raises(ValueError, match=r"hashes|argument"):
            pool.kv_apply(0, *arrays, NO_CHUNKS, 0.0)


def test_arrays_that_are_not_contiguous_are_read_as_they_stand() -> None:
    pair = scheduler_pair(rng_seed=1, settings=SchedulerSettings())
    slot = pair.add_slot()
    hashes, tokens = np.arange(1, 41, dtype=np.uint64), np.arange(1, 41, dtype=np.uint32)
    pair.kv_apply(slot, hashes[::-2], tokens[::-2], NO_CHUNKS, 0.0)
    assert pair.kv_export(slot)[0].tolist() == list(range(2, 41, 2))
    prompt = Prompt(chain=hashes[1::2], size_bytes=20 * 64)
    flags = np.ones(2, dtype=np.bool_)[::2]
    request = PlacementRequest(
        prompts=((prompt,),),
        variant_of_slot=np.zeros(2, dtype=np.int8)[::2],
        exact=flags,
        candidates=flags,
        tokens_per_byte=0.25,
    )
    assert pair.place(request, 0.0).hit_tokens[0] > 0


def test_each_reads_the_others_checkpoint() -> None:
    table = TokenTable.from_pieces([b"a" * 16, b"b" * 100, None])
    kinds: list[Any] = [block_chains.BlockChains, native("BlockChains")]
    written = []
    for one in kinds:
        chains = one(table, SEED)
        names = np.arange(1, 5, dtype=np.uint64)
        chains.store(parent=None, blocks=names, tokens=np.array([0, 1] * 4, dtype=np.uint32), block_tokens=2, root=3)
        chains.store(parent=2, blocks=names[2:3], tokens=NO_TOKENS, block_tokens=0, root=3, medium="CPU", group=1)
        chains.unpublish()
        chains.store(parent=3, blocks=names[3:] + 5, tokens=np.array([1], dtype=np.uint32), block_tokens=2, root=3)
        written.append(chains.dump())
    assert written[0] == written[1]
    for one in kinds:
        assert one.load(table, SEED, written[0]).dump() == written[0]
        with pytest.raises(DataError):
            one.load(table, SEED + 1, written[0])


@pytest.mark.parametrize("name", ["Scheduler", "BlockChains", "hash_chunks"])
def test_the_native_surface_is_the_references(name: str) -> None:
    reference = getattr({"Scheduler": scheduler, "BlockChains": block_chains, "hash_chunks": chunks}[name], name)
    twin = native(name)
    if inspect.isfunction(reference):
        assert list(inspect.signature(reference).parameters) == list(inspect.signature(twin).parameters)
        return
    for member, function in inspect.getmembers(reference, inspect.isroutine):
        if not member.startswith("_"):
            assert parameters(function) == parameters(getattr(twin, member)), member


def parameters(function: Any) -> list[tuple[Any, ...]]:
    """Names of parameters, which are keyword-only, and defaults."""
    return [
        (parameter.name, parameter.kind is parameter.KEYWORD_ONLY, parameter.default)
        for parameter in inspect.signature(function).parameters.values()
    ]
