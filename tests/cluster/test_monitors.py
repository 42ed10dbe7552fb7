"""The scrape configurations that the demo makes from monitors, in a real Prometheus."""

from __future__ import annotations

import base64
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("helm_python", reason="the chart is rendered by Helm's own code")
import monitors
from tests.support.prometheus import Prometheus, needs_prometheus

pytestmark = needs_prometheus
TOKEN = "of-the-policy"


class Exporter(BaseHTTPRequestHandler):
    """One gauge, for requests with the token."""

    def do_GET(self) -> None:
        allowed = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        self.send_response(200 if allowed else 401)
        self.end_headers()
        if allowed:
            self.wfile.write(b"kvtier_epoch 1\n")

    def log_message(self, *_: object) -> None:
        """Nothing."""


class Api:
    """An API server that has two pods and the token's Secret."""

    def __init__(self, port: int) -> None:
        def pod(name: str, policy: str, port_name: str) -> dict[str, Any]:
            return {
                "metadata": {
                    "name": name,
                    "namespace": "serving",
                    "uid": name,
                    "labels": {"kvtier.io/attached": "true"},
                    "annotations": {"kvtier.io/policy": policy},
                },
                "spec": {
                    "containers": [{"name": "vllm", "ports": [{"containerPort": 9}]}],
                    "initContainers": [
                        {
                            "name": "kvtier-tierd",
                            "ports": [{"name": port_name, "containerPort": port}],
                        }
                    ],
                },
                "status": {"podIP": "127.0.0.1", "phase": "Running"},
            }

        terminating = pod("terminating", "chat", "kvtier-http")
        terminating["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        self.pods = [
            pod("engine-0", "chat", "kvtier-http"),
            pod("of-another-policy", "code", "kvtier-http"),
            pod("without-the-port", "chat", "http"),
            terminating,
        ]

    def request(self, method: str, path: str) -> tuple[int, Any]:
        if path.endswith("/secrets/chat-token"):
            return 200, {"data": {"token": base64.b64encode(TOKEN.encode()).decode()}}
        assert (method, path) == ("GET", "/api/v1/namespaces/serving/pods")
        return 200, {"items": self.pods}


@pytest.fixture
def api() -> Iterator[Api]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Exporter)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield Api(server.server_address[1])
    server.shutdown()
    server.server_close()


def test_the_documented_monitor_scrapes_the_pods_of_its_policy_with_its_token(
    api: Api, tmp_path: Path
) -> None:
    jobs = list(monitors.jobs(api, monitors.of_tiers(), tmp_path))
    prometheus = Prometheus(tmp_path / "prometheus", [], jobs)
    try:
        prometheus.wait_scraped()
        prometheus.wait(lambda: prometheus.query("kvtier_epoch") != [], lambda: "no series")
        # The next pod of the policy.
        api.pods[0]["metadata"]["name"] = "engine-1"
        prometheus.retarget([], list(monitors.jobs(api, monitors.of_tiers(), tmp_path)))
        prometheus.wait(
            lambda: prometheus.query('kvtier_epoch{pod="engine-1"}') != [], lambda: "no series"
        )
        (found,) = prometheus.query('kvtier_epoch{pod="engine-1"}')
        pods = {each["metric"]["pod"] for each in prometheus.query("kvtier_epoch")}
        assert pods <= {"engine-0", "engine-1"}
    finally:
        prometheus.close()
    labels = found["metric"]
    assert (labels["namespace"], labels["policy"]) == ("serving", "chat")
    assert labels["container"] == "kvtier-tierd"


def test_the_monitor_of_the_chart_names_the_port_of_its_pods() -> None:
    monitor = monitors.of_operator()
    assert monitor["kind"] == "PodMonitor"
    assert [each["port"] for each in monitor["spec"]["podMetricsEndpoints"]] == ["monitoring"]
