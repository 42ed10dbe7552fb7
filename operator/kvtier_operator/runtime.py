"""The operator's own HTTP: ``/metrics``, ``/healthz`` and ``/readyz`` on ``settings.monitoring``.

A check returns an empty text where all is well, else a sentence. Liveness says whether the process works (its loop
turns, no part of it is stuck); readiness also whether it has what it needs to do its work. Neither depends on a tier or
on a policy.

Logs as lines of JSON (or of text, for people at a terminal).

What a line is about (policy, namespace, the number of the reconcile) is bound once with ``about`` and then stands in
every line that is written from there on in the same task, in those of other modules too.

Metrics that both processes of the operator have. Each process has one registry; names begin with
``kvtier_operator_``.
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
    disable_created_metrics,
    generate_latest,
)
from prometheus_client import ProcessCollector as Process

from kvtier import __version__
from kvtier_operator.kube.resources import Kind
from kvtier_operator.settings import Monitoring

logger = logging.getLogger(__name__)
Check = Callable[[], str]


class Health:
    """Named checks, asked on the event loop whenever somebody asks for them; they must not wait."""

    def __init__(self) -> None:
        self._live: dict[str, Check] = {}
        self._ready: dict[str, Check] = {}

    def live(self, name: str, check: Check) -> None:
        """Adds a check whose failure means that the process should be restarted."""
        self._live[name] = check

    def ready(self, name: str, check: Check) -> None:
        """Adds a check whose failure means that the process cannot do its work at the moment."""
        self._ready[name] = check

    def problems(self, *, readiness: bool) -> dict[str, str]:
        """What is wrong, by name."""
        checks = self._live | (self._ready if readiness else {})
        return {name: text for name, check in checks.items() if (text := check())}


@contextlib.asynccontextmanager
async def serve(
    settings: Monitoring, registry: CollectorRegistry, health: Health
) -> AsyncIterator[int]:
    """Serves for as long as the block runs; gives the port. Raises ``OSError`` where it cannot listen."""

    def answer(*, readiness: bool) -> web.Response:
        problems = health.problems(readiness=readiness)
        text = (
            "".join(f"{name}: {problem}\n" for name, problem in sorted(problems.items())) or "ok\n"
        )
        return web.Response(text=text, status=503 if problems else 200)

    async def healthz(_: web.Request) -> web.Response:
        return answer(readiness=False)

    async def readyz(_: web.Request) -> web.Response:
        return answer(readiness=True)

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(
            body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST}
        )

    application = web.Application()
    application.add_routes(
        [web.get("/healthz", healthz), web.get("/readyz", readyz), web.get("/metrics", metrics)]
    )
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        site = web.TCPSite(runner, settings.host, settings.port)
        await site.start()
        port = int(runner.addresses[0][1])
        logger.info("health and metrics are served", extra={"port": port})
        yield port
    finally:
        await runner.cleanup()


_ABOUT: ContextVar[Mapping[str, Any]] = ContextVar("about", default={})  # noqa: B039  (never changed in place)
_STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


class LogFormat(StrEnum):
    """How lines look."""

    JSON = "json"
    TEXT = "text"


@contextlib.contextmanager
def about(**fields: Any) -> Iterator[None]:
    """Binds fields for the block, in this task and in those it starts."""
    token = _ABOUT.set({**_ABOUT.get(), **fields})
    try:
        yield
    finally:
        _ABOUT.reset(token)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    own = {key: value for key, value in record.__dict__.items() if key not in _STANDARD}
    return {**_ABOUT.get(), **own}


def _moment(record: logging.LogRecord) -> str:
    return (
        datetime.fromtimestamp(record.created, UTC)
        .isoformat(timespec="milliseconds")
        .replace("+00:00", "Z")
    )


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time, level, logger, message, the bound fields, and an error's traceback."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": _moment(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


class TextFormatter(logging.Formatter):
    """The same for people."""

    def format(self, record: logging.LogRecord) -> str:
        fields = " ".join(f"{key}={value}" for key, value in _fields(record).items())
        text = f"{_moment(record)} {record.levelname:<7} {record.getMessage()}{'  ' + fields if fields else ''}"
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


def configure(style: LogFormat, level: int = logging.INFO, stream: TextIO | None = None) -> None:
    """Sets up the process's logging; once, before anything is logged."""
    handler = logging.StreamHandler(stream if stream is not None else sys.stderr)
    handler.setFormatter(JsonFormatter() if style is LogFormat.JSON else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)


CALL_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 15.0)


def new_registry() -> CollectorRegistry:
    """A registry with the process's memory, descriptors and CPU time in it."""
    disable_created_metrics()  # type: ignore[no-untyped-call]
    registry = CollectorRegistry()
    Process(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    info = Gauge(
        "kvtier_operator_build_info", "The version; always 1.", ["version"], registry=registry
    )
    info.labels(__version__).set(1)
    return registry


class ApiMetrics:
    """Calls to the API server and restarts of watches. ``call`` is a client's observer, ``restart`` a cache's
    ``on_restart``.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.calls = Counter(
            "kvtier_operator_api_calls",
            "Attempts to call the API server; code 0: no answer.",
            ["verb", "kind", "code"],
            registry=registry,
        )
        self.seconds = Histogram(
            "kvtier_operator_api_call_seconds",
            "Until an attempt was answered.",
            ["verb"],
            buckets=CALL_SECONDS,
            registry=registry,
        )
        self.restarts = Counter(
            "kvtier_operator_watch_restarts",
            "Lists, and watches begun again, by reason; Start is the first list.",
            ["kind", "reason"],
            registry=registry,
        )

    def call(self, verb: str, kind: str, status: int, seconds: float) -> None:
        """One attempt."""
        self.calls.labels(verb, kind, str(status)).inc()
        if verb != "watch":
            self.seconds.labels(verb).observe(seconds)

    def restart(self, kind: Kind, reason: str) -> None:
        """A list or watch that was begun (again)."""
        self.restarts.labels(kind.kind, reason or "Unknown").inc()
