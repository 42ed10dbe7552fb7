"""Plays the faults one after another and judges each.

A fault passes if no wrong byte was served, nothing crashed, no load waited longer than its clock and 100 ms, the directory never held more than its
capacity, a load beside an open breaker waited for nothing, and stores and loads from files work again without a person.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from kvtier.scorecard import small_disks, writers
from kvtier.scorecard.catalog import FAULTS, Fault, FaultContext
from kvtier.scorecard.mount import FaultyMount
from kvtier.scorecard.testbed import BUDGET_SECONDS, FaultTestbed, Measurements
from kvtier.scorecard.tier_faults import CannotPlayError, TierWrapper

ALLOWED_SECONDS = 0.1
"""DATAPATH: what a promotion may take beyond its clock."""
OPEN_SECONDS = 0.05
"""Beside an open breaker nothing is waited for; this is what measuring takes."""
PASS, FAIL, SKIPPED = "pass", "fail", "skipped"


@dataclass(frozen=True, slots=True)
class ScorecardOptions:
    """``directory``: where to work, a directory of its own below it. ``slack_seconds``: what a slow machine may add to every wait."""

    directory: Path
    faults: tuple[str, ...] = ()
    seconds: float = 6.0
    hang_seconds: float = 60.0
    writer_objects: int = 10_000
    slack_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class ScorecardRow:
    """One fault's result. ``None``: was not, or could not be, measured."""

    fault: str
    verdict: str
    reason: str = ""
    means: str = ""
    wrong_bytes: int | None = None
    crashes: int | None = None
    longest_wait_beyond_clock_seconds: float | None = None
    added_wait_breaker_open_seconds: float | None = None
    bytes_over_budget: int | None = None
    recovery_seconds: float | None = None
    loads: int = 0
    loaded: int = 0
    notes: list[str] = field(default_factory=list)


def names() -> list[str]:
    """Every fault, in order."""
    return (
        [fault.name for fault in FAULTS]
        + list(small_disks.NAMES)
        + [f"writers-{n}" for n in writers.COUNTS]
    )


def run_faults(
    options: ScorecardOptions, on_start: Callable[[str], None] = lambda _: None
) -> Iterator[ScorecardRow]:
    """The rows, one by one as they are played. ``told`` hears the name of each before it begins. Everything that is made is removed."""
    wanted = [name for name in names() if not options.faults or name in options.faults]
    home = Path(tempfile.mkdtemp(prefix="kvtier-faults-", dir=options.directory))
    try:
        chosen = [fault for fault in FAULTS if fault.name in wanted]
        if chosen:
            with _scene(home / "stage", options) as (scene, why_no_mount):
                for fault in chosen:
                    on_start(fault.name)
                    yield _play(fault, scene, why_no_mount, options)
        for name in wanted:
            if name in small_disks.NAMES:
                on_start(name)
                yield small_disk(name, home, options)
            elif name.startswith("writers-"):
                on_start(name)
                yield many_writers(int(name.removeprefix("writers-")), home, options)
    finally:
        shutil.rmtree(home, ignore_errors=True)


@contextmanager
def _scene(home: Path, options: ScorecardOptions) -> Iterator[tuple[FaultContext, str]]:
    below, files = home / "below", home / "tier"
    below.mkdir(parents=True)
    files.mkdir()
    with ExitStack() as stack:
        why = ""
        mount: FaultyMount | TierWrapper
        try:
            mount = FaultyMount(below, files, home / "faults.json", home / "mount.log")
        except OSError as error:
            why = f"no FUSE mount can be made here: {error.strerror or error}"
            mount = TierWrapper(home / "faults.json")
        stack.callback(mount.close)
        wrapped = mount.control if isinstance(mount, TierWrapper) else None
        stage = FaultTestbed(home, below if wrapped else files, below, wrapped)
        stack.callback(stage.close)
        yield FaultContext(stage, mount, options.seconds, options.hang_seconds), why


def _play(
    fault: Fault, scene: FaultContext, why_no_mount: str, options: ScorecardOptions
) -> ScorecardRow:
    means = TierWrapper.means if why_no_mount and fault.means == "FUSE" else fault.means
    stage = scene.stage
    measured = Measurements()
    wrong_before = stage.engine.seen.wrong
    log_before = _length(stage.case.log)
    try:
        stage.fill()
        pid = stage.pid
        fault.play(scene, measured)
        if stage.pid == pid and not stage.is_daemon_running():
            measured.crashes += 1
            measured.notes.append("the daemon ended")
        measured.recovery_seconds = stage.recover()
    except CannotPlayError as error:
        return ScorecardRow(fault.name, SKIPPED, f"{why_no_mount}; {error}", means)
    except (OSError, TimeoutError, LookupError) as error:
        return ScorecardRow(
            fault.name, FAIL, f"could not be played: {type(error).__name__}: {error}", means
        )
    finally:
        scene.mount.set()
    if (text := _traceback(stage.case.log, log_before)) is not None:
        measured.crashes += 1
        measured.notes.append(text)
    measured.wrong = stage.engine.seen.wrong - wrong_before
    return judge(fault.name, means, measured, options.slack_seconds)


def judge(
    name: str, means: str, measured: Measurements, slack_seconds: float = 0.0
) -> ScorecardRow:
    """The verdict about what was measured."""
    beyond = max(0.0, measured.longest_wait - BUDGET_SECONDS)
    added = measured.longest_wait_breaker_open
    problems = [
        (measured.wrong > 0, f"{measured.wrong} objects came back wrong"),
        (
            measured.crashes > 0,
            f"{measured.crashes} crashes or the like: {'; '.join(measured.notes)}",
        ),
        (
            beyond > ALLOWED_SECONDS + slack_seconds,
            f"a load waited {beyond:.3f} s beyond its clock",
        ),
        (
            added is not None and added > OPEN_SECONDS + slack_seconds,
            f"a load waited {added or 0:.3f} s beside an open breaker",
        ),
        (measured.over_budget_bytes > 0, f"{measured.over_budget_bytes} bytes above the capacity"),
        (measured.recovery_seconds is None, "stores and loads did not work again by themselves"),
    ]
    reasons = [text for wrong, text in problems if wrong]
    return ScorecardRow(
        name,
        FAIL if reasons else PASS,
        "; ".join(reasons),
        means,
        wrong_bytes=measured.wrong,
        crashes=measured.crashes,
        longest_wait_beyond_clock_seconds=round(beyond, 3),
        added_wait_breaker_open_seconds=None if added is None else round(added, 3),
        bytes_over_budget=measured.over_budget_bytes,
        recovery_seconds=None
        if measured.recovery_seconds is None
        else round(measured.recovery_seconds, 2),
        loads=measured.loads,
        loaded=measured.loaded,
        notes=list(measured.notes),
    )


def small_disk(name: str, home: Path, options: ScorecardOptions) -> ScorecardRow:
    """ENOSPC and EROFS from a real file system that is small."""
    directory = home / name
    directory.mkdir()
    try:
        with small_disks.mounted(directory) as disk:
            stage = FaultTestbed(directory / "stage", disk.path, disk.path)
            try:
                measured = Measurements()
                small_disks.PLAYS[name](stage, disk, options.seconds, measured)
                measured.wrong = stage.engine.seen.wrong
                if not stage.is_daemon_running():
                    measured.crashes += 1
            finally:
                stage.close()
    except small_disks.NoDiskError as error:
        return ScorecardRow(name, SKIPPED, str(error), small_disks.MEANS)
    except (OSError, TimeoutError) as error:
        return ScorecardRow(
            name, FAIL, f"could not be played: {type(error).__name__}: {error}", small_disks.MEANS
        )
    return judge(name, small_disks.MEANS, measured, options.slack_seconds)


def many_writers(count: int, home: Path, options: ScorecardOptions) -> ScorecardRow:
    """Processes that write one directory, some of them killed."""
    found = writers.run(home / f"writers-{count}", count, options.writer_objects)
    problems = [
        (found.wrong > 0, f"{found.wrong} objects came back wrong or failed"),
        (found.over_bytes > 0, f"{found.over_bytes} bytes above the capacity"),
        (found.temporaries > 0, f"{found.temporaries} temporaries stay behind"),
        (found.unverified > 0, f"{found.unverified} files that are left do not verify"),
        (found.failed > 0, f"{found.failed} writers ended with an error"),
    ]
    reasons = [text for wrong, text in problems if wrong]
    return ScorecardRow(
        f"writers-{count}",
        FAIL if reasons else PASS,
        "; ".join(reasons),
        "process",
        wrong_bytes=found.wrong,
        crashes=found.failed,
        bytes_over_budget=found.over_bytes,
        recovery_seconds=round(found.swept_seconds, 2),
        loads=found.read,
        loaded=found.read,
        notes=[f"{found.stored} stored, {found.dropped} dropped, {found.killed} writers killed"],
    )


def passed(rows: Iterable[ScorecardRow]) -> bool:
    """Whether every row passed."""
    return all(row.verdict == PASS for row in rows)


def _length(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _traceback(path: Path, start: int) -> str | None:
    if not path.exists():
        return None
    with path.open("rb") as file:
        file.seek(start)
        text = file.read().decode(errors="replace")
    where = text.find("Traceback (most recent call last)")
    return (
        None if where < 0 else "in the daemon's log: " + text[where:].strip().splitlines()[-1][:200]
    )
