"""Output of the commands.

Text for programs is written unchanged. rich formats text for people and never interprets markup
from a file.
"""

from __future__ import annotations

import json
import sys

from rich.console import Console, ConsoleDimensions
from rich.measure import Measurement
from rich.table import Table

MAX_TABLE_WIDTH = 10_000
"""Columns of a table that is not written to a terminal."""


def console() -> Console:
    """Standard output. A new object for each call, because callers and tests may replace the
    stream.
    """
    return Console(file=sys.stdout, highlight=False, soft_wrap=True)


def error_console() -> Console:
    """Standard error."""
    return Console(file=sys.stderr, highlight=False, soft_wrap=True)


def print_text(text: str) -> None:
    """Writes text unchanged, with one newline at the end."""
    sys.stdout.write(text if text.endswith("\n") else text + "\n")


def print_json(document: object) -> None:
    """Writes a document as JSON. Characters that the stream cannot encode are escaped."""
    text = json.dumps(document, indent=2, ensure_ascii=False)
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        text = json.dumps(document, indent=2)
    print_text(text)


def print_table(table: Table) -> None:
    """Writes a table. It fits a terminal's width; in a pipe or a file no cell is wrapped, even if
    the environment asks for colors (``FORCE_COLOR``).
    """
    out = console()
    if not sys.stdout.isatty():
        unlimited = out.options.update(width=MAX_TABLE_WIDTH)
        width = max(out.width, Measurement.get(out, unlimited, table).maximum)
        out.size = ConsoleDimensions(width, out.height)
    out.print(table)
