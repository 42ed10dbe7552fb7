"""A real Prometheus scrapes controller and webhook on a real API server."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest
from controller_process import Process
from tests.cluster import admission
from tests.cluster.admission import LABELLED, WebhookProcess, installed, pod, policy
from tests.support import controllers
from tests.support.prometheus import (
    Prometheus,
    Target,
    keep_picture,
    lint,
    needs_prometheus,
    traffic_for_pictures,
)
from tools.monitoring.alerts import GROUPS, Alert
from tools.monitoring.operator_board import OPERATOR

from kvtier_operator.api import crd
from kvtier_operator.settings import Settings

pytestmark = needs_prometheus
ALERTS = (*GROUPS["kvtier.operator"], *GROUPS["kvtier.policies"])
SVG = "{http://www.w3.org/2000/svg}"
MISSING_CLAIM = controllers.file_tier("disk", {"persistentVolumeClaim": {"claimName": "none"}})


class Operating:
    """Both processes, their Prometheus, and a namespace with a policy whose pods are created."""

    def __init__(self, api: Any, nodes: ModuleType, namespace: str, prometheus: Prometheus) -> None:
        self.api, self.nodes, self.namespace = api, nodes, namespace
        self.prometheus = prometheus
        self.began = time.time()
        self.exported: list[Callable[[], str]] = []

    def apply_policy(self, document: dict[str, Any]) -> None:
        """Creates a policy."""
        path = f"/apis/{crd.GROUP}/{crd.VERSION}/namespaces/{self.namespace}/{crd.PLURAL}"
        self.nodes.ok(self.api.request("POST", path, document))

    def admit(self) -> None:
        """A pod passes the webhook."""
        pods = f"/api/v1/namespaces/{self.namespace}/pods"
        self.nodes.ok(self.api.request("POST", f"{pods}?dryRun=All", pod()))


@pytest.fixture(scope="module")
def operating(
    full_cluster: Any, full_api: Any, nodes: ModuleType, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Operating]:
    home = tmp_path_factory.mktemp("monitoring")
    # The Lease is there.
    full_api.request("POST", "/api/v1/namespaces", {"metadata": {"name": Settings().namespace}})
    with contextlib.ExitStack() as stack:
        stack.enter_context(admission.definition(full_cluster, full_api, nodes))
        namespace = nodes.make_namespace(full_api, f"watched-{secrets.token_hex(3)}", LABELLED)
        stack.callback(full_api.request, "DELETE", f"/api/v1/namespaces/{namespace}")
        webhook = stack.enter_context(WebhookProcess(home / "webhook", full_cluster))
        stack.enter_context(installed(full_api, *admission.configurations(webhook)))
        (home / "controller").mkdir()
        controller = Process(
            full_cluster,
            home / "controller",
            namespace,
            leaderElection={"enabled": True},
            resyncSeconds=2,
        )
        controller.start()
        stack.callback(controller.end)
        nodes.wait_for("the controller serves", lambda: _port(controller))
        prometheus = Prometheus(
            home / "prometheus",
            [
                Target("webhook", f"127.0.0.1:{webhook.monitoring_port}", {"pod": "webhook-0"}),
                Target("controller", f"127.0.0.1:{_port(controller)}", {"pod": "controller-0"}),
            ],
        )
        stack.callback(prometheus.close)
        prometheus.wait_scraped()
        found = Operating(full_api, nodes, namespace, prometheus)
        found.exported = [
            lambda: webhook.monitoring("/metrics")[1],
            lambda: controller.ask("/metrics")[1],
        ]
        found.apply_policy(policy())
        found.nodes.ok(full_api.request("POST", f"/api/v1/namespaces/{namespace}/pods", pod()))
        yield found


def _port(controller: Process) -> int:
    ports = [line["port"] for line in controller.lines() if "port" in line]
    return int(ports[-1]) if ports else 0


def test_every_panel_shows_data(operating: Operating) -> None:
    rows = {
        title: tuple(panel for panel in panels if not panel.fault)
        for title, panels in OPERATOR.rows.items()
    }
    empty: list[str] = []

    def complete() -> bool:
        empty[:] = operating.prometheus.empty_panels(replace(OPERATOR, rows=rows))
        return not empty

    operating.prometheus.wait(complete, lambda: f"no data: {empty}", operating.admit)


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_every_alert_selects_series_that_exist(operating: Operating, alert: Alert) -> None:
    absent: list[str] = []

    def exists() -> bool:
        absent[:] = operating.prometheus.absent_selectors(alert)
        return not absent

    operating.prometheus.wait(exists, lambda: f"no series: {absent}")


def test_the_linter_of_prometheus_accepts_the_real_output(operating: Operating) -> None:
    assert [lint(exported()) for exported in operating.exported] == ["", ""]


def test_a_policy_without_its_storage_is_seen_on_its_panel_and_raises_its_alert(
    operating: Operating,
) -> None:
    prometheus = operating.prometheus
    waiting = policy("waiting", {"app": "other"})
    waiting["spec"]["tiers"].append(MISSING_CLAIM)
    operating.apply_policy(waiting)
    (panel,) = (panel for panel in OPERATOR.panels() if panel.fault)

    def seen() -> bool:
        empty = [each for each in prometheus.empty_panels(OPERATOR) if panel.title in each]
        not_ready = prometheus.query(
            'kvtier_operator_policy_condition{policy="waiting",condition="Ready"} < 1'
        )
        return not empty and bool(not_ready) and "KVTierPolicyNotReady" in prometheus.alerts()

    prometheus.wait(seen, lambda: f"{prometheus.alerts()} {prometheus.empty_panels(OPERATOR)}")
    # The test's certificate is valid for an hour.
    names = {alert.name for alert in GROUPS["kvtier.operator"]} - {"KVTierCertificateExpires"}
    prometheus.wait_quiet(names)


def test_panels_become_pictures(operating: Operating) -> None:
    """Of all that this file has done. ``make pictures`` keeps them."""
    traffic_for_pictures(operating.admit)
    text = operating.prometheus.pictures(OPERATOR, time.time() - operating.began)
    titles = [each.text for each in ElementTree.fromstring(text).iter(f"{SVG}text")]
    assert [panel.title for panel in OPERATOR.panels() if panel.title not in titles] == []
    keep_picture(OPERATOR.name, text)
