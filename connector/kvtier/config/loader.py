"""Reading the topology directory.

``structural.json`` is read once and has to be right as a whole. ``live.json`` is followed: each value is taken or
refused by itself, so that one bad value (or a value of a newer version) never takes the others with it, and what was
refused keeps its last good value.

The files may lie on anything that can be mounted, so reading has a deadline and a size limit, and only regular files
are read. All functions may be called from any thread.
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

from kvtier.config.models import (
    SCHEMA_VERSION,
    Breaker,
    Daemon,
    FileSystemTierDocument,
    Live,
    LiveTier,
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
"""A local file takes microseconds; five seconds without it mean that it is not coming."""
Part = TypeVar("Part", bound=BaseModel)
_log = logging.getLogger("kvtier.config")


@dataclass(frozen=True, slots=True)
class RejectedValue:
    """A live value that was not taken: its dotted field, what stood there, what is accepted."""

    field: str
    value: str
    accepted: str

    def __str__(self) -> str:
        return f"{self.field}: {self.value} is not accepted; accepted is {self.accepted}; the last good value stays"


def load(
    directory: Path | str,
    deadline_seconds: float = READ_SECONDS,
    *,
    structural: Path | str | None = None,
) -> Topology:
    """Both documents as in force; the structural one from the file ``structural`` if given. Refused live values are logged.

    Raises ``ConfigurationError`` where the structural document cannot be read or is not accepted.
    """
    topology, refusals = load_with_rejections(directory, deadline_seconds, structural=structural)
    for refusal in refusals:
        _log.warning("%s in %s: %s", LIVE_FILE, directory, refusal)
    return topology


def load_with_rejections(
    directory: Path | str,
    deadline_seconds: float = READ_SECONDS,
    *,
    structural: Path | str | None = None,
) -> tuple[Topology, list[RejectedValue]]:
    """As ``load``, with the live values that were refused."""
    document = load_structural(structural or Path(directory) / STRUCTURAL_FILE, deadline_seconds)
    live, refusals = load_live(
        Path(directory) / LIVE_FILE, document.live, document, deadline_seconds
    )
    return Topology(structural=document, live=live), refusals


def load_for_engine(directory: Path | str) -> Topology:
    """As ``load``, with the structural document that the sidecar keeps, where there is one: an engine that starts again in its pod after
    the pod's annotation was changed has to be told what tierd was told.

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
        _log.warning("what the sidecar kept cannot be read: %s", error)
        return topology
    if first.structural != topology.structural:
        _log.warning(
            "%s was changed and is ignored: what is structural comes with a new pod",
            STRUCTURAL_FILE,
        )
    return first


def load_structural(path: Path | str, deadline_seconds: float = READ_SECONDS) -> Structural:
    """Reads and checks a structural document. Raises ``ConfigurationError``."""
    name = str(path)
    try:
        content = read_bounded(Path(path), deadline_seconds)
    except OSError as error:
        raise ConfigurationError(
            name, error.strerror or str(error), "a readable structural document"
        ) from None
    return parse_structural(content, name)


def parse_structural(content: bytes, name: str = STRUCTURAL_FILE) -> Structural:
    """Checks a structural document. ``name`` is for messages. Raises ``ConfigurationError``."""
    try:
        document = parse_json(content)
    except ValueError as error:
        raise ConfigurationError(name, str(error), "a JSON object") from None
    version = document.get("schemaVersion")
    if version != SCHEMA_VERSION:
        raise ConfigurationError(
            f"{name}: schemaVersion",
            version,
            f"{SCHEMA_VERSION} is what this version of KVTier reads; render it again",
        )
    try:
        structural = Structural.model_validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ConfigurationError(f"{name}: {where}", _shown(first["input"]), first["msg"]) from None
    _check_structural(structural, name)
    return structural


def _check_structural(structural: Structural, name: str) -> None:
    names = [tier.name for tier in structural.tiers]
    if len(set(names)) != len(names):
        raise ConfigurationError(
            f"{name}: tiers", ", ".join(names), "every tier has a name of its own"
        )
    if [isinstance(tier, MemoryTierDocument) for tier in structural.tiers] != [True] + [False] * (
        len(names) - 1
    ):
        raise ConfigurationError(
            f"{name}: tiers",
            ", ".join(tier.kind for tier in structural.tiers),
            "memory first, and only there",
        )
    for field, path in (("runDirectory", structural.run_directory), *_paths(structural)):
        if not path.startswith("/") or ".." in PurePosixPath(path).parts or "\0" in path:
            raise ConfigurationError(f"{name}: {field}", path, "an absolute path without ..")
    files = {tier.name for tier in structural.tiers if isinstance(tier, FileSystemTierDocument)}
    for tier_name in names:
        if tier_name not in structural.live.tiers:
            raise ConfigurationError(
                f"{name}: live.tiers",
                ", ".join(structural.live.tiers),
                f"values for {tier_name}, too",
            )
    for tier_name, tier in structural.live.tiers.items():
        if tier_name in files and tier.capacity_bytes is None:
            raise ConfigurationError(
                f"{name}: live.tiers.{tier_name}.capacityBytes",
                None,
                "a file tier's capacity is mandatory",
            )
        if tier.low_watermark_percent >= tier.high_watermark_percent:
            raise ConfigurationError(
                f"{name}: live.tiers.{tier_name}.lowWatermarkPercent",
                tier.low_watermark_percent,
                "below highWatermarkPercent",
            )


def _paths(structural: Structural) -> list[tuple[str, str]]:
    return [
        (f"tiers.{tier.name}.path", tier.path)
        for tier in structural.tiers
        if isinstance(tier, FileSystemTierDocument)
    ]


def load_live(
    path: Path | str, previous: Live, structural: Structural, deadline_seconds: float = READ_SECONDS
) -> tuple[Live, list[RejectedValue]]:
    """The live values in force after reading ``path``, and what in it was refused. Never raises for what a file holds.

    A file that is not there changes nothing and is no refusal; one that cannot be read changes nothing and is one.
    """
    try:
        content = read_bounded(Path(path), deadline_seconds)
    except FileNotFoundError:
        return previous, []
    except OSError as error:
        return previous, [
            RejectedValue(LIVE_FILE, error.strerror or str(error), "a readable live document")
        ]
    return merge_live(content, previous, structural)


def merge_live(
    content: bytes, previous: Live, structural: Structural
) -> tuple[Live, list[RejectedValue]]:
    """``content`` over ``previous``, value by value.

    Tiers that ``structural`` lacks are ignored (the policy may have one more already); tiers and fields that are not
    named keep their values.
    """
    try:
        document = parse_json(content)
    except ValueError as error:
        return previous, [RejectedValue(LIVE_FILE, str(error), "a JSON object")]
    merge = _Merge()
    try:
        values = merge.fields(
            Live, previous, {k: v for k, v in document.items() if k not in ("breaker", "tiers")}, ""
        )
        if "breaker" in document:
            values["breaker"] = merge.model(
                Breaker, previous.breaker, document["breaker"], "breaker"
            )
        if "tiers" in document:
            values["tiers"] = _merge_tiers(merge, document["tiers"], previous, structural)
    except RecursionError:
        # Writing a value takes a little more depth than reading it did.
        return previous, [RejectedValue(LIVE_FILE, "nested too deeply", "a JSON object")]
    return previous.model_copy(update=values), merge.refusals


def _merge_tiers(
    merge: _Merge, given: Any, previous: Live, structural: Structural
) -> dict[str, LiveTier]:
    tiers = {tier.name: previous.tiers.get(tier.name) or LiveTier() for tier in structural.tiers}
    if not isinstance(given, dict):
        merge.refuse("tiers", given, "a mapping from tier names to values")
        return tiers
    memory = {tier.name for tier in structural.tiers if isinstance(tier, MemoryTierDocument)}
    files = {tier.name for tier in structural.tiers if isinstance(tier, FileSystemTierDocument)}
    for name, old in tiers.items():
        if name not in given:
            continue
        fields = given[name]
        if name in memory and isinstance(fields, dict) and fields.get("capacityBytes") is not None:
            merge.refuse(
                f"tiers.{name}.capacityBytes",
                fields["capacityBytes"],
                "nothing: a memory tier's capacity is structural",
            )
            fields = {key: value for key, value in fields.items() if key != "capacityBytes"}
        if name in files and isinstance(fields, dict) and fields.get("capacityBytes", 1) is None:
            merge.refuse(
                f"tiers.{name}.capacityBytes",
                None,
                "a number of bytes: a file tier's capacity is mandatory",
            )
            fields = {key: value for key, value in fields.items() if key != "capacityBytes"}
        tier = merge.model(LiveTier, old, fields, f"tiers.{name}")
        if tier.low_watermark_percent >= tier.high_watermark_percent:
            merge.refuse(
                f"tiers.{name}.lowWatermarkPercent",
                tier.low_watermark_percent,
                f"a percentage below highWatermarkPercent ({tier.high_watermark_percent}); both stay",
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
    """Takes single values into models and collects what was refused."""

    def __init__(self) -> None:
        self.refusals: list[RejectedValue] = []

    def refuse(self, field: str, value: Any, accepted: str) -> None:
        self.refusals.append(RejectedValue(field, _shown(value), accepted))

    def model(self, model: type[Part], previous: Part, given: Any, prefix: str) -> Part:
        if not isinstance(given, dict):
            self.refuse(prefix, given, "a mapping")
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
                self.refuse(
                    f"{prefix}{key}",
                    value,
                    "a field that this version knows: " + ", ".join(attributes),
                )
                continue
            try:
                # Validated in place of its predecessor, as JSON, so that exactly the document's types are taken.
                checked = model.model_validate_json(json.dumps({**base, key: value}), strict=True)
            except ValidationError as error:
                self.refuse(
                    f"{prefix}{key}", value, error.errors(include_url=False)[0]["msg"].lower()
                )
                continue
            values[attributes[key]] = getattr(checked, attributes[key])
        return values


def parse_json(content: bytes) -> dict[str, Any]:
    """A JSON object; duplicate keys, NaN and anything but an object raise ``ValueError``."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        mapping = dict(pairs)
        if len(mapping) != len(pairs):
            keys = [key for key, _ in pairs]
            raise ValueError(
                f"the key {next(key for key in keys if keys.count(key) > 1)!r} is there twice"
            )
        return mapping

    def refuse_constant(name: str) -> Any:
        raise ValueError(f"{name} is no JSON number")

    try:
        document = json.loads(content, object_pairs_hook=unique, parse_constant=refuse_constant)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except UnicodeDecodeError:
        raise ValueError("not UTF-8") from None
    if not isinstance(document, dict):
        raise ValueError(f"{type(document).__name__}, not an object")
    return document


def read_bounded(
    path: Path, deadline_seconds: float = READ_SECONDS, limit_bytes: int = MAX_DOCUMENT_BYTES
) -> bytes:
    """A regular file's content. Raises ``OSError``: also for a file above the limit, a pipe, or a deadline passed.

    A thread that hangs in a dead mount is left behind (it cannot be ended); it holds nothing but itself.
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


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else text[:79] + "…"
