"""The demo's control: files that are valid in every respect and hold the wrong KV.

No fault of a disk looks like this (a reader cannot tell, that is the point). If the engine's answer stayed the same with such
files, equal answers elsewhere in the demo would prove nothing.

What the demo shows: progress while it works, and a table at the end.

With ``rich`` where it can be imported, with plain lines elsewhere; on no terminal, plain lines too.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvtier.tiers.base import ObjectMeta, ObjectRef
from kvtier.tiers.checksum import preferred
from kvtier.tiers.filesystem.format import HEADER_BYTES, read_header, write_header


def reference_of(path: Path) -> ObjectRef:
    """Which object lies in ``path``: ``<root>/<namespace>/<2 hex>/<2 hex>/<key>.kv``."""
    return ObjectRef(path.parents[2].name, bytes.fromhex(path.stem))


def replace_by_foreign_bytes(victims: Sequence[Path], donors: Sequence[Path]) -> None:
    """Gives each victim the KV of a donor, under the victim's key and with a right checksum. One rank's shard each.

    Raises ``ValueError`` if there are too few donors, ``OSError``, and ``TierCorruptError`` for a file that is none of ours.
    """
    checksum = preferred()
    for victim, donor in zip(victims, donors[: len(victims)], strict=True):
        content = bytearray(donor.read_bytes())
        whole = memoryview(content)
        meta = read_header(whole[:HEADER_BYTES], reference_of(donor), len(content) - HEADER_BYTES)
        payload = whole[HEADER_BYTES : HEADER_BYTES + meta.shard_bytes[0]]
        foreign = ObjectMeta(meta.shard_bytes, checksum.kind, (checksum.digest(payload),))
        write_header(whole[:HEADER_BYTES], reference_of(victim), foreign)
        fresh = victim.with_suffix(".demo")
        fresh.write_bytes(content)
        os.replace(fresh, victim)


class Display:
    """Progress lines with the time since the start. ``write`` takes one line of text."""

    def __init__(
        self,
        write: Callable[[str], None] = lambda line: print(line, flush=True),
        clock: Callable[[], float] = time.monotonic,
        fancy: bool | None = None,
    ) -> None:
        self._write = write
        self._clock = clock
        self._begun = clock()
        if fancy is None:
            fancy = sys.stdout.isatty() and importlib.util.find_spec("rich") is not None
        self._console: Any = None
        if fancy:
            from rich.console import Console

            self._console = Console(highlight=False)

    def note(self, text: str) -> None:
        """One line, with the seconds since the start."""
        self._line(f"[{self._clock() - self._begun:5.1f} s] {text}")

    @contextmanager
    def step(self, text: str) -> Iterator[None]:
        """Something that takes a while: shown as under way, then as done with its time (or as failed)."""
        begun = self._clock()
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
        self.note(f"{text} ({self._clock() - begun:.1f} s)")

    def table(self, title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """A table; all columns but the first two are aligned right."""
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
    """A table in plain text, one line per row, all columns but the first two aligned right."""
    widths = [max(len(row[index]) for row in (headings, *rows)) for index in range(len(headings))]

    def line(cells: Sequence[str]) -> str:
        padded = (
            cell.ljust(width) if index < 2 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return "  ".join(padded).rstrip()

    return [line(headings), line(["-" * width for width in widths]), *(line(row) for row in rows)]
