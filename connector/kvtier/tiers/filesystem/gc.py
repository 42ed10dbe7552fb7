"""Enforces the limits of a tier's directory by hand, while its processes run (``kvtier gc``).

It joins the directory as one more writer that stores nothing. If no leader is alive, it becomes the
leader for the duration and fences writers that are dead. Otherwise it removes objects, which any
process may do at any time, and requests a count from the leader. It announces what it removes, as
every process of a shared directory does, and waits for the leader to pass that on.

Objects go in the order in which the leader would evict them: the end of the prefix that was not
used for the longest time goes first.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from kvtier.tiers.base import TierLimits
from kvtier.tiers.filesystem.announcement_log import POLL_SECONDS, AnnouncementLog
from kvtier.tiers.filesystem.announcements import Announcements
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
from kvtier.tiers.filesystem.prefixes import eviction_order
from kvtier.tiers.filesystem.quota import limit_bytes
from kvtier.tiers.filesystem.verify import objects_of
from kvtier.tiers.filesystem.walker import ObjectFile, object_path
from kvtier.tiers.isolation_keys import KeySet

_NEVER_SECONDS = 10**9
_PROGRESS_OBJECTS = 256
_PASSED_ON_SECONDS = 5.0
"""How long the leader may take to pass on what was removed: it reads the record of a new writer
once a second, and its log five times a second."""
_REMOVALS_PER_BLOCK = 48
"""Announcements of so many removals fit into one block of a log, with the longest keys."""


@dataclass(slots=True)
class CollectPlan:
    """What to remove: whole namespaces, then the least recently used objects."""

    namespaces: list[str] = field(default_factory=list)
    objects: list[ObjectFile] = field(default_factory=list)
    size_bytes: int = 0


@dataclass(frozen=True, slots=True)
class CollectReport:
    """What was removed or, with ``dry_run``, would be. ``janitor``: whether this process led.
    ``announced``: how many of the removals other processes were told of; the others find them by a
    scan, or when they read."""

    dry_run: bool
    janitor: bool
    before_bytes: int
    after_bytes: int
    namespaces: list[str]
    objects: int
    size_bytes: int
    temporaries: int
    announced: int = 0


@dataclass(frozen=True, slots=True)
class CollectHooks:
    """What ``collect`` calls: ``progress`` with what it does, and its clock in seconds."""

    progress: Callable[[str], None] = lambda _: None
    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic


def plan(
    found: Survey,
    objects: list[ObjectFile],
    capacity_bytes: int,
    retention_seconds: float | None,
    now: float,
    progress: Callable[[str], None] = lambda _: None,
) -> CollectPlan:
    """Chooses what to remove. Reads the header of every object if some have to go for capacity.
    ``now``: seconds since the epoch, by the file system's clock."""
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
    if left <= target:
        return chosen
    kept = [each for each in objects if each.namespace not in expired]

    def on_read(count: int) -> None:
        if count % _PROGRESS_OBJECTS == 0:
            progress(f"reading headers: {count} of {len(kept)}")

    for each in eviction_order(Path(found.root), kept, on_read):
        chosen.objects.append(each)
        chosen.size_bytes += each.size_bytes
        left -= each.size_bytes
        if left <= target:
            break
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
    keys: KeySet | None = None,
    hooks: CollectHooks = CollectHooks(),
) -> CollectReport:
    """Enforces the limits. May take ``LEASE_SECONDS`` to find out whether a leader on another host
    is alive. ``keys``: those of the tier, without which removals cannot be announced where its
    objects are sealed.

    Raises ``TierError`` and ``OSError``.
    """
    progress = hooks.progress
    progress("reading the directory")
    if dry_run:
        now = time.time()
        found = survey(root, now)
        objects = objects_of(root, now)
        chosen = plan(found, objects, capacity_bytes, retention_seconds, now, progress)
        after = found.total_bytes - chosen.size_bytes
        return _collected(found, chosen, after, len(chosen.objects), dry_run=True, janitor=False)
    collector = _Collector(root, capacity_bytes, keys, hooks)
    collector.maintenance.join()
    try:
        collector.await_leader()
        now = collector.maintenance.writer.server_time or time.time()
        found = survey(root, now)
        objects = objects_of(root, now)
        chosen = plan(found, objects, capacity_bytes, retention_seconds, now, collector.report)
        removed = collector.remove(chosen, sealed=_is_sealed(found))
        janitor = collector.maintenance.janitor is not None
        if janitor:
            progress("counting")
            collector.maintenance.scan_completely()
        else:
            collector.maintenance.writer.request_recount()
    finally:
        collector.maintenance.release()
    report = _collected(
        found, chosen, survey(root, now).total_bytes, removed, dry_run=False, janitor=janitor
    )
    return replace(report, announced=collector.announced)


def _is_sealed(found: Survey) -> bool:
    """Whether any object says that it has a tag or is encrypted, as far as ``survey`` has looked.
    Then other processes accept no announcement without a tag."""
    seals = {seal for view in found.namespaces for seal in view.seals}
    return any(seal.startswith(("tag", "AES")) for seal in seals)


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


class _Collector:
    """This process among those of the directory. ``announced``: removals that the leader has passed
    on."""

    def __init__(
        self,
        root: Path,
        capacity_bytes: int,
        keys: KeySet | None,
        hooks: CollectHooks,
    ) -> None:
        limits = TierLimits(capacity_bytes, 100, 99, _NEVER_SECONDS)
        self.announced = 0
        self._directory = TierDirectory(
            root,
            _modes_of(root),
            Index(capacity_bytes),
            lambda: limits,
            shared=False,
            clock=hooks.clock,
            announcements=Announcements(True, hooks.clock),
        )
        self.maintenance = DirectoryMaintenance(self._directory)
        self._keys = keys
        self._log = AnnouncementLog(self._directory, lambda: keys)
        self._announces = True
        self._progress = hooks.progress
        self._sleep = hooks.sleep
        self._clock = hooks.clock
        self._renewed_at = self._clock()

    def await_leader(self) -> None:
        """Returns when this process is the leader, or another process is known to lead."""
        root = self._directory.root
        term = current_term(root, uncached=True)
        ledger = read_ledger(root, term)
        first = None if ledger is None else ledger.get("beat")
        for _ in range(int(LEASE_SECONDS / HEARTBEAT_SECONDS) + 3):
            if self.maintenance.janitor is not None:
                return
            ledger = read_ledger(root, term)
            if ledger is not None and (
                is_visible(str(ledger.get("holder"))) or ledger.get("beat") != first
            ):
                return
            self._progress("waiting for the lease of the directory's janitor")
            self._sleep(HEARTBEAT_SECONDS)
            self.maintenance.run_once()

    def report(self, text: str) -> None:
        """Reports progress, and renews the leases when that is due."""
        self._progress(text)
        if self._clock() - self._renewed_at > HEARTBEAT_SECONDS:
            self._renewed_at = self._clock()
            self.maintenance.run_once()

    def remove(self, chosen: CollectPlan, *, sealed: bool) -> int:
        """Removes what was chosen. Returns how many objects there were. ``sealed``: announcements
        need the keys."""
        self._announces = not sealed or self._keys is not None
        if self._announces:
            self._log.skip()
        root, removed, unannounced = self._directory.root, 0, 0
        for number, each in enumerate(chosen.objects):
            try:
                os.unlink(object_path(str(root), each.namespace, each.key))
            except OSError as error:
                if error.errno not in GONE:
                    raise
                continue
            removed += 1
            if self._announces:
                self._directory.announcements.removed(each.namespace, each.key)
                unannounced += 1
                if unannounced >= self._batch_objects():
                    self._announce(unannounced)
                    unannounced = 0
            if number % 64 == 0:
                self.report(f"removing {number} of {len(chosen.objects)}")
        if self._announces and unannounced:
            self._announce(unannounced)
        for name in chosen.namespaces:
            _remove_empty_tree(root / name)
        return removed

    def _batch_objects(self) -> int:
        """Announcements that fit into this process's log, so that the leader misses none."""
        return max(1, self._directory.announcements.role.writer_blocks) * _REMOVALS_PER_BLOCK

    def _announce(self, removed: int) -> None:
        """Returns when the leader has passed on the removals. If it does not, or has no log, none
        is announced from now on: its count finds them."""
        until = self._clock() + _PASSED_ON_SECONDS
        try:
            while True:
                self.maintenance.run_once()
                if not self._directory.announcements.role.writer_blocks:
                    break
                self._log.run_once()
                if self._log.passed_on:
                    self.announced += removed
                    return
                if self._clock() > until:
                    break
                self._progress("announcing what was removed")
                self._sleep(POLL_SECONDS)
        except OSError as error:
            self._progress(f"cannot announce what was removed: {error}")
        self._announces = False


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
