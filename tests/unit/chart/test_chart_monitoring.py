"""Alerts, monitors and dashboards of the chart."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.unit.chart.rendered import CHART, one, render
from tools.monitoring.alerts import ALERTS

MONITORING = ("PrometheusRule", "PodMonitor")


def test_alerts_and_dashboards_are_rendered_on_request_with_links_to_runbooks() -> None:
    assert [body for body in render() if body["kind"] in MONITORING] == []
    url = "https://runbooks.example/kvtier"
    on = {"enabled": True, "labels": {"release": "prometheus"}}
    values = {"runbooksUrl": url, "prometheusRule": on, "podMonitor": on}
    objects = render({"monitoring": values})
    rule = one(objects, "PrometheusRule")
    assert rule["metadata"]["labels"]["release"] == "prometheus"
    rules = [each for group in rule["spec"]["groups"] for each in group["rules"]]
    assert len(rules) == len(ALERTS)
    for each in rules:
        assert each["annotations"]["runbook_url"] == f"{url}#{each['alert'].lower()}"
        assert "{{" not in each["expr"]
    monitor = one(objects, "PodMonitor")["spec"]
    for component in ("controller", "webhook"):
        pod = one(objects, "Deployment", f"kvtier-{component}")["spec"]["template"]
        assert monitor["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
        ports = {port["name"] for port in pod["spec"]["containers"][0]["ports"]}
        assert monitor["podMetricsEndpoints"][0]["port"] in ports


@pytest.mark.parametrize(("seconds", "late"), [(2592000, 1209600), (3600, 1800)])
def test_a_certificate_is_late_when_half_of_the_time_for_its_renewal_is_over(
    seconds: int, late: int
) -> None:
    """With a fixed time, the alert would always fire for certificates that live for less."""
    values = {
        "webhook": {"certificates": {"renewBeforeSeconds": seconds}},
        "monitoring": {"prometheusRule": {"enabled": True}},
    }
    groups = one(render(values), "PrometheusRule")["spec"]["groups"]
    (expr,) = (
        rule["expr"]
        for group in groups
        for rule in group["rules"]
        if rule["alert"] == "KVTierCertificateExpires"
    )
    assert expr.endswith(f" - time() < {late}")


def test_each_dashboard_is_a_config_map_that_a_sidecar_of_grafana_finds() -> None:
    url = "https://runbooks.example/kvtier"
    shown = {"enabled": True, "annotations": {"grafana_folder": "KVTier"}}
    objects = render({"monitoring": {"runbooksUrl": url, "dashboards": shown}})
    found = {
        body["metadata"]["name"]: body
        for body in objects
        if body["metadata"].get("labels", {}).get("grafana_dashboard") == "1"
    }
    names = [f"kvtier-dashboard-{path.stem}" for path in (CHART / "files/dashboards").iterdir()]
    assert sorted(found) == sorted(names)
    assert len(names) == 3
    for body in found.values():
        assert body["metadata"]["annotations"] == {"grafana_folder": "KVTier"}
        ((file, text),) = body["data"].items()
        assert file.endswith(".json")
        dashboard = json.loads(text)
        assert dashboard["uid"].startswith("kvtier-")
        assert url in text
        assert "RUNBOOKS_URL" not in text
        assert "{{pod}}" in text or "{{policy}}" in text


@pytest.mark.parametrize(
    "values", [{"runbooksUrl": "x"}, {"prometheusRule": {"enable": True}}, {"dashboards": True}]
)
def test_invalid_values_for_monitoring_are_rejected(values: dict[str, Any]) -> None:
    with pytest.raises(Exception, match="monitoring"):
        render({"monitoring": values})
