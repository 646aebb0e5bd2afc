"""The scheduler against its literal model, over random lives of a small pool."""

from typing import Any

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from native_core import native, needs_native
from scheduler_model import OWN, ModelScheduler

from trimtab_core.chunks import hash_chunks
from trimtab_core.extra_terms import ExtraTerms
from trimtab_core.scheduler import PlacementRequest, Prompt, Rejection, Scheduler, SchedulerSettings

SETTINGS = SchedulerSettings(kv_capacity_tokens=300, grace_s=2.0)
SEED = 5
PEERS = (1001, 1002)


def u64(values: Any) -> Any:
    return np.array(list(values), dtype=np.uint64)


def u32(values: Any) -> Any:
    return np.array(list(values), dtype=np.uint32)


def text_of(letters: str) -> bytes:
    """One letter, one chunk."""
    return b"".join(letter.encode() * 64 for letter in letters)


def chain_of(letters: str) -> list[int]:
    chain: list[int] = hash_chunks(text_of(letters), 0, SEED).tolist()
    return chain


# Few letters and a long common head, so that prompts meet; long ones too, so that both sampling steps appear.
LETTERS = st.one_of(
    st.text("ab", max_size=7),
    st.sampled_from(["ab" * 6, "ab" * 6 + "b", "a" * 64 + "b" * 9, "a" * 70]),
)
PROMPTS = st.builds(
    lambda letters, rest, tokens: Prompt(
        chain=u64(chain_of(letters)), size_bytes=64 * len(letters) + rest, tokens=tokens
    ),
    LETTERS,
    st.integers(0, 63),
    st.none() | st.none() | st.integers(0, 200),
)


def column(values: list[float]) -> Any:
    return st.none() | st.lists(st.sampled_from(values), max_size=7).map(lambda v: np.array(v, dtype=np.float64))


EXTRAS = st.builds(
    ExtraTerms,
    weight_milli=st.sampled_from([1, 250, 1000, 1000, 4000, 1_000_000]),
    expert_factor=column([0.5, 1.0, 1.37, 40.0]),
    rtt_s=column([0.0, 0.0003, 0.08, 2.0]),
    log_above_tokens=st.sampled_from([0.0, 0.0, 16.0, 100.0]),
)


class SchedulerMachine(RuleBasedStateMachine):
    scheduler: Any = Scheduler

    def __init__(self) -> None:
        super().__init__()
        self.real = self.scheduler(rng_seed=1, settings=SETTINGS)
        self.model = ModelScheduler(SETTINGS)
        self.now_s = 100.0
        self.placed: list[int] = []
        for _ in range(2):
            self.add_slot()

    # Slots and engines

    @precondition(lambda self: len(self.model.slots) < 5)
    @rule()
    def add_slot(self) -> None:
        assert self.real.add_slot() == self.model.add_slot()

    @precondition(lambda self: self.model.slots)
    @rule(data=st.data(), chance=st.integers(0, 2))
    def remove_slot(self, data: st.DataObject, chance: int) -> None:
        if chance == 0:
            slot = self.some_slot(data)
            self.real.remove_slot(slot)
            self.model.remove_slot(slot)

    def some_slot(self, data: st.DataObject) -> int:
        slot: int = data.draw(st.sampled_from(sorted(self.model.slots)))
        return slot

    @precondition(lambda self: self.model.slots)
    @rule(data=st.data(), letters=LETTERS, cut=st.integers(0, 3), removed=LETTERS, step=st.sampled_from([8, 16, 32]))
    def kv_apply(self, data: st.DataObject, letters: str, cut: int, removed: str, step: int) -> None:
        slot = self.some_slot(data)
        added = [(chunk, step * (k + 1)) for k, chunk in enumerate(chain_of(letters))][cut:]
        gone = chain_of(removed)[-2:]
        seen = self.real.kv_apply(slot, u64(c for c, _ in added), u32(t for _, t in added), u64(gone), self.now_s)
        held = self.model.slots[slot].held
        for chunk in gone:
            held.pop(chunk, None)
        held.update(added)
        assert set(seen.tolist()) == self.model.appeared(slot, [c for c, _ in added], self.now_s)

    @precondition(lambda self: self.model.slots)
    @rule(data=st.data(), letters=LETTERS)
    def kv_replace(self, data: st.DataObject, letters: str) -> None:
        slot = self.some_slot(data)
        held = {chunk: 16 * (k + 1) for k, chunk in enumerate(chain_of(letters))}
        seen = self.real.kv_replace(slot, u64(held), u32(held.values()), self.now_s)
        self.model.slots[slot].held = dict(held)
        assert set(seen.tolist()) == self.model.appeared(slot, list(held), self.now_s)

    @precondition(lambda self: self.model.slots)
    @rule(data=st.data())
    def kv_clear(self, data: st.DataObject) -> None:
        slot = self.some_slot(data)
        self.real.kv_clear(slot)
        self.model.slots[slot].held.clear()
        self.model.slots[slot].learned.clear()

    @precondition(lambda self: self.model.slots)
    @rule(
        data=st.data(),
        requests=st.integers(0, 6),
        block=st.sampled_from([0, 8, 16, 32]),
        capacity=st.sampled_from([0, 100, 1000]),
    )
    def report(self, data: st.DataObject, requests: int, block: int, capacity: int) -> None:
        slot = self.some_slot(data)
        self.real.report(slot, requests=requests, block_tokens=block, kv_capacity_tokens=capacity, now_s=self.now_s)
        self.model.report(slot, requests, block, capacity)

    # Own requests

    @rule(data=st.data(), variants=st.integers(0, 2), prompts=st.integers(0, 2))
    def place(self, data: st.DataObject, variants: int, prompts: int) -> None:
        size = data.draw(st.integers(0, self.model.slot_count + 1))
        flags = st.lists(st.sampled_from([True, True, False]), min_size=size, max_size=size)
        request = PlacementRequest(
            prompts=tuple(tuple(data.draw(PROMPTS) for _ in range(variants)) for _ in range(prompts)),
            variant_of_slot=np.array(
                data.draw(st.lists(st.integers(-1, variants - 1), min_size=size, max_size=size)), dtype=np.int8
            ),
            exact=np.array(data.draw(flags), dtype=np.bool_),
            candidates=np.array(data.draw(flags), dtype=np.bool_),
            tokens_per_byte=data.draw(st.sampled_from([0.25, 0.3])),
            batch=data.draw(st.integers(1, 3)),
            cache_reads=data.draw(st.sampled_from([True, True, False])),
            policy=data.draw(st.sampled_from(["product", "product", "round_robin", "least_request"])),
            batch_max=data.draw(st.sampled_from([None, None, 1, 4])),
            extra=data.draw(st.none() | EXTRAS),
        )
        self.model.rates = self.real.load().prefill_rate.tolist()
        given = self.real.place(request, self.now_s)
        self.model.place(request, self.now_s, given)
        if not isinstance(given, Rejection):
            assert given.reservation_id not in self.placed
            self.placed.append(given.reservation_id)

    def some_id(self, data: st.DataObject) -> int:
        of: int = data.draw(st.sampled_from([*self.placed, 999_999]))
        return of

    @rule(data=st.data())
    def first_token(self, data: st.DataObject) -> None:
        of = self.some_id(data)
        assert self.real.first_token(of, self.now_s) == self.model.prefilled((OWN, of), self.now_s)

    @rule(data=st.data(), slot=st.integers(-1, 6))
    def move(self, data: st.DataObject, slot: int) -> None:
        of = self.some_id(data)
        assert self.real.move(of, slot, self.now_s) == self.model.move((OWN, of), slot)

    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        of = self.some_id(data)
        assert self.real.finish(of, self.now_s) == self.model.finish((OWN, of))

    @rule(passed_s=st.sampled_from([0.0, 0.001, 0.05, 1.0, 10.0]))
    def advance(self, passed_s: float) -> None:
        self.now_s += passed_s
        for of in self.real.advance(self.now_s).tolist():
            assert self.model.prefilled((OWN, of), self.now_s)
        self.model.expire(self.now_s)

    @rule(chance=st.integers(0, 4))
    def everything_fades_in_the_end(self, chance: int) -> None:
        if chance == 0:
            self.now_s += 1e6
            for of in self.real.advance(self.now_s).tolist():
                assert self.model.prefilled((OWN, of), self.now_s)
            assert not [r for r in self.model.open.values() if r.is_queued and r.key[0] == OWN and r.slot is not None]
            self.model.expire(self.now_s)

    # Other replicas

    @rule(
        peer=st.sampled_from(PEERS),
        of=st.integers(1, 6),
        slot=st.integers(-1, 5),
        p_tokens=st.sampled_from([0, 10, 500]),
        batch=st.integers(1, 2),
        letters=LETTERS,
        weight=st.sampled_from([1000, 1000, 3500]),
    )
    def peer_reserve(self, peer: int, of: int, slot: int, p_tokens: int, batch: int, letters: str, weight: int) -> None:
        samples = [(chunk, 16 * (k + 1)) for k, chunk in enumerate(chain_of(letters)) if k % 4 == 3]
        hashes, tokens = u64(c for c, _ in samples), u32(t for _, t in samples)
        self.real.peer_reserve(peer, of, slot, p_tokens, batch, hashes, tokens, self.now_s, weight)
        self.model.peer_reserve((peer, of), slot, p_tokens, batch, samples, self.now_s, weight)

    @rule(peer=st.sampled_from(PEERS), of=st.integers(1, 6))
    def peer_first_token(self, peer: int, of: int) -> None:
        self.real.peer_first_token(peer, of, self.now_s)
        self.model.prefilled((peer, of), self.now_s)

    @rule(peer=st.sampled_from(PEERS), of=st.integers(1, 6), slot=st.integers(-1, 5))
    def peer_move(self, peer: int, of: int, slot: int) -> None:
        self.real.peer_move(peer, of, slot, self.now_s)
        self.model.move((peer, of), slot)

    @rule(peer=st.sampled_from(PEERS), of=st.integers(1, 6))
    def peer_finish(self, peer: int, of: int) -> None:
        self.real.peer_finish(peer, of, self.now_s)
        if any(key[0] == peer for key in self.model.open) or peer in self.real.replicas():
            self.model.finish((peer, of))

    @rule(peer=st.sampled_from(PEERS), chance=st.integers(0, 2))
    def peer_drop(self, peer: int, chance: int) -> None:
        if chance == 0:
            self.real.peer_drop(peer, self.now_s)
            self.model.peer_drop(peer)

    @invariant()
    def equals_the_model(self) -> None:
        self.real.check_invariants()
        view = self.real.load()
        assert len(view.requests) == self.real.slot_count == self.model.slot_count
        for slot in range(self.model.slot_count):
            state = self.model.slots.get(slot)
            assert view.requests[slot] == self.model.requests(slot)
            assert view.queued_tokens[slot] == self.model.queued(slot)
            assert view.weight_milli[slot] == self.model.weight_milli(slot)
            assert view.external[slot] == (state.external if state else 0)
            if state:
                hashes, tokens = self.real.kv_export(slot)
                assert list(zip(hashes.tolist(), tokens.tolist(), strict=True)) == sorted(state.held.items())
                chunks, costs = self.real.learned_export(slot)
                learned = list(zip(chunks.tolist(), costs.tolist(), strict=True))
                assert learned == [(c, k) for c, k, _ in state.learned]
        held = [set(state.held) for state in self.model.slots.values()]
        assert self.real.index_size() == (len(set().union(*held)), sum(map(len, held)))
        assert [
            (
                (r.reservation_id, r.slot, r.p_tokens, r.batch, r.weight_milli),
                list(zip(r.sample_hashes, r.sample_tokens, strict=True)),
            )
            for r in self.real.open_reservations()
        ] == [
            (
                (r.key[1], r.slot, r.p_tokens * r.is_queued, r.batch, r.weight_milli),
                r.samples if r.key in self.model.claims else [],
            )
            for r in self.model.open.values()
            if r.key[0] == OWN and r.slot is not None
        ]


class NativeSchedulerMachine(SchedulerMachine):
    scheduler = native("Scheduler")


RUN = settings(max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
SchedulerMachine.TestCase.settings = NativeSchedulerMachine.TestCase.settings = RUN

TestSchedulerEqualsItsModel = SchedulerMachine.TestCase
TestNativeSchedulerEqualsTheModel = needs_native(NativeSchedulerMachine.TestCase)
