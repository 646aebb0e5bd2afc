"""The pages of running pickers, as `explain` and `top` read them.

Its one rule: what is wrong with an answer is said with the flag that named the picker and the remedy. It must not know
what is on the pages.
"""

from __future__ import annotations

import json
from typing import Any, Final

import aiohttp

from trimtab.errors import UsageError

TIMEOUT_S: Final = 10.0


def session() -> aiohttp.ClientSession:
    """For some pickers' pages; to be closed."""
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S))


async def fetch_text(session: aiohttp.ClientSession, url: str, path: str) -> str:
    """A page of the picker whose metrics port is at `url`. Raises UsageError."""
    page = f"{url.rstrip('/')}{path}"
    try:
        async with session.get(page) as response:
            if response.status != 200:
                raise UsageError(f"--url {url}: {page} answered {response.status}; is this a picker's metrics port?")
            return await response.text()
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        reason = str(error) or type(error).__name__
        raise UsageError(
            f"--url {url}: no picker answers there ({reason}). `trimtab local` prints its pickers' URLs; in a cluster, "
            "forward port 9090 of a picker's pod: kubectl port-forward deploy/trimtab-POOL 9090"
        ) from error
    except ValueError as error:
        raise UsageError(f"--url {url}: {page} is no text; is this a picker's metrics port?") from error


async def fetch_json(session: aiohttp.ClientSession, url: str, path: str) -> Any:
    """The same, of a page that is JSON. Raises UsageError."""
    text = await fetch_text(session, url, path)
    try:
        return json.loads(text)
    except ValueError as error:
        raise UsageError(f"--url {url}: {path} is no JSON; is this a picker's metrics port?") from error
