"""Volumes of file tiers, each with exactly one source."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated, ClassVar

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from kvtier_operator.api.base import (
    STRUCTURAL,
    Accepts,
    ErrorType,
    Model,
    ObjectName,
    PositiveQuantity,
    Rule,
    Scalar,
    Violation,
    exactly_one_expression,
    exactly_one_of,
)

PATH_WORDS = "an absolute path without .. in it"


def _plain_path(path: str) -> str:
    if not path.startswith("/") or ".." in path.split("/"):
        raise PydanticCustomError("path", "not a plain absolute path")
    return path


AbsolutePath = Annotated[
    str,
    Field(min_length=1, max_length=1024),
    AfterValidator(_plain_path),
    Accepts(PATH_WORDS),
    Scalar(
        cel="self.startsWith('/') && !(self + '/').contains('/../')",
        message=f"must be {PATH_WORDS}",
        expression=f"'must be {PATH_WORDS}, got ' + self",
    ),
]


class Medium(StrEnum):
    """Storage medium of an emptyDir."""

    DISK = ""
    MEMORY = "Memory"


class AccessMode(StrEnum):
    """Access modes of a claim. A cache cannot use ReadOnlyMany."""

    READ_WRITE_ONCE = "ReadWriteOnce"
    READ_WRITE_ONCE_POD = "ReadWriteOncePod"
    READ_WRITE_MANY = "ReadWriteMany"


ONE_NODE_MODES = (AccessMode.READ_WRITE_ONCE, AccessMode.READ_WRITE_ONCE_POD)


class ResourceRequests(Model):
    """Requests of a claim."""

    storage: Annotated[
        PositiveQuantity | None,
        STRUCTURAL,
        Field(description="Size of the volume. Defaults to the tier's capacity."),
    ] = None


class ClaimResources(Model):
    """Resources of a claim."""

    requests: Annotated[
        ResourceRequests | None, STRUCTURAL, Field(description="Requests of the claim.")
    ] = None


class ClaimSpec(Model):
    """Fields of a PersistentVolumeClaim that a policy can set."""

    storage_class_name: Annotated[
        ObjectName | None,
        STRUCTURAL,
        Field(description="StorageClass. Defaults to the cluster's default class."),
    ] = None
    access_modes: Annotated[
        list[AccessMode] | None,
        STRUCTURAL,
        Field(min_length=1, max_length=3, description="Access modes of the volume."),
    ] = None
    resources: Annotated[
        ClaimResources | None, STRUCTURAL, Field(description="Size of the volume.")
    ] = None

    @property
    def storage(self) -> PositiveQuantity | None:
        """The requested size, or None."""
        if self.resources is None or self.resources.requests is None:
            return None
        return self.resources.requests.storage


class TemplateMetadata(Model):
    """Labels and annotations of the claim that is created for each pod."""

    labels: Annotated[
        dict[str, Annotated[str, Field(max_length=63)]] | None,
        STRUCTURAL,
        Field(max_length=64, description="Labels of the claim."),
    ] = None
    annotations: Annotated[
        dict[str, Annotated[str, Field(max_length=4096)]] | None,
        STRUCTURAL,
        Field(max_length=64, description="Annotations of the claim."),
    ] = None


class VolumeClaimTemplate(Model):
    """Claim that is created for each pod and deleted with it."""

    metadata: Annotated[
        TemplateMetadata | None, STRUCTURAL, Field(description="Metadata of the claim.")
    ] = None
    spec: Annotated[
        ClaimSpec,
        STRUCTURAL,
        Field(description="Specification of the claim. accessModes defaults to [ReadWriteOnce]."),
    ]


class EmptyDirVolume(Model):
    """Directory with the lifetime of the pod."""

    size_limit: Annotated[
        PositiveQuantity | None,
        STRUCTURAL,
        Field(
            description=(
                "Size limit. Must be at least the tier's capacity, because the kubelet evicts a "
                "pod that exceeds it."
            )
        ),
    ] = None
    medium: Annotated[
        Medium, STRUCTURAL, Field(description="Storage medium: the node's disk (empty) or Memory.")
    ] = Medium.DISK


class EphemeralVolume(Model):
    """Volume per pod, deleted with the pod."""

    volume_claim_template: Annotated[
        VolumeClaimTemplate,
        STRUCTURAL,
        Field(description=("Template of the claim that is created for each pod.")),
    ]


class PersistentVolumeClaimVolume(Model):
    """Existing claim of the policy's namespace."""

    claim_name: Annotated[ObjectName, STRUCTURAL, Field(description="Name of the claim.")]


DIRECTORY_WORDS = "Directory, because a directory that the kubelet creates is writable by root only"


def _only_directory(given: str) -> str:
    if given != "Directory":
        raise PydanticCustomError("host_path_type", "not Directory")
    return given


class HostPathVolume(Model):
    """Existing directory of the node, in the allow-list of the namespace."""

    path: Annotated[AbsolutePath, STRUCTURAL, Field(description="Directory on the node.")]
    type: Annotated[
        str,
        STRUCTURAL,
        Field(
            max_length=32,
            description=(
                "Must be Directory. The directory must exist, because the kubelet creates "
                "directories that only root can write to (mode 0755)."
            ),
        ),
        AfterValidator(_only_directory),
        Accepts(DIRECTORY_WORDS),
        Scalar(
            cel="self == 'Directory'",
            message=f"must be {DIRECTORY_WORDS}",
            expression=f"'must be {DIRECTORY_WORDS}, got ' + self",
        ),
    ] = "Directory"


class NfsVolume(Model):
    """An NFS export, allowed for this namespace; the operator creates PersistentVolume and
    claim."""

    server: Annotated[
        str,
        STRUCTURAL,
        Field(
            min_length=1,
            max_length=253,
            pattern=r"^[A-Za-z0-9]([-A-Za-z0-9.:]*[A-Za-z0-9])?$|^[0-9A-Fa-f:.]+$",
        ),
        Field(description="Host name or address of the server."),
        Accepts("a host name or an IP address"),
    ]
    path: Annotated[AbsolutePath, STRUCTURAL, Field(description="Exported directory.")]
    mount_options: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9_.:=/-]+$")]]
        | None,
        STRUCTURAL,
        Field(
            max_length=32,
            description=(
                "Mount options. soft, timeo=50 and retrans=2 are added unless set here, so that an "
                "unavailable server causes errors instead of hangs."
            ),
        ),
    ] = None


class NodeVolume(Model):
    """The sources that a disk of a node can have."""

    empty_dir: Annotated[
        EmptyDirVolume | None,
        STRUCTURAL,
        Field(description="Directory with the lifetime of the pod."),
    ] = None
    ephemeral: Annotated[
        EphemeralVolume | None,
        STRUCTURAL,
        Field(description="Volume per pod, deleted with the pod."),
    ] = None
    persistent_volume_claim: Annotated[
        PersistentVolumeClaimVolume | None,
        STRUCTURAL,
        Field(description="Existing claim of the namespace."),
    ] = None
    host_path: Annotated[
        HostPathVolume | None, STRUCTURAL, Field(description="Directory of the node.")
    ] = None


VOLUME_SOURCES = (
    "emptyDir",
    "ephemeral",
    "persistentVolumeClaim",
    "claimTemplate",
    "hostPath",
    "nfs",
)


def _one_source(volume: Volume) -> Iterator[Violation]:
    given = volume.sources
    if len(given) != 1:
        kind = ErrorType.INVALID if given else ErrorType.REQUIRED
        yield Violation((), ", ".join(given), exactly_one_of(VOLUME_SOURCES), kind)


class Volume(NodeVolume):
    """Volume with exactly one source."""

    claim_template: Annotated[
        ClaimSpec | None,
        STRUCTURAL,
        Field(
            description=(
                "Claim for all pods of the policy, created by the operator. accessModes defaults "
                "to [ReadWriteMany]."
            )
        ),
    ] = None
    nfs: Annotated[
        NfsVolume | None,
        STRUCTURAL,
        Field(description="NFS export. The operator creates a PersistentVolume and a claim."),
    ] = None

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            name="one-source",
            check=_one_source,
            cel="["
            + ", ".join(f"has(self.{name})" for name in VOLUME_SOURCES)
            + "].filter(given, given).size() == 1",
            message=exactly_one_of(VOLUME_SOURCES),
            expression=exactly_one_expression("self", VOLUME_SOURCES),
        ),
    )

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of the sources that are given, as the policy spells them; one in a volume that was
        accepted.
        """
        values = (
            self.empty_dir,
            self.ephemeral,
            self.persistent_volume_claim,
            self.claim_template,
            self.host_path,
            self.nfs,
        )
        return tuple(
            name for name, value in zip(VOLUME_SOURCES, values, strict=True) if value is not None
        )
