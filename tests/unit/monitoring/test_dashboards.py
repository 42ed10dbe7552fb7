"""Dashboards ask for metrics that exist, explain themselves, and lead to runbooks."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tools.monitoring import metrics_page
from tools.monitoring.alerts import ALERTS, RUNBOOKS_URL
from tools.monitoring.capacity import CAPACITY
from tools.monitoring.on_call import ON_CALL
from tools.monitoring.operator_board import OPERATOR
from tools.monitoring.panels import Board

REPOSITORY = Path(__file__).resolve().parents[3]
BOARDS = (ON_CALL, CAPACITY, OPERATOR)
UNITS = {"short", "percentunit", "cps", "s", "bytes", "Bps"}
NAME = re.compile(r"\b(?:vllm:)?kvtier_\w+")
SUFFIX = re.compile(r"_(bucket|count|sum)$")


def metric_names() -> set[str]:
    rows = (*metrics_page.tierd(), *metrics_page.engine(), *metrics_page.operator())
    return {row.name for row in rows}


def committed(board: Board) -> dict[str, Any]:
    path = REPOSITORY / "charts/kvtier/files/dashboards" / f"{board.name}.json"
    document: dict[str, Any] = json.loads(path.read_text())
    return document


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.name)
def test_every_query_asks_for_metrics_that_exist(board: Board) -> None:
    known = metric_names()
    for panel in board.panels():
        for query in panel.queries:
            names = NAME.findall(query.expr)
            assert names
            for name in names:
                assert name in known or SUFFIX.sub("", name) in known, (panel.title, name)


def test_every_alert_asks_for_metrics_that_exist() -> None:
    known = metric_names()
    for alert in ALERTS:
        for name in NAME.findall(alert.expr):
            assert name in known, (alert.name, name)


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.name)
def test_panels_have_a_description_a_unit_and_a_runbook_that_exists(board: Board) -> None:
    titles = [panel.title for panel in board.panels()]
    assert len(titles) == len(set(titles))
    alerts = {alert.name for alert in ALERTS}
    for panel in board.panels():
        assert panel.description.endswith("."), panel.title
        assert panel.unit in UNITS, panel.title
        assert panel.runbook == "" or panel.runbook in alerts, panel.title


def test_every_alert_has_a_panel() -> None:
    linked = {panel.runbook for board in BOARDS for panel in board.panels()}
    assert {alert.name for alert in ALERTS} - linked == set()


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.name)
def test_rates_follow_the_interval_of_the_scrape(board: Board) -> None:
    for panel in board.panels():
        for query in panel.queries:
            assert query.expr.count("rate(") == query.expr.count("[$__rate_interval]")


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.name)
def test_the_json_has_every_panel_and_variable_with_the_chosen_data_source(board: Board) -> None:
    document = committed(board)
    panels = [each for each in document["panels"] if each["type"] != "row"]
    assert [each["title"] for each in panels] == [panel.title for panel in board.panels()]
    for each in panels:
        assert each["datasource"]["uid"] == "${datasource}"
        assert each["fieldConfig"]["defaults"]["unit"] in UNITS
    variables = [each["name"] for each in document["templating"]["list"]]
    assert variables == ["datasource", *board.variables]
    links = [link["url"] for each in panels for link in each.get("links") or ()]
    assert links
    assert all(link.startswith(f"{RUNBOOKS_URL}#") for link in links)
    ids = [each["id"] for each in document["panels"]]
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.name)
def test_panels_do_not_overlap(board: Board) -> None:
    taken: set[tuple[int, int]] = set()
    for each in committed(board)["panels"]:
        place = each["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (place["x"] + column, place["y"] + line)
            for column in range(place["w"])
            for line in range(place["h"])
        }
        assert not cells & taken, each["title"]
        taken |= cells


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.name)
def test_the_json_has_the_schema_of_grafana(board: Board) -> None:
    models = pytest.importorskip(
        "grafana_foundation_sdk.models.dashboard", reason="run: make install"
    )
    plugins = pytest.importorskip("grafana_foundation_sdk.cog.plugins", reason="run: make install")
    plugins.register_default_plugins()
    from grafana_foundation_sdk.cog.encoder import JSONEncoder

    document = committed(board)
    parsed = models.Dashboard.from_json(document)
    again = json.loads(JSONEncoder(sort_keys=True).encode(parsed))
    assert again == document
