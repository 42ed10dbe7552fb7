"""File tiers of a policy: directories of a volume, or of several disks of a node."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, ClassVar

from pydantic import Field

from kvtier_operator.api.base import (
    LIVE,
    STRUCTURAL,
    Amount,
    ErrorType,
    Integer,
    MapKey,
    Model,
    Name,
    Path,
    PositiveQuantity,
    Rule,
    Violation,
    exactly_one_expression,
    exactly_one_of,
)
from kvtier_operator.api.quantity import Quantity, SizeOrPercentage
from kvtier_operator.api.volumes import (
    ONE_NODE_MODES,
    EmptyDirVolume,
    Medium,
    NodeVolume,
    Volume,
)


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
        if tier.volume is None or tier.sharing is not Sharing.CLUSTER:
            return
        if source in tier.volume.sources:
            yield Violation(("volume", source), None, _CLUSTER_WORDS, ErrorType.FORBIDDEN)

    return check


def _claim_for_all_nodes(tier: FileSystemTierSpec) -> Iterator[Violation]:
    claim = tier.volume.claim_template if tier.volume is not None else None
    if tier.sharing is not Sharing.CLUSTER or claim is None:
        return
    for index, mode in enumerate(claim.access_modes or ()):
        if mode in ONE_NODE_MODES:
            path = ("volume", "claimTemplate", "accessModes", index)
            yield Violation(path, mode.value, "must be ReadWriteMany with sharing: Cluster")


def _limit_holds_capacity(tier: FileSystemTierSpec) -> Iterator[Violation]:
    if tier.volume is not None and tier.capacity is not None:
        yield from _small_limit(tier.volume.empty_dir, tier.capacity, ("volume",))


def _small_limit(
    empty_dir: EmptyDirVolume | None, capacity: Quantity, path: Path
) -> Iterator[Violation]:
    if (
        empty_dir is not None
        and empty_dir.size_limit is not None
        and empty_dir.size_limit.value < capacity.value
    ):
        yield Violation(
            (*path, "emptyDir", "sizeLimit"),
            empty_dir.size_limit.text,
            f"must be at least the capacity ({capacity}), because the kubelet evicts a pod "
            "that exceeds sizeLimit",
        )


def _limit_of_volume(volume: TierVolumeSpec) -> Iterator[Violation]:
    yield from _small_limit(volume.empty_dir, volume.capacity, ())


DISK_SOURCES = ("emptyDir", "ephemeral", "persistentVolumeClaim", "hostPath")
"""Sources of one of several volumes: disks of a node."""


def _one_disk_source(volume: TierVolumeSpec) -> Iterator[Violation]:
    given = volume.volume.sources
    if len(given) != 1:
        kind = ErrorType.INVALID if given else ErrorType.REQUIRED
        yield Violation((), ", ".join(given), exactly_one_of(DISK_SOURCES), kind)


class TierVolumeSpec(NodeVolume):
    """One of the disks of a tier, with exactly one source."""

    name: Annotated[
        Name,
        STRUCTURAL,
        Field(
            description=(
                "Name of the volume, unique in the tier. Objects are placed by it: a volume of "
                "another name is another disk."
            )
        ),
    ]
    capacity: Annotated[
        PositiveQuantity,
        LIVE,
        Field(description="Capacity of the directory, for all pods that share it."),
    ]
    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            name="one-disk-source",
            check=_one_disk_source,
            cel="["
            + ", ".join(f"has(self.{name})" for name in DISK_SOURCES)
            + "].filter(given, given).size() == 1",
            message=exactly_one_of(DISK_SOURCES),
            expression=exactly_one_expression("self", DISK_SOURCES),
        ),
        Rule(
            name="volume-size-limit",
            check=_limit_of_volume,
            cel="!has(self.emptyDir) || !has(self.emptyDir.sizeLimit) || "
            "!isQuantity(string(self.emptyDir.sizeLimit)) || "
            "!isQuantity(string(self.capacity)) || "
            "quantity(string(self.emptyDir.sizeLimit))"
            ".compareTo(quantity(string(self.capacity))) >= 0",
            message="must be at least the capacity",
            field_path=".emptyDir.sizeLimit",
        ),
    )

    @property
    def volume(self) -> Volume:
        """The volume that a pod mounts."""
        sources = {"empty_dir", "ephemeral", "persistent_volume_claim", "host_path"}
        return Volume.model_construct(
            self.model_fields_set & sources,
            empty_dir=self.empty_dir,
            ephemeral=self.ephemeral,
            persistent_volume_claim=self.persistent_volume_claim,
            host_path=self.host_path,
        )


@dataclass(frozen=True, slots=True)
class MountedVolume:
    """A volume of a file tier as pods mount it. ``name``: empty for the only one of its tier.
    ``field``: its field below ``fileSystem``.
    """

    tier: str
    name: str
    volume: Volume
    capacity: Quantity
    field: str

    @property
    def key(self) -> str:
        """Unique in the policy: ``nvme``, or ``nvme/disk0`` if the tier has several."""
        return f"{self.tier}/{self.name}" if self.name else self.tier


def _volume_or_volumes(tier: FileSystemTierSpec) -> Iterator[Violation]:
    if (tier.volume is None) == (tier.volumes is None):
        given = "" if tier.volume is None else "volume, volumes"
        kind = ErrorType.INVALID if given else ErrorType.REQUIRED
        yield Violation((), given, "must have exactly one of volume, volumes", kind)
    elif tier.volume is not None and tier.capacity is None:
        detail = "must be set with volume"
        yield Violation(("capacity",), None, detail, ErrorType.REQUIRED)
    elif tier.volumes is not None and tier.capacity is not None:
        detail = "must not be set with volumes: each has its own capacity"
        yield Violation(("capacity",), None, detail, ErrorType.FORBIDDEN)


def _volumes_of_a_node(tier: FileSystemTierSpec) -> Iterator[Violation]:
    if tier.volumes is not None and tier.sharing is Sharing.CLUSTER:
        yield Violation(("sharing",), "Cluster", "must be Pod or Node with volumes")


def _different_volumes(tier: FileSystemTierSpec) -> Iterator[Violation]:
    seen: dict[str, str] = {}
    names: set[str] = set()
    for index, each in enumerate(tier.volumes or ()):
        if each.name in names:
            yield Violation(("volumes", index, "name"), each.name, "", ErrorType.DUPLICATE)
        names.add(each.name)
        claim, host = each.persistent_volume_claim, each.host_path
        if claim is not None:
            path, value = ("persistentVolumeClaim", "claimName"), claim.claim_name
        elif host is not None:
            path, value = ("hostPath", "path"), host.path.rstrip("/")
        else:
            continue
        other = seen.setdefault(f"{path[0]} {value}", each.name)
        if other != each.name:
            yield Violation(
                ("volumes", index, *path), value, f"must differ from that of volume {other}"
            )


def _nothing(_tier: FileSystemTierSpec) -> Iterator[Violation]:
    """``_volume_or_volumes`` checks the capacity too."""
    return iter(())


_OTHERS = "self.volumes.filter(b, has(b.{0}) && b.{0}.{1} == a.{0}.{1}).size() == 1"
_DIFFERENT = " && ".join(
    f"(!has(a.{source}) || {_OTHERS.format(source, field)})"
    for source, field in (("hostPath", "path"), ("persistentVolumeClaim", "claimName"))
)


NODE_DISK_MIN_FREE = SizeOrPercentage.parse("15%")
"""On the file system of a node, where the kubelet evicts pods below 10 to 15 percent."""
NO_MIN_FREE = SizeOrPercentage.parse(0)


def _on_node_disk(volume: Volume) -> bool:
    empty_dir = volume.empty_dir
    on_disk = empty_dir is not None and empty_dir.medium is Medium.DISK
    return on_disk or volume.host_path is not None


class FileSystemTierSpec(Model):
    """Directory with one file per object."""

    capacity: Annotated[
        PositiveQuantity | None,
        LIVE,
        Field(
            description=(
                "Capacity of the directory, for all pods that share it. Required with volume; "
                "with volumes each has its own."
            )
        ),
    ] = None
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
        Integer,
        STRUCTURAL,
        Field(ge=1, le=256, description="Maximum number of concurrent reads, of each volume."),
    ] = 8
    write_threads: Annotated[
        Integer,
        STRUCTURAL,
        Field(ge=1, le=256, description=("Maximum number of concurrent writes, of each volume.")),
    ] = 4
    volume: Annotated[
        Volume | None,
        STRUCTURAL,
        Field(description="Volume of the directory, with exactly one source."),
    ] = None
    volumes: Annotated[
        list[TierVolumeSpec] | None,
        STRUCTURAL,
        MapKey("name"),
        Field(
            min_length=1,
            max_length=8,
            description=(
                "Disks of a node, instead of volume. Each object is stored on one of them, by its "
                "key and their capacities. A disk that fails leaves the others serving."
            ),
        ),
    ] = None

    @property
    def effective_min_free(self) -> SizeOrPercentage:
        """``minFree``, or its default for the volumes."""
        if self.min_free is not None:
            return self.min_free
        return NODE_DISK_MIN_FREE if any(map(_on_node_disk, self._all_volumes)) else NO_MIN_FREE

    @property
    def _all_volumes(self) -> list[Volume]:
        return [
            *([self.volume] if self.volume is not None else []),
            *(each.volume for each in self.volumes or ()),
        ]

    @property
    def sources(self) -> frozenset[str]:
        """The sources of all volumes, as policies spell them."""
        return frozenset(source for volume in self._all_volumes for source in volume.sources)

    @property
    def total_bytes(self) -> int:
        """The capacity, of all volumes together."""
        if self.capacity is not None:
            return self.capacity.size_bytes
        return sum(each.capacity.size_bytes for each in self.volumes or ())

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            name="volume-or-volumes",
            check=_volume_or_volumes,
            cel="has(self.volume) != has(self.volumes)",
            message="must have exactly one of volume, volumes",
        ),
        Rule(
            name="capacity-with-volume",
            check=_nothing,
            cel="has(self.volume) == has(self.volumes) || has(self.capacity) == has(self.volume)",
            message="must be set with volume, and must not be set with volumes",
            field_path=".capacity",
        ),
        Rule(
            name="volumes-of-a-node",
            check=_volumes_of_a_node,
            cel="!has(self.volumes) || self.sharing != 'Cluster'",
            message="must be Pod or Node with volumes",
            field_path=".sharing",
        ),
        Rule(
            name="different-volumes",
            check=_different_volumes,
            cel=f"!has(self.volumes) || self.volumes.all(a, {_DIFFERENT})",
            message="must be different directories and claims",
            field_path=".volumes",
        ),
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
            cel="self.sharing != 'Cluster' || !has(self.volume) || !has(self.volume.emptyDir)",
            message=f"emptyDir {_CLUSTER_WORDS}",
            field_path=".volume",
        ),
        Rule(
            name="cluster-ephemeral",
            check=_no_volume_of_one_pod("ephemeral"),
            cel="self.sharing != 'Cluster' || !has(self.volume) || !has(self.volume.ephemeral)",
            message=f"ephemeral {_CLUSTER_WORDS}",
            field_path=".volume",
        ),
        Rule(
            name="cluster-access-modes",
            check=_claim_for_all_nodes,
            cel="self.sharing != 'Cluster' || !has(self.volume) || "
            "!has(self.volume.claimTemplate) || "
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
            cel="!has(self.volume) || !has(self.capacity) || !has(self.volume.emptyDir) || "
            "!has(self.volume.emptyDir.sizeLimit) || "
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
