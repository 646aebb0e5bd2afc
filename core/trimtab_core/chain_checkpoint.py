"""The checkpoint of a block map: how `BlockChains.dump` and `load` write it down.

The one rule: a checkpoint is read back whole or not at all. It ends with a hash over its bytes, keyed with the seed and
the token table that its end states depend on, so damage, another pool and another model are all refused alike.
It is read by the version that wrote it; another version refuses it, and the caller starts afresh.
"""

import msgspec
import numpy as np
import xxhash

from trimtab_core.block_chains import Block, BlockChains, Place
from trimtab_core.errors import DataError
from trimtab_core.token_table import TokenTable

VERSION = 1
References = list[tuple[str, int, int]]


class Checkpoint(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """Columns over blocks (little-endian arrays); chunks and open bytes are joined, in the order of the blocks."""

    version: int
    counters: tuple[int, ...]
    held_max: int
    gaps: int
    names: bytes
    parents: bytes
    has_parent: bytes
    chains: bytes
    tokens: bytes
    tail_sizes: bytes
    tails: bytes
    chunk_counts: bytes
    chunk_hashes: bytes
    chunk_tokens: bytes
    holdings: list[tuple[References, list[Place]]]
    """Every distinct pair of references and places set aside; `holding` says which pair a block has."""
    holding: bytes
    unconfirmed_since: bytes
    """The gap since which each block is unconfirmed; 0 where it is not."""


def pack(chains: BlockChains) -> bytes:
    """Write the map down."""
    blocks = list(chains._blocks.values())
    distinct: dict[tuple[tuple[tuple[Place, int], ...], tuple[Place, ...]], int] = {}
    holding = [
        distinct.setdefault((tuple(block.references.items()), tuple(sorted(block.set_aside))), len(distinct))
        for block in blocks
    ]
    checkpoint = Checkpoint(
        version=VERSION,
        counters=tuple(getattr(chains, name) for name in COUNTERS),
        held_max=chains._held_max,
        gaps=chains._gaps,
        names=np.array(list(chains._blocks), dtype="<u8").tobytes(),
        parents=np.array([block.parent or 0 for block in blocks], dtype="<u8").tobytes(),
        has_parent=np.array([block.parent is not None for block in blocks], dtype="u1").tobytes(),
        chains=np.array([block.chain for block in blocks], dtype="<u8").tobytes(),
        tokens=np.array([block.tokens for block in blocks], dtype="<u4").tobytes(),
        tail_sizes=np.array([len(block.tail) for block in blocks], dtype="u1").tobytes(),
        tails=b"".join(block.tail for block in blocks),
        chunk_counts=np.array([len(block.chunks) for block in blocks], dtype="<u4").tobytes(),
        chunk_hashes=np.array([chunk for block in blocks for chunk, _ in block.chunks], dtype="<u8").tobytes(),
        chunk_tokens=np.array([tokens for block in blocks for _, tokens in block.chunks], dtype="<u4").tobytes(),
        holdings=[
            ([(medium, group, count) for (medium, group), count in references], list(set_aside))
            for references, set_aside in distinct
        ],
        holding=np.array(holding, dtype="<u4").tobytes(),
        unconfirmed_since=np.array([chains._unconfirmed.get(name, 0) for name in chains._blocks], "<u8").tobytes(),
    )
    return write(checkpoint, chains.table, chains.seed)


def write(checkpoint: Checkpoint, table: TokenTable, seed: int) -> bytes:
    """The bytes of a checkpoint, whichever map it is of."""
    body = msgspec.msgpack.encode(checkpoint)
    return body + _digest(body, table, seed)


def read(table: TokenTable, seed: int, data: bytes) -> Checkpoint:
    """The checkpoint that `write` wrote. Raises `DataError`."""
    body, digest = data[:-8], data[-8:]
    if digest != _digest(body, table, seed):
        raise DataError("checkpoint: damaged, or of another pool or model")
    try:
        checkpoint = msgspec.msgpack.decode(body, type=Checkpoint)
    except msgspec.MsgspecError as error:
        raise DataError(f"checkpoint: {error}") from None
    if checkpoint.version != VERSION:
        raise DataError(f"checkpoint: version {checkpoint.version}, not {VERSION}")
    return checkpoint


def unpack(table: TokenTable, seed: int, data: bytes) -> BlockChains:
    """Read the map back. Raises `DataError`."""
    checkpoint = read(table, seed, data)
    chains = BlockChains(table, seed)
    for name, value in zip(COUNTERS, checkpoint.counters, strict=True):
        setattr(chains, name, value)
    chains._held_max = checkpoint.held_max
    chains._gaps = checkpoint.gaps
    tail_at = chunk_at = 0
    chunks = list(
        zip(
            np.frombuffer(checkpoint.chunk_hashes, dtype="<u8").tolist(),
            np.frombuffer(checkpoint.chunk_tokens, dtype="<u4").tolist(),
            strict=True,
        )
    )
    for name, parent, has_parent, chain, tokens, tail_size, chunk_count, holding, since in zip(
        np.frombuffer(checkpoint.names, dtype="<u8").tolist(),
        np.frombuffer(checkpoint.parents, dtype="<u8").tolist(),
        checkpoint.has_parent,
        np.frombuffer(checkpoint.chains, dtype="<u8").tolist(),
        np.frombuffer(checkpoint.tokens, dtype="<u4").tolist(),
        checkpoint.tail_sizes,
        np.frombuffer(checkpoint.chunk_counts, dtype="<u4").tolist(),
        np.frombuffer(checkpoint.holding, dtype="<u4").tolist(),
        np.frombuffer(checkpoint.unconfirmed_since, dtype="<u8").tolist(),
        strict=True,
    ):
        references, set_aside = checkpoint.holdings[holding]
        block = Block(
            parent=parent if has_parent else None,
            chain=chain,
            tail=checkpoint.tails[tail_at : tail_at + tail_size],
            tokens=tokens,
            chunks=tuple(chunks[chunk_at : chunk_at + chunk_count]),
            references={(medium, group): count for medium, group, count in references},
            set_aside=set(set_aside),
        )
        tail_at += tail_size
        chunk_at += chunk_count
        chains._blocks[name] = block
        if since:
            chains._unconfirmed[name] = since
        chains._settle(name, block)
    chains.drain()
    return chains


COUNTERS = (
    "bytes_seen",
    "tokens_seen",
    "dropped_unknown_parent",
    "dropped_unknown_token",
    "dropped_malformed",
    "dropped_full",
)


def _digest(body: bytes, table: TokenTable, seed: int) -> bytes:
    of_table = xxhash.xxh3_64_intdigest(table.data, xxhash.xxh3_64_intdigest(table.offsets.tobytes(), seed))
    return xxhash.xxh3_64_digest(body, of_table)
