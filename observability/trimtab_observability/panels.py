"""Panels and variables as Trimtab's dashboards use them, over the builders of Grafana's foundation SDK.

The one rule: every panel says in its description what it shows and when to worry, asks the data source that the reader
chose, and has a width of its own. What is asked is the dashboards' business.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from grafana_foundation_sdk.builders import common, heatmap, stat, table, timeseries
from grafana_foundation_sdk.builders import dashboard as dashboards
from grafana_foundation_sdk.builders import prometheus as prometheus_query
from grafana_foundation_sdk.models import common as common_model
from grafana_foundation_sdk.models import dashboard as model
from grafana_foundation_sdk.models import heatmap as heatmap_model
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

SOURCE: Final = model.DataSourceRef(type_val="prometheus", uid="${datasource}")
WIDTH: Final = 24
"""Of a dashboard, in Grafana's columns."""
HEIGHT: Final = 8
NUMBER_HEIGHT: Final = 4
TABLE_HEIGHT: Final = 5
GREEN, ORANGE, RED, BLUE = "green", "orange", "red", "blue"
Panel = timeseries.Panel | stat.Panel | heatmap.Panel | table.Panel


@dataclass(frozen=True, slots=True)
class Query:
    """One question in PromQL, and how its series are named in the legend."""

    expr: str
    legend: str = ""


@dataclass(frozen=True, slots=True)
class Limit:
    """From this value on, this colour."""

    value: float
    color: str


def number(
    title: str,
    query: Query,
    *,
    text: str,
    unit: str = "short",
    span: int = 3,
    limits: Sequence[Limit] = (),
    base: str = BLUE,
    is_name: bool = False,
    decimals: int | None = None,
) -> stat.Panel:
    """A number, with its course behind it. `is_name`: the legend is the answer, not the value."""
    panel = (
        stat.Panel()
        .title(title)
        .description(text)
        .datasource(SOURCE)
        .unit(unit)
        .span(span)
        .height(NUMBER_HEIGHT)
        .thresholds(_thresholds(limits, base))
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        .graph_mode(common_model.BigValueGraphMode.NONE if is_name else common_model.BigValueGraphMode.AREA)
        .color_mode(common_model.BigValueColorMode.VALUE)
        .text_mode(common_model.BigValueTextMode.NAME if is_name else common_model.BigValueTextMode.VALUE)
        .with_target(_target(query, 0, is_instant=is_name))
    )
    return panel if decimals is None else panel.decimals(decimals)


def lines(
    title: str,
    *queries: Query,
    text: str,
    unit: str = "short",
    span: int = 8,
    limits: Sequence[Limit] = (),
    is_stacked: bool = False,
    is_log: bool = False,
    most: float | None = None,
) -> timeseries.Panel:
    """Courses over time. `limits` are drawn as dashed lines; `most`: where the axis ends."""
    panel = (
        timeseries.Panel()
        .title(title)
        .description(text)
        .datasource(SOURCE)
        .unit(unit)
        .span(span)
        .height(HEIGHT)
        .line_width(1.5)
        .fill_opacity(25 if is_stacked else 5)
        .show_points(common_model.VisibilityMode.NEVER)
        .legend(
            common.VizLegendOptions()
            .show_legend(True)
            .display_mode(common_model.LegendDisplayMode.LIST)
            .placement(common_model.LegendPlacement.BOTTOM)
        )
        .tooltip(
            common.VizTooltipOptions()
            .mode(common_model.TooltipDisplayMode.MULTI)
            .sort(common_model.SortOrder.DESCENDING)
        )
    )
    if is_log:
        panel = panel.scale_distribution(
            common.ScaleDistributionConfig().type(common_model.ScaleDistribution.LOG).log(10)
        )
    else:
        panel = panel.min(0)
    if most is not None:
        panel = panel.max(most)
    if is_stacked:
        panel = panel.stacking(common.StackingConfig().mode(common_model.StackingMode.NORMAL).group("A"))
    if limits:
        panel = panel.thresholds(_thresholds(limits, "transparent")).thresholds_style(
            common.GraphThresholdsStyleConfig().mode(common_model.GraphThresholdsStyleMode.DASHED)
        )
    for index, query in enumerate(queries):
        panel = panel.with_target(_target(query, index))
    return panel


def spread(title: str, query: Query, *, text: str, unit: str = "percentunit", span: int = 8) -> heatmap.Panel:
    """A histogram's buckets over time. `query` sums by `le`."""
    return (
        heatmap.Panel()
        .title(title)
        .description(text)
        .datasource(SOURCE)
        .span(span)
        .height(HEIGHT)
        .y_axis(heatmap.YAxisConfig().unit(unit))
        .color(
            heatmap.HeatmapColorOptions()
            .mode(heatmap_model.HeatmapColorMode.SCHEME)
            .scheme("Blues")
            .reverse(True)
            .steps(64)
        )
        .with_target(_target(Query(query.expr, "{{le}}"), 0).format(PromQueryFormat.HEATMAP))
    )


def rows(title: str, columns: Sequence[tuple[str, Query, str]], *, keys: Sequence[str], text: str) -> table.Panel:
    """A table of what is now. `columns`: (heading, query, unit); `keys`: the labels whose values make a row."""
    panel = table.Panel().title(title).description(text).datasource(SOURCE).span(WIDTH).height(TABLE_HEIGHT)
    renamed = {}
    for index, (heading, query, unit) in enumerate(columns):
        panel = panel.with_target(_target(query, index, is_instant=True).format(PromQueryFormat.TABLE))
        renamed[f"Value #{_letter(index)}"] = heading
        panel = panel.override_by_name(heading, [model.DynamicConfigValue(id_val="unit", value=unit)])
    return panel.transformations(
        [
            model.DataTransformerConfig(id_val="merge", options={}),
            model.DataTransformerConfig(
                id_val="organize",
                options={
                    "excludeByName": {"Time": True},
                    "indexByName": {name: place for place, name in enumerate([*keys, *renamed])},
                    "renameByName": renamed,
                },
            ),
        ]
    )


def title_row(title: str) -> dashboards.Row:
    """What the panels after it have in common."""
    return dashboards.Row(title)


def source_variable() -> dashboards.DatasourceVariable:
    """Which Prometheus."""
    return dashboards.DatasourceVariable("datasource").label("Data source").type("prometheus")


def label_variable(name: str, *, query: str, label: str, is_multi: bool) -> dashboards.QueryVariable:
    """The values of a label, as PromQL's `label_values` finds them."""
    variable = (
        dashboards.QueryVariable(name)
        .label(label)
        .datasource(SOURCE)
        .query(query)
        .refresh(model.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(model.VariableSort.ALPHABETICAL_ASC)
    )
    if is_multi:
        # Grafana puts this in place of "All": also pools that come later.
        variable = variable.multi(True).include_all(True).all_value(".*")
        variable = variable.current(model.VariableOption(selected=True, text="All", value="$__all"))
    return variable


def _target(query: Query, index: int, *, is_instant: bool = False) -> prometheus_query.Dataquery:
    target = prometheus_query.Dataquery().datasource(SOURCE).ref_id(_letter(index)).expr(query.expr)
    target = target.legend_format(query.legend or "__auto")
    return target.instant() if is_instant else target.range()


def _letter(index: int) -> str:
    return chr(ord("A") + index)


def _thresholds(limits: Sequence[Limit], base: str) -> dashboards.ThresholdsConfig:
    steps = [model.Threshold(value=None, color=base)]
    steps += [model.Threshold(value=limit.value, color=limit.color) for limit in limits]
    return dashboards.ThresholdsConfig().mode(model.ThresholdsMode.ABSOLUTE).steps(steps)
