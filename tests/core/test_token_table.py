"""The token table: bytes of ids, and what it refuses."""

import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab_core.errors import DataError
from trimtab_core.token_table import MAGIC, TABLE_BYTES_MAX, TokenTable, UnknownToken

PIECES = st.lists(st.none() | st.binary(max_size=6), max_size=40)


def ids(*values: int) -> "np.ndarray[tuple[int], np.dtype[np.uint32]]":
    return np.array(values, dtype=np.uint32)


@given(pieces=PIECES, draw=st.data())
def test_bytes_of_a_run_are_the_joined_bytes_of_its_tokens(pieces: list[bytes | None], draw: st.DataObject) -> None:
    table = TokenTable.from_pieces(pieces)
    run = draw.draw(st.lists(st.integers(0, len(pieces) + 2), max_size=10))
    bad = [token for token in run if token >= len(pieces) or pieces[token] is None]
    if bad:
        with pytest.raises(UnknownToken) as refusal:
            table.bytes_of(ids(*run))
        assert refusal.value.ids.tolist() == bad
    else:
        assert table.bytes_of(ids(*run)) == b"".join(pieces[token] or b"" for token in run)


@given(pieces=PIECES)
def test_a_packed_table_is_read_back_the_same(pieces: list[bytes | None]) -> None:
    table = TokenTable.from_pieces(pieces)
    again = TokenTable.decode(table.encode())
    assert len(again) == len(pieces)
    assert again.offsets.tolist() == table.offsets.tolist()
    assert again.data == table.data
    assert again.invalid.tolist() == [token for token, piece in enumerate(pieces) if piece is None]
    assert again.encode() == table.encode()


def test_an_empty_piece_is_not_an_invalid_one() -> None:
    table = TokenTable.from_pieces([b"", None])
    assert table.bytes_of(ids(0, 0)) == b""
    with pytest.raises(UnknownToken):
        table.bytes_of(ids(1))


@pytest.mark.parametrize("offsets", [[], [1, 3], [0, 2], [0, 3, 2, 3]])
def test_offsets_that_do_not_fit_the_data_are_refused(offsets: list[int]) -> None:
    with pytest.raises(DataError):
        TokenTable(ids(*offsets), b"abc")


def test_an_invalid_id_out_of_range_is_refused() -> None:
    with pytest.raises(DataError):
        TokenTable(ids(0, 3), b"abc", ids(1))


@given(cut=st.integers(0, 60), garbage=st.binary(max_size=30))
def test_damaged_tables_are_refused(cut: int, garbage: bytes) -> None:
    packed = TokenTable.from_pieces([b"some", b"pieces", None, b"of text"]).encode()
    for damaged in (packed[: min(cut, len(packed) - 1)], packed + b"\0", garbage, MAGIC + garbage):
        with pytest.raises(DataError):
            TokenTable.decode(damaged)


def test_a_table_that_unpacks_to_more_than_the_bound_is_refused() -> None:
    packer = zlib.compressobj(1)
    bomb = b"".join(packer.compress(bytes(1 << 20)) for _ in range((TABLE_BYTES_MAX >> 20) + 1)) + packer.flush()
    with pytest.raises(DataError):
        TokenTable.decode(MAGIC + bomb)


@pytest.mark.parametrize("head", [(9, 0, 3), (1, 0, 4), (0xFFFF_FFFF, 0, 0), (1, 1, 3)])
def test_lengths_that_do_not_add_up_are_refused(head: tuple[int, int, int]) -> None:
    raw = np.array(head, dtype="<u4").tobytes() + np.array([3], dtype="<u4").tobytes() + b"abc"
    with pytest.raises(DataError):
        TokenTable.decode(MAGIC + zlib.compress(raw))
