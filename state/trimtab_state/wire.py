"""Reading and writing packed values: bounds-checked, little-endian, arrays as they lie in memory.

The one rule: a reader never believes a length before it has compared it with what is there, and everything it finds
wrong is a CodecError. Knows nothing of what the values mean.
"""

import struct

import numpy as np
import numpy.typing as npt

from trimtab_core.chunks import U32, U64

from .errors import CodecError

TEXT_BYTES_MAX = 1_024
"""Of a name (endpoint, epoch) in a packed value."""


def pack_text(text: str) -> bytes:
    """Length (u16) and UTF-8. Raises CodecError if it is too long or cannot be encoded."""
    try:
        data = text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise CodecError(f"text cannot be encoded: {error.reason}") from error
    if len(data) > TEXT_BYTES_MAX:
        raise CodecError(f"text of {len(data)} bytes, at most {TEXT_BYTES_MAX}")
    return struct.pack("<H", len(data)) + data


def pack_u64(values: U64) -> bytes:
    """The array's elements, little-endian."""
    return np.ascontiguousarray(values, dtype="<u8").tobytes()


def pack_u32(values: U32) -> bytes:
    """The array's elements, little-endian."""
    return np.ascontiguousarray(values, dtype="<u4").tobytes()


class Reader:
    """Takes a packed value apart from its front. Arrays are views of the value, not writable."""

    __slots__ = ("_at", "_data")

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def version(self, *known: int) -> int:
        """The leading byte, one of `known`."""
        (version,) = self.unpack(_U8)
        if version not in known:
            raise CodecError(f"version {version}, known are {known}")
        return int(version)

    def unpack(self, layout: struct.Struct) -> tuple[int, ...]:
        return layout.unpack_from(self._data, self._advance(layout.size))

    def text(self) -> str:
        (size,) = self.unpack(_U16)
        if size > TEXT_BYTES_MAX:
            raise CodecError(f"text of {size} bytes, at most {TEXT_BYTES_MAX}")
        start = self._advance(size)
        try:
            return self._data[start : start + size].decode("utf-8")
        except UnicodeDecodeError as error:
            raise CodecError(f"text is not UTF-8: {error.reason}") from error

    def u64(self, count: int) -> U64:
        return np.frombuffer(self._data, "<u8", count, self._advance(8 * count))

    def u32(self, count: int) -> U32:
        return np.frombuffer(self._data, "<u4", count, self._advance(4 * count))

    def u16(self, count: int) -> npt.NDArray[np.uint16]:
        return np.frombuffer(self._data, "<u2", count, self._advance(2 * count))

    def u8(self, count: int) -> npt.NDArray[np.uint8]:
        return np.frombuffer(self._data, "u1", count, self._advance(count))

    def end(self) -> None:
        """Nothing may be left."""
        if self._at != len(self._data):
            raise CodecError(f"{len(self._data) - self._at} bytes too many")

    def _advance(self, size: int) -> int:
        start, end = self._at, self._at + size
        if end > len(self._data):
            raise CodecError(f"cut off: {end} bytes needed, {len(self._data)} there")
        self._at = end
        return start


_U8 = struct.Struct("<B")
_U16 = struct.Struct("<H")
