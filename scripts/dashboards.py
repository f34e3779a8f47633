"""Writes the chart's dashboards from `panels`: `make dashboards`, with Grafana's own SDK."""

import json
from pathlib import Path

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as models

from scripts.panels import BOARDS, Board, Panel

FOLDER = Path(__file__).resolve().parent.parent / "charts" / "pdcluster" / "dashboards"
_SOURCE = models.DataSourceRef(type_val="prometheus", uid="$datasource")
_SPAN, _HEIGHT = 8, 7  # three beside each other


def document(board: Board) -> str:
    """The dashboard as Grafana imports it."""
    made = (
        dashboard.Dashboard(board.title)
        .uid(f"pdcluster-{board.name}")
        .description(board.text)
        .tags(["pdcluster"])
        .refresh("30s")
        .time("now-1h", "now")
        .timezone("browser")
        .readonly()
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .with_variable(
            dashboard.DatasourceVariable("datasource").type("prometheus").label("Source")
        )
    )
    for variable in _choices() if board.of_cluster else ():
        made = made.with_variable(variable)
    for row in board.rows:
        made = made.with_row(dashboard.Row(row.title))
        for panel in row.panels:
            made = made.with_panel(_panel(panel))
    return json.dumps(made.build(), cls=JSONEncoder, indent=1, sort_keys=True) + "\n"


def _choices() -> list[dashboard.QueryVariable]:
    ready = "pdcluster_router_ready"
    within = f'{ready}{{namespace="$namespace"}}'
    queries = {
        "namespace": f"label_values({ready}, namespace)",
        "cluster": f"label_values({within}, pdcluster_dev_cluster)",
    }
    return [
        dashboard.QueryVariable(name)
        .label(name.capitalize())
        .datasource(_SOURCE)
        .query(query)
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.ALPHABETICAL_ASC)
        for name, query in queries.items()
    ]


def _panel(panel: Panel) -> stat.Panel | timeseries.Panel:
    made: stat.Panel | timeseries.Panel
    if panel.kind == "number":
        options = common.ReduceDataOptions().calcs(["lastNotNull"])
        made = stat.Panel().reduce_options(options).decimals(2)
    else:
        made = (
            timeseries.Panel()
            .fill_opacity(10)
            .show_points(common_models.VisibilityMode.NEVER)
            .min(0)
        )
        if panel.kind == "stacked":
            made = made.stacking(common.StackingConfig().mode(common_models.StackingMode.NORMAL))
    made = made.title(panel.title).unit(panel.unit).datasource(_SOURCE)
    if panel.text:
        made = made.description(panel.text)
    made = made.span(_SPAN).height(_HEIGHT)
    for number, query in enumerate(panel.queries):
        target = prometheus.Dataquery().expr(query.expression).legend_format(query.legend)
        made = made.with_target(target.ref_id(chr(ord("A") + number)).range())
    return made


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for board in BOARDS:
        (FOLDER / f"{board.name}.json").write_text(document(board))


if __name__ == "__main__":
    main()
