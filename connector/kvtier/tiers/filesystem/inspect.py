"""Inspects a tier's directory from outside: what it holds, who uses it, whether every object is
intact (``kvtier inspect``, ``kvtier verify``).

It does not take part in the protocol of the directory and writes nothing; ``verify`` can remove
corrupt objects. Raises ``ConfigurationError`` for a directory that is not a tier's, and
``OSError``.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvtier.errors import ConfigurationError, TierCorruptError, TierError
from kvtier.tiers.base import ObjectRef
from kvtier.tiers.filesystem import io
from kvtier.tiers.filesystem.election import (
    current_term,
    is_dead,
    is_visible,
    read_ledger,
    read_writer,
)
from kvtier.tiers.filesystem.format import HEADER_BYTES, read_header, verify_payload
from kvtier.tiers.filesystem.layout import (
    CONTROL,
    DIRECTORY_BYTES,
    IDENTITY,
    WORKING_PREFIX,
    grants_in,
    writers_path,
)
from kvtier.tiers.filesystem.walker import ObjectFile, ScanReport, object_path, walk

_NAMESPACE = re.compile(r"[0-9a-f]{32}")
_MAX_IDENTITY_BYTES = 1 << 20


@dataclass(slots=True)
class NamespaceUsage:
    """One namespace. ``oldest``, ``newest``: last uses, in seconds since the epoch by the file
    system's clock.
    """

    name: str
    identity: dict[str, str]
    objects: int = 0
    size_bytes: int = 0
    oldest: float | None = None
    newest: float | None = None


@dataclass(frozen=True, slots=True)
class HolderStatus:
    """The leader or a writer. ``state``: Alive, Gone, Released, or Elsewhere (its process is not
    visible from here).
    """

    name: str
    state: str
    grants: dict[int, int] = field(default_factory=dict)
    writing: int = 0
    writing_bytes: int = 0


@dataclass(slots=True)
class Survey:
    """A directory. ``total_bytes``: files and directories, including the control directory.
    ``temporaries``: files being written or left behind. ``ledger``: the leader's record.
    """

    root: str
    namespaces: list[NamespaceUsage]
    total_bytes: int
    temporaries: int
    temporary_bytes: int
    other_bytes: int
    term: int
    janitor: HolderStatus | None
    ledger: dict[str, Any] | None
    writers: list[HolderStatus]


def tier_root(path: Path) -> Path:
    """``path`` if it is a tier's directory. Raises ``ConfigurationError``."""

    def invalid(reason: str) -> ConfigurationError:
        return ConfigurationError(
            "DIR", str(path), f"must be the directory of a fileSystem tier: it {reason}"
        )

    if not path.exists():
        raise invalid("does not exist")
    if not path.is_dir():
        raise invalid("is not a directory")
    if not any(name == CONTROL or _NAMESPACE.fullmatch(name) for name in os.listdir(path)):
        raise invalid("contains no namespace and no .kvtier directory")
    return path


def survey(root: Path, now: float) -> Survey:
    """Reads everything by name and size. ``now``: seconds since the epoch."""
    report = ScanReport()
    spaces: dict[str, NamespaceUsage] = {}
    total = other = 0
    for bucket in walk(root, now, report, clean=False):
        view = spaces.get(bucket.namespace)
        if view is None:
            view = spaces[bucket.namespace] = NamespaceUsage(
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
    term = current_term(root, uncached=False) if (root / CONTROL).is_dir() else 0
    ledger = read_ledger(root, term) if term else None
    writers = list(_writers(root))
    return Survey(
        root=str(root),
        namespaces=sorted(spaces.values(), key=lambda each: each.newest or 0.0, reverse=True),
        total_bytes=total,
        temporaries=sum(each.writing for each in writers) + report.temporaries,
        temporary_bytes=sum(each.writing_bytes for each in writers) + report.temporaries_kept_bytes,
        other_bytes=other - report.temporaries_kept_bytes,
        term=term,
        janitor=None
        if ledger is None
        else HolderStatus(str(ledger.get("holder")), _leader_state(ledger)),
        ledger=ledger,
        writers=writers,
    )


def _leader_state(ledger: dict[str, Any]) -> str:
    return "Released" if ledger.get("released") else _state(str(ledger.get("holder")))


def _state(holder: str) -> str:
    if is_dead(holder):
        return "Gone"
    return "Alive" if is_visible(holder) else "Elsewhere"


def _writers(root: Path) -> Iterator[HolderStatus]:
    top = writers_path(root)
    for name in sorted(os.listdir(top)) if top.is_dir() else ():
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            names = os.listdir(top / name)
            sizes = [_size(top / name / each) for each in names if each.startswith(WORKING_PREFIX)]
            settled = (read_writer(root, name) or {}).get("settled", {})
            grants = {
                number: size
                for number, size in grants_in(names).items()
                if str(number) not in settled
            }
            yield HolderStatus(name, _state(name), grants, len(sizes), sum(sizes))


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
    """What distinguishes namespaces for people."""
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
class FailedObject:
    """An object that failed verification. ``corrupt``: proven; else it could not be read."""

    path: str
    reason: str
    corrupt: bool
    deleted: bool


@dataclass(slots=True)
class VerifyReport:
    """Counts of ``verify``."""

    objects: int = 0
    size_bytes: int = 0
    vanished: int = 0
    unverifiable: int = 0
    bad: list[FailedObject] = field(default_factory=list)

    @property
    def corrupt(self) -> int:
        """How many objects are proven to be corrupt."""
        return sum(each.corrupt for each in self.bad)


def objects_of(root: Path, now: float) -> list[ObjectFile]:
    """Every object, by name and size."""
    return [
        found for bucket in walk(root, now, ScanReport(), clean=False) for found in bucket.objects
    ]


def verify(
    root: Path,
    objects: list[ObjectFile],
    *,
    delete: bool,
    progress: Callable[[VerifyReport], None] = lambda _: None,
) -> VerifyReport:
    """Reads and verifies objects; ``delete`` removes corrupt ones. Objects that are removed
    while it runs count as vanished.
    """
    report = VerifyReport()
    header = memoryview(mmap.mmap(-1, HEADER_BYTES))
    buffer = memoryview(mmap.mmap(-1, HEADER_BYTES))
    direct = False
    with contextlib.suppress(OSError):
        direct = io.direct_io_supported(root)
    for found in objects:
        size = found.size_bytes - HEADER_BYTES
        ref = ObjectRef(found.namespace, found.key)
        path = object_path(str(root), found.namespace, found.key)
        try:
            # Before memory is allocated for it: a foreign file may have any size.
            read_header(_header_of(path, header), ref, size)
            if buffer.nbytes < size:
                buffer = memoryview(mmap.mmap(-1, size))
            io.read_file(path, header, buffer[:size], direct)
            verify_payload(buffer[:size], read_header(header, ref, size))
        except TierCorruptError as error:
            report.bad.append(FailedObject(path, str(error), True, delete and _unlinked(path)))
        except TierError:
            # Its checksum is not available in this process.
            report.unverifiable += 1
        except OSError as error:
            # If the directory itself is gone, the object was not removed from it.
            if error.errno in io.GONE and os.path.isdir(root):
                report.vanished += 1
            else:
                report.bad.append(FailedObject(path, str(error.strerror or error), False, False))
        else:
            report.objects += 1
            report.size_bytes += found.size_bytes
        progress(report)
    return report


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
