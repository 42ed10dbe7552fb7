"""Where the bytes of a file tier live: exactly one source per volume."""

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
    """What holds an emptyDir: the node's disk, or memory."""

    DISK = ""
    MEMORY = "Memory"


class AccessMode(StrEnum):
    """How a claim may be mounted. ReadOnlyMany is no use to a cache."""

    READ_WRITE_ONCE = "ReadWriteOnce"
    READ_WRITE_ONCE_POD = "ReadWriteOncePod"
    READ_WRITE_MANY = "ReadWriteMany"


ONE_NODE_MODES = (AccessMode.READ_WRITE_ONCE, AccessMode.READ_WRITE_ONCE_POD)


class ResourceRequests(Model):
    """What a claim asks for."""

    storage: Annotated[
        PositiveQuantity | None,
        STRUCTURAL,
        Field(description="Size of the volume; the tier's capacity if not set."),
    ] = None


class ClaimResources(Model):
    """Resources of a claim."""

    requests: Annotated[
        ResourceRequests | None, STRUCTURAL, Field(description="What the claim asks for.")
    ] = None


class ClaimSpec(Model):
    """The part of a PersistentVolumeClaim that a policy may say."""

    storage_class_name: Annotated[
        ObjectName | None,
        STRUCTURAL,
        Field(description="StorageClass; the cluster's default if not set."),
    ] = None
    access_modes: Annotated[
        list[AccessMode] | None,
        STRUCTURAL,
        Field(min_length=1, max_length=3, description="How the volume may be mounted."),
    ] = None
    resources: Annotated[
        ClaimResources | None, STRUCTURAL, Field(description="Size of the volume.")
    ] = None

    @property
    def storage(self) -> PositiveQuantity | None:
        """The size asked for, if any."""
        if self.resources is None or self.resources.requests is None:
            return None
        return self.resources.requests.storage


class TemplateMetadata(Model):
    """Labels and annotations of the claim that is made for each pod."""

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
    """A claim made for each pod, and deleted with it."""

    metadata: Annotated[
        TemplateMetadata | None, STRUCTURAL, Field(description="Metadata of the claim.")
    ] = None
    spec: Annotated[
        ClaimSpec,
        STRUCTURAL,
        Field(description="The claim; accessModes is [ReadWriteOnce] if not set."),
    ]


class EmptyDirVolume(Model):
    """A directory that lives as long as the pod."""

    size_limit: Annotated[
        PositiveQuantity | None,
        STRUCTURAL,
        Field(
            description="The kubelet evicts a pod that exceeds it, so it is at least the tier's capacity."
        ),
    ] = None
    medium: Annotated[
        Medium, STRUCTURAL, Field(description="What holds it: the node's disk (empty) or Memory.")
    ] = Medium.DISK


class EphemeralVolume(Model):
    """A volume of its own for each pod, deleted with it."""

    volume_claim_template: Annotated[
        VolumeClaimTemplate, STRUCTURAL, Field(description="The claim for each pod.")
    ]


class PersistentVolumeClaimVolume(Model):
    """A claim that exists in the policy's namespace."""

    claim_name: Annotated[ObjectName, STRUCTURAL, Field(description="Name of the claim.")]


DIRECTORY_WORDS = "Directory, because a directory that the kubelet creates is writable by root only"


def _only_directory(given: str) -> str:
    if given != "Directory":
        raise PydanticCustomError("host_path_type", "not Directory")
    return given


class HostPathVolume(Model):
    """A directory of the node, prepared by its administrator and allowed for this namespace."""

    path: Annotated[AbsolutePath, STRUCTURAL, Field(description="The directory on the node.")]
    type: Annotated[
        str,
        STRUCTURAL,
        Field(
            max_length=32,
            description="Directory: the kubelet would make a missing one for root alone (mode 0755), so it "
            "has "
            "to exist.",
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
    """An NFS export, allowed for this namespace; the operator creates PersistentVolume and claim."""

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
    path: Annotated[AbsolutePath, STRUCTURAL, Field(description="The exported directory.")]
    mount_options: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9_.:=/-]+$")]]
        | None,
        STRUCTURAL,
        Field(
            max_length=32,
            description="Options of the mount. soft, timeo=50 and retrans=2 are added unless set here, "
            "so that a dead server ends in an error.",
        ),
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


class Volume(Model):
    """Exactly one source."""

    empty_dir: Annotated[
        EmptyDirVolume | None,
        STRUCTURAL,
        Field(description="A directory that lives as long as the pod."),
    ] = None
    ephemeral: Annotated[
        EphemeralVolume | None,
        STRUCTURAL,
        Field(description="A volume for each pod, deleted with it."),
    ] = None
    persistent_volume_claim: Annotated[
        PersistentVolumeClaimVolume | None,
        STRUCTURAL,
        Field(description="An existing claim of the namespace."),
    ] = None
    claim_template: Annotated[
        ClaimSpec | None,
        STRUCTURAL,
        Field(
            description="One claim for all pods of the policy, created by the operator; accessModes is "
            "[ReadWriteMany] "
            "if not set."
        ),
    ] = None
    host_path: Annotated[
        HostPathVolume | None, STRUCTURAL, Field(description="A directory of the node.")
    ] = None
    nfs: Annotated[
        NfsVolume | None,
        STRUCTURAL,
        Field(description="An NFS export; the operator creates PersistentVolume and claim."),
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
