"""Every series that an alert or a panel selects exists before anything has happened."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.unit.monitoring.test_metric_names import engine
from tools.monitoring import metrics_page
from tools.monitoring.alerts import ALERTS
from tools.monitoring.dashboards import BOARDS

SELECTOR = re.compile(r"((?:vllm:)?kvtier_\w+)(?:\{([^}]*)\})?")
MATCHER = re.compile(r'(\w+)(=~|!~|!=|=)"([^"]*)"')
FROM_PROMETHEUS = {"namespace", "pod", "policy", "policy_namespace", "model_name"}
"""Labels that monitors, vLLM or the policy give; dashboards select them by variables."""
Labels = Mapping[str, str]


def selectors() -> Iterator[tuple[str, str]]:
    """Who selects, and a selector."""
    for alert in ALERTS:
        for found in SELECTOR.finditer(alert.expr):
            yield alert.name, found.group()
    for board in BOARDS:
        for panel in board.panels():
            for query in panel.queries:
                for found in SELECTOR.finditer(query.expr):
                    yield panel.title, found.group()


@pytest.fixture(scope="module")
def series() -> dict[str, list[Labels]]:
    families = [
        *metrics_page.tierd_families(),
        *text_string_to_metric_families(engine()),
        *metrics_page.operator_families(),
    ]
    found: dict[str, list[Labels]] = {}
    for family in families:
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample.labels)
    return found


def missing(selector: str, series: Mapping[str, Iterable[Labels]]) -> list[str]:
    """Values that a selector names and no series has; the selector itself if nothing matches it."""
    parts = SELECTOR.fullmatch(selector)
    assert parts is not None, selector
    candidates = list(series.get(parts[1], ()))
    for label, operator, value in MATCHER.findall(parts[2] or ""):
        if label in FROM_PROMETHEUS or value.startswith("$"):
            continue
        if operator in ("=", "=~"):
            values = value.split("|") if operator == "=~" else [value]
            absent = [each for each in values if not _having(candidates, label, each)]
            if absent:
                return [f'{parts[1]}{{{label}="{each}"}}' for each in absent]
            candidates = [each for each in candidates if each.get(label) in values]
        else:
            candidates = [each for each in candidates if each.get(label) not in value.split("|")]
    return [] if candidates else [selector]


def _having(candidates: Iterable[Labels], label: str, value: str) -> bool:
    return any(re.fullmatch(value, each.get(label, "")) for each in candidates)


def test_every_selected_series_exists_before_anything_has_happened(
    series: dict[str, list[Labels]],
) -> None:
    assert len(list(selectors())) > 60
    absent = {(who, each) for who, found in selectors() for each in missing(found, series)}
    assert absent == set()


@pytest.mark.parametrize(
    ("selector", "expected"),
    [
        ('kvtier_tier_state{state="Unwell"}', ['kvtier_tier_state{state="Unwell"}']),
        ('kvtier_tier_state{state="Healthy",tier=~"$tier"}', []),
        ('kvtier_tier_state{tier!="disk"}', ['kvtier_tier_state{tier!="disk"}']),
        ("kvtier_nothing", ["kvtier_nothing"]),
        ('kvtier_condition{type=~"PoolSmaller|None"}', ['kvtier_condition{type="None"}']),
    ],
)
def test_a_series_that_does_not_exist_is_found(
    series: dict[str, list[Labels]], selector: str, expected: list[str]
) -> None:
    assert missing(selector, series) == expected
