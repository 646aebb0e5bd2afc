"""Both cores as one: every call goes to the reference and to the native core, and all that they answer must be equal,
to the last bit and type of array; errors too.

The one rule: the reference is the oracle, and its answer is the one handed on.
"""

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
from native_core import native

from trimtab_core.block_chains import BlockChains, ChunkChanges
from trimtab_core.placement import Placement
from trimtab_core.scheduler import Scheduler

UNORDERED = ("chunks",)
"""Methods whose arrays come in no order, the first one's elements being distinct."""


def same(expected: Any, given: Any, path: str) -> None:
    """Assert that two answers are equal; `path` says where they are not."""
    if isinstance(expected, np.ndarray):
        assert expected.dtype == given.dtype, path
        assert expected.tolist() == given.tolist(), path
    elif is_dataclass(expected):
        assert isinstance(expected, Placement) or type(expected) is type(given), path
        for field in fields(expected):
            name = field.name
            same(getattr(expected, name), getattr(given, name), f"{path}.{name}")
    elif isinstance(expected, list | tuple):
        assert type(expected) is type(given), path
        assert len(expected) == len(given), path
        for position, (one, other) in enumerate(zip(expected, given, strict=True)):
            same(one, other, f"{path}[{position}]")
    else:
        assert type(expected) is type(given), path
        assert expected == given, path


def ordered(answer: Any) -> Any:
    """The same answer in the order of its hashes."""
    if isinstance(answer, ChunkChanges):
        order = np.argsort(answer.added)
        return ChunkChanges(
            cleared=answer.cleared,
            added=answer.added[order],
            tokens=answer.tokens[order],
            removed=np.sort(answer.removed),
        )
    hashes, tokens = answer
    order = np.argsort(hashes)
    return hashes[order], tokens[order]


def attempt(call: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return call(), None
    except Exception as error:
        return None, error


class Pair:
    """A reference object and its native twin."""

    def __init__(self, reference: Any, twin: Any) -> None:
        self._reference = reference
        self._twin = twin

    def __getattr__(self, name: str) -> Any:
        expected = getattr(self._reference, name)
        given = getattr(self._twin, name)
        if not callable(expected):
            same(expected, given, name)
            return expected

        def call(*arguments: Any, **named: Any) -> Any:
            answer, error = attempt(lambda: expected(*arguments, **named))
            twin_answer, twin_error = attempt(lambda: given(*arguments, **named))
            assert (type(error), str(error)) == (type(twin_error), str(twin_error)), name
            if error is not None:
                raise error
            if name in UNORDERED or isinstance(answer, ChunkChanges):
                same(ordered(answer), ordered(twin_answer), name)
            else:
                same(answer, twin_answer, name)
            return answer

        return call


def scheduler_pair(**settings: Any) -> Any:
    return Pair(Scheduler(**settings), native("Scheduler")(**settings))


class ChainsPair(Pair):
    """A map of blocks twice."""

    def __init__(self, table: Any, seed: int) -> None:
        super().__init__(BlockChains(table, seed), native("BlockChains")(table, seed))

    @classmethod
    def load(cls, table: Any, seed: int, data: bytes) -> "ChainsPair":
        """Each from the other's bytes, which are the same."""
        pair = cls(table, seed)
        pair._reference = BlockChains.load(table, seed, data)
        pair._twin = native("BlockChains").load(table, seed, data)
        return pair
