"""The chart as a dependency of another chart, loaded and rendered by Helm's own code."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.unit.chart.rendered import CHART, helm


@pytest.fixture
def parent(tmp_path: Path) -> Path:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    home = tmp_path / "platform"
    (home / "templates").mkdir(parents=True)
    dependency = {
        "name": "kvtier",
        "version": chart["version"],
        "repository": f"file://{CHART}",
        "condition": "kvtier.enabled",
        "tags": ["inference"],
    }
    (home / "Chart.yaml").write_text(
        yaml.safe_dump(
            {
                "apiVersion": "v2",
                "name": "platform",
                "version": "1.0.0",
                "dependencies": [dependency],
            }
        )
    )
    shutil.copytree(CHART, home / "charts" / "kvtier")
    return home


def kinds(parent: Path, values: dict[str, Any]) -> set[str]:
    with helm.Chart.load(parent) as chart:
        chart.validate_schema(values)
        rendered = chart.render(values, name="platform", namespace="ai")
    return {
        body["kind"]
        for text in rendered.values()
        if "kind:" in text
        for body in yaml.load_all(text, yaml.CSafeLoader)
        if body
    }


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"kvtier": {"enabled": True}},
        {"global": {"imageRegistry": "registry.example"}, "kvtier": {"enabled": True}},
        {"tags": {"inference": True}},
        {"kvtier": {"enabled": True, "controller": {"replicas": 3}}},
    ],
)
def test_the_chart_is_rendered_as_a_dependency_with_a_condition(
    parent: Path, values: dict[str, Any]
) -> None:
    assert {"Deployment", "CustomResourceDefinition"} <= kinds(parent, values)


def test_a_false_condition_leaves_the_chart_out(parent: Path) -> None:
    assert kinds(parent, {"kvtier": {"enabled": False}}) == set()


def test_a_wrong_value_is_rejected_by_name_in_a_dependency_too(parent: Path) -> None:
    with pytest.raises(helm.HelmError, match="replica"):
        kinds(parent, {"kvtier": {"enabled": True, "webhook": {"replica": 3}}})
