"""What the dashboards show of a run: a real Prometheus scrapes engine, tierd and operator, the last
two as their monitors say, and each panel's queries are evaluated at the end.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import monitors
from serving import ENGINE_PORT, EnginePod

REPOSITORY = Path(__file__).resolve().parents[2]
RANGE = "10m"
"""The interval of rates: the whole run."""
SHOWN_SERIES = 3
DAY_SECONDS = 86_400
NO_DATA = "no data"
Row = tuple[str, str, str, str]


def _prometheus() -> ModuleType:
    """``tests/support/prometheus.py``. Where this runs as a script, another distribution's package
    ``tests`` may be found first.
    """
    if str(REPOSITORY) not in sys.path:
        sys.path.append(str(REPOSITORY))
    name = "kvtier_tests_prometheus"
    if name not in sys.modules:
        path = REPOSITORY / "tests" / "support" / "prometheus.py"
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise ImportError(str(path))
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


class DashboardData:
    """The Prometheus of a run. ``missing`` says what is not installed; then nothing is scraped."""

    def __init__(self, directory: Path, api: Any, pod: EnginePod, policy: str) -> None:
        self._directory, self._api, self._pod, self._policy = directory, api, pod, policy
        self._module = _prometheus()
        self._server: Any = None
        self.missing = "" if self._module.PROGRAM else "Prometheus (Debian package prometheus)"

    def follow(self) -> None:
        """Scrapes the engine's pod that there is now, and the operator's. Called again after the
        pod was replaced.
        """
        if self.missing:
            return
        directory = self._directory.parent
        jobs = [
            job
            for monitor in (monitors.of_tiers(), monitors.of_operator())
            for job in monitors.jobs(self._api, monitor, directory)
        ]
        if self._server is None:
            self._server = self._module.Prometheus(self._directory, [self._engine()], jobs)
        else:
            self._server.retarget([self._engine()], jobs)
        self._server.wait_scraped()

    def close(self) -> None:
        """Ends Prometheus."""
        if self._server is not None:
            self._server.close()

    def rows(self) -> list[Row]:
        """Dashboard, panel, series and value. Panels that have data only after a fault are left
        out if they have none.
        """
        if self._server is None:
            return []
        from tools.monitoring.dashboards import BOARDS

        found: list[Row] = []
        for board in BOARDS:
            for panel in board.panels():
                series = list(self._series(panel))
                if series or not panel.fault:
                    found += shown(board.title.partition("/")[2].strip(), panel, series)
        return found

    def _series(self, panel: Any) -> Iterator[tuple[str, float]]:
        for query in panel.queries:
            expr = query.expr.replace("$__rate_interval", RANGE)
            for each in self._server.query(self._module.expression(expr)):
                yield legend(query.legend, each["metric"]), float(each["value"][1])

    def _engine(self) -> Any:
        """The engine's own metrics: its pod declares no port that a monitor could name."""
        body = self._pod.now()
        metadata = body["metadata"]
        labels = {
            "namespace": metadata["namespace"],
            "pod": metadata["name"],
            "policy": self._policy,
        }
        address = f"{body['status']['podIP']}:{ENGINE_PORT}"
        return self._module.Target("engine", address, labels)


def legend(text: str, labels: Mapping[str, str]) -> str:
    """The name of a series, as Grafana builds it."""
    for key, value in labels.items():
        text = text.replace("{{" + key + "}}", value)
    return text


def shown(board: str, panel: Any, series: list[tuple[str, float]]) -> list[Row]:
    """The rows of a panel: its largest series that are not 0, or one row if all are."""
    write = UNITS.get(panel.unit, number)
    if not series:
        return [(board, panel.title, panel.needs and f"needs {panel.needs}", NO_DATA)]
    ordered = sorted((each for each in series if each[1]), key=lambda each: -each[1])
    if not ordered:
        return [(board, panel.title, "" if len(series) == 1 else "all", write(0.0))]
    rows = [(board, panel.title, name, write(value)) for name, value in ordered[:SHOWN_SERIES]]
    if len(ordered) > SHOWN_SERIES:
        rows.append((board, panel.title, f"and {len(ordered) - SHOWN_SERIES} more", ""))
    return rows


def number(value: float) -> str:
    """At most three significant digits, and no exponent."""
    return f"{value:.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"


def size(value: float) -> str:
    """Bytes."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{number(value)} {unit}"
        value /= 1024
    return f"{number(value)} TiB"


def seconds(value: float) -> str:
    """A duration."""
    if value >= 2 * DAY_SECONDS:
        return f"{value / DAY_SECONDS:.0f} days"
    return f"{number(value)} s" if value >= 1 else f"{value * 1e3:.3g} ms"


UNITS: dict[str, Callable[[float], str]] = {
    "bytes": size,
    "Bps": lambda value: f"{size(value)}/s",
    "percentunit": lambda value: f"{value * 100:.3g} %",
    "s": seconds,
}
