"""Keeping a directory's limits by hand, beside whatever runs: ``kvtier gc``.

Takes part in the lease protocol as one more writer that stores nothing. Where no janitor lives, it becomes the janitor for as long as it takes,
and ends abandoned writers with what they left; else it removes objects, which anybody may at any time, and has the janitor count anew.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from kvtier.tiers.base import TierLimits
from kvtier.tiers.filesystem.direct import GONE
from kvtier.tiers.filesystem.index import Index
from kvtier.tiers.filesystem.keeper import Keeper
from kvtier.tiers.filesystem.layout import CONTROL, IDENTITY, Modes
from kvtier.tiers.filesystem.lease import BEAT_SECONDS, LEASE_SECONDS, here
from kvtier.tiers.filesystem.ledger import limit_bytes
from kvtier.tiers.filesystem.scan import Found, object_path
from kvtier.tiers.filesystem.seat import read_ledger, top_fence
from kvtier.tiers.filesystem.survey import Survey, objects_of, survey

_NEVER_SECONDS = 10**9


@dataclass(slots=True)
class Plan:
    """What has to go: namespaces as a whole, then objects, those first that were used longest ago."""

    namespaces: list[str] = field(default_factory=list)
    objects: list[Found] = field(default_factory=list)
    size_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Collected:
    """What was removed, or would be (``dry_run``). Bytes of the directory before and after. ``janitor``: whether this process was."""

    dry_run: bool
    janitor: bool
    before_bytes: int
    after_bytes: int
    namespaces: list[str]
    objects: int
    size_bytes: int
    temporaries: int


def plan(found: Survey, objects: list[Found], capacity_bytes: int, retention_seconds: float | None, now: float) -> Plan:
    """Chooses. ``now``: seconds since the epoch, by the file system's clock."""
    chosen = Plan()
    if retention_seconds is not None:
        for view in found.namespaces:
            used_at = max(view.newest or 0.0, _described_at(Path(found.root) / view.name))
            if now - used_at > retention_seconds:
                chosen.namespaces.append(view.name)
    dead = set(chosen.namespaces)
    chosen.objects = [each for each in objects if each.namespace in dead]
    chosen.size_bytes = sum(each.size_bytes for each in chosen.objects)
    # The records of this very process are made after this look.
    target = limit_bytes(capacity_bytes, len(found.writers))
    left = found.total_bytes - chosen.size_bytes
    for each in sorted(objects, key=lambda each: (each.used_at, each.key)):
        if left <= target:
            break
        if each.namespace not in dead:
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
) -> Collected:
    """Brings the directory to its limits. May wait ``LEASE_SECONDS`` to see whether a janitor on another host lives.

    Raises ``TierError`` and ``OSError``.
    """
    progress("looking")
    if dry_run:
        now = time.time()
        found = survey(root, now)
        chosen = plan(found, objects_of(root, now), capacity_bytes, retention_seconds, now)
        after = found.total_bytes - chosen.size_bytes
        return _collected(found, chosen, after, len(chosen.objects), dry_run=True, janitor=False)
    modes = _modes_of(root)
    index = Index(capacity_bytes)
    limits = TierLimits(capacity_bytes, 100, 99, _NEVER_SECONDS)
    keeper = Keeper(root, index, lambda: limits, modes, shared=False, on_change=lambda *_: None)
    keeper.start()
    try:
        _settle_office(root, keeper, progress, sleep)
        now = keeper.writer.server_time or time.time()
        found = survey(root, now)
        chosen = plan(found, objects_of(root, now), capacity_bytes, retention_seconds, now)
        removed = _remove(root, chosen, keeper, progress)
        janitor = keeper.janitor is not None
        if janitor:
            progress("counting")
            keeper.first_pass()
        else:
            keeper.writer.note("recount")
    finally:
        keeper.leave()
    return _collected(found, chosen, survey(root, now).total_bytes, removed, dry_run=False, janitor=janitor)


def _modes_of(root: Path) -> Modes:
    """As those who keep books here make theirs: what this process makes while it takes part, and leaves, is theirs to read and to remove, also
    where root does it for an engine that is not root's."""
    try:
        status = os.stat(root / CONTROL)
    except FileNotFoundError:
        status = os.stat(root)
    modes = (0o660, 0o2770) if status.st_mode & 0o020 else (0o640, 0o750)
    if os.geteuid() == 0:
        return Modes(*modes, status.st_gid, status.st_uid)
    return Modes(*modes, status.st_gid if status.st_mode & 0o020 else None)


def _collected(
    found: Survey, chosen: Plan, after_bytes: int, objects: int, *, dry_run: bool, janitor: bool
) -> Collected:
    return Collected(
        dry_run=dry_run,
        janitor=janitor,
        before_bytes=found.total_bytes,
        after_bytes=after_bytes,
        namespaces=chosen.namespaces,
        objects=objects,
        size_bytes=chosen.size_bytes,
        temporaries=found.temporaries,
    )


def _settle_office(root: Path, keeper: Keeper, progress: Callable[[str], None], sleep: Callable[[float], None]) -> None:
    """Returns when this process is the janitor, or another one is known to live."""
    fence = top_fence(root, fresh=True)
    ledger = read_ledger(root, fence)
    first = None if ledger is None else ledger.get("beat")
    for _ in range(int(LEASE_SECONDS / BEAT_SECONDS) + 3):
        if keeper.janitor is not None:
            return
        ledger = read_ledger(root, fence)
        if ledger is not None and (here(str(ledger.get("holder"))) or ledger.get("beat") != first):
            return
        progress("watching whether the janitor lives")
        sleep(BEAT_SECONDS)
        keeper.turn()


def _remove(root: Path, chosen: Plan, keeper: Keeper, progress: Callable[[str], None]) -> int:
    removed = 0
    beat_at = time.monotonic()
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
            if time.monotonic() - beat_at > BEAT_SECONDS:
                beat_at = time.monotonic()
                keeper.turn()
    for name in chosen.namespaces:
        remove_empty_tree(root / name)
    return removed


def remove_empty_tree(namespace: Path) -> None:
    """Removes a namespace's description and every directory of it that is empty."""
    try:
        os.unlink(namespace / IDENTITY)
    except OSError:
        pass
    for directory, _, _ in os.walk(namespace, topdown=False):
        try:
            os.rmdir(directory)
        except OSError:
            continue
