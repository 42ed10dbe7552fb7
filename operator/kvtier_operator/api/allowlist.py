"""What an administrator allows in policies: host directories and NFS exports, groups of files, and
directories from which engines import code.

A policy mounts paths into pods that its author may not be allowed to create, so an administrator
lists what is allowed. The list is empty by default. Paths are compared by component: `/mnt/kv`
allows `/mnt/kv/a`, not `/mnt/kvx`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import PurePosixPath
from typing import Annotated, ClassVar, Protocol

from pydantic import Field

from kvtier_operator.api.base import (
    ErrorType,
    Integer,
    Model,
    Rule,
    Violation,
    exactly_one_of,
)
from kvtier_operator.api.policy import KVTierPolicy
from kvtier_operator.api.validation import FieldError
from kvtier_operator.api.volumes import AbsolutePath, NfsVolume

ANY_NAMESPACE = "*"
HARMLESS_OPTIONS = frozenset(
    {"soft", "timeo", "retrans", "noatime", "nodiratime", "nconnect", "rsize", "wsize"}
)
"""Options that only tune a mount; every policy may set them."""


class AllowedExport(Model):
    """An NFS server and the directory below which exports are allowed."""

    server: Annotated[
        str, Field(min_length=1, max_length=253, description="Server, as policies name it.")
    ]
    export_prefix: Annotated[
        AbsolutePath, Field(description="The exported directory, or a directory above it.")
    ]


def _one_kind(entry: AllowedVolume) -> Iterator[Violation]:
    if (entry.host_path is None) == (entry.nfs is None):
        given = "hostPath, nfs" if entry.nfs is not None else ""
        kind = ErrorType.INVALID if given else ErrorType.REQUIRED
        yield Violation((), given, exactly_one_of(("hostPath", "nfs")), kind)


class AllowedVolume(Model):
    """One entry of the list."""

    namespaces: Annotated[
        list[str], Field(min_length=1, description="Names of namespaces. * means all namespaces.")
    ]
    host_path: Annotated[
        AbsolutePath | None,
        Field(description=("Directory on the nodes. Directories below it are allowed too.")),
    ] = None
    nfs: Annotated[AllowedExport | None, Field(description="Exports of an NFS server.")] = None
    mount_options: Annotated[
        list[str],
        Field(
            default_factory=list,
            description=(
                "Mount options that policies may set, in addition to those that only tune a mount."
            ),
        ),
    ]
    shared: Annotated[
        bool,
        Field(
            description=(
                "Whether all policies share the directory. If false, each policy uses its own "
                "subdirectory <namespace>/<policy uid>."
            )
        ),
    ] = False

    rules: ClassVar[tuple[Rule, ...]] = (Rule(name="one-kind", check=_one_kind),)

    def covers(self, namespace: str) -> bool:
        """Whether the entry is for policies of this namespace."""
        return ANY_NAMESPACE in self.namespaces or namespace in self.namespaces


class GroupRange(Model):
    """Groups from ``min`` to ``max``."""

    min: Annotated[Integer, Field(ge=1, le=2_147_483_647, description="The first group.")]
    max: Annotated[Integer, Field(ge=1, le=2_147_483_647, description="The last group.")]


class PolicyBounds(Model):
    """Values that policies may set, in every namespace."""

    storage_gids: Annotated[
        list[GroupRange],
        Field(
            default_factory=lambda: [GroupRange(min=3000, max=3000)],
            description="Groups that security.storageGid adds to pods with file tiers.",
        ),
    ]
    python_paths: Annotated[
        list[AbsolutePath],
        Field(
            default_factory=lambda: ["/opt", "/usr"],
            description="Directories, with those below, that engine.pythonPath may name.",
        ),
    ]


class Allowances(Protocol):
    """What the operator's settings allow."""

    @property
    def allowed_volumes(self) -> Sequence[AllowedVolume]:
        """Directories and exports."""

    @property
    def policy_bounds(self) -> PolicyBounds:
        """Other values."""


def not_allowed(policy: KVTierPolicy, allowed: Allowances) -> list[FieldError]:
    """Everything in a policy that the administrator does not allow."""
    return [
        *volume_errors(policy, allowed.allowed_volumes),
        *bound_errors(policy, allowed.policy_bounds),
    ]


def bound_errors(policy: KVTierPolicy, bounds: PolicyBounds) -> list[FieldError]:
    """Groups and directories of a policy that the administrator does not allow. The group counts
    only if there are file tiers: pods get it for them.
    """
    found: list[FieldError] = []
    group = policy.spec.security.storage_gid
    has_files = any(tier.file_system is not None for tier in policy.spec.tiers)
    if has_files and not any(each.min <= group <= each.max for each in bounds.storage_gids):
        ranges = ", ".join(f"{each.min}-{each.max}" for each in bounds.storage_gids) or "no group"
        detail = f"group {group} is not allowed: policyBounds.storageGids has {ranges}"
        found.append(FieldError.forbidden("spec.security.storageGid", detail))
    path = policy.spec.engine.python_path
    for directory in path.split(":") if path else ():
        if not any(is_below(directory, prefix) for prefix in bounds.python_paths):
            prefixes = ", ".join(bounds.python_paths) or "no directory"
            detail = f'"{directory}" is not allowed: policyBounds.pythonPaths has {prefixes}'
            found.append(FieldError.forbidden("spec.engine.pythonPath", detail))
            break
    return found


def is_below(path: str, prefix: str) -> bool:
    """Whether ``path`` is ``prefix`` or below it, component by component. Never for a path with
    ``..``.
    """
    parts, above = PurePosixPath(path).parts, PurePosixPath(prefix).parts
    return ".." not in parts and ".." not in above and parts[: len(above)] == above


def volume_errors(policy: KVTierPolicy, allowed: Sequence[AllowedVolume]) -> list[FieldError]:
    """Volumes of a policy that the list does not allow in its namespace."""
    entries = [entry for entry in allowed if entry.covers(policy.namespace)]
    found: list[FieldError] = []
    for index, tier in enumerate(policy.spec.tiers):
        for each in tier.volumes:
            volume, field = each.volume, f"spec.tiers[{index}].fileSystem.{each.field}"
            if volume.host_path is not None:
                prefixes = [entry.host_path for entry in entries if entry.host_path is not None]
                if not any(is_below(volume.host_path.path, prefix) for prefix in prefixes):
                    subject = f'hostPath "{volume.host_path.path}"'
                    detail = _not_allowed(subject, "hostPath", prefixes, policy.namespace)
                    found.append(FieldError.forbidden(f"{field}.hostPath.path", detail))
            if volume.nfs is not None:
                found.extend(_export(volume.nfs, entries, f"{field}.nfs", policy.namespace))
    return found


def _export(
    nfs: NfsVolume, entries: Iterable[AllowedVolume], field: str, namespace: str
) -> Iterator[FieldError]:
    exports = [(entry, entry.nfs) for entry in entries if entry.nfs is not None]
    matching = [
        entry
        for entry, export in exports
        if export.server.lower() == nfs.server.lower() and is_below(nfs.path, export.export_prefix)
    ]
    if not matching:
        prefixes = [f"{export.server}:{export.export_prefix}" for _, export in exports]
        subject = f'NFS export "{nfs.server}:{nfs.path}"'
        yield FieldError.forbidden(field, _not_allowed(subject, "nfs", prefixes, namespace))
        return
    # One entry must allow all options, as in the admission policy for volumes.
    yield from min((list(_options(nfs, entry, field)) for entry in matching), key=len)


def _options(nfs: NfsVolume, entry: AllowedVolume, field: str) -> Iterator[FieldError]:
    options = HARMLESS_OPTIONS.union(entry.mount_options)
    for index, option in enumerate(nfs.mount_options or ()):
        if option not in options and option.split("=", 1)[0] not in options:
            yield FieldError.unsupported(f"{field}.mountOptions[{index}]", option, sorted(options))


def _not_allowed(subject: str, kind: str, prefixes: Sequence[str], namespace: str) -> str:
    if not prefixes:
        entries = f"has no {kind} entry"
    else:
        entries = f"has only {', '.join(prefixes)} and below"
    return f'{subject} is not allowed: allowedVolumes {entries} for namespace "{namespace}"'
