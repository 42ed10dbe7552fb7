"""The generated files are current."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tools.monitoring import alerts, metrics_page

REPOSITORY = Path(__file__).resolve().parents[3]


def dashboards() -> dict[str, str]:
    pytest.importorskip("grafana_foundation_sdk", reason="run: make install")
    from tools.monitoring import dashboards as built

    return built.files()


def metrics() -> dict[str, str]:
    return {metrics_page.FILE: metrics_page.text()}


@pytest.mark.parametrize("files", [metrics, alerts.files, dashboards])
def test_generated_files_have_not_drifted(files: Callable[[], dict[str, str]]) -> None:
    for name, content in files().items():
        assert (REPOSITORY / name).read_text() == content, f"{name} is old: run `make generate`"
