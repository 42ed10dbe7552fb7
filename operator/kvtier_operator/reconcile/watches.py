"""What the controller holds copies of. Secrets are not among them: nobody may list those."""

from __future__ import annotations

from kvtier_operator.cluster import trimming
from kvtier_operator.cluster.cache import Watch
from kvtier_operator.cluster.contract import (
    CLAIMS,
    CONFIG_MAPS,
    DEPLOYMENTS,
    EVENTS,
    LEADER_WORKER_SETS,
    PODS,
    POLICIES,
    REPLICA_SETS,
    STATEFUL_SETS,
    VOLUMES,
)
from kvtier_operator.render.volumes import MANAGED_BY
from kvtier_operator.settings import Settings

OURS = ",".join(f"{key}={value}" for key, value in MANAGED_BY.items())
"""Selects what KVTier made."""


def watches(settings: Settings) -> list[Watch]:
    """For the namespaces that are watched. Volumes only where the operator may make them: it has no right to list them
    otherwise.
    """
    spaces = settings.watch_namespaces
    found = [
        Watch(POLICIES, spaces),
        Watch(PODS, spaces, trim=trimming.pod),
        Watch(CONFIG_MAPS, spaces, labels=OURS),
        Watch(CLAIMS, spaces),
        Watch(EVENTS, spaces, fields="reason=FailedCreate"),
        Watch(REPLICA_SETS, spaces, trim=trimming.workload),
        Watch(DEPLOYMENTS, spaces, trim=trimming.workload),
        Watch(STATEFUL_SETS, spaces, trim=trimming.workload),
        Watch(LEADER_WORKER_SETS, spaces, optional=True, trim=trimming.workload),
    ]
    if settings.storage.create_volumes:
        found.append(Watch(VOLUMES, labels=OURS))
    return found
