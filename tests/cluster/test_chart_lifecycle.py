"""Install, upgrade from the previous chart, roll back and uninstall, with the operator running."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip(
    "helm_python", reason="charts are installed by Helm's own code: helm-python-sdk"
)

import chart_lifecycle
import charts


def test_the_chart_is_installed_upgraded_rolled_back_and_uninstalled(
    node_cluster: Any, node_images: None
) -> None:
    steps: list[str] = []
    with charts.Release(node_cluster.kubeconfig, node_cluster.context) as release:
        chart_lifecycle.Lifecycle(node_cluster, release, steps.append).run()
    assert len(steps) == 4
