"""Builds the dashboards with the Grafana Foundation SDK, as JSON for the chart."""

from __future__ import annotations

import json
from typing import Any

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import (
    BigValueColorMode,
    LegendDisplayMode,
    LegendPlacement,
    StackingMode,
)
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DashboardLinkType,
    DataSourceRef,
    Threshold,
    ThresholdsMode,
    VariableRefresh,
)
from tools.monitoring.alerts import RUNBOOKS_URL
from tools.monitoring.capacity import CAPACITY
from tools.monitoring.on_call import ON_CALL
from tools.monitoring.operator_board import OPERATOR
from tools.monitoring.panels import POD, Board, Panel

DIRECTORY = "charts/kvtier/files/dashboards"
BOARDS = (ON_CALL, CAPACITY, OPERATOR)
SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
WIDTH, HEIGHT, STAT_HEIGHT = 6, 8, 5
"""Four panels in a row of Grafana's 24 columns."""
VARIABLES = {
    "namespace": "label_values(kvtier_tierd_info, namespace)",
    "policy": 'label_values(kvtier_tierd_info{namespace=~"$namespace"}, policy)',
    "model": 'label_values(vllm:kvtier_offered_tokens_total{namespace=~"$namespace"}, model_name)',
    "tier": f"label_values(kvtier_tier_capacity_bytes{{{POD}}}, tier)",
}
OPERATOR_VARIABLES = {
    "namespace": "label_values(kvtier_operator_policy_condition, policy_namespace)",
    "policy": "label_values(kvtier_operator_policy_condition"
    '{policy_namespace=~"$namespace"}, policy)',
}


def build(board: Board) -> dict[str, Any]:
    """The dashboard as Grafana reads it."""
    builder = (
        dashboard.Dashboard(board.title)
        .uid(f"kvtier-{board.name}")
        .description(board.description)
        .tags(["kvtier"])
        .refresh("30s")
        .time("now-6h", "now")
        .timezone("browser")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .readonly()
        .link(_link("Runbooks", RUNBOOKS_URL))
        .link(
            dashboard.DashboardLink("KVTier")
            .type(DashboardLinkType.DASHBOARDS)
            .tags(["kvtier"])
            .keep_time(True)
            .include_vars(True)
        )
        .with_variable(
            dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus")
        )
    )
    queries = OPERATOR_VARIABLES if board is OPERATOR else VARIABLES
    for name in board.variables:
        builder.with_variable(
            dashboard.QueryVariable(name)
            .label(name.capitalize())
            .datasource(SOURCE)
            .query(queries[name])
            .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
            .include_all(True)
            .all_value(".*")
            .multi(True)
        )
    for title, panels in board.rows.items():
        builder.with_row(dashboard.Row(title))
        for panel in panels:
            builder.with_panel(_panel(panel))
    document: dict[str, Any] = json.loads(JSONEncoder(sort_keys=True).encode(builder.build()))
    for number, each in enumerate(document["panels"], 1):
        each["id"] = number
    for variable in document["templating"]["list"]:
        variable["id"] = variable["name"]
    return document


def _link(title: str, url: str) -> dashboard.DashboardLink:
    return dashboard.DashboardLink(title).type(DashboardLinkType.LINK).url(url).target_blank(True)


def _panel(panel: Panel) -> stat.Panel | timeseries.Panel:
    builder: stat.Panel | timeseries.Panel = _stat(panel) if panel.single else _graph(panel)
    builder.title(panel.title).description(panel.description).unit(panel.unit).datasource(SOURCE)
    builder.span(WIDTH).height(STAT_HEIGHT if panel.single else HEIGHT)
    if panel.runbook:
        builder.links(
            [_link(f"Runbook: {panel.runbook}", f"{RUNBOOKS_URL}#{panel.runbook.lower()}")]
        )
    for reference, query in zip("ABCD", panel.queries, strict=False):
        builder.with_target(
            prometheus.Dataquery()
            .expr(query.expr)
            .legend_format(query.legend)
            .ref_id(reference)
            .datasource(SOURCE)
        )
    return builder


def _stat(panel: Panel) -> stat.Panel:
    steps = [Threshold(value=None, color="green")]
    if panel.bad is not None:
        steps.append(Threshold(value=panel.bad, color="red"))
    return (
        stat.Panel()
        .color_mode(BigValueColorMode.VALUE)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        .thresholds(dashboard.ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(steps))
    )


def _graph(panel: Panel) -> timeseries.Panel:
    stacking = StackingMode.NORMAL if panel.stacked else StackingMode.NONE
    return (
        timeseries.Panel()
        .axis_soft_min(0)
        .fill_opacity(30 if panel.stacked else 0)
        .stacking(common.StackingConfig().mode(stacking))
        .legend(
            common.VizLegendOptions()
            .display_mode(LegendDisplayMode.LIST)
            .placement(LegendPlacement.BOTTOM)
            .show_legend(True)
        )
    )


def files() -> dict[str, str]:
    """Paths in the repository, and contents."""
    return {
        f"{DIRECTORY}/{board.name}.json": json.dumps(build(board), indent=2, sort_keys=True) + "\n"
        for board in BOARDS
    }
