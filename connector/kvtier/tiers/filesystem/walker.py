"""Finding out what a directory holds, without opening a file.

Temporaries carry the boot and process that made them in their name, so that what a killed process left is told apart from what a
living one is writing.

Walking a directory a little at a time: the index learns what other processes did, the janitor counts.

A pass reads every directory once, in the order of names. It may take as long as it likes: what it finds is taken over bucket by
bucket, and what it did not meet is looked for by name before it is dropped.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from kvtier.processes import is_observable
from kvtier.tiers.base import ALIGNMENT_BYTES, OnChange
from kvtier.tiers.filesystem.format import HEADER_BYTES, SUFFIX
from kvtier.tiers.filesystem.index import Index
from kvtier.tiers.filesystem.io import GONE
from kvtier.tiers.filesystem.layout import DIRECTORY_BYTES, IDENTITY

TEMPORARY_PREFIX = ".tmp-"
_TEMPORARY = re.compile(r"\.tmp-([0-9a-f]{8})-([0-9a-z]+)-(\d+)-[0-9a-f]+")
_NAMESPACE = re.compile(r"[0-9a-f]{32}")
_BUCKET = re.compile(r"[0-9a-f]{2}")
_OBJECT = re.compile(r"((?:[0-9a-f]{2}){1,64})\.kv")
ABANDONED_SECONDS = 3600.0
"""A temporary of a process that cannot be asked (another host, another pod) is abandoned after this long."""
_COPY_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class ObjectFile:
    """One object file. ``used_at``: its modification time, which a hit refreshes now and then."""

    namespace: str
    key: bytes
    size_bytes: int
    used_at: float


@dataclass(frozen=True, slots=True)
class Bucket:
    """One directory of objects, or (``second`` empty) one above. ``other_bytes``: of what is in it and no object."""

    namespace: str
    first: str
    second: str
    path: str
    objects: list[ObjectFile]
    other_bytes: int
    empty: bool

    @property
    def entries(self) -> int:
        """What listing it has cost: names looked at, and the directory."""
        return len(self.objects) + 1


@dataclass(slots=True)
class ScanReport:
    """What a scan met besides objects."""

    temporaries: int = 0
    temporaries_removed: int = 0
    temporaries_kept_bytes: int = 0
    other_bytes: int = 0
    ignored: int = 0
    unreadable: int = 0


def abandoned(name: str, age_seconds: float) -> bool:
    """Whether nobody is writing this temporary any more."""
    if age_seconds > ABANDONED_SECONDS:
        return True
    match = _TEMPORARY.fullmatch(name)
    if match is None or not is_observable(match[1], match[2]):
        return False
    return int(match[3]) != os.getpid() and not os.path.exists(f"/proc/{match[3]}")


def scan(root: Path, now: float, report: ScanReport, *, sweep: bool = True) -> Iterator[Bucket]:
    """Yields every directory with its objects, in the order of names, and (``sweep``) removes abandoned temporaries and what is no
    whole object. Names that are not ours are left alone.

    ``now``: seconds since the epoch, by the file system's clock or one near it. Raises ``OSError`` only if the root itself cannot be read.
    """
    with os.scandir(root) as entries:
        namespaces = sorted(entry.name for entry in entries if _NAMESPACE.fullmatch(entry.name))
    reader = _Reader(now, report, sweep)
    for namespace in namespaces:
        top = f"{root}/{namespace}"
        yield from reader.above(namespace, "", top)
        for first in reader.buckets:
            yield from reader.above(namespace, first, f"{top}/{first}")
            for second in reader.buckets:
                bucket = reader.bucket(namespace, first, second, f"{top}/{first}/{second}")
                if bucket is not None:
                    yield bucket


class _Reader:
    """Reads single directories."""

    def __init__(self, now: float, report: ScanReport, sweep: bool) -> None:
        self.buckets: list[str] = []
        self._now = now
        self._report = report
        self._sweep = sweep

    def above(self, namespace: str, first: str, path: str) -> Iterator[Bucket]:
        """A directory of directories; ``buckets`` are those."""
        found = self._children(path)
        names = [entry.name for entry in found or () if _BUCKET.fullmatch(entry.name)]
        self.buckets = sorted(names)
        if found is None:
            return
        other = sum(self._other(entry) for entry in found if not _BUCKET.fullmatch(entry.name))
        yield Bucket(namespace, first, "", path, [], other, not found)

    def bucket(self, namespace: str, first: str, second: str, path: str) -> Bucket | None:
        """A directory of objects; None if it cannot be read."""
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
            whole = status.st_size > HEADER_BYTES and not status.st_size % ALIGNMENT_BYTES
            if whole and _buckets(match[1]) == (first, second) and stat.S_ISREG(status.st_mode):
                objects.append(
                    ObjectFile(namespace, bytes.fromhex(match[1]), status.st_size, status.st_mtime)
                )
                continue
            # Not a whole object, or not in its place: it can never be read. A young one may be a copy that somebody else is making.
            self._report.ignored += 1
            young = self._now - status.st_mtime < _COPY_SECONDS
            if young or not self._sweep or not _removed(entry.path):
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
                self._sweep
                and abandoned(entry.name, self._now - status.st_mtime)
                and _removed(entry.path)
            ):
                report.temporaries_removed += 1
                return 0
            report.temporaries += 1
            report.temporaries_kept_bytes += status.st_size
        elif entry.is_file(follow_symlinks=False):
            report.other_bytes += status.st_size
        else:
            return 0
        return status.st_size


def _removed(path: str) -> bool:
    try:
        os.unlink(path)
    except OSError:
        return False
    return True


def object_path(root: str, namespace: str, key: bytes) -> str:
    """``<root>/<namespace>/<2 hex>/<2 hex>/<key>.kv``. The directories come from the key's second and third byte: the first is the
    group, the same for most objects."""
    name = key.hex()
    first, second = _buckets(name)
    return f"{root}/{namespace}/{first}/{second}/{name}{SUFFIX}"


def _buckets(name: str) -> tuple[str, str]:
    spread = name[2:6].ljust(4, "0")
    return spread[:2], spread[2:4]


Counted = Callable[[int, tuple[str, str, str]], None]


@dataclass(slots=True)
class PassResult:
    """What a pass found. ``newest``: per namespace, when anything in it was used last, by the file system's clock."""

    report: ScanReport = field(default_factory=ScanReport)
    newest: dict[str, float] = field(default_factory=dict)
    other_bytes: int = 0


class Pass:
    """One walk. ``counted`` is told of bytes met, with the bucket; None where nobody counts. ``touched_after``: objects used later than this,
    by their file's time, move to the young end. ``shared``: others write here, and what they made or used after that may displace what was used
    longest ago.

    Used by one thread at a time. ``step`` raises ``OSError`` if the root cannot be read.
    """

    def __init__(
        self,
        root: Path,
        index: Index,
        on_change: OnChange,
        now: float,
        counted: Counted | None,
        touched_after: float,
        shared: bool = False,
    ) -> None:
        self.result = PassResult()
        self.began_at = now
        self._root = root
        self._index = index
        self._on_change = on_change
        self._counted = counted
        self._touched_after = touched_after
        self._shared = shared
        self._new: list[ObjectFile] = []
        self._costs = self._run(now)
        index.begin_pass()

    def step(self, budget: int) -> bool:
        """Looks at about ``budget`` names; True at the end."""
        spent = 0
        for cost in self._costs:
            spent += cost
            if spent >= budget:
                self._take_over()
                return False
        return True

    def _run(self, now: float) -> Iterator[int]:
        result = self.result
        for bucket in scan(self._root, now, result.report, sweep=self._counted is not None):
            result.other_bytes += bucket.other_bytes
            if bucket.second:
                self._objects(bucket)
            else:
                self._above(bucket)
            yield bucket.entries
        self._take_over()
        yield 1
        for number, (namespace, key) in enumerate(self._index.unmet()):
            self._missing(namespace, key)
            if number % 64 == 63:
                yield 64

    def _above(self, bucket: Bucket) -> None:
        if not bucket.first:
            newest = 0.0
            try:
                newest = os.lstat(f"{bucket.path}/{IDENTITY}").st_mtime
            except OSError:
                try:
                    # Without a description: when something was last made or removed here.
                    newest = os.lstat(bucket.path).st_mtime
                except OSError:
                    newest = self.began_at
            self.result.newest[bucket.namespace] = newest
        self._count(bucket)

    def _objects(self, bucket: Bucket) -> None:
        newest = self.result.newest
        for found in bucket.objects:
            newest[found.namespace] = max(newest.get(found.namespace, 0.0), found.used_at)
            if not self._index.meet(found.namespace, found.key):
                self._new.append(found)
            elif found.used_at > self._touched_after:
                self._index.touch(found.namespace, found.key)
        self._count(bucket)

    def _count(self, bucket: Bucket) -> None:
        if self._counted is None:
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
        self._counted(size, (bucket.namespace, bucket.first, bucket.second))

    def _take_over(self) -> None:
        """New objects, oldest first, so that they take their places in the order of use. A file system's clock ticks some hundred times
        a second; among equals the key decides, so that all processes see one order."""
        self._new.sort(key=lambda found: (found.used_at, found.key))
        for found in self._new:
            # What only this process writes was indexed when it was written; it left for what was used later.
            take = (
                self._index.add
                if self._shared and found.used_at > self._touched_after
                else self._index.find
            )
            if take(found.namespace, found.key, found.size_bytes):
                self._on_change(found.namespace, found.key, True)
        self._new.clear()

    def _missing(self, namespace: str, key: bytes) -> None:
        try:
            os.lstat(object_path(str(self._root), namespace, key))
        except OSError as error:
            if error.errno in GONE and self._index.remove(namespace, key):
                self._on_change(namespace, key, False)
