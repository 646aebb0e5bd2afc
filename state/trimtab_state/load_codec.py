"""Packed forms of the load log and of leases: columns of operations, so that a batch costs few Python steps.

The one rule: one leading version byte, and whatever does not fit exactly is a CodecError. Written is the oldest version
that can say it: a replica that does not know weights reads the others' load as long as nobody uses them.

    entry   version u8, incarnation u64, sequence u64, operations
    lease   version u8, incarnation u64, sequence u64, renewal u64, operations (all of them reserve)
    operations   count u32, names u16, samples u32, endpoint names, kind u8[], endpoint index u16[], sample count u16[],
                 reservation id u64[], p_tokens u32[], batch u32[], (version 2: weight u32[],) sample hashes u64[],
                 sample tokens u32[]
"""

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from trimtab_core.chunks import U32, U64
from trimtab_core.extra_terms import ORDINARY_MILLI, WEIGHT_MILLI_MAX

from .errors import CodecError
from .wire import Reader, pack_text, pack_u32, pack_u64

VERSION = 1
"""Without weights: all are ordinary."""
VERSION_WEIGHTS = 2
VERSIONS = (VERSION, VERSION_WEIGHTS)
NO_ENDPOINT = 0xFFFF
U32_MAX = 0xFFFF_FFFF
SAMPLES_MAX = 0xFFFF
"""Samples of one operation."""
OPERATIONS_MAX = 1 << 20
"""Operations in one value that a reader accepts."""
SAMPLES_PER_OPERATION = 64
"""That are as much work as an operation without any."""
LEASE_HEAD_BYTES = 25
"""The front of a lease that tells liveness and position."""

NO_U64: U64 = np.empty(0, dtype=np.uint64)
NO_U32: U32 = np.empty(0, dtype=np.uint32)

_POSITION = struct.Struct("<QQ")
_LEASE = struct.Struct("<QQQ")
_COUNTS = struct.Struct("<IHI")


class LoadKind(IntEnum):
    RESERVE = 0
    FIRST_TOKEN = 1
    MOVED = 2
    FINISHED = 3
    GOODBYE = 4
    """The incarnation ends: all its reservations with it."""


KINDS = tuple(LoadKind)


class LoadOperation(NamedTuple):
    """One step of a replica's load. What a kind does not need is zero or empty. (A tuple: followers make many.)"""

    kind: LoadKind
    reservation_id: int
    endpoint: str = ""
    p_tokens: int = 0
    """0 in a reserve operation: the first token has been seen."""
    batch: int = 0
    sample_hashes: U64 = NO_U64
    sample_tokens: U32 = NO_U32
    weight_milli: int = ORDINARY_MILLI
    """Of each of its engine requests, by their class."""


class LoadEntry(NamedTuple):
    """A batch of operations of one replica incarnation."""

    incarnation: int
    sequence: int
    operations: Sequence[LoadOperation]


class LeaseHead(NamedTuple):
    """The front of a lease."""

    incarnation: int
    sequence: int
    """Its state is the one after this entry of the log."""
    renewal: int
    """Counts the renewals: a changed one proves that the replica lived."""


class Lease(NamedTuple):
    """A replica incarnation's open reservations, as reserve operations."""

    head: LeaseHead
    reservations: Sequence[LoadOperation]


def encode_load_entry(entry: LoadEntry) -> bytes:
    """Raises CodecError."""
    version = _version_for(entry.operations)
    head = _POSITION.pack(entry.incarnation, entry.sequence)
    return b"".join((bytes((version,)), head, _pack_operations(entry.operations, version)))


def writer_of_load_entry(data: bytes) -> int | None:
    """The incarnation that wrote an entry, without reading its operations; None where that cannot be told."""
    is_known = len(data) > _POSITION.size and data[0] in VERSIONS
    return int(_POSITION.unpack_from(data, 1)[0]) if is_known else None


def work_of_load_entry(data: bytes) -> int:
    """How much there is to read in an entry, without reading it: its operations, and samples at 64 for one; 0 where
    that cannot be told."""
    if len(data) < 1 + _POSITION.size + _COUNTS.size or data[0] not in VERSIONS:
        return 0
    operations, _, samples = _COUNTS.unpack_from(data, 1 + _POSITION.size)
    return int(operations) + int(samples) // SAMPLES_PER_OPERATION


def decode_load_entry(data: bytes) -> LoadEntry:
    """Raises CodecError."""
    reader = Reader(data)
    version = reader.version(*VERSIONS)
    incarnation, sequence = reader.unpack(_POSITION)
    if sequence == 0:
        raise CodecError("entry with sequence 0")
    operations = _take_operations(reader, version)
    reader.end()
    return LoadEntry(incarnation, sequence, operations)


def encode_lease(lease: Lease) -> bytes:
    """Raises CodecError."""
    version = _version_for(lease.reservations)
    return b"".join((bytes((version,)), _LEASE.pack(*lease.head), _pack_operations(lease.reservations, version)))


def decode_lease(data: bytes) -> Lease:
    """Raises CodecError."""
    reader = Reader(data)
    version = reader.version(*VERSIONS)
    head = LeaseHead(*reader.unpack(_LEASE))
    operations = _take_operations(reader, version)
    reader.end()
    if any(operation.kind is not LoadKind.RESERVE for operation in operations):
        raise CodecError("lease with other operations than reserve")
    return Lease(head, operations)


def decode_lease_head(data: bytes) -> LeaseHead:
    """From the first LEASE_HEAD_BYTES of a lease. Raises CodecError."""
    reader = Reader(data[:LEASE_HEAD_BYTES])
    reader.version(*VERSIONS)
    return LeaseHead(*reader.unpack(_LEASE))


def _version_for(operations: Sequence[LoadOperation]) -> int:
    return VERSION if all(o.weight_milli == ORDINARY_MILLI for o in operations) else VERSION_WEIGHTS


def _pack_operations(operations: Sequence[LoadOperation], version: int) -> bytes:
    names: dict[str, int] = {}
    indexes = [names.setdefault(o.endpoint, len(names)) if o.endpoint else NO_ENDPOINT for o in operations]
    counts = [len(o.sample_hashes) for o in operations]
    if len(names) >= NO_ENDPOINT or len(operations) > OPERATIONS_MAX or max(counts, default=0) > SAMPLES_MAX:
        raise CodecError(f"{len(operations)} operations, {len(names)} endpoints, {max(counts)} samples: too many")
    if any(len(o.sample_tokens) != n for o, n in zip(operations, counts, strict=True)):
        raise CodecError("samples without a token count each")
    sampled = [o for o, n in zip(operations, counts, strict=True) if n]
    weights = [min(max(o.weight_milli, 1), WEIGHT_MILLI_MAX) for o in operations]
    return b"".join(
        (
            _COUNTS.pack(len(operations), len(names), sum(counts)),
            *(pack_text(name) for name in names),
            bytes(o.kind for o in operations),
            np.array(indexes, dtype="<u2").tobytes(),
            np.array(counts, dtype="<u2").tobytes(),
            np.array([o.reservation_id for o in operations], dtype="<u8").tobytes(),
            np.array([min(max(o.p_tokens, 0), U32_MAX) for o in operations], dtype="<u4").tobytes(),
            np.array([min(max(o.batch, 0), U32_MAX) for o in operations], dtype="<u4").tobytes(),
            np.array(weights, dtype="<u4").tobytes() if version == VERSION_WEIGHTS else b"",
            *(pack_u64(o.sample_hashes) for o in sampled),
            *(pack_u32(o.sample_tokens) for o in sampled),
        )
    )


def _take_operations(reader: Reader, version: int) -> list[LoadOperation]:
    count, name_count, samples = reader.unpack(_COUNTS)
    if count > OPERATIONS_MAX:
        raise CodecError(f"{count} operations, at most {OPERATIONS_MAX}")
    names = [reader.text() for _ in range(name_count)]
    kinds, indexes, counts = reader.u8(count), reader.u16(count), reader.u16(count)
    ids, p_tokens, batches = reader.u64(count), reader.u32(count), reader.u32(count)
    weights = reader.u32(count).tolist() if version == VERSION_WEIGHTS else [ORDINARY_MILLI] * count
    hashes, tokens = reader.u64(samples), reader.u32(samples)
    if any(not 1 <= weight <= WEIGHT_MILLI_MAX for weight in weights):
        raise CodecError(f"weight of a request out of bounds, 1 to {WEIGHT_MILLI_MAX} thousandths")
    if count and int(kinds.max()) >= len(KINDS):
        raise CodecError(f"unknown kind of operation {int(kinds.max())}")
    if np.any((indexes != NO_ENDPOINT) & (indexes >= name_count)):
        raise CodecError("operation names an endpoint that is not there")
    if np.any((indexes == NO_ENDPOINT) & ((kinds == LoadKind.RESERVE) | (kinds == LoadKind.MOVED))):
        raise CodecError("operation without its endpoint")
    ends = np.cumsum(counts, dtype=np.int64)
    if samples != (int(ends[-1]) if count else 0):
        raise CodecError("sample counts do not add up")
    operations, start = [], 0
    columns = (kinds, indexes, ids, p_tokens, batches, ends)
    rows = zip(*(column.tolist() for column in columns), weights, strict=True)
    for kind, index, reservation_id, p, batch, end, weight in rows:
        endpoint = "" if index == NO_ENDPOINT else names[index]
        # Copies, since samples live long and a view would keep the whole entry with them.
        own = (hashes[start:end].copy(), tokens[start:end].copy()) if end > start else (NO_U64, NO_U32)
        operations.append(LoadOperation(KINDS[kind], reservation_id, endpoint, p, batch, *own, weight))
        start = end
    return operations
