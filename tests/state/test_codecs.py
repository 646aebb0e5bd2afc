"""Packed values: what goes in comes out, and nothing that is malformed raises anything but CodecError."""

import contextlib
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from trimtab_state import CodecError
from trimtab_state.documents import (
    Alarm,
    ControlDocument,
    EndpointSpec,
    Heartbeat,
    Policy,
    ServedModel,
    decode_alarm,
    decode_control,
    decode_heartbeat,
    encode,
)
from trimtab_state.kv_codec import (
    KvEntry,
    KvSnapshot,
    decode_entry,
    decode_snapshot,
    encode_entry,
    encode_snapshot,
)
from trimtab_state.load_codec import (
    LEASE_HEAD_BYTES,
    Lease,
    LeaseHead,
    LoadEntry,
    LoadKind,
    LoadOperation,
    decode_lease,
    decode_lease_head,
    decode_load_entry,
    encode_lease,
    encode_load_entry,
    writer_of_load_entry,
)
from trimtab_state.notices import parse_notice
from trimtab_state.stream_position import parse_id

U64S, U32S = st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1)
POSITIONS = st.integers(1, 2**64 - 1)
NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
HASHES = arrays(np.uint64, st.integers(0, 12))


@st.composite
def chunk_arrays(draw: st.DrawFn) -> tuple[Any, Any]:
    hashes = draw(HASHES)
    return hashes, draw(arrays(np.uint32, len(hashes)))


@st.composite
def kv_entries(draw: st.DrawFn) -> KvEntry:
    added, tokens = draw(chunk_arrays())
    return KvEntry(
        draw(NAMES), draw(U64S), draw(POSITIONS), draw(NAMES), draw(st.booleans()), added, tokens, draw(HASHES)
    )


@st.composite
def operations(draw: st.DrawFn, kinds: "list[LoadKind]") -> LoadOperation:
    kind = draw(st.sampled_from(kinds))
    needs_endpoint = kind in (LoadKind.RESERVE, LoadKind.MOVED)
    endpoint = draw(NAMES.filter(bool)) if needs_endpoint else ""
    weight_milli = draw(st.sampled_from([1000, 1000, 1, 2_500, 1_000_000]))
    return LoadOperation(kind, draw(U64S), endpoint, draw(U32S), draw(U32S), *draw(chunk_arrays()), weight_milli)


def same(one: Any, other: Any) -> bool:
    """Equal, arrays by their elements and types."""
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other) and type(one) is type(other)


@given(kv_entries())
def test_kv_entries_come_out_as_they_went_in(entry: KvEntry) -> None:
    assert same(decode_entry(encode_entry(entry)), entry)


@given(U64S, U64S, NAMES, chunk_arrays())
def test_snapshots_come_out_as_they_went_in(incarnation: int, sequence: int, epoch: str, chunks: Any) -> None:
    snapshot = KvSnapshot(incarnation, sequence, epoch, *chunks)
    assert same(decode_snapshot(encode_snapshot(snapshot), chunks_max=12), snapshot)


@given(U64S, POSITIONS, st.lists(operations(list(LoadKind)), max_size=6))
def test_load_entries_come_out_as_they_went_in(incarnation: int, sequence: int, steps: "list[LoadOperation]") -> None:
    entry = LoadEntry(incarnation, sequence, steps)
    assert same(decode_load_entry(encode_load_entry(entry)), entry)


@given(st.tuples(U64S, U64S, U64S), st.lists(operations([LoadKind.RESERVE]), max_size=6))
def test_leases_come_out_as_they_went_in(head: tuple[int, int, int], reservations: "list[LoadOperation]") -> None:
    lease = Lease(LeaseHead(*head), reservations)
    data = encode_lease(lease)
    assert same(decode_lease(data), lease)
    assert decode_lease_head(data[:LEASE_HEAD_BYTES]) == lease.head


def a_lease() -> bytes:
    samples = np.arange(3, dtype=np.uint64), np.arange(3, dtype=np.uint32)
    return encode_lease(Lease(LeaseHead(1, 2, 3), [LoadOperation(LoadKind.RESERVE, 4, "a", 5, 6, *samples)]))


def a_load_entry() -> bytes:
    return encode_load_entry(LoadEntry(1, 2, [LoadOperation(kind, 4, "a", 5, 6) for kind in LoadKind]))


def a_weighted_entry() -> bytes:
    return encode_load_entry(LoadEntry(1, 2, [LoadOperation(LoadKind.RESERVE, 4, "a", 5, 6, weight_milli=4_000)]))


def an_entry() -> bytes:
    two = np.arange(2, dtype=np.uint64)
    return encode_entry(KvEntry("a", 1, 2, "e", True, two, np.arange(2, dtype=np.uint32), two))


def a_snapshot() -> bytes:
    return encode_snapshot(KvSnapshot(1, 2, "e", np.arange(2, dtype=np.uint64), np.arange(2, dtype=np.uint32)))


def a_control() -> bytes:
    endpoints = (EndpointSpec(name="a", address="b", rank=1),)
    return encode(ControlDocument(namespace="n", name="p", endpoints=endpoints, policy=Policy(batch_limit=3)))


def a_heartbeat() -> bytes:
    return encode(Heartbeat(endpoint="a", epoch="e", models={"m": ServedModel(card="d")}))


DECODERS: dict[str, tuple[Callable[[bytes], object], Callable[[], bytes]]] = {
    "entry": (decode_entry, an_entry),
    "snapshot": (lambda data: decode_snapshot(data, chunks_max=100), a_snapshot),
    "load entry": (decode_load_entry, a_load_entry),
    "weighted load entry": (decode_load_entry, a_weighted_entry),
    "lease": (decode_lease, a_lease),
    "lease head": (decode_lease_head, a_lease),
    "control": (decode_control, a_control),
    "heartbeat": (decode_heartbeat, a_heartbeat),
    "alarm": (decode_alarm, lambda: encode(Alarm(prefix_class="0" * 16))),
    "stream id": (parse_id, lambda: b"17-3"),
}


@pytest.mark.parametrize("name", DECODERS)
@given(st.binary(max_size=200))
@example(b"")
@example(b"\x01" + b"\xff" * 60)
@example(b"[" * 199)
def test_any_bytes_are_read_or_refused(name: str, data: bytes) -> None:
    with contextlib.suppress(CodecError):
        DECODERS[name][0](data)


@pytest.mark.parametrize("name", DECODERS)
@given(st.data())
def test_damaged_values_are_read_or_refused(name: str, data: st.DataObject) -> None:
    decode, make = DECODERS[name]
    value = bytearray(make())
    for _ in range(data.draw(st.integers(1, 4))):
        value[data.draw(st.integers(0, len(value) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(CodecError):
        decode(bytes(value))


@pytest.mark.parametrize("name", ["entry", "snapshot", "load entry", "weighted load entry", "lease"])
def test_every_cut_and_every_addition_is_refused(name: str) -> None:
    decode, make = DECODERS[name]
    value = make()
    decode(value)
    for end in range(len(value)):
        with pytest.raises(CodecError):
            decode(value[:end])
    with pytest.raises(CodecError):
        decode(value + b"\0")
    with pytest.raises(CodecError, match="version"):
        decode(b"\x09" + value[1:])


def test_a_length_beyond_the_bound_is_refused_before_anything_is_allocated() -> None:
    with pytest.raises(CodecError, match="at most 1"):
        decode_snapshot(a_snapshot(), chunks_max=1)


def test_writers_refuse_what_readers_would() -> None:
    none = np.empty(0, dtype=np.uint64), np.empty(0, dtype=np.uint32)
    one = np.ones(1, dtype=np.uint64)
    with pytest.raises(CodecError):
        encode_entry(KvEntry("a" * 2_000, 1, 1, "e", False, *none, none[0]))
    with pytest.raises(CodecError):
        encode_entry(KvEntry("\ud800", 1, 1, "e", False, *none, none[0]))
    with pytest.raises(CodecError):
        encode_entry(KvEntry("a", 1, 1, "e", False, one, none[1], none[0]))
    with pytest.raises(CodecError):
        encode_snapshot(KvSnapshot(1, 1, "e", one, none[1]))
    with pytest.raises(CodecError):
        encode_load_entry(LoadEntry(1, 1, [LoadOperation(LoadKind.RESERVE, 1, "a", 1, 1, one, none[1])]))


def test_documents_of_a_newer_version_are_read() -> None:
    newer = b'{"endpoint":"a","epoch":"e","state":"asleep","something_new":[1]}'
    assert decode_heartbeat(newer) == Heartbeat(endpoint="a", epoch="e", state="asleep")


@pytest.mark.parametrize("fields", [{}, {b"k": b"control"}, {b"k": b"news", b"n": b""}, {b"k": b"\xff", b"n": b""}])
def test_notices_that_are_not_understood_are_none(fields: dict[bytes, bytes]) -> None:
    assert parse_notice(fields) is None


@pytest.mark.parametrize("field", ["running", "waiting", "kv_capacity_tokens", "block_tokens"])
@pytest.mark.parametrize("value", [-1, 2**53 + 1, 2**63, 2**64, 10**30])
def test_numbers_that_no_engine_can_mean_are_refused(field: str, value: int) -> None:
    with pytest.raises(CodecError):
        decode_heartbeat(msgspec.json.encode({"endpoint": "a", "epoch": "e", field: value}))


def test_names_and_limits_beyond_their_bounds_are_refused() -> None:
    for field in ("endpoint", "epoch"):
        with pytest.raises(CodecError):
            decode_heartbeat(msgspec.json.encode({"endpoint": "a", "epoch": "e", field: "x" * 5_000}))
    for wrong in ({"endpoints": [{"name": "x" * 5_000, "address": "a"}]}, {"policy": {"batch_limit": 2**63}}):
        with pytest.raises(CodecError):
            decode_control(msgspec.json.encode({"namespace": "n", "name": "p"} | wrong))


OLD_ENTRY = bytes.fromhex("01 0500000000000000 0700000000000000") + bytes.fromhex(
    "01000000 0100 00000000 0100 61 00 0000 0000 0900000000000000 64000000 02000000"
)
"""A reserve operation as replicas wrote it that knew no weights."""


def test_entries_of_replicas_that_know_no_weights_are_of_ordinary_requests() -> None:
    entry = decode_load_entry(OLD_ENTRY)
    assert entry.operations == [LoadOperation(LoadKind.RESERVE, 9, "a", 100, 2)]
    assert entry.operations[0].weight_milli == 1_000


def test_where_nobody_uses_weights_replicas_that_know_none_can_read_what_is_written() -> None:
    operation = LoadOperation(LoadKind.RESERVE, 9, "a", 100, 2)
    assert encode_load_entry(LoadEntry(5, 7, [operation])) == OLD_ENTRY
    assert encode_lease(Lease(LeaseHead(5, 7, 1), [operation]))[0] == OLD_ENTRY[0]
    weighted = operation._replace(weight_milli=1_001)
    assert encode_load_entry(LoadEntry(5, 7, [weighted]))[0] != OLD_ENTRY[0]


def test_weights_out_of_bounds_are_refused() -> None:
    data = a_weighted_entry()
    at = data.index((4_000).to_bytes(4, "little"))
    for weight in (0, 1_000_001, 2**32 - 1):
        with pytest.raises(CodecError, match="weight"):
            decode_load_entry(data[:at] + weight.to_bytes(4, "little") + data[at + 4 :])


def test_the_writer_of_a_load_entry_is_told_without_reading_the_rest() -> None:
    data = encode_load_entry(LoadEntry(2**63 + 5, 7, []))
    assert writer_of_load_entry(data) == 2**63 + 5
    assert writer_of_load_entry(data[:-1] + b"damage") == 2**63 + 5
    for unreadable in (b"", data[:1], data[:9], b"\x09" + data[1:]):
        assert writer_of_load_entry(unreadable) is None
