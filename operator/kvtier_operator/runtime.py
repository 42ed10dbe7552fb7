"""What both processes of the operator share: logging, metrics, and the monitoring server with
health checks.

Logging: ``configure`` sets up the process once, before anything is logged. ``about`` binds fields
(policy, namespace, the number of a reconcile); every line that the same task logs inside the block
has them, whichever module logs it.

Metrics: each process has one registry. Names of metrics begin with ``kvtier_operator_``.

Monitoring: ``serve`` answers ``/metrics``, ``/healthz`` and ``/readyz``. A health check returns an
empty string if all is well, otherwise a sentence. Liveness covers the process itself (the event
loop runs, nothing is stuck). Readiness covers also what the process needs for its work. Neither
depends on a tier or a policy.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, TextIO

from aiohttp import web
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)

from kvtier import __version__
from kvtier.listening import listen
from kvtier_operator.kube.resources import Kind
from kvtier_operator.settings import MonitoringSettings

logger = logging.getLogger(__name__)

# Logging.

_FIELDS: ContextVar[Mapping[str, Any]] = ContextVar("fields", default={})  # noqa: B039  (immutable)
_STANDARD_ATTRIBUTES = frozenset(logging.makeLogRecord({}).__dict__) | {
    "message",
    "asctime",
    "taskName",
}


class LogFormat(StrEnum):
    """The format of log lines."""

    JSON = "json"
    TEXT = "text"


class LogLevel(StrEnum):
    """Least severe log lines that are written."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


OWN_LOGGERS = ("kvtier", "kvtier_operator")


def configure(
    style: LogFormat, level: LogLevel = LogLevel.INFO, stream: TextIO | None = None
) -> None:
    """Sets up logging for the process.

    ``debug`` applies to KVTier's own loggers only: the Kubernetes client logs the bodies of
    responses at that level, which contain tokens.
    """
    number = logging.getLevelNamesMapping()[level.name]
    handler = logging.StreamHandler(stream if stream is not None else sys.stderr)
    handler.setFormatter(JsonFormatter() if style is LogFormat.JSON else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(number, logging.INFO))
    for name in OWN_LOGGERS:
        logging.getLogger(name).setLevel(number)
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)


@contextlib.contextmanager
def about(**fields: Any) -> Iterator[None]:
    """Binds log fields for the block, in this task and in the tasks that it starts."""
    token = _FIELDS.set({**_FIELDS.get(), **fields})
    try:
        yield
    finally:
        _FIELDS.reset(token)


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time, level, logger, message, the fields, and the traceback of an
    error.
    """

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": _timestamp(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields_of(record),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


class TextFormatter(logging.Formatter):
    """The same content as text, for terminals."""

    def format(self, record: logging.LogRecord) -> str:
        fields = " ".join(f"{key}={value}" for key, value in _fields_of(record).items())
        text = f"{_timestamp(record)} {record.levelname:<7} {record.getMessage()}"
        if fields:
            text = f"{text}  {fields}"
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


def _fields_of(record: logging.LogRecord) -> dict[str, Any]:
    extra = {k: v for k, v in record.__dict__.items() if k not in _STANDARD_ATTRIBUTES}
    return {**_FIELDS.get(), **extra}


def _timestamp(record: logging.LogRecord) -> str:
    time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
    return time.replace("+00:00", "Z")


# Metrics.

CALL_CODES = (
    "0", "200", "201", "401", "403", "404", "409", "410", "422", "429", "500", "503", "504",
)  # fmt: skip
"""Exist at 0 from the first call of a verb and kind on, so that ``increase()`` sees an error."""
RESTART_REASONS = (
    "Start", "List", "Stopped", "Undelivered",
    "Disconnected", "Unauthorized", "Forbidden", "NotFound", "Expired",
)  # fmt: skip
"""Exist at 0 from the first list of a kind on."""
CALL_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 15.0)


def new_registry() -> CollectorRegistry:
    """A registry with the metrics of the process: memory, file descriptors, CPU time, version."""
    disable_created_metrics()  # type: ignore[no-untyped-call]
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    info = Gauge(
        "kvtier_operator_build_info",
        "Version of the operator; always 1.",
        ["version"],
        registry=registry,
    )
    info.labels(__version__).set(1)
    return registry


class ApiMetrics:
    """Metrics of API server calls and watches.

    ``call`` has the signature of a client's observer, ``restart`` that of a cache's ``on_restart``.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._called: set[tuple[str, str]] = set()
        self._listed: set[str] = set()
        self.calls = Counter(
            "kvtier_operator_api_calls",
            "API server call attempts, by status code; 0 if there was no response.",
            ["verb", "kind", "code"],
            registry=registry,
        )
        self.seconds = Histogram(
            "kvtier_operator_api_call_duration_seconds",
            "Duration of API server call attempts.",
            ["verb"],
            buckets=CALL_SECONDS,
            registry=registry,
        )
        self.restarts = Counter(
            "kvtier_operator_watch_restarts",
            "Lists and watch restarts, by reason; Start is the initial list.",
            ["kind", "reason"],
            registry=registry,
        )

    def call(self, verb: str, kind: str, status: int, seconds: float) -> None:
        """Records one attempt."""
        if (verb, kind) not in self._called:
            self._called.add((verb, kind))
            for code in CALL_CODES:
                self.calls.labels(verb, kind, code)
        self.calls.labels(verb, kind, str(status)).inc()
        if verb != "watch":
            self.seconds.labels(verb).observe(seconds)

    def restart(self, kind: Kind, reason: str) -> None:
        """Records a list, or a watch that started again."""
        if kind.kind not in self._listed:
            self._listed.add(kind.kind)
            for known in RESTART_REASONS:
                self.restarts.labels(kind.kind, known)
        self.restarts.labels(kind.kind, reason or "Unknown").inc()


# Monitoring.

Check = Callable[[], str]


class Health:
    """Named health checks. They run on the event loop at each probe and must not block."""

    def __init__(self) -> None:
        self._live: dict[str, Check] = {}
        self._ready: dict[str, Check] = {}

    def live(self, name: str, check: Check) -> None:
        """Adds a liveness check: if it fails, the process should be restarted."""
        self._live[name] = check

    def ready(self, name: str, check: Check) -> None:
        """Adds a readiness check: while it fails, the process cannot do its work."""
        self._ready[name] = check

    def problems(self, *, readiness: bool) -> dict[str, str]:
        """The problem of each failing check, by name."""
        checks = self._live | (self._ready if readiness else {})
        return {name: problem for name, check in checks.items() if (problem := check())}


@contextlib.asynccontextmanager
async def serve(
    settings: MonitoringSettings, registry: CollectorRegistry, health: Health
) -> AsyncIterator[int]:
    """Serves while the block runs; yields the port. Raises ``OSError`` if it cannot listen."""

    def respond(*, readiness: bool) -> web.Response:
        problems = health.problems(readiness=readiness)
        lines = "".join(f"{name}: {problem}\n" for name, problem in sorted(problems.items()))
        return web.Response(text=lines or "ok\n", status=503 if problems else 200)

    async def healthz(_: web.Request) -> web.Response:
        return respond(readiness=False)

    async def readyz(_: web.Request) -> web.Response:
        return respond(readiness=True)

    async def metrics(_: web.Request) -> web.Response:
        content_type = {"Content-Type": CONTENT_TYPE_LATEST}
        return web.Response(body=generate_latest(registry), headers=content_type)

    application = web.Application()
    application.add_routes(
        [web.get("/healthz", healthz), web.get("/readyz", readyz), web.get("/metrics", metrics)]
    )
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.SockSite(runner, listen(settings.host, settings.port)).start()
        port = int(runner.addresses[0][1])
        logger.info("serving health and metrics", extra={"port": port})
        yield port
    finally:
        await runner.cleanup()
