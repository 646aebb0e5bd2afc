"""Packed forms of the KV log and of KV snapshots.

The one rule: one leading version byte, and whatever does not fit exactly is a CodecError. Positions are the writer's
(incarnation, sequence); nothing here knows what they mean.

    entry     version u8, flags u8, incarnation u64, sequence u64, added u32, removed u32, endpoint, epoch,
              added hashes u64[], removed hashes u64[], tokens u32[] of the added
    snapshot  version u8, incarnation u64, sequence u64, chunks u32, epoch, hashes u64[], tokens u32[]
"""

import struct
from typing import NamedTuple

from trimtab_core.chunks import U32, U64

from .errors import CodecError
from .wire import Reader, pack_text, pack_u32, pack_u64

VERSION = 1
FLAG_CLEARED = 1
ENTRY_CHUNKS_MAX = 1 << 20
"""Added or removed chunks in one entry that a reader accepts; writers stay far below it."""

_ENTRY = struct.Struct("<BQQII")
_SNAPSHOT = struct.Struct("<QQI")


class KvEntry(NamedTuple):
    """One step of an endpoint's chunks: cleared, then removed, then added. (A tuple, since followers make many.)"""

    endpoint: str
    incarnation: int
    sequence: int
    epoch: str
    cleared: bool
    added: U64
    tokens: U32
    removed: U64


class KvSnapshot(NamedTuple):
    """All chunks of an endpoint after the entry `sequence` of its writer."""

    incarnation: int
    sequence: int
    epoch: str
    hashes: U64
    tokens: U32


def encode_entry(entry: KvEntry) -> bytes:
    """Raises CodecError for names that are too long."""
    if len(entry.tokens) != len(entry.added):
        raise CodecError(f"{len(entry.added)} added chunks with {len(entry.tokens)} token counts")
    head = _ENTRY.pack(
        FLAG_CLEARED if entry.cleared else 0, entry.incarnation, entry.sequence, len(entry.added), len(entry.removed)
    )
    return b"".join(
        (
            bytes((VERSION,)),
            head,
            pack_text(entry.endpoint),
            pack_text(entry.epoch),
            pack_u64(entry.added),
            pack_u64(entry.removed),
            pack_u32(entry.tokens),
        )
    )


def decode_entry(data: bytes) -> KvEntry:
    """The arrays are read-only views of `data`. Raises CodecError."""
    reader = Reader(data)
    reader.version(VERSION)
    flags, incarnation, sequence, added, removed = reader.unpack(_ENTRY)
    if flags & ~FLAG_CLEARED:
        raise CodecError(f"unknown flags {flags:#x}")
    if sequence == 0:
        raise CodecError("entry with sequence 0")
    if added > ENTRY_CHUNKS_MAX or removed > ENTRY_CHUNKS_MAX:
        raise CodecError(f"entry with {added} added and {removed} removed chunks, at most {ENTRY_CHUNKS_MAX}")
    endpoint, epoch = reader.text(), reader.text()
    added_hashes, removed_hashes, tokens = reader.u64(added), reader.u64(removed), reader.u32(added)
    reader.end()
    return KvEntry(endpoint, incarnation, sequence, epoch, bool(flags), added_hashes, tokens, removed_hashes)


def encode_snapshot(snapshot: KvSnapshot) -> bytes:
    """Raises CodecError."""
    if len(snapshot.tokens) != len(snapshot.hashes):
        raise CodecError(f"{len(snapshot.hashes)} chunks with {len(snapshot.tokens)} token counts")
    head = _SNAPSHOT.pack(snapshot.incarnation, snapshot.sequence, len(snapshot.hashes))
    arrays = pack_u64(snapshot.hashes), pack_u32(snapshot.tokens)
    return b"".join((bytes((VERSION,)), head, pack_text(snapshot.epoch), *arrays))


def decode_snapshot(data: bytes, *, chunks_max: int) -> KvSnapshot:
    """The arrays are read-only views of `data`. Raises CodecError, also for more than `chunks_max` chunks."""
    reader = Reader(data)
    reader.version(VERSION)
    incarnation, sequence, chunks = reader.unpack(_SNAPSHOT)
    if chunks > chunks_max:
        raise CodecError(f"snapshot of {chunks} chunks, at most {chunks_max}")
    epoch = reader.text()
    hashes, tokens = reader.u64(chunks), reader.u32(chunks)
    reader.end()
    return KvSnapshot(incarnation, sequence, epoch, hashes, tokens)
