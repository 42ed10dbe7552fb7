"""Finding out what a directory holds, without opening a file.

Temporaries carry the boot and process that made them in their name, so that what a killed process left is told apart from what a
living one is writing.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvtier.tiers.base import ALIGNMENT_BYTES
from kvtier.tiers.filesystem.format import HEADER_BYTES, SUFFIX

TEMPORARY_PREFIX = ".tmp-"
_TEMPORARY = re.compile(r"\.tmp-([0-9a-f]{8})-([0-9a-z]+)-(\d+)-[0-9a-f]+")
_NAMESPACE = re.compile(r"[0-9a-f]{32}")
_BUCKET = re.compile(r"[0-9a-f]{2}")
_OBJECT = re.compile(r"((?:[0-9a-f]{2}){1,64})\.kv")
ABANDONED_SECONDS = 3600.0
"""A temporary of a process that cannot be asked (another host, another pod) is abandoned after this long."""


_COPY_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Found:
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
    objects: list[Found]
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


def process_tag() -> str:
    """Names this boot, process-number space and process, for temporaries."""
    return f"{_boot()}-{_pid_space()}-{os.getpid()}"


def _boot() -> str:
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
    return "00000000"


def _pid_space() -> str:
    with contextlib.suppress(OSError):
        return str(os.stat("/proc/self/ns/pid").st_ino)
    return "0"


def abandoned(name: str, age_seconds: float) -> bool:
    """Whether nobody is writing this temporary any more."""
    if age_seconds > ABANDONED_SECONDS:
        return True
    match = _TEMPORARY.fullmatch(name)
    # Another boot may be another host whose first process-number space has the same number as the one here.
    if match is None or match[2] != _pid_space() or match[1] != _boot():
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
        objects: list[Found] = []
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
                objects.append(Found(namespace, bytes.fromhex(match[1]), status.st_size, status.st_mtime))
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
            if self._sweep and abandoned(entry.name, self._now - status.st_mtime) and _removed(entry.path):
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
