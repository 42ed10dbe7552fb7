"""The operator's processes on this machine, as the accounts of an installed chart."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from charts import NAMESPACE, rendered
from nodes import ok, wait_for

Settings = dict[str, Any]
REPOSITORY = Path(__file__).resolve().parents[2]
CALLS = re.compile(
    r"^kvtier_operator_api_calls_total\{(?P<labels>.*)\} (?P<count>\S+)$", re.MULTILINE
)


def settings_of(installed: Mapping[str, Any]) -> Settings:
    written = next(body for body in rendered(dict(installed)) if body["kind"] == "ConfigMap")
    return dict(yaml.safe_load(written["data"]["settings.yaml"]))


class Process:
    """One of the operator's two processes."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
        self.process, self._port, self._log = process, port, log

    def metrics(self) -> str:
        """Its /metrics; empty before it listens."""
        try:
            with urllib.request.urlopen(
                f"http://127.0.0.1:{self._port}/metrics", timeout=5
            ) as answer:
                return str(answer.read().decode())
        except OSError:
            return ""

    def ready(self) -> bool:
        """Whether /readyz says so."""
        try:
            with urllib.request.urlopen(
                f"http://127.0.0.1:{self._port}/readyz", timeout=5
            ) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def calls(self, code: str) -> dict[tuple[str, str], int]:
        """Calls to the API server that were answered with ``code``, by verb and kind."""
        found: dict[tuple[str, str], int] = {}
        for match in CALLS.finditer(self.metrics()):
            labels = dict(re.findall(r'(\w+)="([^"]*)"', match["labels"]))
            if labels["code"] == code and float(match["count"]):
                found[labels["verb"], labels["kind"]] = int(float(match["count"]))
        return found

    def log(self) -> str:
        """The end of its log."""
        return self._log.read_text(errors="replace")[-4000:]


@contextlib.contextmanager
def operator(
    component: str, cluster: Any, api: Any, settings: Settings, home: Path
) -> Iterator[Process]:
    """``kvtier-operator COMPONENT`` as the chart's account."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    here = {**settings, "monitoring": {"host": "127.0.0.1", "port": port}}
    here["webhook"] = {**settings["webhook"], "host": "127.0.0.1", "port": 0, "drainSeconds": 0}
    (home / "settings.yaml").write_text(yaml.safe_dump(here))
    config, log = home / "kubeconfig", home / "log"
    config.write_text(yaml.safe_dump(_kubeconfig(cluster, api, f"kvtier-{component}")))
    command = [sys.executable, "-m", "kvtier_operator.main", component]
    command += [
        "--settings",
        str(home / "settings.yaml"),
        "--kubeconfig",
        str(config),
        "--log-format",
        "text",
    ]
    paths = f"{REPOSITORY / 'connector'}:{REPOSITORY / 'operator'}"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=output,
            env={**os.environ, "PYTHONPATH": paths},
            start_new_session=True,
        )
    found = Process(process, port, log)
    try:
        try:
            wait_for(
                f"the {component} is ready", lambda: found.ready() or process.poll() is not None, 60
            )
        except AssertionError as error:
            raise AssertionError(f"{error}: {found.log()}") from None
        assert process.poll() is None, found.log()
        yield found
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(40)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)


def _kubeconfig(cluster: Any, api: Any, account: str) -> dict[str, Any]:
    path = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/{account}/token"
    request = {
        "apiVersion": "authentication.k8s.io/v1",
        "kind": "TokenRequest",
        "spec": {"expirationSeconds": 3600},
    }
    token = ok(api.request("POST", path, request))["status"]["token"]
    config = yaml.safe_load(Path(cluster.kubeconfig).read_text())
    server = config["clusters"][0]["cluster"]
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "account",
        "clusters": [{"name": "account", "cluster": server}],
        "users": [{"name": "account", "user": {"token": token}}],
        "contexts": [{"name": "account", "context": {"cluster": "account", "user": "account"}}],
    }
