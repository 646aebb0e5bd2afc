"""Draws a dashboard from its JSON and the answers to its queries, for people who have no Grafana at hand.

The one rule: what is drawn is in the dashboard and in the answers; nothing is chosen or smoothed here. It is no
imitation of Grafana: the same panels at the same places, with the same titles, units, limits and legends.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator
from matplotlib.transforms import Bbox

from trimtab_observability.local_prometheus import Series

Answers = Mapping[int, Sequence[Sequence[Series]]]
"""Panel id to the series of each of its queries."""
COLUMNS: Final = 24
ROW_INCHES: Final = 0.36
WIDTH_INCHES: Final = 17.0
COLORS: Final = ("#3274d9", "#e0752d", "#299c46", "#a352cc", "#d44a3a", "#7d7a6f", "#b8a000", "#00a5a5")
NAMED: Final = {"green": "#299c46", "orange": "#e0752d", "red": "#d44a3a", "blue": "#3274d9"}
INK: Final = "#24292e"
LEGEND_MAX: Final = 8
EDGE_X: Final = 0.004
"""Between panels, of the figure's width."""


def draw(dashboard: Mapping[str, Any], answers: Answers, path: Path, *, caption: str) -> None:
    """One PNG of the whole dashboard."""
    height = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in dashboard["panels"]) + 2
    figure = plt.figure(figsize=(WIDTH_INCHES, height * ROW_INCHES), facecolor="#f4f5f5")
    top = 1.2 / height
    figure.text(0.006, 1 - 0.7 / height, dashboard["title"], fontsize=15, weight="bold", color=INK, va="center")
    figure.text(0.994, 1 - 0.7 / height, caption, fontsize=8.5, color="#6e7076", va="center", ha="right")
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        box = (
            place["x"] / COLUMNS + EDGE_X,
            1 - top - (place["y"] + place["h"]) / height,
            place["w"] / COLUMNS - 2 * EDGE_X,
            place["h"] / height - 0.12 / height,
        )
        if panel["type"] == "row":
            figure.text(box[0], box[1] + box[3] / 2, panel["title"], fontsize=11, weight="bold", color=INK, va="center")
        else:
            _panel(figure, box, panel, answers[panel["id"]], height)
    figure.savefig(path, dpi=72)
    plt.close(figure)


def legend_of(target: Mapping[str, Any], labels: Mapping[str, str]) -> str:
    """A series' name as Grafana makes it from the query's legend."""
    text = str(target["legendFormat"])
    if text == "__auto":
        return ", ".join(f"{key}={value}" for key, value in sorted(labels.items()) if key != "__name__")
    return re.sub(r"{{\s*(\w+)\s*}}", lambda found: labels.get(found[1], ""), text)


def value_text(value: float, unit: str) -> str:
    """A value with its unit, as short as it stays clear."""
    if unit == "percentunit":
        return f"{value * 100:.3g} %"
    if unit == "s":
        size = abs(value)
        if size >= 172_800:
            return f"{value / 86_400:.3g} d"
        for factor, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
            if size >= factor or (name == "µs"):
                return f"{value / factor:.3g} {name}" if size else "0 s"
    if unit == "bytes":
        return f"{value / 2**20:.4g} MiB"
    suffix = {"reqps": " req/s"}.get(unit, "")
    for factor, name in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if abs(value) >= factor:
            return f"{value / factor:.3g}{name}{suffix}"
    return f"{value:.3g}{suffix}"


def _panel(
    figure: Figure,
    box: tuple[float, float, float, float],
    panel: Mapping[str, Any],
    found: Sequence[Sequence[Series]],
    height: float,
) -> None:
    frame = figure.add_axes(box)
    frame.set_xticks([])
    frame.set_yticks([])
    frame.set_facecolor("white")
    for spine in frame.spines.values():
        spine.set_color("#dcdee1")
    left, bottom, width, tall = box
    figure.text(left + 0.004, bottom + tall - 0.5 / height, panel["title"], fontsize=9, color=INK, va="center")
    unit = panel.get("fieldConfig", {}).get("defaults", {}).get("unit", "short")
    head = 1.0 / height
    if panel["type"] == "stat":
        _number(figure, box, panel, found, unit, height)
        return
    if panel["type"] == "table":
        _table(frame, panel, found)
        return
    foot = 1.9 / height if panel["type"] == "timeseries" else 1.0 / height
    axes = figure.add_axes((left + 0.038, bottom + foot, width - 0.046, tall - head - foot))
    axes.tick_params(labelsize=7, colors="#6e7076", length=2)
    axes.grid(color="#eceef0", linewidth=0.6)
    for spine in axes.spines.values():
        spine.set_visible(False)
    if panel["type"] == "heatmap":
        unit = panel["options"]["yAxis"]["unit"]
        _heatmap(axes, found[0], unit)
    else:
        _lines(axes, panel, found, unit)
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda at_s, _: f"{datetime.fromtimestamp(at_s, UTC):%H:%M:%S}"))


def _lines(axes: Axes, panel: Mapping[str, Any], found: Sequence[Sequence[Series]], unit: str) -> None:
    defaults = panel["fieldConfig"]["defaults"]
    custom = defaults["custom"]
    named = [
        (legend_of(target, series.labels), series)
        for target, answer in zip(panel["targets"], found, strict=True)
        for series in sorted(answer, key=lambda series: sorted(series.labels.items()))
    ]
    is_stacked = custom.get("stacking", {}).get("mode") == "normal"
    below: dict[float, float] = {}
    for index, (name, series) in enumerate(named):
        color = COLORS[index % len(COLORS)]
        times = np.array([at_s for at_s, _ in series.points])
        values = np.array([value for _, value in series.points])
        if is_stacked:
            base = np.array([below.get(at_s, 0.0) for at_s, _ in series.points])
            known = np.nan_to_num(values)
            axes.fill_between(times, base, base + known, color=color, alpha=0.25, linewidth=0)
            values = base + known
            below |= {at_s: value for (at_s, _), value in zip(series.points, values.tolist(), strict=True)}
        # Not clipped: what is zero all the time lies on the axis, and is to be seen.
        axes.plot(times, values, color=color, linewidth=1.2, label=name, clip_on=False, zorder=3)
    if custom.get("scaleDistribution", {}).get("type") == "log":
        axes.set_yscale("log")
    elif "min" in defaults:
        top = defaults.get("max")
        highest = max((value for _, series in named for _, value in series.points if value == value), default=0.0)
        axes.set_ylim(bottom=defaults["min"], top=top or (axes.get_ylim()[1] if highest > 0 else 1.0))
    for step in defaults.get("thresholds", {}).get("steps", ())[1:]:
        if axes.get_ylim()[0] <= step["value"] <= axes.get_ylim()[1] * 4:
            axes.axhline(step["value"], color=NAMED[step["color"]], linewidth=1, linestyle="--")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: value_text(value, unit)))
    axes.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: ""))
    if named:
        handles, names = axes.get_legend_handles_labels()
        axes.legend(
            handles[:LEGEND_MAX],
            names[:LEGEND_MAX],
            loc="upper left",
            bbox_to_anchor=(-0.12, -0.12),
            ncols=min(4, len(named)) if max(map(len, names)) < 18 else 2,
            fontsize=6.5,
            frameon=False,
            handlelength=1.2,
            columnspacing=1.0,
            labelspacing=0.2,
        )


def _heatmap(axes: Axes, answer: Sequence[Series], unit: str) -> None:
    ordered = sorted(answer, key=lambda series: float(series.labels["le"]))
    times = sorted({at_s for series in ordered for at_s, _ in series.points})
    place = {at_s: index for index, at_s in enumerate(times)}
    counts = np.zeros((len(ordered), len(times)))
    for row, series in enumerate(ordered):
        for at_s, value in series.points:
            counts[row, place[at_s]] = value
    # Prometheus's buckets count all below their bound.
    cells = np.diff(counts, axis=0, prepend=0.0)
    axes.pcolormesh(
        np.array(times),
        np.arange(len(ordered)),
        np.where(cells > 0, cells, np.nan),
        cmap="Blues",
        shading="nearest",
        vmin=0,
    )
    axes.set_yticks(range(len(ordered)))
    axes.set_yticklabels(
        [
            "more" if series.labels["le"] == "+Inf" else "≤ " + value_text(float(series.labels["le"]), unit)
            for series in ordered
        ]
    )
    axes.grid(False)


def _number(
    figure: Figure,
    box: tuple[float, float, float, float],
    panel: Mapping[str, Any],
    found: Sequence[Sequence[Series]],
    unit: str,
    height: float,
) -> None:
    left, bottom, width, tall = box
    series = max(found[0], key=lambda series: series.points[-1][0])
    value = [value for _, value in series.points if value == value][-1]
    color = COLORS[0]
    for step in panel["fieldConfig"]["defaults"]["thresholds"]["steps"]:
        if step["value"] is None or value >= step["value"]:
            color = NAMED.get(step["color"], color)
    is_name = panel["options"]["textMode"] == "name"
    text = legend_of(panel["targets"][0], series.labels) if is_name else value_text(value, unit)
    if panel["options"]["graphMode"] == "area" and len(series.points) > 1:
        axes = figure.add_axes((left + 0.001, bottom + 0.05 / height, width - 0.002, 1.0 / height))
        axes.axis("off")
        values = np.nan_to_num(np.array([value for _, value in series.points]))
        axes.fill_between(range(len(values)), values, color=color, alpha=0.18, linewidth=0)
        axes.plot(values, color=color, linewidth=1)
        axes.set_ylim(min(0.0, float(values.min())), max(float(values.max()) * 1.1, 1e-9))
    figure.text(
        left + width / 2,
        bottom + tall * 0.5,
        text,
        fontsize=16 if len(text) < 10 else 12,
        color=color,
        ha="center",
        va="center",
        weight="bold",
    )


def _table(axes: Axes, panel: Mapping[str, Any], found: Sequence[Sequence[Series]]) -> None:
    organize = next(step["options"] for step in panel["transformations"] if step["id"] == "organize")
    units = {
        override["matcher"]["options"]: override["properties"][0]["value"]
        for override in panel["fieldConfig"]["overrides"]
    }
    columns = sorted(organize["indexByName"], key=organize["indexByName"].__getitem__)
    keys = [name for name in columns if name not in organize["renameByName"]]
    cells: dict[tuple[str, ...], dict[str, str]] = {}
    for target, answer in zip(panel["targets"], found, strict=True):
        heading = organize["renameByName"][f"Value #{target['refId']}"]
        for series in answer:
            row = cells.setdefault(tuple(series.labels.get(key, "") for key in keys), {})
            row[heading] = value_text(series.points[-1][1], units[heading])
    headings = [organize["renameByName"].get(name, name) for name in columns]
    body = [
        [*row, *(values.get(heading, "") for heading in headings[len(keys) :])] for row, values in sorted(cells.items())
    ]
    drawn = axes.table(
        cellText=body, colLabels=headings, loc="upper center", bbox=Bbox.from_bounds(0.004, 0.1, 0.992, 0.62)
    )
    drawn.auto_set_font_size(False)
    drawn.set_fontsize(9)
    for cell in drawn.get_celld().values():
        cell.set_edgecolor("#dcdee1")
