"""Tiers of a policy: name, live settings of all kinds, and exactly one kind."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated, ClassVar

from pydantic import Field

from kvtier.config.models import StorePolicy
from kvtier_operator.api.base import (
    LIVE,
    STRUCTURAL,
    Accepts,
    ErrorType,
    Integer,
    Model,
    Name,
    NonNegativeQuantity,
    ObjectName,
    PositiveQuantity,
    Rule,
    Violation,
    exactly_one_expression,
    exactly_one_of,
)
from kvtier_operator.api.file_tier import FileSystemTierSpec, MountedVolume
from kvtier_operator.api.quantity import Quantity


class EvictionPolicy(StrEnum):
    """Which object is evicted first from memory."""

    LRU = "LRU"
    ARC = "ARC"


class Persistence(StrEnum):
    """What survives a restart of the engine inside the pod."""

    PROCESS = "Process"
    POD = "Pod"


class MemoryTier(Model):
    """Host pool: pinned memory that engine and tierd share."""

    capacity: Annotated[
        PositiveQuantity,
        STRUCTURAL,
        Field(
            description=(
                "Capacity of the tier per pod, not per rank. The volume and memory limits are "
                "larger by the overhead."
            )
        ),
    ]
    eviction_policy: Annotated[
        EvictionPolicy,
        STRUCTURAL,
        Field(
            description=(
                "Which object is evicted first. LRU: the end of the least recently used prefix, "
                "with an eighth of the room kept for prefixes that were used again. ARC: learns "
                "how much room to keep for them, and is used while it has more hits than LRU would."
            )
        ),
    ] = EvictionPolicy.LRU
    persistence: Annotated[
        Persistence,
        STRUCTURAL,
        Field(
            description=(
                "What survives a restart of the engine inside the pod. Pod: all checksummed "
                "objects. Process: none."
            )
        ),
    ] = Persistence.POD


class SecretReference(Model):
    """Secret of the policy's namespace."""

    name: Annotated[ObjectName, STRUCTURAL, Field(description="Name of the Secret.")]


class LMCacheTierSpec(Model):
    """Storage backend of LMCache."""

    url: Annotated[
        str,
        STRUCTURAL,
        Field(min_length=4, max_length=2048, pattern=r"^[a-z][a-z0-9+.-]*://[^\s]+$"),
        Field(
            description=(
                "Storage URL of an LMCache backend. Passwords belong in credentialsSecretRef."
            )
        ),
        Accepts("a storage URL such as redis://host:6379"),
    ]
    capacity: Annotated[
        PositiveQuantity | None,
        LIVE,
        Field(description="Capacity of the backend, if the backend needs one."),
    ] = None
    credentials_secret_ref: Annotated[
        SecretReference | None,
        STRUCTURAL,
        Field(
            description=(
                "Secret with the credentials of the backend. It is mounted, and never copied into "
                "a ConfigMap."
            )
        ),
    ] = None


TIER_KINDS = ("memory", "fileSystem", "lmcache")


def _one_kind(tier: TierSpec) -> Iterator[Violation]:
    given = tier.kinds
    if len(given) != 1:
        kind = ErrorType.INVALID if given else ErrorType.REQUIRED
        yield Violation((), ", ".join(given), exactly_one_of(TIER_KINDS), kind)


class TierSpec(Model):
    """Tier of KV cache below GPU memory."""

    name: Annotated[
        Name,
        STRUCTURAL,
        Field(
            description=(
                "Name of the tier, unique in the policy. Directories and metrics have this name."
            )
        ),
    ]
    load_weight: Annotated[
        Integer,
        LIVE,
        Field(
            ge=1,
            le=10_000,
            description=(
                "Preference for loads from this tier. With selection Cost, 100 uses the measured "
                "cost as it is."
            ),
        ),
    ] = 100
    lookup_timeout_milliseconds: Annotated[
        Integer,
        LIVE,
        Field(
            ge=1,
            le=10_000,
            description=(
                "How long a request may wait while a key that is not in the index is looked up in "
                "a tier that other processes write to. A twentieth of the time to recompute, if "
                "that is known and shorter. No effect on memory, and on files with one writer."
            ),
        ),
    ] = 50
    load_timeout_seconds: Annotated[
        Integer,
        LIVE,
        Field(
            ge=1,
            le=600,
            description=(
                "Timeout of a load from this tier, including the lookup. No effect on memory."
            ),
        ),
    ] = 5
    store_policy: Annotated[
        StorePolicy,
        LIVE,
        Field(
            description=(
                "Which chunks are stored: All, Reused (chunks that occur a second time, to reduce "
                "flash wear), or None. No effect on memory."
            )
        ),
    ] = StorePolicy.ALL
    max_pending_store_bytes: Annotated[
        NonNegativeQuantity,
        LIVE,
        Field(
            description="Maximum size of stores that are being written. Further stores wait in RAM."
        ),
    ] = Quantity.parse("1Gi")
    max_write_bytes_per_second: Annotated[
        PositiveQuantity | None,
        LIVE,
        Field(
            description=(
                "Maximum average write rate, to reduce flash wear or network load. Further stores "
                "wait in RAM. If not set, there is no limit. No effect on memory."
            )
        ),
    ] = None
    memory: Annotated[
        MemoryTier | None,
        STRUCTURAL,
        Field(description="Host memory. Only the first tier is memory."),
    ] = None
    file_system: Annotated[
        FileSystemTierSpec | None,
        STRUCTURAL,
        Field(description=("Directory with one file per object.")),
    ] = None
    lmcache: Annotated[
        LMCacheTierSpec | None, STRUCTURAL, Field(description="Storage backend of LMCache.")
    ] = None

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            name="one-kind",
            check=_one_kind,
            cel="["
            + ", ".join(f"has(self.{kind})" for kind in TIER_KINDS)
            + "].filter(given, given).size() == 1",
            message=exactly_one_of(TIER_KINDS),
            expression="'tier ' + self.name + ' ' + " + exactly_one_expression("self", TIER_KINDS),
        ),
    )

    @property
    def volumes(self) -> tuple[MountedVolume, ...]:
        """What pods mount for a file tier."""
        files = self.file_system
        if files is None:
            return ()
        if files.volume is not None and files.capacity is not None:
            return (MountedVolume(self.name, "", files.volume, files.capacity, "volume"),)
        return tuple(
            MountedVolume(self.name, each.name, each.volume, each.capacity, f"volumes[{index}]")
            for index, each in enumerate(files.volumes or ())
        )

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds that are set, as spelled in policies. A valid tier has one."""
        values = (self.memory, self.file_system, self.lmcache)
        return tuple(
            kind for kind, value in zip(TIER_KINDS, values, strict=True) if value is not None
        )
