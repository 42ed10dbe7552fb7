"""`kvtier faults`: the scorecard, with a progress display, as a table or as JSON."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvtier.cli.console import console, error_console
from kvtier.errors import ConfigurationError

PASSED, FAILED, SKIPPED_SOME = 0, 1, 3
MARKS = {"pass": "[green]pass[/]", "fail": "[red]fail[/]", "skipped": "[yellow]skipped[/]"}


def options(
    path: Path | None, faults: Iterable[str], seconds: float, hang_seconds: float, objects: int
) -> Any:
    """The scorecard's options. Raises ``ConfigurationError`` for a directory or a fault that is none."""
    from kvtier.scorecard import runner

    directory = path or Path(tempfile.gettempdir())
    if not directory.is_dir() or not os.access(directory, os.W_OK):
        raise ConfigurationError("--path", str(directory), "a directory that can be written")
    known = runner.names()
    for name in faults:
        if name not in known:
            raise ConfigurationError("--fault", name, "one of " + ", ".join(known))
    return runner.ScorecardOptions(
        directory.absolute(),
        tuple(faults),
        seconds=seconds,
        hang_seconds=hang_seconds,
        writer_objects=objects,
    )


def run(chosen: Any, with_engine: bool) -> list[Any]:
    """Plays everything, with a progress bar on standard error where that is a terminal."""
    from kvtier.scorecard import engine_faults, runner

    signal.signal(signal.SIGTERM, _told_to_end)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        # The terminal is gone, and nobody said (nohup) that it shall go on all the same.
        signal.signal(signal.SIGHUP, _told_to_end)
    plays: list[tuple[list[str], Callable[[Callable[[str], None]], Iterable[Any]]]] = [
        (
            [name for name in runner.names() if not chosen.faults or name in chosen.faults],
            lambda told: runner.run_faults(chosen, told),
        )
    ]
    if with_engine:
        plays.append(
            (
                engine_faults.names(chosen),
                lambda told: engine_faults.run_engine_faults(chosen, told),
            )
        )
    rows: list[Any] = []
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=error_console(), transient=True) as progress:
        task = progress.add_task("", total=sum(len(names) for names, _ in plays))
        for _, play in plays:
            for row in play(lambda name: progress.update(task, description=name)):
                rows.append(row)
                progress.advance(task)
    return rows


def _told_to_end(number: int, _: object) -> None:
    """As Ctrl-C: whatever was started or mounted is ended and removed on the way out."""
    raise SystemExit(128 + number)


def compare(chosen: Any) -> list[Any]:
    """The same faults on the storage of others."""
    from kvtier.scorecard import peers

    rows: list[Any] = []
    with Progress(
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        console=error_console(),
        transient=True,
    ) as progress:
        task = progress.add_task("peers", total=None)
        rows.extend(
            peers.compare(chosen, on_start=lambda name: progress.update(task, description=name))
        )
    return rows


def as_json(rows: Iterable[Any], others: Iterable[Any]) -> dict[str, Any]:
    """The document that `--json` prints."""
    document: dict[str, Any] = {"faults": [asdict(row) for row in rows]}
    found = [asdict(row) for row in others]
    if found:
        document["peers"] = found
    return document


def show(rows: list[Any], others: list[Any]) -> None:
    """The tables."""
    table = Table(
        "fault",
        "verdict",
        "means",
        "wrong",
        "crashes",
        "beyond clock s",
        "breaker open s",
        "over budget",
        "recovery s",
        "loads",
        "why",
        title="KVTier",
    )
    for row in rows:
        table.add_row(
            row.fault,
            MARKS[row.verdict],
            row.means,
            _cell(row.wrong_bytes),
            _cell(row.crashes),
            _cell(row.longest_wait_beyond_clock_seconds),
            _cell(row.added_wait_breaker_open_seconds),
            _cell(row.bytes_over_budget),
            _cell(row.recovery_seconds),
            f"{row.loaded}/{row.loads}" if row.loads else "",
            "; ".join(part for part in (row.reason, *row.notes) if part),
        )
    console().print(table)
    if others:
        table = Table(
            "peer",
            "fault",
            "verdict",
            "wrong",
            "crashes",
            "longest wait s",
            "recovery s",
            "why",
            title="Peers",
        )
        for row in others:
            table.add_row(
                f"{row.peer} {row.version}",
                row.fault,
                MARKS[row.verdict],
                _cell(row.wrong_bytes),
                _cell(row.crashes),
                _cell(row.longest_wait_seconds),
                _cell(row.recovery_seconds),
                row.reason,
            )
        console().print(table)


def status(rows: Iterable[Any]) -> int:
    """0: all pass; 1: something fails; 3: nothing fails, but something could not be played."""
    verdicts = {row.verdict for row in rows}
    return FAILED if "fail" in verdicts else SKIPPED_SOME if "skipped" in verdicts else PASSED


def _cell(value: object) -> str:
    return "" if value is None else str(value)
