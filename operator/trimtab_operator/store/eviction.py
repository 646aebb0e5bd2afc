"""Whether the store throws keys away when its memory is full: then a pool loses its document, or its engines' caches.

The one rule: it only asks, and a store that does not tell is no fault. What to do about it, `pool_conditions` says.
"""

import re
from collections.abc import Mapping
from typing import Any, Final

from trimtab_state import Store

SAFE: Final = "noeviction"
FIELD: Final = "maxmemory-policy"
QUESTIONS: Final = (("INFO", "memory"), ("CONFIG", "GET", FIELD))
"""Hosted stores mostly answer the first; a user that may not ask it may be allowed the second."""
_ANSWER: Final = re.compile(r"maxmemory.policy\W+([a-z-]+)")


async def evicting_policy(store: Store) -> str:
    """`maxmemory-policy` of a server that evicts keys; empty: there is none, or none that tells.

    Raises StateUnavailable.
    """
    for question in QUESTIONS:
        replies = await store.on_each_server(*question)
        found = [policy for reply in replies.values() if (policy := _policy_in(reply))]
        if found:
            return next((policy for policy in sorted(found) if policy != SAFE), "")
    return ""


def _policy_in(reply: Any) -> str:
    """Of an answer in whatever shape the client library gives it."""
    if isinstance(reply, Exception):
        return ""
    if isinstance(reply, Mapping):
        reply = " ".join(f"{_text(name)} {_text(value)}" for name, value in reply.items())
    elif isinstance(reply, list | tuple):
        reply = " ".join(map(_text, reply))
    answer = _ANSWER.search(_text(reply))
    return answer[1] if answer else ""


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
