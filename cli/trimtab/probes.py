"""Questions to ask a process that is starting: is its port open, is its page there, what does it say.

Its one rule: a probe answers True or False within its timeout and never raises for a process that is not there yet.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import socket
from collections.abc import Awaitable, Callable
from typing import Any, Final

import aiohttp

PROBE_TIMEOUT_S: Final = 1.0
_PORT_FIRST, _PORT_LAST = 18000, 32000
"""Below the range from which the system takes ports for outgoing connections, so that those cannot take ours."""


def is_free(port: int, *, host: str = "127.0.0.1") -> bool:
    """Whether nobody listens on the port now."""
    with socket.socket() as probe:
        # As the servers do it: a port whose last connections are still winding down can be had.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def free_ports(count: int, *, host: str = "127.0.0.1") -> list[int]:
    """`count` distinct TCP ports that nobody listens on now. Raises OSError where there are not enough."""
    shuffled = random.Random().sample(range(_PORT_FIRST, _PORT_LAST), _PORT_LAST - _PORT_FIRST)
    ports = list(itertools.islice((port for port in shuffled if is_free(port, host=host)), count))
    if len(ports) < count:
        raise OSError(f"no {count} free ports between {_PORT_FIRST} and {_PORT_LAST} on {host}")
    return ports


def listening(port: int, *, host: str = "127.0.0.1") -> Callable[[], Awaitable[bool]]:
    """Whether a TCP connection is accepted."""

    async def probe() -> bool:
        try:
            _, writer = await asyncio.wait_for(asyncio.open_connection(host, port), PROBE_TIMEOUT_S)
        except (OSError, TimeoutError):
            return False
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        return True

    return probe


def http_ok(url: str) -> Callable[[], Awaitable[bool]]:
    """Whether GET answers 200."""

    async def probe() -> bool:
        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=PROBE_TIMEOUT_S)) as session,
                session.get(url) as response,
            ):
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False

    return probe


async def get_json(url: str) -> Any:
    """The JSON that GET answers with status 200; None for anything else."""
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=PROBE_TIMEOUT_S)) as session,
            session.get(url) as response,
        ):
            return await response.json(content_type=None) if response.status == 200 else None
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
        return None


async def get_text(url: str) -> str:
    """The text that GET answers with status 200; empty for anything else."""
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=PROBE_TIMEOUT_S)) as session,
            session.get(url) as response,
        ):
            return await response.text() if response.status == 200 else ""
    except (aiohttp.ClientError, TimeoutError, OSError):
        return ""


def json_says(url: str, key: str) -> Callable[[], Awaitable[bool]]:
    """Whether GET answers a JSON object in which `key` is true."""

    async def probe() -> bool:
        answer = await get_json(url)
        return isinstance(answer, dict) and answer.get(key) is True

    return probe
