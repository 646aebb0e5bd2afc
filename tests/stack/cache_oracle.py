"""What a picker must know of an engine, worked out the long way from the engine's own cache.

The one rule: nothing of the product is used but the hash of a chain of text. The text of a cached chain is put
together token by token, its chunks are laid over its blocks, and each gets the count that the rule of prompt chunks
gives it: the end of the block that holds its last byte if it is the last chunk to end there, else that block's start;
of several blocks that complete one chunk the smallest count stands.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from trimtab_core.chunks import CHUNK_BYTES, hash_chunks, pool_seed, root_hash

Chunks = dict[int, int]
"""Chunk hash to tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """How one picker's index of one endpoint differs from what the engine holds."""

    picker: str
    endpoint: str
    missing: int
    """Chunks that the engine holds and the picker does not know."""
    surplus: int
    """Chunks that the picker believes in and the engine does not hold."""
    too_few: int
    """Chunks known with a smaller count than the engine's blocks give."""
    too_many: int
    """Chunks known with a larger count, while a smaller one is held too."""
    expected: int

    @property
    def is_equal(self) -> bool:
        return not (self.missing or self.surplus or self.too_few or self.too_many)

    @property
    def is_claim_without_cover(self) -> bool:
        """Something is promised that a request would not find."""
        return bool(self.surplus or self.too_few)


class CacheOracle:
    """`table` is the bytes of each token id."""

    def __init__(self, *, seed: int, table: Sequence[bytes]) -> None:
        self._seed = seed
        self._table = table

    @classmethod
    def of_pool(cls, *, secret: str, namespace: str, name: str, model_dir: Path) -> CacheOracle:
        """For a pool of engines with this model."""
        return cls(seed=pool_seed(secret.encode(), namespace, name), table=token_bytes(model_dir))

    def chunks(self, rank: Mapping[str, Any]) -> Chunks:
        """Everything that one rank's page of `/lab/cache` makes a picker expect."""
        expected: Chunks = {}
        for chain in rank["chains"]:
            for chunk, tokens in self._chain(chain, rank["block_tokens"]):
                expected[chunk] = min(tokens, expected.get(chunk, tokens))
        return expected

    def _chain(self, chain: Mapping[str, Any], block_tokens: int) -> Iterable[tuple[int, int]]:
        pieces = [self._table[token] for token in chain["tokens"]]
        assert len(pieces) % block_tokens == 0, "a cached chain is whole blocks"
        text = b"".join(pieces)
        root = root_hash(self._seed, chain["lora_name"], chain["cache_salt"])
        hashes = hash_chunks(text, root, self._seed).tolist()
        begin_byte = 0
        for start in range(0, len(pieces), block_tokens):
            end = start + block_tokens
            end_byte = begin_byte + sum(map(len, pieces[start:end]))
            ending_here = [
                number
                for number in range(begin_byte // CHUNK_BYTES, len(hashes))
                if begin_byte < (number + 1) * CHUNK_BYTES <= end_byte
            ]
            for number in ending_here[:-1]:
                yield hashes[number], start
            for number in ending_here[-1:]:
                yield hashes[number], end
            begin_byte = end_byte


def difference(picker: str, endpoint: str, known: Chunks, expected: Chunks) -> Difference:
    """The two compared, chunk by chunk."""
    common = known.keys() & expected.keys()
    return Difference(
        picker=picker,
        endpoint=endpoint,
        missing=len(expected.keys() - known.keys()),
        surplus=len(known.keys() - expected.keys()),
        too_few=sum(known[chunk] < expected[chunk] for chunk in common),
        too_many=sum(known[chunk] > expected[chunk] for chunk in common),
        expected=len(expected),
    )


async def engine_cache(session: aiohttp.ClientSession, engine_url: str) -> list[dict[str, Any]]:
    """The live cache of each rank of an emulated engine."""
    async with session.get(f"{engine_url}/lab/cache") as response:
        page = json.loads(await response.read())
    ranks: list[dict[str, Any]] = page["ranks"]
    return ranks


async def known_chunks(session: aiohttp.ClientSession, picker_url: str, endpoint: str) -> Chunks:
    """What a picker's index has for an endpoint; nothing for one that it does not know."""
    async with session.get(f"{picker_url}/state", params={"chunks": endpoint}) as response:
        if response.status == 404:
            return {}
        page = json.loads(await response.read())
    return {int(chunk, 16): tokens for chunk, tokens in zip(page["chunks"], page["tokens"], strict=True)}


def token_bytes(model_dir: Path) -> list[bytes]:
    """The bytes of each token of a byte-level BPE tokenizer file; special tokens stand for their own name."""
    file = json.loads((model_dir / "tokenizer.json").read_text())
    table = dict[int, bytes]()
    letters = _byte_letters()
    for name, number in file["model"]["vocab"].items():
        table[number] = bytes(letters[letter] for letter in name if letter in letters)
    for token in file["added_tokens"]:
        table[token["id"]] = token["content"].encode()
    return [table[number] for number in range(len(table))]


def _byte_letters() -> dict[str, int]:
    """The letter that each byte is spelled with: itself where it can be seen, else one after U+00FF."""
    seen = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = sorted(set(range(0x100)) - seen)
    return {**{chr(byte): byte for byte in seen}, **{chr(0x100 + at): byte for at, byte in enumerate(hidden)}}
