"""Pods that outlive their grace period, most often because a process hangs in a tier's mount, where
SIGKILL has no effect. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtier_operator.api.names import tier_volume
from kvtier_operator.api.pods import Pod, PodVolume
from kvtier_operator.api.status import TierState
from kvtier_operator.controller import objects
from kvtier_operator.controller.pods.reports import PodReport

OVERDUE_SECONDS = 60.0
"""After ``deletionTimestamp``, which is the end of the grace period: a kubelet needs some seconds
to remove a pod.
"""


@dataclass(frozen=True, slots=True)
class OverduePod:
    """A pod that should be gone. ``mounts``: of tiers, in which it may hang."""

    pod: Pod
    mounts: tuple[str, ...]

    @property
    def message(self) -> str:
        """For people. A lost node or a finalizer is a likelier reason than a mount."""
        metadata = self.pod.metadata
        if _node_is_lost(self.pod):
            cause = "its node does not respond"
        elif metadata.finalizers:
            cause = f"it has the finalizer {objects.join_names(metadata.finalizers)}"
        elif self.mounts:
            cause = f"it may hang in {' or '.join(self.mounts)}"
        else:
            cause = "it mounts no tier"
        node = self.pod.spec.node_name or "none"
        return f"pod {metadata.name} on node {node} still exists after its grace period; {cause}"


def overdue_pod(
    pod: Pod, report: PodReport | None, tiers: Sequence[str], now: float
) -> OverduePod | None:
    """The pod, if it should be gone. ``report``: its last answer, however old; ``tiers``: keys of
    the volumes of the policy's file tiers.
    """
    grace_ends = objects.parse_time(pod.metadata.deletion_timestamp)
    if grace_ends is None or now - grace_ends < OVERDUE_SECONDS or not objects.is_injected(pod):
        return None
    unhealthy = (
        {tier.name for tier in report.tiers if tier.state is not TierState.HEALTHY}
        if report is not None
        else set()
    )
    suspects = _mounts(pod, [key for key in tiers if key.split("/", 1)[0] in unhealthy])
    return OverduePod(pod, suspects or _mounts(pod, tiers))


def seconds_until_overdue(pod: Pod, now: float) -> float | None:
    """None if the pod is not terminating, or overdue already."""
    grace_ends = objects.parse_time(pod.metadata.deletion_timestamp)
    if grace_ends is None or now - grace_ends >= OVERDUE_SECONDS:
        return None
    return grace_ends + OVERDUE_SECONDS - now


def _node_is_lost(pod: Pod) -> bool:
    disruption = pod.status.condition("DisruptionTarget")
    evicted = disruption is not None and disruption.reason == "DeletionByTaintManager"
    return evicted or pod.status.reason == "NodeLost"


def _mounts(pod: Pod, tiers: Sequence[str]) -> tuple[str, ...]:
    """``tiers``: keys of their volumes."""
    volumes = {volume.name: volume for volume in pod.spec.volumes}
    return tuple(
        f"{_source(volumes[name])} (tier {key})"
        for key in tiers
        if (name := tier_volume(*key.split("/", 1))) in volumes
    )


def _source(volume: PodVolume) -> str:
    if volume.host_path is not None:
        return f"hostPath {volume.host_path.path}"
    if volume.persistent_volume_claim is not None:
        return f"claim {volume.persistent_volume_claim.claim_name}"
    if volume.nfs is not None:
        return f"nfs {volume.nfs.server}:{volume.nfs.path}"
    return f"volume {volume.name}"
