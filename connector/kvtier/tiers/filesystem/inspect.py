"""Looking at a tier's directory from outside: what is there, who uses it, whether every object is what it says.

Takes no part and writes nothing, except that ``verify`` may be told to remove what is corrupt. Raises ``ConfigurationError`` for a directory that is
no tier, and ``OSError``.

Keeping a directory's limits by hand, beside whatever runs: ``kvtier gc``.

Takes part in the lease protocol as one more writer that stores nothing. Where no janitor lives, it becomes the janitor for as long as it takes,
and ends abandoned writers with what they left; else it removes objects, which anybody may at any time, and has the janitor count anew.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvtier.errors import ConfigurationError, TierCorruptError, TierError
from kvtier.tiers.base import ObjectRef, TierLimits
from kvtier.tiers.filesystem import io
from kvtier.tiers.filesystem.election import (
    BEAT_SECONDS,
    LEASE_SECONDS,
    here,
    read_ledger,
    read_writer,
    surely_gone,
    top_fence,
)
from kvtier.tiers.filesystem.format import HEADER_BYTES, read_header, verify_payload
from kvtier.tiers.filesystem.index import Index
from kvtier.tiers.filesystem.io import GONE
from kvtier.tiers.filesystem.layout import (
    CONTROL,
    DIRECTORY_BYTES,
    IDENTITY,
    WORKING_PREFIX,
    Modes,
    grants_among,
    writers_path,
)
from kvtier.tiers.filesystem.maintenance import DirectoryMaintenance
from kvtier.tiers.filesystem.quota import limit_bytes
from kvtier.tiers.filesystem.walker import ObjectFile, ScanReport, object_path, scan

_NAMESPACE = re.compile(r"[0-9a-f]{32}")
_MAX_IDENTITY_BYTES = 1 << 20


@dataclass(slots=True)
class NamespaceView:
    """One namespace. Times are seconds since the epoch, by the file system's clock."""

    name: str
    identity: dict[str, str]
    objects: int = 0
    size_bytes: int = 0
    oldest: float | None = None
    newest: float | None = None


@dataclass(frozen=True, slots=True)
class HolderView:
    """A janitor or a writer. ``state``: Alive, Gone, Released, or Elsewhere (a process that cannot be asked from here)."""

    name: str
    state: str
    grants: dict[int, int] = field(default_factory=dict)
    writing: int = 0
    writing_bytes: int = 0


@dataclass(slots=True)
class Survey:
    """A directory. ``total_bytes``: files and directories, those of the tier's own records too. ``temporaries``: files being written, or left
    behind. ``ledger``: the janitor's record."""

    root: str
    namespaces: list[NamespaceView]
    total_bytes: int
    temporaries: int
    temporary_bytes: int
    other_bytes: int
    fence: int
    janitor: HolderView | None
    ledger: dict[str, Any] | None
    writers: list[HolderView]


def tier_root(path: Path) -> Path:
    """``path`` if it is a tier's directory. Raises ``ConfigurationError``."""
    accepted = "the directory of a fileSystem tier (as in its volume, or in the topology's structural.json)"
    if not path.exists():
        raise ConfigurationError("DIR", str(path), f"it does not exist; accepted is {accepted}")
    if not path.is_dir():
        raise ConfigurationError("DIR", str(path), f"it is not a directory; accepted is {accepted}")
    if not any(name == CONTROL or _NAMESPACE.fullmatch(name) for name in os.listdir(path)):
        raise ConfigurationError(
            "DIR", str(path), f"no tier has ever been here; accepted is {accepted}"
        )
    return path


def survey(root: Path, now: float) -> Survey:
    """Looks at everything by name and size."""
    report = ScanReport()
    spaces: dict[str, NamespaceView] = {}
    total = other = 0
    for bucket in scan(root, now, report, sweep=False):
        view = spaces.get(bucket.namespace)
        if view is None:
            view = spaces[bucket.namespace] = NamespaceView(
                bucket.namespace, _identity(root / bucket.namespace)
            )
        total += DIRECTORY_BYTES + bucket.other_bytes
        other += bucket.other_bytes
        for found in bucket.objects:
            view.objects += 1
            view.size_bytes += found.size_bytes
            view.oldest = found.used_at if view.oldest is None else min(view.oldest, found.used_at)
            view.newest = found.used_at if view.newest is None else max(view.newest, found.used_at)
    total += sum(view.size_bytes for view in spaces.values()) + _tree_bytes(root / CONTROL)
    fence = top_fence(root, fresh=False) if (root / CONTROL).is_dir() else 0
    ledger = read_ledger(root, fence) if fence else None
    writers = list(_writers(root))
    return Survey(
        root=str(root),
        namespaces=sorted(spaces.values(), key=lambda each: each.newest or 0.0, reverse=True),
        total_bytes=total,
        temporaries=sum(each.writing for each in writers) + report.temporaries,
        temporary_bytes=sum(each.writing_bytes for each in writers) + report.temporaries_kept_bytes,
        other_bytes=other - report.temporaries_kept_bytes,
        fence=fence,
        janitor=None
        if ledger is None
        else HolderView(str(ledger.get("holder")), _janitor_state(ledger)),
        ledger=ledger,
        writers=writers,
    )


def _janitor_state(ledger: dict[str, Any]) -> str:
    return "Released" if ledger.get("released") else _state(str(ledger.get("holder")))


def _state(holder: str) -> str:
    if surely_gone(holder):
        return "Gone"
    return "Alive" if here(holder) else "Elsewhere"


def _writers(root: Path) -> Iterator[HolderView]:
    top = writers_path(root)
    for name in sorted(os.listdir(top)) if top.is_dir() else ():
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            names = os.listdir(top / name)
            sizes = [_size(top / name / each) for each in names if each.startswith(WORKING_PREFIX)]
            settled = (read_writer(root, name) or {}).get("settled", {})
            grants = {
                number: size
                for number, size in grants_among(names).items()
                if str(number) not in settled
            }
            yield HolderView(name, _state(name), grants, len(sizes), sum(sizes))


def _size(path: Path) -> int:
    try:
        return os.lstat(path).st_size
    except OSError:
        return 0


def _tree_bytes(top: Path) -> int:
    total = 0
    for directory, _, files in os.walk(top):
        total += DIRECTORY_BYTES + sum(_size(Path(directory) / name) for name in files)
    return total


def _identity(namespace: Path) -> dict[str, str]:
    """What a person tells namespaces apart by."""
    try:
        with (namespace / IDENTITY).open("rb") as file:
            document = json.loads(file.read(_MAX_IDENTITY_BYTES))
        engine = document["engine"]
        model = engine.get("model", {})
        found = {
            "model": model.get("name") or model.get("digest"),
            "revision": model.get("revision"),
            "engine": " ".join(
                str(engine.get("engine", {}).get(key, "")) for key in ("name", "version")
            ).strip(),
            "dtype": engine.get("dtype"),
            "kvCacheDtype": engine.get("kv_cache_dtype"),
            "tensorParallel": engine.get("parallel", {}).get("tensor"),
            "chunkTokens": engine.get("effective_chunk_tokens"),
            "salt": engine.get("salt"),
        }
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError):
        return {}
    return {key: str(value) for key, value in found.items() if value not in (None, "")}


@dataclass(frozen=True, slots=True)
class Bad:
    """An object that did not verify. ``corrupt``: provably wrong; else it could not be read."""

    path: str
    reason: str
    corrupt: bool
    deleted: bool


@dataclass(slots=True)
class Verified:
    """What ``verify`` has seen."""

    objects: int = 0
    size_bytes: int = 0
    vanished: int = 0
    unverifiable: int = 0
    bad: list[Bad] = field(default_factory=list)

    @property
    def corrupt(self) -> int:
        """How many are provably wrong."""
        return sum(each.corrupt for each in self.bad)


def objects_of(root: Path, now: float) -> list[ObjectFile]:
    """Every object, by name and size."""
    return [
        found for bucket in scan(root, now, ScanReport(), sweep=False) for found in bucket.objects
    ]


def verify(
    root: Path,
    objects: list[ObjectFile],
    *,
    delete: bool,
    progress: Callable[[Verified], None] = lambda _: None,
) -> Verified:
    """Reads and verifies objects. Those that an engine removes meanwhile are no fault. ``delete``: removes those that are corrupt."""
    done = Verified()
    header = memoryview(mmap.mmap(-1, HEADER_BYTES))
    room = memoryview(mmap.mmap(-1, HEADER_BYTES))
    works = False
    with contextlib.suppress(OSError):
        works = io.direct_io_supported(root)
    for found in objects:
        size = found.size_bytes - HEADER_BYTES
        ref = ObjectRef(found.namespace, found.key)
        path = object_path(str(root), found.namespace, found.key)
        try:
            # Before memory is taken for it: a file that is none of ours may be of any size.
            read_header(_header_of(path, header), ref, size)
            if room.nbytes < size:
                room = memoryview(mmap.mmap(-1, size))
            io.read_file(path, header, room[:size], works)
            verify_payload(room[:size], read_header(header, ref, size))
        except TierCorruptError as error:
            done.bad.append(Bad(path, str(error), True, delete and _unlinked(path)))
        except TierError:
            # Its checksum is one that cannot be computed with what is installed here.
            done.unverifiable += 1
        except OSError as error:
            # Where the directory itself is gone, no object was removed from it.
            if error.errno in io.GONE and os.path.isdir(root):
                done.vanished += 1
            else:
                done.bad.append(Bad(path, str(error.strerror or error), False, False))
        else:
            done.objects += 1
            done.size_bytes += found.size_bytes
        progress(done)
    return done


def _header_of(path: str, header: memoryview) -> memoryview:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        header[:] = os.pread(descriptor, HEADER_BYTES, 0).ljust(HEADER_BYTES, b"\0")
        return header
    finally:
        os.close(descriptor)


def _unlinked(path: str) -> bool:
    try:
        os.unlink(path)
    except OSError:
        return False
    return True


_NEVER_SECONDS = 10**9


@dataclass(slots=True)
class Plan:
    """What has to go: namespaces as a whole, then objects, those first that were used longest ago."""

    namespaces: list[str] = field(default_factory=list)
    objects: list[ObjectFile] = field(default_factory=list)
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


def plan(
    found: Survey,
    objects: list[ObjectFile],
    capacity_bytes: int,
    retention_seconds: float | None,
    now: float,
) -> Plan:
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
    keeper = DirectoryMaintenance(
        root, index, lambda: limits, modes, shared=False, on_change=lambda *_: None
    )
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
    return _collected(
        found, chosen, survey(root, now).total_bytes, removed, dry_run=False, janitor=janitor
    )


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


def _settle_office(
    root: Path,
    keeper: DirectoryMaintenance,
    progress: Callable[[str], None],
    sleep: Callable[[float], None],
) -> None:
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


def _remove(
    root: Path, chosen: Plan, keeper: DirectoryMaintenance, progress: Callable[[str], None]
) -> int:
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
