"""Speculation: claims, counted and expired, against a list of claims."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from trimtab_core.reservation import OWN
from trimtab_core.speculation import Speculation

CHUNKS_MAX = 40
KEYS = st.integers(0, 30).map(lambda n: (OWN if n % 2 else 7, n))
SLOTS = st.integers(0, 3)


class ModelClaim:
    def __init__(
        self, key: tuple[int, int], slot: int, chunks: list[int], tokens: list[int], awaited: set[int]
    ) -> None:
        self.key, self.slot, self.chunks, self.tokens = key, slot, chunks, tokens
        self.awaited = awaited
        self.expires_s: float | None = None
        self.floor = dict[int, int]()


class SpeculationMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.real = Speculation(chunks_max=CHUNKS_MAX)
        self.claims: list[ModelClaim] = []
        self.counts: dict[tuple[int, int], int] = {}  # (chunk, slot) -> the smallest count of an unbroken row of claims
        self.now_s = 0.0

    def of(self, key: tuple[int, int]) -> ModelClaim | None:
        return next((claim for claim in self.claims if claim.key == key), None)

    def settle(self) -> None:
        """Pairs that nobody claims any more lose their count; those that stand keep the smallest."""
        claimed: dict[tuple[int, int], int] = {}
        for claim in self.claims:
            for chunk, tokens in zip(claim.chunks, claim.tokens, strict=True):
                pair = (chunk, claim.slot)
                claimed[pair] = min(tokens, claimed.get(pair, tokens))
        self.counts = {pair: min(tokens, self.counts.get(pair, tokens)) for pair, tokens in claimed.items()}

    @rule(
        key=KEYS,
        slot=SLOTS,
        chunks=st.lists(st.integers(1, 12), max_size=9),
        tokens=st.integers(0, 64),
        awaited=st.sets(st.integers(1, 12), max_size=2),
    )
    def claim(self, key: tuple[int, int], slot: int, chunks: list[int], tokens: int, awaited: set[int]) -> None:
        counts = [tokens + 16 * position for position in range(len(chunks))]
        self.real.claim(key, slot, chunks, counts, awaited)
        if chunks and self.of(key) is None:
            self.claims.append(ModelClaim(key, slot, chunks, counts, set(awaited)))
            self.settle()
            while sum(len(claim.chunks) for claim in self.claims) > CHUNKS_MAX:
                self.claims.pop(0)
        self.settle()

    @rule(key=KEYS)
    def end(self, key: tuple[int, int]) -> None:
        self.real.end(key)
        self.claims = [claim for claim in self.claims if claim.key != key]
        self.settle()

    @rule(slot=SLOTS, chunks=st.lists(st.integers(1, 12), max_size=4))
    def confirm(self, slot: int, chunks: list[int]) -> None:
        self.real.confirm(slot, chunks)
        for claim in [claim for claim in self.claims if claim.slot == slot and claim.awaited]:
            claim.awaited -= set(chunks)
            if not claim.awaited:
                self.claims.remove(claim)
        self.settle()

    @precondition(lambda self: self.claims)
    @rule(data=st.data(), slot=SLOTS, awaited=st.sets(st.integers(1, 12), max_size=2))
    def move(self, data: st.DataObject, slot: int, awaited: set[int]) -> None:
        claim = data.draw(st.sampled_from(self.claims))
        self.real.move(claim.key, slot, set(awaited))
        if claim.slot != slot:
            claim.awaited = set(awaited)
            self.claims.remove(claim)
            self.settle()
            claim.slot = slot
            self.claims.append(claim)
            self.claims.sort(key=lambda other: list(self.real._claims).index(other.key))
        self.settle()

    @rule(key=KEYS, grace_s=st.just(2.0))
    def expire_at(self, key: tuple[int, int], grace_s: float) -> None:
        self.real.expire_at(key, self.now_s + grace_s)
        claim = self.of(key)
        if claim is not None and claim.expires_s is None:
            claim.expires_s = self.now_s + grace_s

    @rule(passed_s=st.sampled_from([0.0, 0.5, 1.0, 3.0]))
    def expire(self, passed_s: float) -> None:
        self.now_s += passed_s
        self.real.expire(self.now_s)
        self.claims = [c for c in self.claims if c.expires_s is None or c.expires_s > self.now_s]
        self.settle()

    @rule(slot=SLOTS)
    def drop_slot(self, slot: int) -> None:
        self.real.drop_slot(slot)
        self.claims = [claim for claim in self.claims if claim.slot != slot]
        self.settle()

    @invariant()
    def equals_the_model(self) -> None:
        self.real.check_invariants()
        for (chunk, slot), tokens in self.counts.items():
            assert self.real.index.tokens_of(chunk, slot) == tokens
        assert self.real.index.pair_count == len(self.counts)
        for claim in self.claims:
            of_real = self.real.claim_of(claim.key)
            assert of_real is not None
            assert of_real.awaited == claim.awaited
        assert len(self.real._claims) == len(self.claims)


SpeculationMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


TestSpeculationEqualsItsModel = SpeculationMachine.TestCase


def test_at_the_bound_the_oldest_claim_goes_first_and_is_counted() -> None:
    speculation = Speculation(chunks_max=4)
    for n in range(1, 4):
        speculation.claim((OWN, n), 0, [10 * n, 10 * n + 1], [16, 32])
    assert speculation.claim_of((OWN, 1)) is None
    assert speculation.claim_of((OWN, 2)) is not None
    assert (speculation.dropped_full, speculation.chunk_count) == (1, 4)


def test_a_claim_larger_than_the_bound_does_not_stay() -> None:
    speculation = Speculation(chunks_max=4)
    speculation.claim((OWN, 1), 0, [1, 2, 3, 4, 5], [16] * 5)
    speculation.check_invariants()
    assert speculation.chunk_count == 0
