"""Finding out what a directory holds, without opening a file.

Temporaries carry the boot and process that made them in their name, so that what a killed process left is told apart from what a
living one is writing.
"""

from __future__ import annotations

import contextlib
import os
import re
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


@dataclass(frozen=True, slots=True)
class Found:
    """One object file. ``used_at``: its modification time, which a hit refreshes now and then."""

    namespace: str
    key: bytes
    size_bytes: int
    used_at: float


@dataclass(slots=True)
class ScanReport:
    """What a scan met besides objects."""

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
    if match is None or match[2] != _pid_space():
        return False
    return match[1] != _boot() or (int(match[3]) != os.getpid() and not os.path.exists(f"/proc/{match[3]}"))


def scan(root: Path, now: float, report: ScanReport) -> Iterator[Found]:
    """Yields every object below ``root`` and removes abandoned temporaries. Names that are not ours are left alone.

    Raises ``OSError`` only if the root itself cannot be read.
    """
    with os.scandir(root) as entries:
        namespaces = [entry for entry in entries if _NAMESPACE.fullmatch(entry.name)]
    for namespace in namespaces:
        for entry in _children(namespace.path, report):
            if _BUCKET.fullmatch(entry.name):
                for inner in _children(entry.path, report):
                    if _BUCKET.fullmatch(inner.name):
                        yield from _bucket(namespace.name, inner.path, now, report)
            else:
                _other(entry, now, report)


def _children(path: str, report: ScanReport) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as entries:
            return list(entries)
    except OSError:
        report.unreadable += 1
        return []


def _bucket(namespace: str, path: str, now: float, report: ScanReport) -> Iterator[Found]:
    for entry in _children(path, report):
        match = _OBJECT.fullmatch(entry.name)
        if match is None:
            _other(entry, now, report)
            continue
        try:
            status = entry.stat(follow_symlinks=False)
        except OSError:
            report.unreadable += 1
            continue
        if status.st_size <= HEADER_BYTES or status.st_size % ALIGNMENT_BYTES:
            # Not a whole object: it can never be read, and must not stay uncounted.
            report.ignored += 1
            with contextlib.suppress(OSError):
                os.unlink(entry.path)
            continue
        yield Found(namespace, bytes.fromhex(match[1]), status.st_size, status.st_mtime)


def _other(entry: os.DirEntry[str], now: float, report: ScanReport) -> None:
    try:
        status = entry.stat(follow_symlinks=False)
        if entry.name.startswith(TEMPORARY_PREFIX) and abandoned(entry.name, now - status.st_mtime):
            os.unlink(entry.path)
            report.temporaries_removed += 1
            return
    except OSError:
        report.unreadable += 1
        return
    if entry.name.startswith(TEMPORARY_PREFIX):
        report.temporaries_kept_bytes += status.st_size
    elif entry.is_file(follow_symlinks=False):
        report.other_bytes += status.st_size


def object_path(root: str, namespace: str, key: bytes) -> str:
    """``<root>/<namespace>/<2 hex>/<2 hex>/<key>.kv``. The directories come from the key's second and third byte: the first is the
    group, the same for most objects."""
    name = key.hex()
    spread = name[2:6].ljust(4, "0")
    return f"{root}/{namespace}/{spread[:2]}/{spread[2:4]}/{name}{SUFFIX}"
