"""What replays showed, one policy beside another: numbers, a text table, a picture.

The one rule: a summary has the same keys for every policy, failed requests count as failed and nowhere else, and a
number that nobody measured is None.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import numpy.typing as npt

from trimtab_lab.replay import RequestResult

Floats = npt.NDArray[np.float64]

INK, MUTED, GRID = "#1f2430", "#6b7280", "#e5e7eb"
COLOURS = ("#2563eb", "#ea580c", "#059669", "#9333ea", "#db2777", "#0891b2")
"""One a policy, in order; told apart in grey and by colour-blind readers by the line styles that go with them."""
LINES = ("-", "--", "-.", ":", (0, (3, 1, 1, 1, 1, 1)), (0, (5, 1)))


class Summary(TypedDict):
    ttft_mean_s: float | None
    ttft_p50_s: float | None
    ttft_p95_s: float | None
    ttft_p99_s: float | None
    tpot_mean_s: float | None
    tpot_p99_s: float | None
    hit_rate: float | None
    decision_p50_s: float | None
    decision_p99_s: float | None
    requests: int
    failed: int
    requests_per_endpoint: dict[str, int]


def summarise(results: Sequence[RequestResult], *, decision_s: Sequence[float] = ()) -> Summary:
    """`decision_s`: times of the scheduling decisions, if they were measured elsewhere than in response headers."""
    good = [result for result in results if result.is_ok]
    ttft = [result.ttft_s for result in good if result.ttft_s is not None]
    tpot = [result.tpot_s for result in good if result.tpot_s is not None]
    decisions = list(decision_s) or [result.decision_s for result in good if result.decision_s is not None]
    prompt_tokens = sum(result.prompt_tokens for result in good)
    served = Counter(result.endpoint for result in good if result.endpoint)
    return Summary(
        ttft_mean_s=_mean(ttft),
        ttft_p50_s=_quantile(ttft, 0.50),
        ttft_p95_s=_quantile(ttft, 0.95),
        ttft_p99_s=_quantile(ttft, 0.99),
        tpot_mean_s=_mean(tpot),
        tpot_p99_s=_quantile(tpot, 0.99),
        hit_rate=sum(result.cached_tokens for result in good) / prompt_tokens if prompt_tokens else None,
        decision_p50_s=_quantile(decisions, 0.50),
        decision_p99_s=_quantile(decisions, 0.99),
        requests=len(results),
        failed=len(results) - len(good),
        requests_per_endpoint=dict(sorted(served.items())),
    )


def table(summaries: Mapping[str, Summary]) -> str:
    """The summaries side by side, a column each; the last column says how the last compares with the first."""
    rows: list[tuple[str, list[str], str]] = []
    for title, key, unit in (
        ("TTFT mean", "ttft_mean_s", "s"),
        ("TTFT p50", "ttft_p50_s", "s"),
        ("TTFT p95", "ttft_p95_s", "s"),
        ("TTFT p99", "ttft_p99_s", "s"),
        ("TPOT mean", "tpot_mean_s", "s"),
        ("TPOT p99", "tpot_p99_s", "s"),
        ("prefix hits", "hit_rate", "%"),
        ("decision p50", "decision_p50_s", "s"),
        ("decision p99", "decision_p99_s", "s"),
        ("requests", "requests", ""),
        ("failed", "failed", ""),
    ):
        values: list[float | None] = [summary[key] for summary in summaries.values()]  # type: ignore[literal-required]
        rows.append((title, [_shown(value, unit) for value in values], _compared(values, unit)))
    served = [summary["requests_per_endpoint"] for summary in summaries.values()]
    for name in sorted({name for counts in served for name in counts}):
        rows.append((f"  {name}", [str(counts.get(name, 0)) for counts in served], ""))
    has_comparison = len(summaries) > 1
    header = ["", *summaries]
    if has_comparison:
        header.append(f"{header[-1]} / {header[1]}")
    body = [[title, *cells, *([ratio] if has_comparison else [])] for title, cells, ratio in rows]
    widths = [max(len(row[column]) for row in [header, *body]) for column in range(len(header))]

    def line(cells: list[str]) -> str:
        numbers = [cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)]
        return "  ".join([cells[0].ljust(widths[0]), *numbers]).rstrip()

    return "\n".join([line(header), "-" * (sum(widths) + 2 * (len(widths) - 1)), *map(line, body)])


def plot(runs: Mapping[str, Sequence[RequestResult]], path: Path, *, title: str = "") -> None:
    """A PNG: TTFT as cumulative shares, prefix hits, and requests per endpoint, for each policy. Policies keep their
    colour throughout. Raises ValueError without a single good request."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    summaries = {policy: summarise(results) for policy, results in runs.items()}
    if all(summary["ttft_p50_s"] is None for summary in summaries.values()):
        raise ValueError("there is nothing to plot: no request got a token")
    style: dict[Any, Any] = {
        "font.family": "DejaVu Sans", "font.size": 10.5, "text.color": INK, "axes.labelcolor": MUTED,
        "axes.edgecolor": GRID, "axes.spines.top": False, "axes.spines.right": False, "axes.titlelocation": "left",
        "axes.titleweight": "bold", "axes.titlesize": 11.5, "axes.titlepad": 12, "xtick.color": MUTED,
        "ytick.color": MUTED, "xtick.major.size": 0, "ytick.major.size": 0,
    }  # fmt: skip
    with pyplot.rc_context(style):
        figure = pyplot.figure(figsize=(13, 5.2), layout="constrained")
        figure.get_layout_engine().set(wspace=0.06)  # type: ignore[union-attr,call-arg]
        left, middle, right = figure.subplots(1, 3, width_ratios=(1.7, 0.8 + 0.1 * len(runs), 1.3))
        _plot_ttft(left, runs, summaries)
        _plot_hits(middle, summaries)
        _plot_endpoints(right, summaries)
        if title:
            figure.suptitle(title, x=0.01, ha="left", fontsize=14, fontweight="bold")
        figure.savefig(path, dpi=150, facecolor="white")
        pyplot.close(figure)


def _plot_ttft(axes: Any, runs: Mapping[str, Sequence[RequestResult]], summaries: Mapping[str, Summary]) -> None:
    for number, (policy, results) in enumerate(runs.items()):
        ttft = np.sort(np.array([result.ttft_s for result in results if result.is_ok and result.ttft_s is not None]))
        if not len(ttft):
            continue
        share = np.arange(1, len(ttft) + 1) / len(ttft)
        colour, mean = COLOURS[number % len(COLOURS)], summaries[policy]["ttft_mean_s"]
        label = f"{policy}  (mean {_shown(mean, 's')})"
        axes.plot(ttft, share, color=colour, linestyle=LINES[number % len(LINES)], linewidth=2.2, label=label)
        p95 = summaries[policy]["ttft_p95_s"]
        axes.plot([p95], [0.95], "o", color=colour, markersize=6, markeredgecolor="white", zorder=5)
    axes.axhline(0.95, color=GRID, linewidth=1, zorder=0)
    axes.annotate("p95", (1, 0.95), xycoords=("axes fraction", "data"), xytext=(2, 0), textcoords="offset points",
                  color=MUTED, fontsize=9, va="center")  # fmt: skip
    axes.set_xscale("log")
    axes.set_ylim(0, 1.01)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g} s" if value >= 1 else f"{value * 1e3:g} ms")
    axes.grid(axis="both", color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.set_title("Time to first token: share of requests")
    axes.set_xlabel("time to first token (logarithmic)")
    axes.tick_params(which="minor", length=0)
    axes.legend(frameon=False, loc="upper left", handlelength=2.6)


def _plot_hits(axes: Any, summaries: Mapping[str, Summary]) -> None:
    rates = [100 * (summary["hit_rate"] or 0.0) for summary in summaries.values()]
    places = np.arange(len(summaries))
    axes.bar(places, rates, width=0.62, color=[COLOURS[number % len(COLOURS)] for number in range(len(rates))])
    for place, rate in zip(places, rates, strict=True):
        axes.annotate(f"{rate:.0f} %", (place, rate), xytext=(0, 4), textcoords="offset points", ha="center",
                      fontweight="bold")  # fmt: skip
    axes.set_xticks(places, [policy.replace("_", "\n") for policy in summaries])
    axes.set_ylim(0, max(10.0, max(rates) * 1.2))
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.set_title("Prompt tokens found cached")


def _plot_endpoints(axes: Any, summaries: Mapping[str, Summary]) -> None:
    served = [summary["requests_per_endpoint"] for summary in summaries.values()]
    endpoints = sorted({name for counts in served for name in counts})
    axes.set_title("Requests per endpoint")
    if not endpoints:
        axes.set_axis_off()
        axes.text(0.0, 0.9, "not told by the gateway", color=MUTED, transform=axes.transAxes)
        return
    height = 0.8 / len(summaries)
    places = np.arange(len(endpoints))
    most = 0
    for number, per_endpoint in enumerate(served):
        counts = [per_endpoint.get(name, 0) for name in endpoints]
        most = max(most, *counts)
        offsets = places + (number - (len(summaries) - 1) / 2) * height
        axes.barh(offsets, counts, height=height * 0.88, color=COLOURS[number % len(COLOURS)])
        for place, count in zip(offsets, counts, strict=True):
            axes.annotate(str(count), (count, place), xytext=(4, 0), textcoords="offset points", va="center",
                          fontsize=9, color=MUTED)  # fmt: skip
    axes.set_yticks(places, endpoints)
    axes.invert_yaxis()
    axes.set_xlim(0, most * 1.15)
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None


def _quantile(values: Sequence[float], share: float) -> float | None:
    return float(np.quantile(values, share)) if values else None


def _shown(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    if unit == "%":
        return f"{100 * value:.1f} %"
    if unit != "s":
        return f"{value:,}"
    for limit, factor, name in ((1e-3, 1e6, "µs"), (1.0, 1e3, "ms")):
        if value < limit:
            return f"{value * factor:.3g} {name}"
    return f"{value:.3g} s"


def _compared(values: Sequence[float | None], unit: str) -> str:
    first, last = values[0], values[-1]
    if unit == "" or first is None or last is None:
        return ""
    if unit == "%":
        return f"{100 * (last - first):+.1f} points"
    return f"x {last / first:.2f}" if first > 0 else ""
