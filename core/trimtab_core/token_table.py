"""The token table: the bytes that each token id of a model stands for.

The one rule: the bytes of a run of tokens are the bytes of its tokens, joined; nothing depends on neighbours. An id
that does not obey this (an added token that strips spaces, a piece that a lossy normaliser made) has no bytes here, and
looking it up is refused, which ends the chain of blocks at that place. The table knows no tokenizer and tokenises
nothing.
"""

import itertools
import zlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from trimtab_core.chunks import U32
from trimtab_core.errors import CoreError, DataError

TABLE_TOKENS_MAX = 4_000_000
"""Most ids in a table. An encoded table that claims more is refused."""
TABLE_BYTES_MAX = 256 * 1024 * 1024
"""Most bytes an encoded table may unpack to. More is refused before it is unpacked."""
MAGIC = b"TTB1"


class UnknownToken(CoreError, LookupError):  # noqa: N818  # says what is wrong already
    """Some of the ids are out of range or have no bytes; `ids` names them, in order of appearance."""

    def __init__(self, ids: U32) -> None:
        super().__init__(f"no bytes known for token ids {ids.tolist()[:8]}")
        self.ids = ids


class TokenTable:
    """`offsets` has one entry more than there are ids: token i is `data[offsets[i] : offsets[i + 1]]`.

    `invalid` lists the ids that have no bytes, which is not the same as standing for zero bytes.
    """

    __slots__ = ("_pieces", "data", "invalid", "offsets")

    def __init__(self, offsets: U32, data: bytes, invalid: U32 | None = None) -> None:
        self.offsets = np.ascontiguousarray(offsets, dtype=np.uint32)
        self.data = data
        self.invalid = np.unique(np.asarray(() if invalid is None else invalid, dtype=np.uint32))
        if len(self.offsets) == 0 or self.offsets[0] != 0 or self.offsets[-1] != len(data):
            raise DataError("token table: offsets must run from 0 to the length of the data")
        if np.any(self.offsets[1:] < self.offsets[:-1]):
            raise DataError("token table: offsets must not fall")
        if len(self.invalid) and self.invalid[-1] >= len(self):
            raise DataError("token table: an invalid id is out of range")
        ends = self.offsets.tolist()
        pieces: list[bytes | None] = [data[start:end] for start, end in itertools.pairwise(ends)]
        for token in self.invalid.tolist():
            pieces[token] = None
        self._pieces = pieces

    @classmethod
    def from_pieces(cls, pieces: Sequence[bytes | None]) -> "TokenTable":
        """A table from the bytes of each id; None marks an id that has none."""
        lengths = np.fromiter((len(piece or b"") for piece in pieces), dtype=np.uint64, count=len(pieces))
        offsets = np.concatenate((np.zeros(1, dtype=np.uint64), np.cumsum(lengths, dtype=np.uint64)))
        if offsets[-1] > TABLE_BYTES_MAX or len(pieces) > TABLE_TOKENS_MAX:
            raise DataError("token table: too large")
        invalid = np.array([token for token, piece in enumerate(pieces) if piece is None], dtype=np.uint32)
        return cls(offsets.astype(np.uint32), b"".join(piece or b"" for piece in pieces), invalid)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def bytes_of(self, ids: npt.NDArray[np.unsignedinteger]) -> bytes:
        """The text of a run of tokens. Raises `UnknownToken` if any id is out of range or has no bytes."""
        pieces = self._pieces
        try:
            return b"".join([pieces[token] for token in ids.tolist()])
        except (IndexError, TypeError):
            unknown = [token for token in ids.tolist() if token >= len(pieces) or pieces[token] is None]
            raise UnknownToken(np.array(unknown, dtype=np.uint32)) from None

    def encode(self) -> bytes:
        """A packed form, for `decode`. The same table always gives the same bytes (on one version of zlib)."""
        head = np.array([len(self), len(self.invalid), len(self.data)], dtype="<u4").tobytes()
        lengths = np.diff(self.offsets).astype("<u4").tobytes()
        return MAGIC + zlib.compress(head + lengths + self.invalid.astype("<u4").tobytes() + self.data, 6)

    @classmethod
    def decode(cls, packed: bytes) -> "TokenTable":
        """The table that `encode` packed. Raises `DataError` on anything else."""
        if packed[:4] != MAGIC:
            raise DataError("token table: not a packed table")
        unpacker = zlib.decompressobj()
        try:
            raw = unpacker.decompress(packed[4:], TABLE_BYTES_MAX)
        except zlib.error as error:
            raise DataError(f"token table: {error}") from None
        if not unpacker.eof or unpacker.unused_data or len(raw) < 12:
            raise DataError("token table: cut short or too large")
        tokens, invalid_count, data_bytes = (int(n) for n in np.frombuffer(raw, dtype="<u4", count=3))
        if tokens > TABLE_TOKENS_MAX or len(raw) != 12 + 4 * (tokens + invalid_count) + data_bytes:
            raise DataError("token table: lengths do not add up")
        lengths = np.frombuffer(raw, dtype="<u4", count=tokens, offset=12)
        invalid = np.frombuffer(raw, dtype="<u4", count=invalid_count, offset=12 + 4 * tokens)
        offsets = np.concatenate((np.zeros(1, dtype=np.uint64), np.cumsum(lengths, dtype=np.uint64)))
        if int(offsets[-1]) != data_bytes:
            raise DataError("token table: lengths do not add up")
        return cls(offsets.astype(np.uint32), raw[len(raw) - data_bytes :], invalid.astype(np.uint32))
