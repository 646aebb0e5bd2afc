"""What `BlockChains` has to be, written down literally: nothing incremental, nothing shared, everything from the text.

Each known block keeps its whole path of tokens from the root. All published chunks are worked out afresh on every look:
by hashing the whole path of every held block and seeing which chunks end inside it.
"""

from collections import Counter
from dataclasses import dataclass, field

from trimtab_core.chunks import CHUNK_BYTES, hash_chunks

Place = tuple[str, int]


@dataclass(kw_only=True)
class ModelBlock:
    parent: int | None
    root: int
    before: list[int]
    own: list[int]
    held: Counter[Place] = field(default_factory=Counter)
    aside: set[Place] = field(default_factory=set)


class ModelChains:
    def __init__(self, pieces: list[bytes | None], seed: int) -> None:
        self.pieces = pieces
        self.seed = seed
        self.blocks: dict[int, ModelBlock] = {}
        self.since: dict[int, int] = {}  # unconfirmed blocks -> the gap that made them so
        self.gaps = 0
        self.held_most = 0
        self.dropped = Counter[str]()

    def store(self, parent: int | None, names: list[int], runs: list[list[int]], root: int, place: Place) -> None:
        if runs and parent is not None:
            ancestor: int | None = parent
            while ancestor is not None and ancestor in self.blocks:
                block = self.blocks[ancestor]
                if not block.aside or block.held[place]:
                    break
                self.refer(ancestor, place)
                ancestor = block.parent
        for position, name in enumerate(names):
            if name in self.blocks:
                self.refer(name, place)
            elif runs:
                run = runs[position]
                if parent is not None and parent not in self.blocks:
                    self.dropped["parent"] += 1
                elif any(token >= len(self.pieces) or self.pieces[token] is None for token in run):
                    self.dropped["token"] += 1
                else:
                    before = [] if parent is None else self.blocks[parent].before + self.blocks[parent].own
                    root = root if parent is None else self.blocks[parent].root
                    self.blocks[name] = ModelBlock(parent=parent, root=root, before=before, own=run)
                    self.refer(name, place)
            parent = name
        self.held_most = max(self.held_most, len(self.held()))

    def refer(self, name: int, place: Place) -> None:
        self.blocks[name].held[place] += 1
        self.blocks[name].aside.discard(place)
        self.since.pop(name, None)

    def remove(self, names: list[int], place: Place) -> None:
        for name in names:
            block = self.blocks.get(name)
            if block is None:
                continue
            if block.held[place]:
                block.held[place] -= 1
            else:
                block.aside.discard(place)
            if not +block.held:
                if block.aside and (name in self.since or len(self.since) < self.held_most):
                    self.since.setdefault(name, self.gaps)
                else:
                    del self.blocks[name]
                    self.since.pop(name, None)

    def clear(self) -> None:
        self.blocks.clear()
        self.since.clear()
        self.held_most = 0

    def unpublish(self) -> None:
        self.gaps += 1
        for name, block in self.blocks.items():
            if +block.held:
                block.aside |= set(+block.held)
                block.held.clear()
                self.since[name] = self.gaps
        while len(self.since) > self.held_most:
            first = min(self.since, key=lambda name: (self.since[name], -self.tokens(name), name))
            del self.blocks[first], self.since[first]

    def tokens(self, name: int) -> int:
        return len(self.blocks[name].before) + len(self.blocks[name].own)

    def held(self) -> list[ModelBlock]:
        return [block for block in self.blocks.values() if +block.held]

    def chunks(self) -> dict[int, int]:
        published: dict[int, int] = {}
        for block in self.held():
            start = sum(len(self.pieces[token] or b"") for token in block.before)
            text = b"".join(self.pieces[token] or b"" for token in block.before + block.own)
            chain = hash_chunks(text, block.root, self.seed).tolist()
            inside = [k for k in range(len(chain)) if start < CHUNK_BYTES * (k + 1) <= len(text)]
            for k in inside:
                at_end = k == inside[-1]
                tokens = len(block.before) + (len(block.own) if at_end else 0)
                published[chain[k]] = min(tokens, published.get(chain[k], tokens))
        return published
