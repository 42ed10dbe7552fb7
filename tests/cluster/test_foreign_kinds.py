"""What the chart renders for the Prometheus operator and cert-manager, on an API server that has
their kinds: every field is known there, and Helm installs, upgrades and removes it.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

pytest.importorskip(
    "helm_python", reason="charts are installed by Helm's own code: helm-python-sdk"
)
import charts
import foreign_definitions
import helm_python as helm

REPOSITORY = Path(__file__).resolve().parents[2]
NAMESPACE = "default"
RELABELINGS = [
    {"sourceLabels": ["__meta_kubernetes_pod_node_name"], "targetLabel": "node"},
    {"sourceLabels": ["pod"], "regex": "kvtier-.*", "action": "keep"},
]
SCRAPE = {
    "enabled": True,
    "labels": {"release": "prometheus"},
    "annotations": {"example.com/team": "platform"},
    "interval": "1m30s",
    "scrapeTimeout": "500ms",
    "relabelings": RELABELINGS,
    "metricRelabelings": RELABELINGS,
}
RULES = {"enabled": True, "labels": {"release": "prometheus"}}
ISSUER = {"name": "corporate", "kind": "ClusterIssuer"}


def certificates(**more: Any) -> dict[str, Any]:
    return {"webhook": {"certificates": {"mode": "CertManager", **more}}}


ON = {"enabled": True}
DEFAULTS = {"monitoring": {"podMonitor": ON, "prometheusRule": ON}, **certificates()}
ALL = {
    "monitoring": {"serviceMonitor": SCRAPE, "prometheusRule": RULES},
    "commonLabels": {"team": "platform"},
    "commonAnnotations": {"example.com/team": "platform"},
    **certificates(issuerRef=ISSUER, lifetimeSeconds=3600, renewBeforeSeconds=1200),
}
VALUES: dict[str, dict[str, Any]] = {
    "defaults": DEFAULTS,
    "all settings": ALL,
    "PodMonitor with all settings": {"monitoring": {"podMonitor": SCRAPE}},
    "ServiceMonitor with defaults": {"monitoring": {"serviceMonitor": ON}},
}


@pytest.fixture(scope="module")
def kinds(full_api: Any, nodes: ModuleType) -> Iterator[dict[str, tuple[str, str]]]:
    with foreign_definitions.installed(full_api, nodes) as found:
        yield found


def create(api: Any, kinds: dict[str, tuple[str, str]], body: dict[str, Any]) -> tuple[int, Any]:
    """The strict answer to the creation of an object in ``NAMESPACE``, which is not kept."""
    group, plural = kinds[body["kind"]]
    body = copy.deepcopy(body)
    body["metadata"]["namespace"] = NAMESPACE
    path = f"/apis/{group}/v1/namespaces/{NAMESPACE}/{plural}"
    return api.request("POST", f"{path}?fieldValidation=Strict&dryRun=All", body)


def rendered(values: dict[str, Any]) -> list[dict[str, Any]]:
    with helm.Chart.load(charts.CHART) as chart:
        texts = chart.render(values, name="kvtier", namespace=NAMESPACE)
    return [
        body
        for name, text in texts.items()
        if not name.endswith("NOTES.txt")
        for body in yaml.load_all(text, yaml.CSafeLoader)
        if body
    ]


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES.keys())
def test_the_api_server_knows_every_field(
    full_api: Any, kinds: dict[str, tuple[str, str]], values: dict[str, Any]
) -> None:
    found = [body for body in rendered(values) if body["kind"] in kinds]
    assert len({body["kind"] for body in found} & {"PodMonitor", "ServiceMonitor"}) == 1
    answers = [(body["kind"], *create(full_api, kinds, body)) for body in found]
    assert [(kind, answer) for kind, status, answer in answers if status != 201] == []


def test_the_api_server_knows_every_field_of_the_documented_monitor(
    full_api: Any, kinds: dict[str, tuple[str, str]]
) -> None:
    text = (REPOSITORY / "docs/monitoring.md").read_text()
    blocks = re.findall(r"^```yaml\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    monitor = yaml.safe_load(next(each for each in blocks if "kind: PodMonitor" in each))
    relabelings = yaml.safe_load(next(each for each in blocks if "hashmod" in each))
    monitor["spec"]["podMetricsEndpoints"].append(relabelings)
    status, answer = create(full_api, kinds, monitor)
    assert status == 201, answer


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        ("PodMonitor", "selectors", {}),
        ("PodMonitor", "podMetricsEndpoints", [{"port": "monitoring", "interval": "1 minute"}]),
        ("ServiceMonitor", "endpoints", [{"ports": "monitoring"}]),
        ("PrometheusRule", "groups", [{"name": "a", "rules": [{"alert": "A"}]}]),
        ("Certificate", "secretNames", "x"),
        ("Certificate", "usages", ["serving"]),
    ],
)
def test_a_wrong_field_is_rejected(
    full_api: Any, kinds: dict[str, tuple[str, str]], kind: str, field: str, value: Any
) -> None:
    objects = rendered(ALL) if kind == "ServiceMonitor" else rendered(DEFAULTS)
    body = next(body for body in objects if body["kind"] == kind)
    body["spec"][field] = value
    assert create(full_api, kinds, body)[0] in (400, 422)


def test_helm_installs_upgrades_and_removes_them(
    full_cluster: Any, full_api: Any, kinds: dict[str, tuple[str, str]], nodes: ModuleType
) -> None:
    charts.without_definition(full_cluster)

    def names() -> set[str]:
        return {
            f"{kind}/{each['metadata']['name']}"
            for kind, (group, plural) in kinds.items()
            for each in full_api.request(
                "GET", f"/apis/{group}/v1/namespaces/{charts.NAMESPACE}/{plural}"
            )[1]["items"]
        }

    with charts.Release(full_cluster.kubeconfig, full_cluster.context) as release:
        try:
            release.install(DEFAULTS)
            assert names() == {
                "PodMonitor/kvtier-operator",
                "PrometheusRule/kvtier",
                "Certificate/kvtier-webhook",
                "Certificate/kvtier-webhook-ca",
                "Issuer/kvtier-self-signed",
                "Issuer/kvtier-webhook-ca",
            }
            release.upgrade({"monitoring": {"serviceMonitor": SCRAPE}})
            assert names() == {"ServiceMonitor/kvtier-operator"}
            release.rollback()
            assert len(names()) == 6
        finally:
            release.uninstall()
            charts.without_definition(full_cluster)
    nodes.wait_for("everything is removed", lambda: names() == set(), 30)
