"""Output of the demo: progress lines with the elapsed time, and a table at the end.

Uses rich if it can be imported and standard output is a terminal, and plain lines otherwise.
"""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any


class Display:
    """Prints progress lines and tables. ``write`` prints one line of text."""

    def __init__(
        self,
        write: Callable[[str], None] = lambda line: print(line, flush=True),
        clock: Callable[[], float] = time.monotonic,
        fancy: bool | None = None,
    ) -> None:
        self._write = write
        self._clock = clock
        self._started = clock()
        if fancy is None:
            fancy = sys.stdout.isatty() and importlib.util.find_spec("rich") is not None
        self._console: Any = None
        if fancy:
            from rich.console import Console

            self._console = Console(highlight=False)

    def note(self, text: str) -> None:
        """Prints a line with the elapsed seconds."""
        self._line(f"[{self._clock() - self._started:5.1f} s] {text}")

    @contextmanager
    def step(self, text: str) -> Iterator[None]:
        """Prints a step that takes time, and afterwards its duration."""
        started = self._clock()
        if self._console is None:
            self.note(f"{text} ...")
            yield
            return
        status = self._console.status(f"{text} ...")
        status.start()
        try:
            yield
        finally:
            status.stop()
        self.note(f"{text} ({self._clock() - started:.1f} s)")

    def table(self, title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Prints a table. The first two columns are left-aligned, the others right-aligned."""
        if self._console is not None:
            from rich.table import Table

            table = Table(title=title, title_justify="left")
            for index, heading in enumerate(headings):
                table.add_column(heading, justify="left" if index < 2 else "right")
            for row in rows:
                table.add_row(*row)
            self._console.print(table)
            return
        self._write("")
        self._write(title)
        for line in plain_table(headings, rows):
            self._write(line)
        self._write("")

    def _line(self, text: str) -> None:
        if self._console is not None:
            self._console.print(text, markup=False)
        else:
            self._write(text)


def plain_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table in plain text, one line per row, aligned as ``Display.table`` does."""
    widths = [max(len(row[index]) for row in (headings, *rows)) for index in range(len(headings))]

    def line(cells: Sequence[str]) -> str:
        padded = (
            cell.ljust(width) if index < 2 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return "  ".join(padded).rstrip()

    return [line(headings), line(["-" * width for width in widths]), *(line(row) for row in rows)]
