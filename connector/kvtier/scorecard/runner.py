"""Runs the faults of the scorecard one after another and judges each.

A fault passes if no wrong byte was served, nothing crashed, no load waited longer than its deadline
plus 100 ms, the directory never exceeded its capacity, loads did not wait for a tier with an open
breaker, and stores and loads from files recovered without intervention.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from kvtier.scorecard import (
    announcement_faults,
    file_systems,
    remote_faults,
    sealed_faults,
    small_disks,
    volume_faults,
    writers,
)
from kvtier.scorecard.catalog import FAULTS, Fault, FaultContext
from kvtier.scorecard.mount import FaultyMount
from kvtier.scorecard.testbed import FaultTestbed, Measurements
from kvtier.scorecard.tier_faults import TierWrapper, UnsupportedFaultError

ALLOWED_SECONDS = 0.1
"""How long a promotion may take beyond its deadline (docs/datapath.md)."""
OPEN_SECONDS = 0.05
"""Loads do not wait for a tier with an open breaker. This is the error of the measurement."""
PASS, FAIL, SKIPPED = "pass", "fail", "skipped"


@dataclass(frozen=True, slots=True)
class ScorecardOptions:
    """``directory``: a temporary directory is created below it. ``slack_seconds``: what a slow
    machine may add to every wait. ``file_systems``: kinds of ``file_systems.KINDS`` on which the
    faults of file tiers run, each in turn; none for that of ``directory``.
    """

    directory: Path
    faults: tuple[str, ...] = ()
    seconds: float = 6.0
    hang_seconds: float = 60.0
    writer_objects: int = 10_000
    slack_seconds: float = 0.0
    file_systems: tuple[str, ...] = ()
    fuse: bool = True
    """Whether storage faults are injected by a FUSE mount, where one can be made."""
    patience: float = 1.0
    """What deadlines of loads and waits for tierd are multiplied by, on a slow machine."""


@dataclass(frozen=True, slots=True)
class ScorecardRow:
    """The result of one fault. ``None``: not measured. ``file_system``: the kind that was asked
    for; empty for that of the directory, and without a file tier."""

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
    file_system: str = ""


def names() -> list[str]:
    """The names of all faults, in order."""
    return (
        [fault.name for fault in FAULTS]
        + [fault.name for fault in sealed_faults.SEALED_FAULTS]
        + list(small_disks.NAMES)
        + list(volume_faults.VOLUME_FAULTS)
        + remote_faults.names()
        + [f"writers-{n}" for n in writers.COUNTS]
        + list(announcement_faults.NAMES)
    )


def run_faults(
    options: ScorecardOptions, on_start: Callable[[str], None] = lambda _: None
) -> Iterator[ScorecardRow]:
    """Yields the rows as the faults run. ``on_start`` is called with the name of each before it
    starts. Everything that is created is removed.
    """
    selected = [name for name in names() if not options.faults or name in options.faults]
    home = Path(tempfile.mkdtemp(prefix="kvtier-faults-", dir=options.directory))
    try:
        for kind in options.file_systems or ("",):
            for row in _run_on(kind, home / kind, selected, options, on_start):
                yield replace(row, file_system=kind)
        for server in remote_faults.SERVERS:
            rows = [name for name in remote_faults.names(server) if name in selected]
            if rows:
                yield from _run_remote(server, rows, home / server, options, on_start)
    finally:
        shutil.rmtree(home, ignore_errors=True)


def _run_on(
    kind: str,
    home: Path,
    selected: list[str],
    options: ScorecardOptions,
    on_start: Callable[[str], None],
) -> Iterator[ScorecardRow]:
    """The faults of file tiers on a file system of this kind; empty for that of ``home``. What does
    not belong to the tier is in ``home``."""
    remote = set(remote_faults.names())
    try:
        with file_systems.provided(kind, home / "on") as place:
            yield from _run_files(kind, home, place, selected, options, on_start)
    except small_disks.DiskUnavailableError as error:
        for name in selected:
            if name not in remote:
                yield ScorecardRow(name, SKIPPED, str(error))


def _run_files(
    kind: str,
    home: Path,
    place: Path,
    selected: list[str],
    options: ScorecardOptions,
    on_start: Callable[[str], None],
) -> Iterator[ScorecardRow]:
    chosen = [fault for fault in FAULTS if fault.name in selected]
    if chosen:
        with _context(home / "testbed", place, options) as (context, no_mount_reason):
            for fault in chosen:
                on_start(fault.name)
                yield _run(fault, context, no_mount_reason, options)
    for sealed in sealed_faults.SEALED_FAULTS:
        if sealed.name in selected:
            on_start(sealed.name)
            yield sealed_fault(sealed, home, options, place)
    for name in selected:
        if name in small_disks.NAMES:
            on_start(name)
            yield small_disk(name, home, options, kind or "ext4")
        elif name in volume_faults.VOLUME_FAULTS:
            on_start(name)
            yield one_disk(name, home, options, place)
        elif name.startswith("writers-"):
            on_start(name)
            yield many_writers(int(name.removeprefix("writers-")), place, options)
        elif name in announcement_faults.NAMES:
            on_start(name)
            yield announcement_fault(name, home, options, place)


@contextmanager
def _context(
    home: Path, place: Path, options: ScorecardOptions
) -> Iterator[tuple[FaultContext, str]]:
    below, files = place / "below", home / "tier"
    below.mkdir(parents=True)
    files.mkdir(parents=True)
    with ExitStack() as stack:
        reason = ""
        mount: FaultyMount | TierWrapper
        try:
            if not options.fuse:
                raise OSError("turned off")
            mount = FaultyMount(below, files, home / "faults.json", home / "mount.log")
        except OSError as error:
            reason = f"cannot create a FUSE mount: {error.strerror or error}"
            mount = TierWrapper(home / "faults.json")
        stack.callback(mount.close)
        wrapped = mount.control if isinstance(mount, TierWrapper) else None
        testbed = FaultTestbed(home, below if wrapped else files, below, wrapped)
        testbed.patience = options.patience
        stack.callback(testbed.close)
        yield FaultContext(testbed, mount, options.seconds, options.hang_seconds), reason


def _run_remote(
    server: str,
    rows: list[str],
    home: Path,
    options: ScorecardOptions,
    on_start: Callable[[str], None],
) -> Iterator[ScorecardRow]:
    """Faults of a server behind an lmcache tier, one after another on one testbed."""
    on_start(rows[0])
    try:
        with remote_faults.testbed(server, home) as context:
            for name in rows:
                on_start(name)
                yield _remote_row(name, context, options)
    except remote_faults.ServerUnavailableError as error:
        for name in rows:
            yield ScorecardRow(name, SKIPPED, str(error), remote_faults.MEANS)


def _remote_row(
    name: str, context: remote_faults.RemoteContext, options: ScorecardOptions
) -> ScorecardRow:
    testbed, measurements = context.testbed, Measurements()
    testbed.patience = options.patience
    wrong_before, log_before = testbed.engine.seen.wrong, _size(testbed.tierd.log)
    try:
        testbed.fill()
        remote_faults.REMOTE_FAULTS[name](context, options.seconds, measurements)
        if not testbed.daemon_is_serving():
            measurements.crashes += 1
            measurements.notes.append("the daemon exited")
        measurements.recovery_seconds = testbed.recover()
    except (OSError, TimeoutError, LookupError) as error:
        reason = f"the fault could not be injected: {type(error).__name__}: {error}"
        return ScorecardRow(name, FAIL, reason, remote_faults.MEANS)
    if (text := _traceback(testbed.tierd.log, log_before)) is not None:
        measurements.crashes += 1
        measurements.notes.append(text)
    measurements.wrong = testbed.engine.seen.wrong - wrong_before
    return judge(name, remote_faults.MEANS, measurements, options.slack_seconds)


def _run(
    fault: Fault, context: FaultContext, no_mount_reason: str, options: ScorecardOptions
) -> ScorecardRow:
    means = TierWrapper.means if no_mount_reason and fault.means == "FUSE" else fault.means
    testbed = context.testbed
    measurements = Measurements()
    wrong_before = testbed.engine.seen.wrong
    log_before = _size(testbed.tierd.log)
    try:
        testbed.fill()
        pid = testbed.pid
        fault.run(context, measurements)
        if testbed.pid == pid and not testbed.daemon_is_serving():
            measurements.crashes += 1
            measurements.notes.append("the daemon exited")
        measurements.recovery_seconds = testbed.recover()
    except UnsupportedFaultError as error:
        return ScorecardRow(fault.name, SKIPPED, f"{no_mount_reason}; {error}", means)
    except (OSError, TimeoutError, LookupError) as error:
        return ScorecardRow(
            fault.name,
            FAIL,
            f"the fault could not be injected: {type(error).__name__}: {error}",
            means,
        )
    finally:
        context.mount.set()
    if (text := _traceback(testbed.tierd.log, log_before)) is not None:
        measurements.crashes += 1
        measurements.notes.append(text)
    measurements.wrong = testbed.engine.seen.wrong - wrong_before
    return judge(fault.name, means, measurements, options.slack_seconds)


def sealed_fault(
    fault: sealed_faults.SealedFault,
    home: Path,
    options: ScorecardOptions,
    place: Path | None = None,
) -> ScorecardRow:
    """A fault of a directory with keys, with a daemon of its own. ``place``: where the tier is, if
    not in ``home``."""
    measurements = Measurements()
    try:
        keyed = sealed_faults.KeyedTestbed(home / fault.name, fault.encryption, place)
        testbed = keyed.testbed
        testbed.patience = options.patience
        try:
            testbed.fill()
            fault.run(keyed, options.seconds, measurements)
            if not testbed.daemon_is_serving():
                measurements.crashes += 1
                measurements.notes.append("the daemon exited")
            measurements.recovery_seconds = testbed.recover()
            measurements.wrong = testbed.engine.seen.wrong
        finally:
            testbed.close()
    except (OSError, TimeoutError, LookupError) as error:
        return ScorecardRow(
            fault.name,
            FAIL,
            f"the fault could not be injected: {type(error).__name__}: {error}",
            sealed_faults.MEANS,
        )
    if (text := _traceback(testbed.tierd.log, 0)) is not None:
        measurements.crashes += 1
        measurements.notes.append(text)
    return judge(fault.name, sealed_faults.MEANS, measurements, options.slack_seconds)


def judge(
    name: str, means: str, measurements: Measurements, slack_seconds: float = 0.0
) -> ScorecardRow:
    """The verdict on the measurements of a fault."""
    beyond = max(0.0, measurements.longest_wait - measurements.budget_seconds)
    added = measurements.longest_wait_breaker_open
    problems = [
        (measurements.wrong > 0, f"{measurements.wrong} loads returned wrong bytes"),
        (
            measurements.crashes > 0,
            f"{measurements.crashes} crashes or violations: {'; '.join(measurements.notes)}",
        ),
        (
            beyond > ALLOWED_SECONDS + slack_seconds,
            f"a load waited {beyond:.3f} s beyond its deadline",
        ),
        (
            added is not None and added > OPEN_SECONDS + slack_seconds,
            f"a load waited {added or 0:.3f} s with an open breaker",
        ),
        (
            measurements.over_budget_bytes > 0,
            f"the directory exceeded its capacity by {measurements.over_budget_bytes} bytes",
        ),
        (measurements.recovery_seconds is None, "stores and loads did not recover"),
    ]
    reasons = [text for wrong, text in problems if wrong]
    return ScorecardRow(
        name,
        FAIL if reasons else PASS,
        "; ".join(reasons),
        means,
        wrong_bytes=measurements.wrong,
        crashes=measurements.crashes,
        longest_wait_beyond_clock_seconds=round(beyond, 3),
        added_wait_breaker_open_seconds=None if added is None else round(added, 3),
        bytes_over_budget=measurements.over_budget_bytes,
        recovery_seconds=None
        if measurements.recovery_seconds is None
        else round(measurements.recovery_seconds, 2),
        loads=measurements.loads,
        loaded=measurements.loaded,
        notes=list(measurements.notes),
    )


def small_disk(
    name: str, home: Path, options: ScorecardOptions, kind: str = "ext4"
) -> ScorecardRow:
    """ENOSPC and EROFS from a small real file system of this kind."""
    directory = home / name
    directory.mkdir()
    try:
        with small_disks.small(directory, kind) as disk:
            testbed = FaultTestbed(directory / "testbed", disk.path, disk.path)
            testbed.patience = options.patience
            try:
                measurements = Measurements()
                small_disks.DISK_FAULTS[name](testbed, disk, options.seconds, measurements)
                measurements.wrong = testbed.engine.seen.wrong
                if not testbed.daemon_is_serving():
                    measurements.crashes += 1
            finally:
                testbed.close()
    except small_disks.DiskUnavailableError as error:
        return ScorecardRow(name, SKIPPED, str(error), small_disks.MEANS)
    except (OSError, TimeoutError) as error:
        return ScorecardRow(
            name,
            FAIL,
            f"the fault could not be injected: {type(error).__name__}: {error}",
            small_disks.MEANS,
        )
    return judge(name, small_disks.MEANS, measurements, options.slack_seconds)


def one_disk(
    name: str, home: Path, options: ScorecardOptions, place: Path | None = None
) -> ScorecardRow:
    """One of two volumes of a tier fails, with a daemon of its own. ``place``: where they are, if
    not in ``home``."""
    measurements, means = Measurements(), volume_faults.MEANS
    try:
        with volume_faults.testbed(home / name, place, options.fuse) as context:
            bed, means = context.testbed, context.means
            bed.patience = options.patience
            bed.fill()
            volume_faults.VOLUME_FAULTS[name](context, options.seconds, measurements)
            if not bed.daemon_is_serving():
                measurements.crashes += 1
                measurements.notes.append("the daemon exited")
            measurements.recovery_seconds = bed.recover()
            measurements.wrong = bed.engine.seen.wrong
    except (OSError, TimeoutError, LookupError) as error:
        reason = f"the fault could not be injected: {type(error).__name__}: {error}"
        return ScorecardRow(name, FAIL, reason, means)
    if (text := _traceback(bed.tierd.log, 0)) is not None:
        measurements.crashes += 1
        measurements.notes.append(text)
    return judge(name, means, measurements, options.slack_seconds)


def many_writers(count: int, home: Path, options: ScorecardOptions) -> ScorecardRow:
    """Processes that write to one directory, some of which are killed."""
    found = writers.run(home / f"writers-{count}", count, options.writer_objects)
    problems = [
        (found.wrong > 0, f"{found.wrong} loads returned wrong bytes or failed"),
        (found.over_bytes > 0, f"the directory exceeded its capacity by {found.over_bytes} bytes"),
        (found.temporaries > 0, f"{found.temporaries} temporary files were left behind"),
        (found.unverified > 0, f"{found.unverified} remaining files do not verify"),
        (found.failed > 0, f"{found.failed} writers failed"),
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
        recovery_seconds=round(found.cleaned_seconds, 2),
        loads=found.read,
        loaded=found.read,
        notes=[f"{found.stored} stored, {found.dropped} dropped, {found.killed} writers killed"],
    )


def announcement_fault(
    name: str, home: Path, options: ScorecardOptions, place: Path
) -> ScorecardRow:
    """A fault of the logs of a directory that several processes share."""
    try:
        found = announcement_faults.run(
            name,
            place / name,
            home / f"{name}-nodes",
            options.seconds,
            options.slack_seconds,
            options.patience,
        )
    except (OSError, TimeoutError) as error:
        reason = f"the fault could not be injected: {type(error).__name__}: {error}"
        return ScorecardRow(name, FAIL, reason, announcement_faults.MEANS)
    return judge(name, announcement_faults.MEANS, found, options.slack_seconds)


def passed(rows: Iterable[ScorecardRow]) -> bool:
    """Whether every row passed."""
    return all(row.verdict == PASS for row in rows)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _traceback(path: Path, start: int) -> str | None:
    if not path.exists():
        return None
    with path.open("rb") as file:
        file.seek(start)
        text = file.read().decode(errors="replace")
    where = text.find("Traceback (most recent call last)")
    return (
        None
        if where < 0
        else "exception in the daemon's log: " + text[where:].strip().splitlines()[-1][:200]
    )
