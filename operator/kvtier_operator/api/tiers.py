"""Tiers of a policy: name, live settings of all kinds, and exactly one kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import StrEnum
from typing import Annotated, ClassVar

from pydantic import Field

from kvtier.config.models import StorePolicy
from kvtier_operator.api.base import (
    LIVE,
    STRUCTURAL,
    Accepts,
    Amount,
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
from kvtier_operator.api.quantity import Quantity, SizeOrPercentage
from kvtier_operator.api.volumes import ONE_NODE_MODES, Medium, Volume


class EvictionPolicy(StrEnum):
    """Which object is evicted first from memory."""

    LRU = "LRU"
    ARC = "ARC"


class Persistence(StrEnum):
    """What survives a restart of the engine inside the pod."""

    PROCESS = "Process"
    POD = "Pod"


class Sharing(StrEnum):
    """Which pods write to the directory of a file tier."""

    POD = "Pod"
    NODE = "Node"
    CLUSTER = "Cluster"


class DirectIO(StrEnum):
    """Whether files bypass the page cache."""

    AUTO = "Auto"
    ALWAYS = "Always"
    NEVER = "Never"


class Sync(StrEnum):
    """Whether a file is fsynced before it is published."""

    NONE = "None"
    DATA = "Data"


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
                "how much room to keep for them."
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


_HIGH = "(has(self.highWatermarkPercent) ? self.highWatermarkPercent : 90)"
_LOW = "(has(self.lowWatermarkPercent) ? self.lowWatermarkPercent : 75)"


def _watermarks(tier: FileSystemTierSpec) -> Iterator[Violation]:
    if tier.low_watermark_percent >= tier.high_watermark_percent:
        yield Violation(
            ("lowWatermarkPercent",),
            tier.low_watermark_percent,
            f"must be below highWatermarkPercent ({tier.high_watermark_percent})",
        )


_CLUSTER_WORDS = (
    "must not be set with sharing: Cluster; use a volume that all nodes can mount, or sharing: Pod"
)


def _no_volume_of_one_pod(source: str) -> Callable[[FileSystemTierSpec], Iterator[Violation]]:
    def check(tier: FileSystemTierSpec) -> Iterator[Violation]:
        if tier.sharing is Sharing.CLUSTER and source in tier.volume.sources:
            yield Violation(("volume", source), None, _CLUSTER_WORDS, ErrorType.FORBIDDEN)

    return check


def _claim_for_all_nodes(tier: FileSystemTierSpec) -> Iterator[Violation]:
    claim = tier.volume.claim_template
    if tier.sharing is not Sharing.CLUSTER or claim is None:
        return
    for index, mode in enumerate(claim.access_modes or ()):
        if mode in ONE_NODE_MODES:
            path = ("volume", "claimTemplate", "accessModes", index)
            yield Violation(path, mode.value, "must be ReadWriteMany with sharing: Cluster")


def _limit_holds_capacity(tier: FileSystemTierSpec) -> Iterator[Violation]:
    empty_dir = tier.volume.empty_dir
    if (
        empty_dir is not None
        and empty_dir.size_limit is not None
        and empty_dir.size_limit.value < tier.capacity.value
    ):
        yield Violation(
            ("volume", "emptyDir", "sizeLimit"),
            empty_dir.size_limit.text,
            f"must be at least the capacity ({tier.capacity}), because the kubelet evicts a pod "
            "that exceeds sizeLimit",
        )


NODE_DISK_MIN_FREE = SizeOrPercentage.parse("15%")
"""On the file system of a node, where the kubelet evicts pods below 10 to 15 percent."""
NO_MIN_FREE = SizeOrPercentage.parse(0)


class FileSystemTierSpec(Model):
    """Directory with one file per object."""

    capacity: Annotated[
        PositiveQuantity,
        LIVE,
        Field(description="Capacity of the directory, for all pods that share it."),
    ]
    min_free: Annotated[
        Amount | None,
        LIVE,
        Field(
            description=(
                "Space that stays free on the file system, whatever uses it: a size, or a "
                "percentage of the file system. The tier evicts its objects and stops storing to "
                "leave it. Defaults to 15% for hostPath and for emptyDir on disk, because the "
                "kubelet evicts pods from a node whose disk is 85 to 90% full, and to 0 otherwise."
            )
        ),
    ] = None
    high_watermark_percent: Annotated[
        Integer,
        LIVE,
        Field(ge=2, le=100, description="Percentage of the capacity at which eviction starts."),
    ] = 90
    low_watermark_percent: Annotated[
        Integer,
        LIVE,
        Field(
            ge=1,
            le=99,
            description=(
                "Percentage of the capacity at which eviction stops. Must be below "
                "highWatermarkPercent."
            ),
        ),
    ] = 75
    retention_seconds: Annotated[
        Integer,
        LIVE,
        Field(
            ge=0,
            le=315_360_000,
            description="Age at which the data of unused namespaces is removed.",
        ),
    ] = 604_800
    sharing: Annotated[
        Sharing,
        STRUCTURAL,
        Field(
            description=(
                "Which pods write to the directory: this pod only, pods of the node, or pods of "
                "the cluster."
            )
        ),
    ]
    direct_io: Annotated[
        DirectIO,
        STRUCTURAL,
        Field(
            alias="directIO",
            description=(
                "Whether files bypass the page cache. Auto: if the file system supports it."
            ),
        ),
    ] = DirectIO.AUTO
    sync: Annotated[
        Sync,
        LIVE,
        Field(
            description=(
                "Data: fsync before a file is published. None: no fsync. A power failure can "
                "damage files, which verification detects."
            )
        ),
    ] = Sync.NONE
    read_threads: Annotated[
        Integer, STRUCTURAL, Field(ge=1, le=256, description="Maximum number of concurrent reads.")
    ] = 8
    write_threads: Annotated[
        Integer,
        STRUCTURAL,
        Field(ge=1, le=256, description=("Maximum number of concurrent writes.")),
    ] = 4
    volume: Annotated[
        Volume, STRUCTURAL, Field(description="Volume of the directory, with exactly one source.")
    ]

    @property
    def effective_min_free(self) -> SizeOrPercentage:
        """``minFree``, or its default for the volume."""
        if self.min_free is not None:
            return self.min_free
        empty_dir = self.volume.empty_dir
        on_disk = empty_dir is not None and empty_dir.medium is Medium.DISK
        return NODE_DISK_MIN_FREE if on_disk or self.volume.host_path is not None else NO_MIN_FREE

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            name="watermarks",
            check=_watermarks,
            # With the defaults, because the schema has none in items of lists.
            cel=f"{_LOW} < {_HIGH}",
            message="must be below highWatermarkPercent",
            expression="'must be below highWatermarkPercent (%d), got %d'"
            f".format([{_HIGH}, {_LOW}])",
            field_path=".lowWatermarkPercent",
        ),
        Rule(
            name="cluster-empty-dir",
            check=_no_volume_of_one_pod("emptyDir"),
            cel="self.sharing != 'Cluster' || !has(self.volume.emptyDir)",
            message=f"emptyDir {_CLUSTER_WORDS}",
            field_path=".volume",
        ),
        Rule(
            name="cluster-ephemeral",
            check=_no_volume_of_one_pod("ephemeral"),
            cel="self.sharing != 'Cluster' || !has(self.volume.ephemeral)",
            message=f"ephemeral {_CLUSTER_WORDS}",
            field_path=".volume",
        ),
        Rule(
            name="cluster-access-modes",
            check=_claim_for_all_nodes,
            cel="self.sharing != 'Cluster' || !has(self.volume.claimTemplate) || "
            "!has(self.volume.claimTemplate.accessModes) || "
            "self.volume.claimTemplate.accessModes.all(mode, mode == 'ReadWriteMany')",
            message="must be ReadWriteMany with sharing: Cluster",
            expression="'must be ReadWriteMany with sharing: Cluster, got ' + "
            "self.volume.claimTemplate.accessModes.join(', ')",
            field_path=".volume.claimTemplate.accessModes",
        ),
        Rule(
            name="size-limit",
            check=_limit_holds_capacity,
            cel="!has(self.volume.emptyDir) || !has(self.volume.emptyDir.sizeLimit) || "
            "!isQuantity(string(self.volume.emptyDir.sizeLimit)) || "
            "!isQuantity(string(self.capacity)) || "
            "quantity(string(self.volume.emptyDir.sizeLimit))"
            ".compareTo(quantity(string(self.capacity))) >= 0",
            message="must be at least the capacity",
            expression="'must be at least the capacity (' + string(self.capacity) + '), because "
            "the kubelet evicts a pod that exceeds sizeLimit, got ' + "
            "string(self.volume.emptyDir.sizeLimit)",
            field_path=".volume.emptyDir.sizeLimit",
        ),
    )


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
    def kinds(self) -> tuple[str, ...]:
        """Kinds that are set, as spelled in policies. A valid tier has one."""
        values = (self.memory, self.file_system, self.lmcache)
        return tuple(
            kind for kind, value in zip(TIER_KINDS, values, strict=True) if value is not None
        )
