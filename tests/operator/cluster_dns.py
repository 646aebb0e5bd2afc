"""Cluster DNS for tests: A records of headless Services over UDP, changed at will.

The one rule: it knows the names it was given and says of all others that they do not exist.
"""

import asyncio
import socket
import struct
from collections.abc import Mapping, Sequence

PORT = 53
QUESTION_A = 1
OK, NO_SUCH_NAME = 0x8180, 0x8183
TTL_S = 1


class ClusterDns(asyncio.DatagramProtocol):
    """`records`: addresses by name; replace it to change the answers."""

    def __init__(self) -> None:
        self.records: Mapping[str, Sequence[str]] = {}
        self._transport: asyncio.DatagramTransport | None = None

    async def start(self, address: str) -> None:
        """Answer at `address`, port 53."""
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.create_datagram_endpoint(lambda: self, local_addr=(address, PORT))

    def stop(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        name, end = _name(data)
        (kind,) = struct.unpack_from("!H", data, end)
        found = self.records.get(name)
        addresses = list(found or ()) if kind == QUESTION_A else []
        header = struct.pack(
            "!HHHHHH", struct.unpack_from("!H", data)[0], NO_SUCH_NAME if found is None else OK, 1, len(addresses), 0, 0
        )
        answers = b"".join(
            struct.pack("!HHHIH", 0xC00C, QUESTION_A, 1, TTL_S, 4) + socket.inet_aton(ip) for ip in addresses
        )
        assert self._transport is not None
        self._transport.sendto(header + data[12 : end + 4] + answers, addr)


def _name(data: bytes) -> tuple[str, int]:
    """The question's name, lower case, and where it ends."""
    labels, at = [], 12
    while data[at]:
        labels.append(data[at + 1 : at + 1 + data[at]].decode("ascii").lower())
        at += 1 + data[at]
    return ".".join(labels), at + 1
