"""`kvtier render --topology`: a policy as a topology directory on this machine, without a cluster."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvtier.tierd.rundir import RunDirectory
from kvtier.topology import writing
from kvtier.topology.models import Daemon, HttpEndpoint, Topology
from kvtier_operator.api.policy import KVTierPolicy
from kvtier_operator.render.topology import Placement, local_run_directory, local_tier_paths, topology

TIERS_DIRECTORY = "tiers"
"""Below the topology directory: file tiers whose volume only a pod would bring along."""


@dataclass(frozen=True, slots=True)
class Written:
    """A topology on disk: its absolute directory, the documents, and what a pod would have got otherwise."""

    directory: Path
    topology: Topology
    notes: tuple[str, ...]


def place(
    policy: KVTierPolicy,
    directory: Path | str,
    *,
    tier_paths: Mapping[str, str] | None = None,
    run_directory: str | None = None,
    http: HttpEndpoint | None = None,
    daemon: Daemon = Daemon.ENGINE,
    generation: int = 0,
) -> Written:
    """The topology that ``write`` would write. Raises ``ConfigurationError``.

    ``daemon`` is Engine unless asked otherwise: on a plain machine there is no sidecar. Files keep the user's group
    unless the policy names one.
    """
    target = Path(directory).absolute()
    overrides = {name: str(Path(path).absolute()) for name, path in (tier_paths or {}).items()}
    paths, notes = local_tier_paths(policy, overrides, str(target / TIERS_DIRECTORY))
    security = policy.spec.security
    placement = Placement(
        run_directory=str(Path(run_directory).absolute())
        if run_directory
        else local_run_directory(policy, os.getuid()),
        tier_paths=paths,
        http=http or HttpEndpoint(),
        daemon=daemon,
        storage_gid=security.storage_gid if "storage_gid" in security.model_fields_set else None,
        secrets_directory=str(target / "secrets"),
    )
    RunDirectory(placement.run_directory, shared=daemon is Daemon.SIDECAR)  # refuses what no engine could use
    return Written(target, topology(policy, placement, generation), tuple(notes))


def write(
    policy: KVTierPolicy,
    directory: Path | str,
    *,
    tier_paths: Mapping[str, str] | None = None,
    run_directory: str | None = None,
    http: HttpEndpoint | None = None,
    daemon: Daemon = Daemon.ENGINE,
    generation: int = 0,
) -> Written:
    """Writes structural.json and live.json into ``directory``. Raises ``ConfigurationError`` and ``OSError``."""
    placed = place(
        policy,
        directory,
        tier_paths=tier_paths,
        run_directory=run_directory,
        http=http,
        daemon=daemon,
        generation=generation,
    )
    writing.write(placed.directory, placed.topology)
    own = placed.directory / TIERS_DIRECTORY
    if any(getattr(tier, "path", "").startswith(f"{own}/") for tier in placed.topology.structural.tiers):
        # tierd makes a tier's directory but not its parent: where a mount is missing, that would be the wrong disk.
        own.mkdir(exist_ok=True)
    return placed
