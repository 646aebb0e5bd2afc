"""The learned index: what slots in approximate mode hold, guessed from what was sent there.

The one rule: a slot never remembers more tokens than its KV cache can hold; the prompt longest unused goes first, and
of a prompt its end goes before its head, as engines evict. Without that order a deep chunk could outlive the head that
it implies.
"""

from collections import OrderedDict

from trimtab_core.errors import ensure
from trimtab_core.sample_index import SampleIndex


class LearnedIndex:
    """Chunks with the tokens that each adds to the one before it, in order of use, for each slot."""

    def __init__(self) -> None:
        self.index = SampleIndex()
        self._costs: dict[int, OrderedDict[int, int]] = {}  # slot -> chunk -> tokens; the next to forget is first
        self._tokens: dict[int, int] = {}  # slot -> sum of its costs

    def learn(self, slot: int, chunks: list[int], tokens: list[int], capacity_tokens: int) -> None:
        """`slot` has prefilled prompts with these chunks (prompt by prompt, head first; `tokens` as in a claim).

        Where a chunk is known with a smaller step (its neighbours are remembered one by one, and this is a sample of
        them), the smaller one stays.
        """
        costs = self._costs.setdefault(slot, OrderedDict())
        total = self._tokens.get(slot, 0)
        for position in range(len(chunks) - 1, -1, -1):
            chunk, end = chunks[position], tokens[position]
            before = tokens[position - 1] if position else 0
            # Falling counts: the next prompt begins. At least one token each, or short prompts would cost nothing.
            cost = max(end - before if end >= before else end, 1)
            known = costs.get(chunk)
            if known is None:
                self.index.set(chunk, slot, end)
            else:
                cost = min(cost, known)
                total -= known
                costs.move_to_end(chunk)
            costs[chunk] = cost
            total += cost
        while total > capacity_tokens:
            chunk, cost = costs.popitem(last=False)
            self.index.discard(chunk, slot)
            total -= cost
        self._tokens[slot] = total

    def costs(self, slot: int) -> dict[int, int]:
        """Chunks with the tokens that each adds, the next to forget first."""
        return dict(self._costs.get(slot, {}))

    def tokens_held(self, slot: int) -> int:
        """Tokens that the slot is taken to hold."""
        return self._tokens.get(slot, 0)

    def clear(self, slot: int) -> None:
        """The slot holds nothing."""
        self.index.discard_many(slot, self._costs.pop(slot, ()))
        self._tokens.pop(slot, None)

    def check_invariants(self) -> None:
        """Raise `InvariantError` if the state contradicts itself."""
        self.index.check_invariants()
        ensure(sum(map(len, self._costs.values())) == self.index.pair_count, "other pairs are remembered than indexed")
        for slot, costs in self._costs.items():
            ensure(sum(costs.values()) == self._tokens[slot], f"slot {slot}: tokens are miscounted")
            ensure(all(cost > 0 for cost in costs.values()), f"slot {slot}: a chunk that costs nothing")
            for chunk in costs:
                ensure(self.index.slots_of(chunk) >> slot & 1 == 1, f"slot {slot}: remembers a chunk it does not index")
