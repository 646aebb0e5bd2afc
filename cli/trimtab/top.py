"""`trimtab top`: what running pickers believe of their pool now, an endpoint a line.

Its one rule: it shows what /state and /metrics of the pickers say and works out nothing but rates. It must not change
anything in a picker.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import aiohttp

from trimtab.errors import UsageError
from trimtab.picker_pages import fetch_json, fetch_text, session

CLEAR: Final = "\x1b[H\x1b[2J"
"""What makes a terminal's screen empty."""
PLACED: Final = "trimtab_decisions_total"
REFUSED: Final = "trimtab_rejected_total"
WAITING: Final = "trimtab_waiting_requests"
PROMPT_TOKENS: Final = "trimtab_prompt_tokens_total"
HIT_TOKENS: Final = "trimtab_predicted_hit_tokens_total"
COLUMNS: Final = (
    *("endpoint", "state", "cache", "B", "external", "reported", "queued", "P x (B+1)", "prefill/s", "KV", "chunks"),
)
METRICS: Final = (PLACED, REFUSED, WAITING, PROMPT_TOKENS, HIT_TOKENS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What one picker said."""

    url: str
    time_s: float
    """When, by this process's monotonic clock."""
    state: Mapping[str, Any]
    """/state; empty where it did not answer."""
    metrics: Mapping[str, float]
    """Of METRICS, the sums over all labels."""


async def top(urls: Sequence[str]) -> str:
    """The text to print. Raises UsageError where a picker does not answer."""
    async with session() as pages:
        return as_text(await asyncio.gather(*(_look(pages, url) for url in urls)))


async def watch(urls: Sequence[str], *, every_s: float, show: Callable[[str], None]) -> None:
    """Look again and again until cancelled; a picker that does not answer is shown as such."""
    before: list[Look] = []
    async with session() as pages:
        while True:
            looks = await asyncio.gather(*(_look_or_not(pages, url) for url in urls))
            show(as_text(looks, before))
            before = looks
            await asyncio.sleep(every_s)


def as_text(looks: Sequence[Look], before: Sequence[Look] = ()) -> str:
    """A line for each picker, then one for each endpoint as the first picker that is ready sees it. `before`: an
    earlier look at the same pickers, for rates; without one, totals since a picker's start are shown."""
    earlier = {look.url: look for look in before if look.state}
    shown = next((look for look in looks if look.state.get("ready")), looks[0])
    answering = [look for look in looks if look.state]
    is_alike = len({look.state["index_digest"] for look in answering}) <= 1
    lines = [_summary(shown, answering, is_alike=is_alike), ""] if shown.state else []
    per = "/s" if earlier else ""
    headings = ("picker", "ready", "store", "open", f"requests{per}", f"refused{per}", "waiting", "hit rate", "index")
    lines += _aligned([headings, *(_picker_row(look, earlier.get(look.url), shown) for look in looks)])
    if endpoints := [row for row in shown.state.get("endpoints", ()) if row["member"] or row["requests"]]:
        # Of those that are gone only what still has requests is of interest.
        lines += ["", *_aligned([COLUMNS, *map(_endpoint_row, endpoints)])]
    return "\n".join(lines)


def _summary(shown: Look, answering: Sequence[Look], *, is_alike: bool) -> str:
    state = shown.state
    why = f" ({state['policy_reason']})" if state.get("policy_reason") else ""
    hotspots = state["hotspots"]
    acted = sum(hotspot["acted_on"] for hotspot in hotspots)
    candidates = sum(row["candidate"] for row in state["endpoints"])
    parts = [
        f"placed by {state['policy']}{why}",
        f"{candidates} of {state['members']} endpoints may be chosen",
        f"hotspots: {len(hotspots)}, {acted} acted on" if hotspots else "no hotspot",
    ]
    if len(answering) > 1:
        parts.append("pickers know the same caches" if is_alike else "pickers do not know the same caches (now)")
    return ", ".join(parts)


def _picker_row(look: Look, earlier: Look | None, shown: Look) -> tuple[str, ...]:
    if not look.state:
        return (look.url, "no answer", *["-"] * 7)
    since_s = look.time_s - earlier.time_s if earlier is not None else 0.0

    def grown(name: str) -> float:
        then = earlier.metrics[name] if earlier is not None else 0.0
        return look.metrics[name] - (then if look.metrics[name] >= then else 0.0)  # a new process counts anew

    def count(name: str) -> str:
        return f"{grown(name) / since_s:,.1f}" if since_s else f"{grown(name):,.0f}"

    prompt_tokens = grown(PROMPT_TOKENS)
    return (
        look.url,
        _yes(look.state["ready"]),
        _yes(look.state["connected"]),
        f"{look.state['open_reservations']:,}",
        count(PLACED),
        count(REFUSED),
        f"{look.metrics[WAITING]:,.0f}",
        f"{grown(HIT_TOKENS) / prompt_tokens:.1%}" if prompt_tokens else "-",
        "" if look is shown else ("alike" if look.state["index_digest"] == shown.state["index_digest"] else "differs"),
    )


def _endpoint_row(row: Mapping[str, Any]) -> tuple[str, ...]:
    state, engines = row["state"], row["reported_requests"]
    # Whether a cache is known is worked out for those that may be chosen alone.
    known = "exact" if row["candidate"] else "-"
    return (
        row["endpoint"],
        state if row["candidate"] or state != "serving" else "not chosen",
        row["approximate"] or ("unsynced" if row["unsynced"] else known),
        f"{row['requests'] + row['external']:,}",
        f"{row['external']:,}",
        "-" if engines is None else f"{engines:,}",
        f"{row['queued_tokens']:,.0f}",
        f"{row['product']:,.0f}",
        f"{row['prefill_rate']:,.0f}",
        "-" if row["kv_usage"] is None else f"{row['kv_usage']:.0%}",
        f"{row['index_chunks']:,}",
    )


def _yes(value: bool) -> str:
    return "yes" if value else "NO"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Names to the left, numbers to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join([row[0].ljust(widths[0]), *cells]).rstrip())
    return lines


async def _look(pages: aiohttp.ClientSession, url: str) -> Look:
    state, metrics = await asyncio.gather(fetch_json(pages, url, "/state"), fetch_text(pages, url, "/metrics"))
    return Look(url=url, time_s=time.monotonic(), state=state, metrics={name: _sum(metrics, name) for name in METRICS})


async def _look_or_not(pages: aiohttp.ClientSession, url: str) -> Look:
    try:
        return await _look(pages, url)
    except UsageError:
        return Look(url=url, time_s=time.monotonic(), state={}, metrics={})


def _sum(page: str, name: str) -> float:
    """Over all labels of one metric, in Prometheus's text format."""
    starts = (name + "{", name + " ")
    return sum(float(line.rpartition(" ")[2]) for line in page.splitlines() if line.startswith(starts))
