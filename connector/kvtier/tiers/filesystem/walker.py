"""Reads what a directory holds, without opening a file.

``walk`` lists every bucket. ``DirectoryScan`` walks the directory in steps and updates the index:
it adds what other processes have stored, and drops what no longer exists. A scan may take as long
as it likes: what it finds is applied bucket by bucket, and an object that it did not see is looked
up by name before it is dropped.

Temporary files of earlier releases carry the boot and the process that created them in their name,
so that the leftovers of a killed process can be told from files that a live one is writing.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from kvtier.processes import is_observable
from kvtier.tiers.base import ALIGNMENT_BYTES
from kvtier.tiers.filesystem import io
from kvtier.tiers.filesystem.directory import TierDirectory
from kvtier.tiers.filesystem.format import HEADER_BYTES, SUFFIX, is_foreign
from kvtier.tiers.filesystem.io import GONE
from kvtier.tiers.filesystem.layout import DIRECTORY_BYTES, IDENTITY

TEMPORARY_PREFIX = ".tmp-"
_TEMPORARY = re.compile(r"\.tmp-([0-9a-f]{8})-([0-9a-z]+)-(\d+)-[0-9a-f]+")
_NAMESPACE = re.compile(r"[0-9a-f]{32}")
_BUCKET = re.compile(r"[0-9a-f]{2}")
_OBJECT = re.compile(r"((?:[0-9a-f]{2}){1,64})\.kv")
ABANDONED_SECONDS = 3600.0
"""A temporary file of a process that is not visible from here is abandoned after this long."""
_COPY_SECONDS = 60.0


# Names.


def object_path(root: str, namespace: str, key: bytes) -> str:
    """``<root>/<namespace>/<2 hex>/<2 hex>/<key>.kv``.

    The directories come from the second and third byte of the key. The first byte is the KV cache
    group, which is the same for most objects.
    """
    name = key.hex()
    first, second = _buckets(name)
    return f"{root}/{namespace}/{first}/{second}/{name}{SUFFIX}"


def _buckets(name: str) -> tuple[str, str]:
    spread = name[2:6].ljust(4, "0")
    return spread[:2], spread[2:4]


def is_abandoned(name: str, age_seconds: float) -> bool:
    """Whether no process is writing this temporary file."""
    if age_seconds > ABANDONED_SECONDS:
        return True
    match = _TEMPORARY.fullmatch(name)
    if match is None or not is_observable(match[1], match[2]):
        return False
    return int(match[3]) != os.getpid() and not os.path.exists(f"/proc/{match[3]}")


# Walking.


@dataclass(frozen=True, slots=True)
class ObjectFile:
    """One object file. ``used_at``: its modification time, which hits refresh now and then."""

    namespace: str
    key: bytes
    size_bytes: int
    used_at: float


@dataclass(frozen=True, slots=True)
class Bucket:
    """A directory of objects or, with an empty ``second``, one above. ``other_bytes``: of files in
    it that are not objects.
    """

    namespace: str
    first: str
    second: str
    path: str
    objects: list[ObjectFile]
    other_bytes: int
    empty: bool

    @property
    def entries(self) -> int:
        """The cost of listing it: one for each name and one for the directory."""
        return len(self.objects) + 1


@dataclass(slots=True)
class ScanReport:
    """What a scan found besides objects."""

    temporaries: int = 0
    temporaries_kept_bytes: int = 0
    other_bytes: int = 0
    ignored: int = 0
    unreadable: int = 0


def walk(root: Path, now: float, report: ScanReport, *, clean: bool = True) -> Iterator[Bucket]:
    """Yields every directory with its objects, in the order of names.

    ``clean``: removes abandoned temporary files and files that are not complete objects. Names that
    KVTier does not create are ignored. ``now``: seconds since the epoch, by the file system's clock
    or one near it. Raises ``OSError`` only if the root itself cannot be read.
    """
    with os.scandir(root) as entries:
        namespaces = sorted(entry.name for entry in entries if _NAMESPACE.fullmatch(entry.name))
    reader = _BucketReader(now, report, clean)
    for namespace in namespaces:
        top = f"{root}/{namespace}"
        yield from reader.parent(namespace, "", top)
        for first in reader.buckets:
            yield from reader.parent(namespace, first, f"{top}/{first}")
            for second in reader.buckets:
                bucket = reader.bucket(namespace, first, second, f"{top}/{first}/{second}")
                if bucket is not None:
                    yield bucket


class _BucketReader:
    """Reads single directories."""

    def __init__(self, now: float, report: ScanReport, clean: bool) -> None:
        self.buckets: list[str] = []
        self._now = now
        self._report = report
        self._clean = clean

    def parent(self, namespace: str, first: str, path: str) -> Iterator[Bucket]:
        """A directory of directories; ``buckets`` are their names."""
        found = self._children(path)
        names = [entry.name for entry in found or () if _BUCKET.fullmatch(entry.name)]
        self.buckets = sorted(names)
        if found is None:
            return
        other = sum(self._other(entry) for entry in found if not _BUCKET.fullmatch(entry.name))
        yield Bucket(namespace, first, "", path, [], other, not found)

    def bucket(self, namespace: str, first: str, second: str, path: str) -> Bucket | None:
        """A directory of objects. None if it cannot be read."""
        found = self._children(path)
        if found is None:
            return None
        objects: list[ObjectFile] = []
        other = 0
        for entry in found:
            match = _OBJECT.fullmatch(entry.name)
            if match is None:
                other += self._other(entry)
                continue
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            except OSError:
                self._report.unreadable += 1
                continue
            complete = status.st_size > HEADER_BYTES and not status.st_size % ALIGNMENT_BYTES
            if complete and _buckets(match[1]) == (first, second) and stat.S_ISREG(status.st_mode):
                objects.append(
                    ObjectFile(namespace, bytes.fromhex(match[1]), status.st_size, status.st_mtime)
                )
                continue
            # Incomplete, or in the wrong bucket: it can never be read. A young one may be a copy in
            # progress. Another release's format may have other sizes.
            self._report.ignored += 1
            young = self._now - status.st_mtime < _COPY_SECONDS
            kept = young or not self._clean or has_foreign_header(entry.path)
            if kept or not unlinked(entry.path):
                other += status.st_size
        return Bucket(namespace, first, second, path, objects, other, not found)

    def _children(self, path: str) -> list[os.DirEntry[str]] | None:
        try:
            with os.scandir(path) as entries:
                return list(entries)
        except FileNotFoundError:
            return None
        except OSError:
            self._report.unreadable += 1
            return None

    def _other(self, entry: os.DirEntry[str]) -> int:
        report = self._report
        try:
            status = entry.stat(follow_symlinks=False)
        except FileNotFoundError:
            return 0
        except OSError:
            report.unreadable += 1
            return 0
        if entry.name.startswith(TEMPORARY_PREFIX):
            if (
                self._clean
                and is_abandoned(entry.name, self._now - status.st_mtime)
                and unlinked(entry.path)
            ):
                return 0
            report.temporaries += 1
            report.temporaries_kept_bytes += status.st_size
        elif entry.is_file(follow_symlinks=False):
            report.other_bytes += status.st_size
        else:
            return 0
        return status.st_size


def has_foreign_header(path: str) -> bool:
    """Whether the file is of no format of KVTier; False if it cannot be read."""
    try:
        return is_foreign(io.read_start(path, HEADER_BYTES))
    except OSError:
        return False


def unlinked(path: str) -> bool:
    """Removes a file; returns whether it did."""
    try:
        os.unlink(path)
    except OSError:
        return False
    return True


# Scanning.

OnCounted = Callable[[int, tuple[str, str, str]], None]


@dataclass(slots=True)
class ScanResult:
    """What a scan found. ``newest``: for each namespace, when anything in it was last used, by the
    file system's clock.
    """

    report: ScanReport = field(default_factory=ScanReport)
    newest: dict[str, float] = field(default_factory=dict)
    other_bytes: int = 0


class DirectoryScan:
    """One scan of a directory. One thread at a time; ``step`` raises ``OSError`` if the root cannot
    be read.

    ``now``: seconds since the epoch, by the file system's clock. ``used_after``: objects whose file
    was used later than this become the most recently used; in a shared directory, new ones among
    them may displace others from the index. ``on_counted`` receives the bytes of each bucket with
    its name; None if this process is not the leader, and then nothing is removed.
    """

    def __init__(
        self,
        directory: TierDirectory,
        now: float,
        used_after: float,
        on_counted: OnCounted | None = None,
    ) -> None:
        self.result = ScanResult()
        self.started_at = now
        self._directory = directory
        self._index = directory.index
        self._used_after = used_after
        self._on_counted = on_counted
        self._discovered: list[ObjectFile] = []
        self._costs = self._run(now)
        self._index.begin_scan()

    def step(self, budget: int) -> bool:
        """Reads about ``budget`` names. True at the end."""
        spent = 0
        for cost in self._costs:
            spent += cost
            if spent >= budget:
                self._add_discovered()
                return False
        return True

    def _run(self, now: float) -> Iterator[int]:
        result = self.result
        clean = self._on_counted is not None
        for bucket in walk(self._directory.root, now, result.report, clean=clean):
            result.other_bytes += bucket.other_bytes
            if bucket.second:
                self._scan_objects(bucket)
            else:
                self._scan_parent(bucket)
            yield bucket.entries
        self._add_discovered()
        yield 1
        for number, (namespace, key) in enumerate(self._index.not_seen()):
            self._drop_if_gone(namespace, key)
            if number % 64 == 63:
                yield 64

    def _scan_parent(self, bucket: Bucket) -> None:
        if not bucket.first:
            newest = 0.0
            try:
                newest = os.lstat(f"{bucket.path}/{IDENTITY}").st_mtime
            except OSError:
                try:
                    # Without a description: when a directory was last created or removed here.
                    newest = os.lstat(bucket.path).st_mtime
                except OSError:
                    newest = self.started_at
            self.result.newest[bucket.namespace] = newest
        self._count(bucket)

    def _scan_objects(self, bucket: Bucket) -> None:
        newest = self.result.newest
        for found in bucket.objects:
            newest[found.namespace] = max(newest.get(found.namespace, 0.0), found.used_at)
            if not self._index.mark_seen(found.namespace, found.key, found.size_bytes):
                self._discovered.append(found)
            elif found.used_at > self._used_after:
                # Its first use or a later one; the time of a file does not tell.
                self._index.touch(found.namespace, found.key, often=False)
        self._count(bucket)

    def _count(self, bucket: Bucket) -> None:
        if self._on_counted is None:
            return
        size = (
            DIRECTORY_BYTES + bucket.other_bytes + sum(found.size_bytes for found in bucket.objects)
        )
        if bucket.empty and bucket.second:
            try:
                os.rmdir(bucket.path)
            except OSError:
                pass
            else:
                size = 0
        self._on_counted(size, (bucket.namespace, bucket.first, bucket.second))

    def _add_discovered(self) -> None:
        """Indexes new objects, oldest first, so that they are in the order of use. The clock of a
        file system ticks a few hundred times a second; among equal times the key decides, so that
        all processes agree on the order.
        """
        announce = self._announces
        self._discovered.sort(key=lambda found: (found.used_at, found.key))
        for found in self._discovered:
            # In a directory of one process a recent object was indexed when it was written, and
            # displaced by objects used later.
            name = (found.namespace, found.key, found.size_bytes)
            if (
                self._index.add(*name)
                if self._directory.shared and found.used_at > self._used_after
                else self._index.add_discovered(*name, found.used_at)
            ):
                self._directory.on_change(found.namespace, found.key, True)
                if announce:
                    self._directory.announcements.published(*name)
        self._discovered.clear()

    def _drop_if_gone(self, namespace: str, key: bytes) -> None:
        try:
            os.lstat(object_path(str(self._directory.root), namespace, key))
        except OSError as error:
            if error.errno in GONE:
                self._directory.drop(namespace, key)
                if self._announces:
                    self._directory.announcements.removed(namespace, key)

    @property
    def _announces(self) -> bool:
        """Whether this scan tells others what changed without an announcement, such as files that
        were copied or removed by hand: the leader's, except its first one."""
        return self._on_counted is not None and self._used_after != float("inf")
