"""Dashboards as data: panels, their queries, and the selectors that all queries share.

``policy`` is the label that a monitor takes from the pod; metrics of the operator have their own
labels of the policy, because Prometheus sets ``namespace`` to the operator's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

POD = 'namespace=~"$namespace",policy=~"$policy"'
TIER = f'{POD},tier=~"$tier"'
ENGINE = 'namespace=~"$namespace",model_name=~"$model"'
POLICY = 'policy_namespace=~"$namespace",policy=~"$policy"'
RATE = "[$__rate_interval]"
LEGEND = "{{namespace}}/{{pod}}"
LEGEND_TIER = "{{namespace}}/{{pod}} {{tier}}"


@dataclass(frozen=True, slots=True)
class Query:
    """One query and the name of its series."""

    expr: str
    legend: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel. ``runbook``: the alert whose runbook it links to. ``fault``: what must happen
    before it has data, for the test with a real Prometheus. ``needs``: without what it has
    no data, shown where it is empty. ``bad``: from which value on it is red.
    """

    title: str
    description: str
    unit: str
    queries: tuple[Query, ...]
    runbook: str = ""
    fault: str = ""
    needs: str = ""
    stacked: bool = False
    single: bool = False
    bad: float | None = None


@dataclass(frozen=True, slots=True)
class Board:
    """One dashboard: rows of panels. ``variables``: beside the data source."""

    name: str
    title: str
    description: str
    variables: tuple[str, ...]
    rows: dict[str, tuple[Panel, ...]]

    def panels(self) -> Iterable[Panel]:
        """All panels."""
        for row in self.rows.values():
            yield from row
