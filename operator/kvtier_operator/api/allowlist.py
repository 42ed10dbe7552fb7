"""Which directories of nodes and which exports a namespace's policies may name.

A policy mounts paths into pods that its author may not be allowed to create, so an administrator lists what is allowed;
the list is empty by default. Compared by path component: `/mnt/kv` allows `/mnt/kv/a`, not `/mnt/kvx`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import PurePosixPath
from typing import Annotated, ClassVar

from pydantic import Field

from kvtier_operator.api.base import Model, Rule, Violation
from kvtier_operator.api.policy import KVTierPolicy
from kvtier_operator.api.validation import FieldError, shown
from kvtier_operator.api.volumes import AbsolutePath, NfsVolume

ANY_NAMESPACE = "*"
HARMLESS_OPTIONS = frozenset(
    {"soft", "timeo", "retrans", "noatime", "nodiratime", "nconnect", "rsize", "wsize"}
)
"""Options that only tune a mount; every policy may set them."""


class AllowedExport(Model):
    """An NFS server and the directory below which exports are allowed."""

    server: Annotated[
        str, Field(min_length=1, max_length=253, description="The server, as policies name it.")
    ]
    export_prefix: Annotated[
        AbsolutePath, Field(description="The export, or a directory above it.")
    ]


def _one_kind(entry: AllowedVolume) -> Iterator[Violation]:
    if (entry.host_path is None) == (entry.nfs is None):
        yield Violation(
            (), "both" if entry.nfs is not None else "neither", "exactly one of hostPath, nfs"
        )


class AllowedVolume(Model):
    """One entry of the list."""

    namespaces: Annotated[
        list[str], Field(min_length=1, description="Names of namespaces; * is every namespace.")
    ]
    host_path: Annotated[
        AbsolutePath | None, Field(description="A directory of nodes, and all below it.")
    ] = None
    nfs: Annotated[AllowedExport | None, Field(description="Exports of a server.")] = None
    mount_options: Annotated[
        list[str],
        Field(
            default_factory=list, description="Options that policies may set beside harmless ones."
        ),
    ]
    shared: Annotated[
        bool,
        Field(
            description="Policies store in the directory itself, together; otherwise each has a directory of its own "
            "in it, <namespace>/<policy uid>."
        ),
    ] = False

    rules: ClassVar[tuple[Rule, ...]] = (Rule(name="one-kind", check=_one_kind),)

    def covers(self, namespace: str) -> bool:
        """Whether the entry is for policies of this namespace."""
        return ANY_NAMESPACE in self.namespaces or namespace in self.namespaces


def is_below(path: str, prefix: str) -> bool:
    """Whether ``path`` is ``prefix`` or below it, component by component. Never for a path with ``..``."""
    parts, above = PurePosixPath(path).parts, PurePosixPath(prefix).parts
    return ".." not in parts and ".." not in above and parts[: len(above)] == above


def refusals(policy: KVTierPolicy, allowed: Sequence[AllowedVolume]) -> list[FieldError]:
    """What of a policy is outside the list of its namespace."""
    entries = [entry for entry in allowed if entry.covers(policy.namespace)]
    found: list[FieldError] = []
    for index, tier in enumerate(policy.spec.tiers):
        if tier.file_system is None:
            continue
        volume = tier.file_system.volume
        field = f"spec.tiers[{index}].fileSystem.volume"
        if volume.host_path is not None:
            prefixes = [entry.host_path for entry in entries if entry.host_path is not None]
            if not any(is_below(volume.host_path.path, prefix) for prefix in prefixes):
                found.append(
                    FieldError(
                        f"{field}.hostPath.path",
                        shown(volume.host_path.path),
                        _allowed(prefixes, policy.namespace),
                    )
                )
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
        yield FieldError(field, shown(f"{nfs.server}:{nfs.path}"), _allowed(prefixes, namespace))
        return
    # One entry has to cover them all, as in the guard that the API server applies to volumes.
    yield from min((list(_options(nfs, entry, field)) for entry in matching), key=len)


def _options(nfs: NfsVolume, entry: AllowedVolume, field: str) -> Iterator[FieldError]:
    options = HARMLESS_OPTIONS.union(entry.mount_options)
    for index, option in enumerate(nfs.mount_options or ()):
        if option not in options and option.split("=", 1)[0] not in options:
            yield FieldError(
                f"{field}.mountOptions[{index}]",
                shown(option),
                "one of " + ", ".join(sorted(options)),
            )


def _allowed(prefixes: Sequence[str], namespace: str) -> str:
    if not prefixes:
        return f"nothing of this kind in namespace {namespace}: its administrator has allowed none"
    return (
        f"what the administrator allows in namespace {namespace}: {', '.join(prefixes)} and below"
    )
