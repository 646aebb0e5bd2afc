"""A run of bytes of any length, of which only the front and the end are kept.

The one rule: it never holds more than HEAD_BYTES + TAIL_BYTES, whatever is added.
"""

HEAD_BYTES = 2_048
"""What is kept of the front: ids stand there, in a response as in an event of a stream."""
TAIL_BYTES = 16_384
"""What is kept of the end: the usage stands there."""


class HeadAndTail:
    """Add pieces; read what is left of them all."""

    __slots__ = ("_head", "_tail", "size")

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self._head = b""
        self._tail = b""
        self.size = 0

    def add(self, data: bytes) -> None:
        self.size += len(data)
        if (room := HEAD_BYTES - len(self._head)) > 0:
            self._head += data[:room]
            data = data[room:]
        if data:
            self._tail = (self._tail + data[-TAIL_BYTES:])[-TAIL_BYTES:]

    @property
    def is_whole(self) -> bool:
        return self.size == len(self._head) + len(self._tail)

    @property
    def head(self) -> bytes:
        return self._head

    @property
    def kept(self) -> bytes:
        """All of it, or its front and its end run together."""
        return self._head + self._tail
