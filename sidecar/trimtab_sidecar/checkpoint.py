"""The checkpoint of one rank: what its cached prefixes are and where in the engine's log that was.

The one rule: a checkpoint is believed whole or not at all. It is written beside its place and renamed over it, so that
a reader sees the old one or the new one; a version, a checksum and the map's own fingerprint of seed and token table
refuse everything else, and the caller starts afresh. It survives the container, not the pod (an emptyDir), so nothing
waits for the disk. Roots and hashes are in it, no text but each block's open chunk's last bytes (under 64), so the
file is private to its user.
"""

import os
import re
from pathlib import Path

import msgspec
import xxhash

MAGIC = b"TTSC1\n"
CHECKPOINT_BYTES_MAX = 512 * 1024 * 1024
"""A larger checkpoint is neither written nor read."""


class CheckpointError(ValueError):
    """The checkpoint cannot be used: start afresh."""


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """What a sidecar needs to go on where it was."""

    endpoint: str
    epoch: str
    engine: str
    """Identity of the engine process; empty where it was not known."""
    sequence: int
    digest: int
    """Of the frame at `sequence`."""
    group: int | None
    other_groups: dict[int, str | None]
    chains: bytes
    """As `BlockChains.dump` packs it."""


_decoder = msgspec.msgpack.Decoder(Checkpoint)


class CheckpointFile:
    """The checkpoint of `endpoint` in `directory`."""

    def __init__(self, directory: Path, endpoint: str) -> None:
        self.endpoint = endpoint
        # Names differ in colons and brackets only where they are different endpoints, and those all stay apart.
        safe = re.sub(r"[^0-9A-Za-z.-]", "_", endpoint)
        self.path = directory / f"{safe}-{xxhash.xxh3_64_hexdigest(endpoint.encode())[:8]}.checkpoint"

    def write(self, checkpoint: Checkpoint) -> int:
        """Replace the checkpoint; returns its size in bytes. Raises CheckpointError (too large) or OSError."""
        body = msgspec.msgpack.encode(checkpoint)
        if len(body) > CHECKPOINT_BYTES_MAX:
            raise CheckpointError(f"a checkpoint of {len(body)} bytes, at most {CHECKPOINT_BYTES_MAX}")
        partial = self.path.with_suffix(".partial")
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(MAGIC)
            file.write(xxhash.xxh3_64_digest(body))
            file.write(body)
        partial.replace(self.path)
        return len(MAGIC) + 8 + len(body)

    def read(self) -> Checkpoint | None:
        """The checkpoint, None if there is none. Raises CheckpointError."""
        try:
            if self.path.stat().st_size > CHECKPOINT_BYTES_MAX:
                raise CheckpointError("too large")
            data = self.path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise CheckpointError(str(error)) from error
        head = len(MAGIC) + 8
        if data[: len(MAGIC)] != MAGIC:
            raise CheckpointError("not a checkpoint of this version")
        if data[len(MAGIC) : head] != xxhash.xxh3_64_digest(data[head:]):
            raise CheckpointError("checksum differs")
        try:
            checkpoint = _decoder.decode(memoryview(data)[head:])
        except (msgspec.MsgspecError, RecursionError) as error:
            raise CheckpointError("malformed") from error
        if checkpoint.endpoint != self.endpoint:
            raise CheckpointError(f"of another endpoint, {checkpoint.endpoint}")
        return checkpoint
