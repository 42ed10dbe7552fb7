"""Enforces the limits of a tier's directory by hand, while its processes run (``kvtier gc``).

It joins the directory as one more writer that stores nothing. If no leader is alive, it becomes the
leader for the duration and fences writers that are dead. Otherwise it removes objects, which any
process may do at any time, and requests a count from the leader.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from kvtier.tiers.base import TierLimits
from kvtier.tiers.filesystem.directory import TierDirectory
from kvtier.tiers.filesystem.election import (
    HEARTBEAT_SECONDS,
    LEASE_SECONDS,
    current_term,
    is_visible,
    read_ledger,
)
from kvtier.tiers.filesystem.index import Index
from kvtier.tiers.filesystem.inspect import Survey, survey
from kvtier.tiers.filesystem.io import GONE
from kvtier.tiers.filesystem.layout import CONTROL, IDENTITY, SAVED_INDEX, Modes
from kvtier.tiers.filesystem.maintenance import DirectoryMaintenance
from kvtier.tiers.filesystem.quota import limit_bytes
from kvtier.tiers.filesystem.verify import objects_of
from kvtier.tiers.filesystem.walker import ObjectFile, object_path

_NEVER_SECONDS = 10**9


@dataclass(slots=True)
class CollectPlan:
    """What to remove: whole namespaces, then the least recently used objects."""

    namespaces: list[str] = field(default_factory=list)
    objects: list[ObjectFile] = field(default_factory=list)
    size_bytes: int = 0


@dataclass(frozen=True, slots=True)
class CollectReport:
    """What was removed or, with ``dry_run``, would be. ``janitor``: whether this process led."""

    dry_run: bool
    janitor: bool
    before_bytes: int
    after_bytes: int
    namespaces: list[str]
    objects: int
    size_bytes: int
    temporaries: int


def plan(
    found: Survey,
    objects: list[ObjectFile],
    capacity_bytes: int,
    retention_seconds: float | None,
    now: float,
) -> CollectPlan:
    """Chooses what to remove. ``now``: seconds since the epoch, by the file system's clock."""
    chosen = CollectPlan()
    if retention_seconds is not None:
        for view in found.namespaces:
            used_at = max(view.newest or 0.0, _described_at(Path(found.root) / view.name))
            if now - used_at > retention_seconds:
                chosen.namespaces.append(view.name)
    expired = set(chosen.namespaces)
    chosen.objects = [each for each in objects if each.namespace in expired]
    chosen.size_bytes = sum(each.size_bytes for each in chosen.objects)
    # This process joins the directory later: its own records are in the spare.
    target = limit_bytes(capacity_bytes, len(found.writers))
    left = found.total_bytes - chosen.size_bytes
    for each in sorted(objects, key=lambda each: (each.used_at, each.key)):
        if left <= target:
            break
        if each.namespace not in expired:
            chosen.objects.append(each)
            chosen.size_bytes += each.size_bytes
            left -= each.size_bytes
    return chosen


def _described_at(namespace: Path) -> float:
    try:
        return os.lstat(namespace / IDENTITY).st_mtime
    except OSError:
        return 0.0


def collect(
    root: Path,
    capacity_bytes: int,
    retention_seconds: float | None,
    *,
    dry_run: bool,
    progress: Callable[[str], None] = lambda _: None,
    sleep: Callable[[float], None] = time.sleep,
) -> CollectReport:
    """Enforces the limits. May take ``LEASE_SECONDS`` to find out whether a leader on another host
    is alive.

    Raises ``TierError`` and ``OSError``.
    """
    progress("reading the directory")
    if dry_run:
        now = time.time()
        found = survey(root, now)
        chosen = plan(found, objects_of(root, now), capacity_bytes, retention_seconds, now)
        after = found.total_bytes - chosen.size_bytes
        return _collected(found, chosen, after, len(chosen.objects), dry_run=True, janitor=False)
    limits = TierLimits(capacity_bytes, 100, 99, _NEVER_SECONDS)
    maintenance = DirectoryMaintenance(
        TierDirectory(root, _modes_of(root), Index(capacity_bytes), lambda: limits, shared=False)
    )
    maintenance.join()
    try:
        _await_leader(root, maintenance, progress, sleep)
        now = maintenance.writer.server_time or time.time()
        found = survey(root, now)
        chosen = plan(found, objects_of(root, now), capacity_bytes, retention_seconds, now)
        removed = _remove(root, chosen, maintenance, progress)
        janitor = maintenance.janitor is not None
        if janitor:
            progress("counting")
            maintenance.scan_completely()
        else:
            maintenance.writer.request_recount()
    finally:
        maintenance.release()
    return _collected(
        found, chosen, survey(root, now).total_bytes, removed, dry_run=False, janitor=janitor
    )


def _modes_of(root: Path) -> Modes:
    """The modes and owner of the control directory, so that the processes of the directory can read
    and remove what this one creates, also when root runs it for an engine that is not root's.
    """
    try:
        status = os.stat(root / CONTROL)
    except FileNotFoundError:
        status = os.stat(root)
    modes = (0o660, 0o2770) if status.st_mode & 0o020 else (0o640, 0o750)
    if os.geteuid() == 0:
        return Modes(*modes, status.st_gid, status.st_uid)
    return Modes(*modes, status.st_gid if status.st_mode & 0o020 else None)


def _collected(
    found: Survey,
    chosen: CollectPlan,
    after_bytes: int,
    objects: int,
    *,
    dry_run: bool,
    janitor: bool,
) -> CollectReport:
    return CollectReport(
        dry_run=dry_run,
        janitor=janitor,
        before_bytes=found.total_bytes,
        after_bytes=after_bytes,
        namespaces=chosen.namespaces,
        objects=objects,
        size_bytes=chosen.size_bytes,
        temporaries=found.temporaries,
    )


def _await_leader(
    root: Path,
    maintenance: DirectoryMaintenance,
    progress: Callable[[str], None],
    sleep: Callable[[float], None],
) -> None:
    """Returns when this process is the leader, or another process is known to lead."""
    term = current_term(root, uncached=True)
    ledger = read_ledger(root, term)
    first = None if ledger is None else ledger.get("beat")
    for _ in range(int(LEASE_SECONDS / HEARTBEAT_SECONDS) + 3):
        if maintenance.janitor is not None:
            return
        ledger = read_ledger(root, term)
        if ledger is not None and (
            is_visible(str(ledger.get("holder"))) or ledger.get("beat") != first
        ):
            return
        progress("waiting for the lease of the directory's janitor")
        sleep(HEARTBEAT_SECONDS)
        maintenance.run_once()


def _remove(
    root: Path,
    chosen: CollectPlan,
    maintenance: DirectoryMaintenance,
    progress: Callable[[str], None],
) -> int:
    removed = 0
    renewed_at = time.monotonic()
    for number, each in enumerate(chosen.objects):
        path = object_path(str(root), each.namespace, each.key)
        try:
            os.unlink(path)
        except OSError as error:
            if error.errno not in GONE:
                raise
            continue
        removed += 1
        if number % 64 == 0:
            progress(f"removing {number} of {len(chosen.objects)}")
            if time.monotonic() - renewed_at > HEARTBEAT_SECONDS:
                renewed_at = time.monotonic()
                maintenance.run_once()
    for name in chosen.namespaces:
        _remove_empty_tree(root / name)
    return removed


def _remove_empty_tree(namespace: Path) -> None:
    """Removes the description of a namespace and its empty directories."""
    for name in (IDENTITY, SAVED_INDEX):
        with contextlib.suppress(OSError):
            os.unlink(namespace / name)
    for directory, _, _ in os.walk(namespace, topdown=False):
        try:
            os.rmdir(directory)
        except OSError:
            continue
