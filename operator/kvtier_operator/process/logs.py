"""Logs as lines of JSON (or of text, for people at a terminal).

What a line is about (policy, namespace, the number of the reconcile) is bound once with ``about`` and then stands in
every line that is written from there on in the same task, in those of other modules too.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, TextIO

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
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


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
