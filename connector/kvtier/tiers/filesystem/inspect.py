"""Inspects a tier's directory from outside: what it holds and who uses it (``kvtier inspect``).

It does not take part in the protocol of the directory and writes nothing. Raises
``ConfigurationError`` for a directory that is not a tier's, and ``OSError``.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvtier.errors import ConfigurationError
from kvtier.tiers.filesystem import io
from kvtier.tiers.filesystem.election import (
    current_term,
    is_dead,
    is_visible,
    read_ledger,
    read_writer,
)
from kvtier.tiers.filesystem.format import HEADER_BYTES, describe_seal, facts_of
from kvtier.tiers.filesystem.layout import (
    CONTROL,
    DIRECTORY_BYTES,
    IDENTITY,
    WORKING_PREFIX,
    grants_in,
    writers_path,
)
from kvtier.tiers.filesystem.walker import Bucket, ScanReport, object_path, walk

_NAMESPACE = re.compile(r"[0-9a-f]{32}")
_MAX_IDENTITY_BYTES = 1 << 20
SAMPLED_OBJECTS = 256
"""Objects of a namespace whose headers ``survey`` reads."""


@dataclass(slots=True)
class NamespaceUsage:
    """One namespace. ``oldest``, ``newest``: last uses, in seconds since the epoch by the file
    system's clock. ``seals``: how the first ``SAMPLED_OBJECTS`` say that they are sealed, which
    nothing proves here.
    """

    name: str
    identity: dict[str, str]
    objects: int = 0
    size_bytes: int = 0
    oldest: float | None = None
    newest: float | None = None
    seals: Counter[str] = field(default_factory=Counter)


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


@dataclass(slots=True)
class TenantUsage:
    """What one tenant holds in a directory. ``tenant``: its digest; empty for objects that belong
    to none."""

    tenant: str
    objects: int = 0
    size_bytes: int = 0


@dataclass(frozen=True, slots=True)
class TenantSurvey:
    """Tenants of a directory, those that hold the most first. ``unknown``: objects whose headers
    are damaged, of another version or gone."""

    tenants: list[TenantUsage]
    unknown: int


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
    """Reads everything by name and size, and the headers of a few objects. ``now``: seconds since
    the epoch."""
    report = ScanReport()
    spaces: dict[str, NamespaceUsage] = {}
    total = other = 0
    for bucket in walk(root, now, report, clean=False):
        view = spaces.get(bucket.namespace)
        if view is None:
            view = spaces[bucket.namespace] = NamespaceUsage(
                bucket.namespace, _identity(root / bucket.namespace)
            )
        _sample_seals(str(root), bucket, view)
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


def survey_tenants(root: Path, now: float) -> TenantSurvey:
    """Reads the header of every object. ``now``: seconds since the epoch."""
    found: dict[str, TenantUsage] = {}
    unknown = 0
    for bucket in walk(root, now, ScanReport(), clean=False):
        for each in bucket.objects:
            try:
                path = object_path(str(root), each.namespace, each.key)
                facts = facts_of(io.read_start(path, HEADER_BYTES))
            except OSError:
                facts = None
            if facts is None:
                unknown += 1
                continue
            tenant = facts.tenant.hex()
            usage = found.setdefault(tenant, TenantUsage(tenant))
            usage.objects += 1
            usage.size_bytes += each.size_bytes
    order = sorted(found.values(), key=lambda each: (-each.size_bytes, each.tenant))
    return TenantSurvey(order, unknown)


def _sample_seals(root: str, bucket: Bucket, view: NamespaceUsage) -> None:
    for found in bucket.objects:
        if view.seals.total() >= SAMPLED_OBJECTS:
            return
        with contextlib.suppress(OSError):
            path = object_path(root, found.namespace, found.key)
            view.seals[describe_seal(io.read_start(path, HEADER_BYTES))] += 1


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
        document = json.loads(io.read_start(str(namespace / IDENTITY), _MAX_IDENTITY_BYTES))
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
