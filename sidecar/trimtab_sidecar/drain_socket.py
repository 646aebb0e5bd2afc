"""How `drain` reaches the running sidecar: a socket in the checkpoint folder, which only this pod sees.

The one rule: the answer comes after the draining state was handed on. The socket takes one word and no other; it is no
network port, so nobody outside of the pod can take an endpoint out of service with it.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from pathlib import Path

DRAIN = b"drain\n"
DONE = b"draining\n"
SOCKET_NAME = "drain.sock"
PATH_BYTES_MAX = 100
"""A Unix socket's path may have some 107 bytes."""
ANSWER_S = 5.0
"""How long `ask_to_drain` waits for the answer."""


class DrainSocketError(Exception):
    """The running sidecar cannot be reached, or does not answer as it should."""


def socket_path(directory: Path) -> Path:
    path = directory / SOCKET_NAME
    if len(str(path).encode()) > PATH_BYTES_MAX:
        raise DrainSocketError(f"the path of the checkpoint folder is too long for a socket: {directory}")
    return path


async def serve_drain(directory: Path, drain: Callable[[], Awaitable[None]]) -> asyncio.Server:
    """Listen until the server is closed. Raises DrainSocketError or OSError."""
    path = socket_path(directory)
    with contextlib.suppress(FileNotFoundError):
        path.unlink()  # of a sidecar that is gone: there is one sidecar in a pod

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(OSError, TimeoutError, ValueError):
                async with asyncio.timeout(ANSWER_S):
                    if await reader.readline() == DRAIN:
                        await drain()
                        writer.write(DONE)
                        await writer.drain()
        finally:
            writer.close()

    server = await asyncio.start_unix_server(answer, path=str(path), limit=64)
    path.chmod(0o600)
    return server


async def ask_to_drain(directory: Path) -> None:
    """Returns once the running sidecar has handed the draining state on. Raises DrainSocketError."""
    try:
        async with asyncio.timeout(ANSWER_S):
            reader, writer = await asyncio.open_unix_connection(str(socket_path(directory)))
            try:
                writer.write(DRAIN)
                await writer.drain()
                answer = await reader.readline()
            finally:
                writer.close()
    except (OSError, TimeoutError) as error:
        raise DrainSocketError(f"no running sidecar: {type(error).__name__}") from error
    if answer != DONE:
        raise DrainSocketError("the running sidecar gave no answer")
