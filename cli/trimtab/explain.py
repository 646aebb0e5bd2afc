"""`trimtab explain`: the last decisions of running pickers, each with what every endpoint had to offer, and the last
requests that they refused.

Its one rule: it shows what the picker wrote down at the moment of the choice and computes nothing anew. It must not
change anything in the picker.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import aiohttp

from trimtab.picker_pages import fetch_json, session

LAST_MAX: Final = 256
"""Decisions that a picker keeps."""
_COLUMNS: Final = ("endpoint", "hit", "queued", "P", "B")
_DECIDED_BY: Final = {"product": "score = P x B", "least_request": "score = B", "round_robin": "turn"}
"""The last column, by policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainOptions:
    """What to show."""

    urls: tuple[str, ...]
    """Metrics ports of the pickers to ask: each one knows its own decisions only."""
    last: int
    """How many decisions, the newest of all pickers together."""
    as_json: bool


def explain(options: ExplainOptions) -> str:
    """The text to print, the newest decision last in both forms. Raises UsageError where no picker answers."""
    decisions = asyncio.run(_fetch_all(options))
    if options.as_json:
        return json.dumps(decisions, indent=2)
    if not decisions:
        return "No request was placed or refused here yet: send one through the gateway. Each picker has its own."
    return "\n\n".join(as_table(decision) for decision in decisions)


def as_table(decision: Mapping[str, Any]) -> str:
    """One decision as lines: the request, then a row for each endpoint, best first."""
    if decision.get("refused"):
        return "\n".join([_title(decision), *(f"  {e['endpoint']}  {e['verdict']}" for e in decision["endpoints"])])
    columns = (*_COLUMNS, _DECIDED_BY.get(decision["policy"], "score"))
    rows = [_row(endpoint) for endpoint in decision["endpoints"]]
    widths = [max(len(row[column]) for row in [columns, *rows]) for column in range(len(columns))]
    lines = [_title(decision), _aligned(columns, widths)]
    for row, endpoint in zip(rows, decision["endpoints"], strict=True):
        mark = "<--" if endpoint["verdict"].startswith("won") else "   "
        lines.append(f"{_aligned(row, widths)}  {mark} {endpoint['verdict']}")
    hidden = decision["candidate_count"] - sum(1 for e in decision["endpoints"] if e["batch"] is not None)
    if hidden > 0:
        lines.append(f"  and {hidden} more")
    for endpoint in decision["endpoints"]:
        if endpoint.get("terms"):
            lines.append(f"  {endpoint['endpoint']}: {_terms(endpoint['terms'])}")
    if decision.get("hotspot"):
        lines.append(
            f"  Changed by the hotspot detector: class {decision['hotspot']} brings more load than the endpoints that "
            "hold its prefix can carry"
        )
    if decision.get("approximate"):
        detail = f" ({decision['approximate_detail']})" if decision.get("approximate_detail") else ""
        lines.append(f"  The prefix is not known exactly: {decision['approximate']}{detail}")
    return "\n".join(lines)


def _title(decision: Mapping[str, Any]) -> str:
    parts = [
        f"{decision['age_s']:.1f} s ago",
        f"{decision['kind']} for {decision['model']}",
    ]
    if refused := decision.get("refused"):
        parts.append(f"refused with {refused['status']} {refused['reason']}: {refused['message']}")
    else:
        parts.append(f"{decision['prompt_tokens']} prompt tokens")
    if decision.get("class"):
        parts.append(f"class {decision['class']}")
    if decision.get("objective"):
        parts.append(f"objective {decision['objective']}" + ("" if decision["objective_known"] else " (not known)"))
    if decision.get("priority"):
        parts.append(f"priority {decision['priority']}")
    if decision.get("waited_s"):
        parts.append(f"waited {decision['waited_s']:.2f} s for a place" + (" in vain" if refused else ""))
    if decision.get("moved_from"):
        others = ", ".join(decision["moved_from"])
        parts.append(f"moved from {others}, which another picker chose at the same moment, or which went then")
    if decision.get("request_id"):
        parts.append(f"request {decision['request_id']}")
    if decision.get("picker"):
        parts.append(f"picker {decision['picker']}")
    return _printable(", ".join(parts))


def _printable(text: str) -> str:
    """Clients choose some of the words, and a terminal obeys characters that are no text."""
    return "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in text)


def _row(endpoint: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        endpoint["endpoint"],
        _number(endpoint.get("hit_tokens")),
        _number(endpoint.get("queued_tokens")),
        _number(endpoint.get("p_tokens")),
        _weight(endpoint.get("weighted_batch", endpoint.get("batch"))),
        endpoint.get("turn") or _number(endpoint.get("score")),
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _weight(value: float | None) -> str:
    """B: a whole number but where classes weigh."""
    return "-" if value is None else f"{value:,.2f}".rstrip("0").rstrip(".")


def _terms(terms: Mapping[str, float]) -> str:
    """What the class of the request and the network did to P and B there."""
    words = {
        "expert_factor": "experts x {:.2f}",
        "network_tokens": "network + {:,.0f} tokens",
        "p_before_log_tokens": "P before its logarithm {:,.0f}",
        "weighted_batch": "B with the weights of classes {:,.2f}",
    }
    return ", ".join(text.format(terms[name]) for name, text in words.items() if name in terms)


def _aligned(cells: Sequence[str], widths: Iterable[int]) -> str:
    name_width, *number_widths = widths
    numbers = "  ".join(cell.rjust(width) for cell, width in zip(cells[1:], number_widths, strict=True))
    return f"  {cells[0].ljust(name_width)}  {numbers}"


async def _fetch_all(options: ExplainOptions) -> list[dict[str, Any]]:
    """The newest `last` decisions of all pickers, the newest last."""
    async with session() as pages:
        answers = await asyncio.gather(*(_fetch(pages, url, options.last) for url in options.urls))
    decisions = [decision for answer in answers for decision in answer]
    newest_first = sorted(decisions, key=lambda decision: float(decision["age_s"]))
    return newest_first[: options.last][::-1]


async def _fetch(pages: aiohttp.ClientSession, url: str, last: int) -> list[dict[str, Any]]:
    document = await fetch_json(pages, url, f"/decisions?count={last}")
    return [{**decision, "picker": url} for decision in document["decisions"]]
