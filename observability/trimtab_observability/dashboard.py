"""What Trimtab's dashboards have in common: name, variables, links to one another, and the PromQL that they share.

The one rule: all labels of the fleet's own metrics are `pool`, `pool_namespace` and `model_server`; which process
answered is Prometheus's `instance`. Every replica of a pool shows every endpoint, so a sum over endpoints first takes
one of the replicas' values.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from grafana_foundation_sdk.builders import dashboard as dashboards
from grafana_foundation_sdk.models import dashboard as model

from trimtab_observability.panels import Panel, label_variable, source_variable

TAG: Final = "trimtab"
MANY: Final = 'pool_namespace=~"$namespace"'
"""The pools of the chosen namespaces."""
ONE: Final = 'pool_namespace=~"$namespace", pool=~"$pool"'
"""The chosen pool."""
BY_POOL: Final = "pool_namespace, pool"


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """One dashboard: `name` is its file's and its uid's end."""

    name: str
    title: str
    text: str
    is_of_one_pool: bool
    rows: Sequence[tuple[str, Sequence[Panel]]]
    """(heading, panels); the heading is empty for the panels on top."""

    @property
    def uid(self) -> str:
        """In Grafana's addresses."""
        return f"{TAG}-{self.name}"


def built(page: Page) -> model.Dashboard:
    """The page as Grafana's own model of it, panels numbered in their order."""
    dashboard = (
        dashboards.Dashboard(page.title)
        .uid(page.uid)
        .description(page.text)
        .tags([TAG])
        .timezone("browser")
        .refresh("30s")
        .time("now-1h", "now")
        .tooltip(model.DashboardCursorSync.CROSSHAIR)
        .with_variable(source_variable())
        .with_variable(
            label_variable(
                "namespace",
                query="label_values(trimtab_ready, pool_namespace)",
                label="Namespace",
                is_multi=not page.is_of_one_pool,
            )
        )
        .link(
            dashboards.DashboardLink("Trimtab")
            .type(model.DashboardLinkType.DASHBOARDS)
            .tags([TAG])
            .include_vars(True)
            .keep_time(True)
        )
    )
    if page.is_of_one_pool:
        query = 'label_values(trimtab_ready{pool_namespace=~"$namespace"}, pool)'
        dashboard = dashboard.with_variable(label_variable("pool", query=query, label="Pool", is_multi=False))
    number = 0
    for heading, panels in page.rows:
        if heading:
            number += 1
            dashboard = dashboard.with_row(dashboards.Row(heading).id(number))
        for panel in panels:
            number += 1
            dashboard = dashboard.with_panel(panel.id(number))
    return dashboard.build()


def rate(metric: str, where: str) -> str:
    """A counter's rate, resets of its process included, over the time that Grafana finds right."""
    return f"rate({metric}{{{where}}}[$__rate_interval])"


def quantile(share: float, histogram: str, where: str, *, by: str = "") -> str:
    """A quantile of a histogram, for all that `by` tells apart."""
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({share}, sum by ({labels}) ({rate(f'{histogram}_bucket', where)}))"


def of_endpoints(metric: str, where: str, *, by: str = "model_server") -> str:
    """A gauge of endpoints, as one of the replicas has it."""
    return f"max by ({by}) ({metric}{{{where}}})"


def ratio(over: str, under: str, where: str, *, by: str = "") -> str:
    """Two counters, the one as a share of the other."""
    sums = f"sum by ({by})" if by else "sum"
    return f"{sums} ({rate(over, where)}) / {sums} ({rate(under, where)})"
