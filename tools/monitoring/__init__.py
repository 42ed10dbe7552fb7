"""Generates what people monitor KVTier with: the list of metrics, alerts and dashboards."""

from __future__ import annotations

from tools.monitoring import alerts, metrics_page


def files() -> dict[str, str]:
    """Paths in the repository, and contents."""
    return {metrics_page.FILE: metrics_page.text(), **alerts.files()}
