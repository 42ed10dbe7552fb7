"""``kvtier faults``: runs the fault scorecard and prints its verdicts."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from kvtier.cli.console import error_console, print_table
from kvtier.cli.inputs import OptionError
from kvtier.scorecard import engine_faults, peers, remote_faults, runner
from kvtier.scorecard.file_systems import KINDS
from kvtier.scorecard.runner import ScorecardOptions, ScorecardRow

PASSED, FAILED, INCOMPLETE = 0, 1, 3
STYLES = {"pass": "green", "fail": "red", "skipped": "yellow"}


def fault_names() -> list[str]:
    """The names of all faults."""
    return runner.names()


def scorecard_options(
    path: Path | None, faults: Iterable[str], seconds: float, hang_seconds: float, objects: int
) -> ScorecardOptions:
    """Checks the options of the command. Raises ``OptionError``."""
    directory = path or Path(tempfile.gettempdir())
    if not directory.is_dir() or not os.access(directory, os.W_OK):
        raise OptionError("--path", directory, "must be a writable directory")
    known = fault_names()
    for name in faults:
        if name not in known:
            raise OptionError("--fault", name, f"must be one of: {', '.join(known)}")
    return ScorecardOptions(
        directory.absolute(),
        tuple(faults),
        seconds=seconds,
        hang_seconds=hang_seconds,
        writer_objects=objects,
    )


def on_file_systems(options: ScorecardOptions, kinds: Iterable[str]) -> ScorecardOptions:
    """The options with these file systems; ``all`` is each of them. Raises ``OptionError``."""
    chosen = [kind for each in kinds for kind in (KINDS if each == "all" else (each,))]
    for kind in chosen:
        if kind not in KINDS:
            raise OptionError("--file-system", kind, f"must be one of: {', '.join(KINDS)}, all")
    return replace(options, file_systems=tuple(dict.fromkeys(chosen)))


def run(options: ScorecardOptions, *, with_engine: bool) -> list[ScorecardRow]:
    """Injects every fault. Shows progress on standard error if it is a terminal."""
    signal.signal(signal.SIGTERM, _exit_on_signal)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        # Under nohup the signal is ignored, and the run continues without its terminal.
        signal.signal(signal.SIGHUP, _exit_on_signal)
    selected = [name for name in fault_names() if not options.faults or name in options.faults]
    remote = set(remote_faults.names())
    on_files = sum(name not in remote for name in selected)
    total = len(selected) + on_files * max(len(options.file_systems) - 1, 0)
    total += len(engine_faults.names(options)) if with_engine else 0
    rows: list[ScorecardRow] = []
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=error_console(), transient=True) as progress:
        task = progress.add_task("", total=total)

        def on_start(name: str) -> None:
            progress.update(task, description=name)

        runs: list[Callable[[], Iterable[ScorecardRow]]] = [
            lambda: runner.run_faults(options, on_start)
        ]
        if with_engine:
            runs.append(lambda: engine_faults.run_engine_faults(options, on_start))
        for each in runs:
            for row in each():
                rows.append(row)
                progress.advance(task)
    return rows


def compare(options: ScorecardOptions) -> list[Any]:
    """Injects the same faults under the file tiers of other projects."""
    columns = (TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=error_console(), transient=True) as progress:
        task = progress.add_task("peers", total=None)
        on_start = lambda name: progress.update(task, description=name)  # noqa: E731
        return list(peers.compare(options, on_start=on_start))


def exit_status(rows: Iterable[ScorecardRow]) -> int:
    """0: all passed; 1: at least one failed; 3: none failed, but at least one was skipped."""
    verdicts = {row.verdict for row in rows}
    if "fail" in verdicts:
        return FAILED
    return INCOMPLETE if "skipped" in verdicts else PASSED


def to_json(rows: Iterable[ScorecardRow], peer_rows: Iterable[Any]) -> dict[str, Any]:
    """The output of ``--json``."""
    document: dict[str, Any] = {"faults": [asdict(row) for row in rows]}
    compared = [asdict(row) for row in peer_rows]
    if compared:
        document["peers"] = compared
    return document


def show(rows: list[ScorecardRow], peer_rows: list[Any]) -> None:
    """Prints the tables."""
    table = Table(
        "fault",
        "files on",
        "verdict",
        "method",
        "wrong bytes",
        "crashes",
        "wait beyond limit (s)",
        "wait, breaker open (s)",
        "bytes over budget",
        "recovery (s)",
        "loads",
        "notes",
        title="KVTier",
    )
    for row in rows:
        table.add_row(
            row.fault,
            row.file_system,
            _verdict(row.verdict),
            Text(row.means),
            _cell(row.wrong_bytes),
            _cell(row.crashes),
            _cell(row.longest_wait_beyond_clock_seconds),
            _cell(row.added_wait_breaker_open_seconds),
            _cell(row.bytes_over_budget),
            _cell(row.recovery_seconds),
            f"{row.loaded}/{row.loads}" if row.loads else "",
            Text("; ".join(part for part in (row.reason, *row.notes) if part)),
        )
    print_table(table)
    if not peer_rows:
        return
    table = Table(
        "peer",
        "fault",
        "verdict",
        "wrong bytes",
        "crashes",
        "longest wait (s)",
        "recovery (s)",
        "notes",
        title="Peers",
    )
    for row in peer_rows:
        table.add_row(
            f"{row.peer} {row.version}",
            row.fault,
            _verdict(row.verdict),
            _cell(row.wrong_bytes),
            _cell(row.crashes),
            _cell(row.longest_wait_seconds),
            _cell(row.recovery_seconds),
            Text(row.reason),
        )
    print_table(table)


def _exit_on_signal(number: int, _: object) -> None:
    """Exits as on Ctrl-C, so that processes and mounts are cleaned up."""
    raise SystemExit(128 + number)


def _verdict(verdict: str) -> Text:
    return Text(verdict, style=STYLES[verdict])


def _cell(value: object) -> str:
    return "" if value is None else str(value)
