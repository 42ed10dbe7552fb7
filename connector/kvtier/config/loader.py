"""Reads the topology directory.

``structural.json`` is read once and must be valid as a whole. ``live.json`` is followed: each value
is validated on its own, so that an invalid value, or one of a newer version, does not affect the
others. A rejected value keeps its last valid value.

The files may be on any kind of mount, so reading has a deadline and a size limit, and only regular
files are read. All functions may be called from any thread.
"""

from __future__ import annotations

import json
import logging
import os
import stat
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from kvtier.config import lmcache_url
from kvtier.config.models import (
    SCHEMA_VERSION,
    Daemon,
    FileSystemTierDocument,
    Live,
    LiveTier,
    LMCacheTierDocument,
    MemoryTierDocument,
    Structural,
    Topology,
)
from kvtier.errors import ConfigurationError

STRUCTURAL_FILE = "structural.json"
LIVE_FILE = "live.json"
MAX_DOCUMENT_BYTES = 1 << 20
"""A ConfigMap holds at most 1 MiB."""
READ_SECONDS = 5.0
"""A local file takes microseconds; after five seconds the mount hangs."""
Part = TypeVar("Part", bound=BaseModel)
_log = logging.getLogger("kvtier.config")


@dataclass(frozen=True, slots=True)
class RejectedValue:
    """A live value that was rejected: its dotted field, its value as JSON, and what it must be."""

    field: str
    value: str
    requirement: str

    def __str__(self) -> str:
        return (
            f"{self.field}: Invalid value: {self.value}: {self.requirement}; "
            "the last valid value stays in effect"
        )


def load(
    directory: Path | str,
    deadline_seconds: float = READ_SECONDS,
    *,
    structural: Path | str | None = None,
) -> Topology:
    """Both documents, the structural one from the file ``structural`` if given. Logs rejected live
    values.

    Raises ``ConfigurationError`` if the structural document is unreadable or invalid.
    """
    topology, rejected = load_with_rejections(directory, deadline_seconds, structural=structural)
    for each in rejected:
        _log.warning("%s in %s: %s", LIVE_FILE, directory, each)
    return topology


def load_with_rejections(
    directory: Path | str,
    deadline_seconds: float = READ_SECONDS,
    *,
    structural: Path | str | None = None,
) -> tuple[Topology, list[RejectedValue]]:
    """As ``load``, with the rejected live values."""
    document = load_structural(structural or Path(directory) / STRUCTURAL_FILE, deadline_seconds)
    live, rejected = load_live(
        Path(directory) / LIVE_FILE, document.live, document, deadline_seconds
    )
    return Topology(structural=document, live=live), rejected


def load_for_engine(directory: Path | str) -> Topology:
    """As ``load``, with the sidecar's copy of the structural document, if there is one: an engine
    that restarts after the pod's annotation was changed must use the same document as tierd.

    Raises ``ConfigurationError``.
    """
    topology = load(directory)
    if topology.structural.daemon is not Daemon.SIDECAR:
        return topology
    kept = Path(topology.structural.run_directory) / STRUCTURAL_FILE
    if not kept.is_file():
        return topology
    try:
        first = load(directory, structural=kept)
    except ConfigurationError as error:
        _log.warning("cannot use the sidecar's copy of %s: %s", STRUCTURAL_FILE, error)
        return topology
    if first.structural != topology.structural:
        _log.warning("%s has changed; the change applies to new pods only", STRUCTURAL_FILE)
    return first


def load_structural(path: Path | str, deadline_seconds: float = READ_SECONDS) -> Structural:
    """Reads and checks a structural document. Raises ``ConfigurationError``."""
    name = str(path)
    try:
        content = read_bounded(Path(path), deadline_seconds)
    except OSError as error:
        raise ConfigurationError(
            name, error.strerror or str(error), "must be a readable structural document"
        ) from None
    return parse_structural(content, name)


def parse_structural(content: bytes, name: str = STRUCTURAL_FILE) -> Structural:
    """Checks a structural document. ``name`` is for messages. Raises ``ConfigurationError``."""
    try:
        document = parse_json(content)
    except ValueError as error:
        raise ConfigurationError(name, str(error), "must be a JSON object") from None
    version = document.get("schemaVersion")
    if version != SCHEMA_VERSION:
        raise ConfigurationError(
            f"{name}: schemaVersion",
            version,
            f"must be {SCHEMA_VERSION} for this version of KVTier; render the document again",
        )
    try:
        structural = Structural.model_validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ConfigurationError(
            f"{name}: {where}", _shown(first["input"]), _requirement(error)
        ) from None
    _check_structural(structural, name)
    return structural


def _check_structural(structural: Structural, name: str) -> None:
    names = [tier.name for tier in structural.tiers]
    if len(set(names)) != len(names):
        raise ConfigurationError(f"{name}: tiers", ", ".join(names), "must have unique names")
    if [isinstance(tier, MemoryTierDocument) for tier in structural.tiers] != [True] + [False] * (
        len(names) - 1
    ):
        raise ConfigurationError(
            f"{name}: tiers",
            ", ".join(tier.kind for tier in structural.tiers),
            "must start with the only memory tier",
        )
    for field, path in (("runDirectory", structural.run_directory), *_paths(structural)):
        if not path.startswith("/") or ".." in PurePosixPath(path).parts or "\0" in path:
            raise ConfigurationError(
                f"{name}: {field}", path, "must be an absolute path without .."
            )
    for document in structural.tiers:
        if isinstance(document, LMCacheTierDocument):
            _check_lmcache(document, name)
        elif isinstance(document, FileSystemTierDocument):
            _check_volumes(document, structural.live, name)
    files = {tier.name for tier in structural.tiers if isinstance(tier, FileSystemTierDocument)}
    for tier_name in names:
        if tier_name not in structural.live.tiers:
            raise ConfigurationError(
                f"{name}: live.tiers",
                ", ".join(structural.live.tiers),
                f"must have values for {tier_name}",
            )
    for tier_name, tier in structural.live.tiers.items():
        if tier_name in files and tier.capacity_bytes is None:
            raise ConfigurationError(
                f"{name}: live.tiers.{tier_name}.capacityBytes",
                None,
                "must be set for a fileSystem tier",
            )
        if tier.low_watermark_percent >= tier.high_watermark_percent:
            raise ConfigurationError(
                f"{name}: live.tiers.{tier_name}.lowWatermarkPercent",
                tier.low_watermark_percent,
                "must be below highWatermarkPercent",
            )


def _check_volumes(tier: FileSystemTierDocument, live: Live, name: str) -> None:
    if bool(tier.path) == bool(tier.volumes):
        given = [each.path for each in tier.volumes]
        raise ConfigurationError(
            f"{name}: tiers.{tier.name}", tier.path or given, "must have one of path, volumes"
        )
    names = [each.name for each in tier.volumes]
    paths = [each.path.rstrip("/") for each in tier.volumes]
    for field, values in (("names", names), ("paths", paths)):
        if len(set(values)) != len(values):
            raise ConfigurationError(
                f"{name}: tiers.{tier.name}.volumes", ", ".join(values), f"must have unique {field}"
            )
    capacities = live.tiers[tier.name].volume_capacity_bytes if tier.name in live.tiers else {}
    for each in names:
        if each not in capacities:
            raise ConfigurationError(
                f"{name}: live.tiers.{tier.name}.volumeCapacityBytes",
                ", ".join(capacities),
                f"must have a capacity for {each}",
            )


def _check_lmcache(tier: LMCacheTierDocument, name: str) -> None:
    must = lmcache_url.requirement(tier.url)
    if must:
        raise ConfigurationError(
            f"{name}: tiers.{tier.name}.url", lmcache_url.printable(tier.url), must
        )
    if tier.credentials_directory is not None and not lmcache_url.takes_credentials(tier.url):
        raise ConfigurationError(
            f"{name}: tiers.{tier.name}.credentialsDirectory",
            tier.credentials_directory,
            "must be absent: only redis:// and rediss:// have credentials",
        )


def _paths(structural: Structural) -> list[tuple[str, str]]:
    files = [tier for tier in structural.tiers if isinstance(tier, FileSystemTierDocument)]
    return [(f"tiers.{tier.name}.path", tier.path) for tier in files if tier.path] + [
        (f"tiers.{tier.name}.volumes.{volume.name}.path", volume.path)
        for tier in files
        for volume in tier.volumes
    ]


def load_live(
    path: Path | str, previous: Live, structural: Structural, deadline_seconds: float = READ_SECONDS
) -> tuple[Live, list[RejectedValue]]:
    """The live values in effect after reading ``path``, and its rejected values. Never raises for
    the content of files.

    A missing file changes nothing. An unreadable file changes nothing and counts as a rejected
    value.
    """
    try:
        content = read_bounded(Path(path), deadline_seconds)
    except FileNotFoundError:
        return previous, []
    except OSError as error:
        return previous, [
            RejectedValue(
                LIVE_FILE, error.strerror or str(error), "must be a readable live document"
            )
        ]
    return merge_live(content, previous, structural)


def merge_live(
    content: bytes, previous: Live, structural: Structural
) -> tuple[Live, list[RejectedValue]]:
    """``content`` over ``previous``, value by value.

    Tiers that ``structural`` lacks are ignored, because the policy may have more already. Tiers and
    fields that ``content`` lacks keep their values.
    """
    try:
        document = parse_json(content)
    except ValueError as error:
        return previous, [RejectedValue(LIVE_FILE, str(error), "must be a JSON object")]
    merge = _Merge()
    try:
        values = merge.fields(
            Live,
            previous,
            {k: v for k, v in document.items() if k not in ("tiers", *_PARTS)},
            "",
        )
        for name in _PARTS:
            if name in document:
                part = getattr(previous, name)
                values[name] = merge.model(type(part), part, document[name], name)
        if "tiers" in document:
            values["tiers"] = _merge_tiers(merge, document["tiers"], previous, structural)
    except RecursionError:
        # Serializing a value needs more stack than parsing it.
        return previous, [
            RejectedValue(LIVE_FILE, "the document is nested too deeply", "must be a JSON object")
        ]
    return previous.model_copy(update=values), merge.rejected


_PARTS = ("breaker", "hints", "tenants")
"""Live values that are objects."""


def _merge_tiers(
    merge: _Merge, given: Any, previous: Live, structural: Structural
) -> dict[str, LiveTier]:
    tiers = {tier.name: previous.tiers.get(tier.name) or LiveTier() for tier in structural.tiers}
    if not isinstance(given, dict):
        merge.reject("tiers", given, "must be a JSON object with tier names as keys")
        return tiers
    memory = {tier.name for tier in structural.tiers if isinstance(tier, MemoryTierDocument)}
    files = {tier.name for tier in structural.tiers if isinstance(tier, FileSystemTierDocument)}
    for name, old in tiers.items():
        if name not in given:
            continue
        fields = given[name]
        if name in memory and isinstance(fields, dict) and fields.get("capacityBytes") is not None:
            merge.reject(
                f"tiers.{name}.capacityBytes",
                fields["capacityBytes"],
                "must be absent: a memory tier's capacity is structural",
            )
            fields = {key: value for key, value in fields.items() if key != "capacityBytes"}
        if name in files and isinstance(fields, dict) and fields.get("capacityBytes", 1) is None:
            merge.reject(
                f"tiers.{name}.capacityBytes",
                None,
                "must be set for a fileSystem tier",
            )
            fields = {key: value for key, value in fields.items() if key != "capacityBytes"}
        tier = merge.model(LiveTier, old, fields, f"tiers.{name}")
        if tier.low_watermark_percent >= tier.high_watermark_percent:
            merge.reject(
                f"tiers.{name}.lowWatermarkPercent",
                tier.low_watermark_percent,
                f"must be a percentage below highWatermarkPercent ({tier.high_watermark_percent})",
            )
            tier = tier.model_copy(
                update={
                    "low_watermark_percent": old.low_watermark_percent,
                    "high_watermark_percent": old.high_watermark_percent,
                }
            )
        tiers[name] = tier
    return tiers


class _Merge:
    """Merges single values into models and collects the rejected ones."""

    def __init__(self) -> None:
        self.rejected: list[RejectedValue] = []

    def reject(self, field: str, value: Any, requirement: str) -> None:
        self.rejected.append(RejectedValue(field, _shown(value), requirement))

    def model(self, model: type[Part], previous: Part, given: Any, prefix: str) -> Part:
        if not isinstance(given, dict):
            self.reject(prefix, given, "must be a JSON object")
            return previous
        return previous.model_copy(update=self.fields(model, previous, given, f"{prefix}."))

    def fields(
        self, model: type[BaseModel], previous: BaseModel, given: Mapping[str, Any], prefix: str
    ) -> dict[str, Any]:
        attributes = {info.alias or name: name for name, info in model.model_fields.items()}
        base = previous.model_dump(mode="json", by_alias=True)
        values: dict[str, Any] = {}
        for key, value in given.items():
            if key not in attributes:
                self.reject(
                    f"{prefix}{key}",
                    value,
                    "must be one of the fields of this version: " + ", ".join(attributes),
                )
                continue
            try:
                # Validated within the previous document and as JSON, so that only the documented
                # types are valid.
                checked = model.model_validate_json(json.dumps({**base, key: value}), strict=True)
            except ValidationError as error:
                self.reject(f"{prefix}{key}", value, _requirement(error))
                continue
            values[attributes[key]] = getattr(checked, attributes[key])
        return values


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object with these members. Raises ``ValueError`` if two have the same key."""
    mapping = dict(pairs)
    if len(mapping) != len(pairs):
        keys = [key for key, _ in pairs]
        repeated = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {repeated!r} is defined more than once")
    return mapping


def parse_json(content: bytes) -> dict[str, Any]:
    """A JSON object; duplicate keys, NaN and anything but an object raise ``ValueError``."""

    def reject_constant(name: str) -> Any:
        raise ValueError(f"{name} is not a JSON number")

    try:
        document = json.loads(
            content, object_pairs_hook=unique_keys, parse_constant=reject_constant
        )
    except RecursionError:
        raise ValueError("the document is nested too deeply") from None
    except UnicodeDecodeError:
        raise ValueError("the document is not UTF-8") from None
    if not isinstance(document, dict):
        raise ValueError(f"the document is a {type(document).__name__}, not an object")
    return document


def read_bounded(
    path: Path, deadline_seconds: float = READ_SECONDS, limit_bytes: int = MAX_DOCUMENT_BYTES
) -> bytes:
    """A regular file's content. Raises ``OSError``, also for a pipe, a file above the limit, or a
    missed deadline.

    A reading thread that hangs in a dead mount cannot be ended and is abandoned; it holds no lock.
    """
    result: list[bytes | OSError] = []

    def read() -> None:
        try:
            result.append(_read(path, limit_bytes))
        except OSError as error:
            result.append(error)

    thread = threading.Thread(target=read, name="kvtier-topology-read", daemon=True)
    thread.start()
    thread.join(deadline_seconds)
    if not result:
        raise TimeoutError(None, f"not read within {deadline_seconds:g} s", str(path))
    if isinstance(result[0], OSError):
        raise result[0]
    return result[0]


def _read(path: Path, limit_bytes: int) -> bytes:
    # O_NONBLOCK: opening a pipe without a writer would wait for one.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(None, "not a regular file", str(path))
        content = bytearray()
        while len(content) <= limit_bytes:
            piece = os.read(descriptor, limit_bytes + 1 - len(content))
            if not piece:
                return bytes(content)
            content += piece
        raise OSError(None, f"longer than {limit_bytes} bytes", str(path))
    finally:
        os.close(descriptor)


def _requirement(error: ValidationError) -> str:
    """What the first invalid value must be, in the words of a field error."""
    message = error.errors(include_url=False)[0]["msg"]
    return message.lower().replace("input should be", "must be")


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else text[:79] + "…"
