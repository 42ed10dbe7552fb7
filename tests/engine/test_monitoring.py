"""A real Prometheus scrapes a real vLLM server and its tierd: dashboards and alerts see both."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from tests.support.prometheus import (
    Prometheus,
    Target,
    keep_picture,
    lint,
    needs_prometheus,
    traffic_for_pictures,
)
from tools.monitoring.alerts import GROUPS, Alert
from tools.monitoring.capacity import CAPACITY
from tools.monitoring.on_call import ON_CALL
from tools.monitoring.panels import Board

from kvtier.config.models import Daemon
from kvtier.files import replace_file
from kvtier.harness.engine_process import EngineServer, http_request
from kvtier.harness.engine_testbed import CHUNK_TOKENS, ENGINE_OPTIONS, EngineOptions, EngineTestbed
from kvtier.harness.tiny_model import prompt

pytestmark = needs_prometheus
CHUNKS = 6
SVG = "{http://www.w3.org/2000/svg}"
MAX_PICTURE_BYTES = 150_000
PICTURE_SECONDS = 120.0
"""Only a panel that stays empty takes as long."""
POD = {"namespace": "serving", "pod": "engine-0", "policy": "chat"}
VOLUMES = ("nvme0", "nvme1")
ALERTS = (*GROUPS["kvtier.tiers"], *GROUPS["kvtier.capacity"])


class Serving:
    """An engine with its daemon under traffic, and the Prometheus that scrapes both."""

    def __init__(self, case: EngineTestbed, server: EngineServer, prometheus: Prometheus) -> None:
        self.case = case
        self.server = server
        self.prometheus = prometheus
        self.began = time.time()
        self._seed = 0

    def serve(self) -> None:
        """A prompt that is computed and stored, and one that comes back after its blocks were
        evicted."""
        self._seed += 1
        tokens = prompt(CHUNKS * CHUNK_TOKENS + 5, 900 + self._seed)
        for _ in range(2):
            self.server.complete(tokens, 2)
            self.server.reset_prefix_cache()


@pytest.fixture(scope="module")
def serving(model: Path, payload: Path, scratch: Path) -> Iterator[Serving]:
    tuning = EngineOptions(
        daemon=Daemon.SIDECAR,
        persistence="Process",
        failure_threshold=2,
        load_timeout_seconds=2,
        volumes=VOLUMES,
    )
    case = EngineTestbed(scratch / "monitoring", model, payload, tuning)
    arguments = []
    for name, value in ENGINE_OPTIONS.items():
        flag = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            arguments += [flag] if value else []
        else:
            arguments += [flag, str(value)]
    started: list[EngineServer | Prometheus] = []
    try:
        case.start_daemon()
        variables = {**case.environment(), "VLLM_SERVER_DEV_MODE": "1"}
        server = EngineServer(
            sys.executable, model, arguments, variables, case.directory / "server.log"
        )
        started.append(server)
        server.wait_ready()
        host, port = case._http_address() or ("", 0)
        prometheus = Prometheus(
            case.directory / "prometheus",
            [
                Target("tierd", f"{host}:{port}", POD),
                Target("engine", f"127.0.0.1:{server.port}", POD),
            ],
        )
        started.append(prometheus)
        prometheus.wait_scraped()
        yield Serving(case, server, prometheus)
    finally:
        for each in reversed(started):
            each.kill() if isinstance(each, EngineServer) else each.close()
        case.close()


def healthy(board: Board) -> Board:
    """Without the panels that have data under a fault only."""
    rows = {
        title: tuple(panel for panel in panels if not panel.fault)
        for title, panels in board.rows.items()
    }
    return replace(board, rows=rows)


@pytest.mark.parametrize("board", [ON_CALL, CAPACITY], ids=lambda board: board.name)
def test_every_panel_shows_data_under_traffic(serving: Serving, board: Board) -> None:
    empty: list[str] = []

    def complete() -> bool:
        empty[:] = serving.prometheus.empty_panels(healthy(board))
        return not empty

    serving.prometheus.wait(complete, lambda: f"no data: {empty}", serving.serve)


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_every_alert_selects_series_that_exist(serving: Serving, alert: Alert) -> None:
    assert serving.prometheus.absent_selectors(alert) == []


def test_the_linter_of_prometheus_accepts_the_real_output(serving: Serving) -> None:
    host, port = serving.case._http_address() or ("", 0)
    assert lint(http_request(port, "GET", "/metrics", 30, host)[1]) == ""
    assert lint(serving.server.request("GET", "/metrics")[1]) == ""


def test_no_alert_is_raised_while_all_is_well(serving: Serving) -> None:
    # In the first hour a tier may look as if it earned nothing.
    names = {alert.name for alert in ALERTS if alert.severity != "info"}
    serving.prometheus.wait_quiet(names)


def test_no_traffic_is_refused_for_a_while(serving: Serving) -> None:
    traffic_for_pictures(serving.serve)
    assert serving.prometheus.query("sum(vllm:kvtier_off_total)")[0]["value"][1] == "0"


def test_faults_are_seen_on_their_panels_and_raise_their_alert(serving: Serving) -> None:
    case, prometheus = serving.case, serving.prometheus
    case.set_faults(read={"fail": True}, write={"fail": True}, check={"fail": True})
    replace_file(case.topology / "live.json", b'{"generation": "invalid"}')
    panels = [panel.title for panel in ON_CALL.panels() if panel.fault]
    assert panels == ["Breakers opened", "Conditions of tierd"]
    missing: list[str] = []

    def seen() -> bool:
        empty = prometheus.empty_panels(ON_CALL)
        missing[:] = [each for each in empty if each.split(":")[0] in panels]
        return not missing and prometheus.alerts().keys() >= {
            "KVTierTierUnavailable",
            "KVTierVolumeUnavailable",
        }

    prometheus.wait(seen, lambda: f"{missing} {prometheus.alerts()}", serving.serve)

    def open_volumes() -> dict[str, str]:
        found = prometheus.query('max by (volume) (kvtier_volume_state{state="BreakerOpen"})')
        return {each["metric"]["volume"]: each["value"][1] for each in found}

    def values(query: str) -> list[float]:
        return [float(each["value"][1]) for each in prometheus.query(query)]

    every = dict.fromkeys(VOLUMES, "1")
    prometheus.wait(lambda: open_volumes() == every, lambda: str(open_volumes()), serving.serve)
    for query in (
        'sum(kvtier_tier_state{state="BreakerOpen",tier="disk"})',
        'kvtier_condition{type="LiveValuesRefused"}',
    ):
        prometheus.wait(lambda q=query: values(q) == [1], lambda q=query: f"{q}: {values(q)}")


@pytest.mark.parametrize("board", [ON_CALL, CAPACITY], ids=lambda board: board.name)
def test_panels_become_pictures(serving: Serving, board: Board) -> None:
    """Of all that this file has done to the engine. ``make pictures`` keeps them."""
    traffic_for_pictures(serving.serve, 15.0)
    deadline = time.monotonic() + PICTURE_SECONDS
    missing = [panel.title for panel in board.panels()]
    while missing and time.monotonic() < deadline:
        # A rate needs two scrapes of what has moved.
        text = serving.prometheus.pictures(board, time.time() - serving.began)
        titles = [each.text for each in ElementTree.fromstring(text).iter(f"{SVG}text")]
        missing = [panel.title for panel in board.panels() if panel.title not in titles]
        if missing:
            serving.serve()
    assert missing == []
    assert len(text) < MAX_PICTURE_BYTES
    keep_picture(board.name, text)
