"""Speculation: the chunks of requests that were just routed, before the engine's events tell of them.

The one rule: a claim belongs to one reservation and stands for what the index will show. Once the index has shown it,
the claim is gone and the index alone is the truth, so that an eviction is believed at once. A claim also goes a grace
after its first token (events were lost), and at once if the reservation ends before its first token.

Claims on the same chunk of the same slot are counted; the smallest token count claimed stands until the last one goes.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from trimtab_core.errors import ensure
from trimtab_core.reservation import ReservationKey
from trimtab_core.sample_index import SampleIndex


@dataclass(slots=True, kw_only=True, eq=False)
class Claim:
    """What one reservation claims: `chunks` with their `tokens`, prompt by prompt, each from its head to its end.

    `awaited`: chunks after whose appearance in the slot's index there is nothing left to claim; none: nothing will.
    """

    slot: int
    chunks: list[int]
    tokens: list[int]
    awaited: set[int]
    expires_s: float | None = None


class Speculation:
    """All claims in force. `chunks_max` bounds their chunks; beyond it the oldest claims are dropped, and counted."""

    def __init__(self, *, chunks_max: int) -> None:
        self.index = SampleIndex()
        self.chunks_max = chunks_max
        self.chunk_count = 0
        self.dropped_full = 0
        self._claims: dict[ReservationKey, Claim] = {}
        self._more_claims: dict[int, dict[int, int]] = {}  # slot -> chunk -> claims on it beyond the first
        self._expiries: deque[tuple[float, ReservationKey]] = deque()
        self._awaiting: dict[int, dict[int, list[ReservationKey]]] = {}  # slot -> chunk -> claims

    def claim(
        self, key: ReservationKey, slot: int, chunks: list[int], tokens: list[int], awaited: Iterable[int] = ()
    ) -> None:
        """`key`'s prompts are on their way to `slot`, whose index has none of `awaited` yet."""
        if not chunks or key in self._claims:
            return
        self._claims[key] = claim = Claim(slot=slot, chunks=chunks, tokens=tokens, awaited=set(awaited))
        self._acquire(key, claim)
        while self.chunk_count > self.chunks_max:
            self.end(next(iter(self._claims)))
            self.dropped_full += 1

    def claim_of(self, key: ReservationKey) -> Claim | None:
        """The claim of a reservation, while it is in force."""
        return self._claims.get(key)

    def confirm(self, slot: int, chunks: list[int]) -> None:
        """The slot's index has these chunks now. Claims that waited for nothing else are over."""
        of_slot = self._awaiting.get(slot)
        if of_slot is None:
            return
        for chunk in chunks:
            for key in tuple(of_slot.get(chunk, ())):
                claim = self._claims[key]
                if claim.awaited == {chunk}:
                    self.end(key)
                else:
                    self._await_no_more(key, claim, chunk)

    def move(self, key: ReservationKey, slot: int, awaited: set[int]) -> None:
        """The request went to another slot after all, whose index has none of `awaited` yet."""
        claim = self._claims.get(key)
        if claim is not None and claim.slot != slot:
            self._release(key, claim)
            claim.slot, claim.awaited = slot, awaited
            self._acquire(key, claim)

    def end(self, key: ReservationKey) -> None:
        """The claim goes now, if there is one."""
        claim = self._claims.pop(key, None)
        if claim is not None:
            self._release(key, claim)

    def expire_at(self, key: ReservationKey, expires_s: float) -> None:
        """The claim goes when `expire` is told that time. Times must not fall from one call to the next."""
        claim = self._claims.get(key)
        if claim is not None and claim.expires_s is None:
            claim.expires_s = expires_s
            self._expiries.append((expires_s, key))

    def expire(self, now_s: float) -> None:
        """Drop the claims whose time has come."""
        while self._expiries and self._expiries[0][0] <= now_s:
            _, key = self._expiries.popleft()
            claim = self._claims.get(key)
            if claim is not None and claim.expires_s is not None and claim.expires_s <= now_s:
                self.end(key)

    def drop_slot(self, slot: int) -> None:
        """The slot is gone, and what was claimed for it."""
        for key in [key for key, claim in self._claims.items() if claim.slot == slot]:
            self.end(key)

    def _await_no_more(self, key: ReservationKey, claim: Claim, chunk: int) -> None:
        claim.awaited.discard(chunk)
        of_slot = self._awaiting[claim.slot]
        of_slot[chunk].remove(key)
        if not of_slot[chunk]:
            del of_slot[chunk]
        if not of_slot:
            del self._awaiting[claim.slot]

    def _acquire(self, key: ReservationKey, claim: Claim) -> None:
        self.chunk_count += len(claim.chunks)
        for chunk in claim.awaited:
            self._awaiting.setdefault(claim.slot, {}).setdefault(chunk, []).append(key)
        held = self.index.add(claim.slot, claim.chunks, claim.tokens)
        if held:
            more = self._more_claims.setdefault(claim.slot, {})
            for chunk in held:
                more[chunk] = more.get(chunk, 0) + 1

    def _release(self, key: ReservationKey, claim: Claim) -> None:
        self.chunk_count -= len(claim.chunks)
        for chunk in tuple(claim.awaited):
            self._await_no_more(key, claim, chunk)
        more = self._more_claims.get(claim.slot)
        if not more:
            self.index.discard_many(claim.slot, claim.chunks)
            return
        last: list[int] = []
        for chunk in claim.chunks:
            others = more.get(chunk, 0)
            if others > 1:
                more[chunk] = others - 1
            elif others == 1:
                del more[chunk]
            else:
                last.append(chunk)
        self.index.discard_many(claim.slot, last)

    def check_invariants(self) -> None:
        """Raise `InvariantError` if the state contradicts itself."""
        self.index.check_invariants()
        counts: dict[tuple[int, int], int] = {}
        for claim in self._claims.values():
            for chunk in claim.chunks:
                counts[chunk, claim.slot] = counts.get((chunk, claim.slot), 0) + 1
        ensure(sum(counts.values()) == self.chunk_count, "claimed chunks are miscounted")
        ensure(len(counts) == self.index.pair_count, "the index holds other pairs than are claimed")
        more = {pair: count - 1 for pair, count in counts.items() if count > 1}
        kept = {(chunk, slot): n for slot, of_slot in self._more_claims.items() for chunk, n in of_slot.items()}
        ensure(more == kept, "claims on one chunk are miscounted")
        for chunk, slot in counts:
            ensure(self.index.tokens_of(chunk, slot) is not None, f"chunk {chunk} of slot {slot} is claimed, not held")
        awaiting = {
            (slot, chunk, key)
            for slot, of_slot in self._awaiting.items()
            for chunk, keys in of_slot.items()
            for key in keys
        }
        awaited = {(claim.slot, chunk, key) for key, claim in self._claims.items() for chunk in claim.awaited}
        ensure(awaiting == awaited, "other chunks are awaited than claims wait for")
        ensure(self.chunk_count <= self.chunks_max, "more speculative chunks than the bound")
