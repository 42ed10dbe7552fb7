"""A real Prometheus that scrapes processes of a test, and the queries of dashboards and alerts."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from tools.monitoring.alerts import Alert, rules
from tools.monitoring.panels import Board
from tools.monitoring.pictures import Series, legend, picture

from kvtier.harness.engine_process import free_port

PROGRAM = shutil.which("prometheus")
needs_prometheus = pytest.mark.skipif(
    PROGRAM is None, reason="Prometheus (Debian package prometheus) is missing"
)
PROMTOOL = shutil.which("promtool")
WAIT_SECONDS = 120.0
VARIABLES = {
    "$__rate_interval": "20s",
    "$namespace": ".*",
    "$policy": ".*",
    "$model": ".*",
    "$tier": ".*",
}
SELECTOR = re.compile(r"(?:vllm:)?kvtier_\w+(?:\{[^}]*\})?")


@dataclass(frozen=True)
class Target:
    """What is scraped. ``labels``: what a monitor takes from the pod. ``token``: a file."""

    job: str
    address: str
    labels: Mapping[str, str] = field(default_factory=dict)
    token: Path | None = None


class Prometheus:
    """Scrapes once a second and evaluates the alerts of the chart. ``jobs``: scrape configurations
    beside ``targets``."""

    def __init__(
        self, directory: Path, targets: list[Target], jobs: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        directory.mkdir(parents=True)
        self._port = free_port()
        (directory / "rules.yaml").write_text(yaml.safe_dump(rules()))
        self._file = directory / "prometheus.yaml"
        self._jobs = self._write(targets, jobs)
        self._log = directory / "prometheus.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    str(PROGRAM),
                    "--config.file=prometheus.yaml",
                    f"--storage.tsdb.path={directory / 'data'}",
                    f"--web.listen-address=127.0.0.1:{self._port}",
                ],
                cwd=directory,
                stdout=log,
                stderr=log,
            )

    def retarget(self, targets: list[Target], jobs: Sequence[Mapping[str, Any]] = ()) -> None:
        """Scrapes other targets from now on."""
        known = self._jobs = self._write(targets, jobs)
        self._process.send_signal(signal.SIGHUP)

        def followed() -> bool:
            active: dict[str, set[str]] = {}
            for each in self._get("targets")["activeTargets"]:
                address = each["discoveredLabels"]["__address__"]
                active.setdefault(each["scrapePool"], set()).add(address)
            # Relabeling drops targets of a job.
            return active.keys() == known.keys() and all(
                found <= known[name] for name, found in active.items()
            )

        self.wait(followed, lambda: "Prometheus does not follow its configuration")

    def _write(
        self, targets: list[Target], jobs: Sequence[Mapping[str, Any]]
    ) -> dict[str, set[str]]:
        """The addresses of each job of the configuration."""
        configuration = _configuration(targets, jobs)
        self._file.write_text(yaml.safe_dump(configuration))
        return {job["job_name"]: _addresses(job) for job in configuration["scrape_configs"]}

    def close(self) -> None:
        """Ends the process."""
        self._process.terminate()
        try:
            self._process.wait(15)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(15)

    def wait_ready(self) -> None:
        """Waits until it answers queries."""

        def ready() -> bool:
            try:
                return bool(self.query("vector(1)"))
            except OSError:
                return False

        self.wait(ready, lambda: "Prometheus does not answer")

    def wait_scraped(self) -> None:
        """Waits until every job has a target and every target was scraped without an error."""
        self.wait_ready()
        self.wait(lambda: self._unhealthy() == [], lambda: f"not scraped: {self._unhealthy()}")

    def wait_quiet(self, names: AbstractSet[str]) -> None:
        """Waits until none of these alerts is pending or firing. On a machine that is slow, a
        scrape can be missed, and the alerts about what is absent are pending until the next.
        """
        self.wait(lambda: not names & self.alerts().keys(), lambda: f"{self.alerts()}")

    def query(self, expr: str) -> list[dict[str, Any]]:
        """The result of an instant query, without values that are not a number."""
        found = self._get("query", query=expr)["result"]
        if not isinstance(found, list):
            return []
        return [each for each in found if isinstance(each, dict) and each["value"][1] != "NaN"]

    def pictures(self, board: Board, seconds: float) -> str:
        """The panels of a board over the last ``seconds``, as SVG."""
        data = {}
        for panel in board.panels():
            found = []
            for query in panel.queries:
                for each in self._range(expression(query.expr), seconds):
                    points = tuple(
                        (float(time), float(value))
                        for time, value in each["values"]
                        if value not in ("NaN", "+Inf", "-Inf")
                    )
                    if points:
                        found.append(Series(legend(query.legend, each["metric"]), points))
            data[panel.title] = found
        return picture(board, data)

    def _range(self, expr: str, seconds: float) -> list[dict[str, Any]]:
        end = time.time()
        step = max(1.0, seconds / 60)
        found = self._get("query_range", query=expr, start=end - seconds, end=end, step=step)
        result: list[dict[str, Any]] = found["result"]
        return result

    def alerts(self) -> dict[str, str]:
        """The state of each alert that is pending or firing."""
        return {
            each["labels"]["alertname"]: each["state"] for each in self._get("alerts")["alerts"]
        }

    def empty_panels(self, board: Board) -> list[str]:
        """Panels of which a query has no data."""
        return [
            f"{panel.title}: {expression(query.expr)}"
            for panel in board.panels()
            for query in panel.queries
            if not self.query(expression(query.expr))
        ]

    def absent_selectors(self, alert: Alert) -> list[str]:
        """Selectors of an alert that match no series: a wrong name or label."""
        return [each for each in SELECTOR.findall(alert.expr) if not self.query(f"count({each})")]

    def wait(
        self,
        condition: Callable[[], bool],
        failure: Callable[[], str],
        between: Callable[[], None] = lambda: None,
    ) -> None:
        """Waits for a condition. ``between`` runs before each look."""
        deadline = time.monotonic() + WAIT_SECONDS
        while True:
            between()
            if condition():
                return
            assert self._process.poll() is None, self._log.read_text()[-2000:]
            assert time.monotonic() < deadline, failure()
            time.sleep(0.5)

    def _unhealthy(self) -> list[str]:
        found = self._get("targets")["activeTargets"]
        idle = self._jobs.keys() - {each["scrapePool"] for each in found}
        return [f"{name}: no target" for name in sorted(idle)] + [
            f"{each['scrapeUrl']}: {each['lastError'] or each['health']}"
            for each in found
            if each["health"] != "up"
        ]

    def _get(self, path: str, **arguments: str | float) -> dict[str, Any]:
        url = f"http://127.0.0.1:{self._port}/api/v1/{path}?{urllib.parse.urlencode(arguments)}"
        try:
            with urllib.request.urlopen(url, timeout=30) as answer:
                document = json.load(answer)
        except urllib.error.HTTPError as error:
            if error.code == 503:
                raise
            raise AssertionError(f"{arguments}: {error.read().decode()}") from error
        data: dict[str, Any] = document["data"]
        return data


def lint(text: str) -> str:
    """What Prometheus' linter says about KVTier's metrics in an exposition; empty if nothing.

    vLLM's prefix has a colon, which the linter reserves for recording rules.
    """
    lines = [line for line in text.splitlines() if "kvtier_" in line]
    assert len(lines) > 20
    checked = subprocess.run(
        [str(PROMTOOL), "check", "metrics"],
        input="\n".join(lines).replace("vllm:", "vllm_") + "\n",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert checked.returncode in (0, 3), checked.stderr
    return checked.stdout + checked.stderr


def traffic_for_pictures(serve: Callable[[], None], seconds: float = 45.0) -> None:
    """Traffic for some time, if ``make pictures`` runs the test, so that lines are long enough."""
    if os.environ.get("KVTIER_PICTURES"):
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            serve()
            time.sleep(0.5)


def keep_picture(name: str, text: str) -> None:
    """Writes a picture for the documentation, if ``make pictures`` runs the test."""
    directory = os.environ.get("KVTIER_PICTURES")
    if directory:
        Path(directory).mkdir(parents=True, exist_ok=True)
        (Path(directory) / f"{name}.svg").write_text(text, encoding="utf-8")


def expression(expr: str) -> str:
    """A query with every variable set to all values, as Grafana sends it."""
    for name, value in VARIABLES.items():
        expr = expr.replace(name, value)
    return expr


def _addresses(job: Mapping[str, Any]) -> set[str]:
    return {address for group in job["static_configs"] for address in group["targets"]}


def _configuration(targets: list[Target], more: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    jobs = [dict(each) for each in more]
    for target in targets:
        job: dict[str, Any] = {
            "job_name": target.job,
            "static_configs": [{"targets": [target.address], "labels": dict(target.labels)}],
        }
        if target.token is not None:
            job["authorization"] = {"credentials_file": str(target.token)}
        jobs.append(job)
    return {
        "global": {
            "scrape_interval": "1s",
            "scrape_timeout": "1s",
            "evaluation_interval": "1s",
        },
        "rule_files": ["rules.yaml"],
        "scrape_configs": jobs,
    }
