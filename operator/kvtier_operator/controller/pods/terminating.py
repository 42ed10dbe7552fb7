"""Pods that should be gone and are not: a wait that SIGKILL cannot end, in a mount of a tier most often. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvtier_operator.api.names import tier_volume
from kvtier_operator.api.status import TierState
from kvtier_operator.controller import objects
from kvtier_operator.controller.pods.reports import Report
from kvtier_operator.kube.resources import Object

OVERDUE_SECONDS = 60.0
"""After ``deletionTimestamp``, which is when the grace period ends: a kubelet needs some seconds to take a pod apart."""


@dataclass(frozen=True, slots=True)
class Overdue:
    """A pod that should be gone, where it is, and what it may hang in."""

    pod: Object
    node: str
    mounts: tuple[str, ...]

    @property
    def message(self) -> str:
        """For people. A lost node and a finalizer are likelier reasons than a mount."""
        finalizers = objects.metadata(self.pod).get("finalizers")
        if _node_is_lost(self.pod):
            why = "its node does not answer"
        elif finalizers:
            why = f"it has the finalizer {objects.listed(map(str, finalizers))}"
        else:
            why = f"it may hang in {' or '.join(self.mounts) if self.mounts else 'no mount of a tier'}"
        return f"pod {objects.name(self.pod)} on node {self.node or 'none'} should be gone and is not; {why}"


def overdue(pod: Object, report: Report | None, tiers: Sequence[str], now: float) -> Overdue | None:
    """Looks at one pod. ``report``: its last answer, however old; ``tiers``: names of the policy's file tiers."""
    ends = objects.parse_time(objects.metadata(pod).get("deletionTimestamp"))
    if ends is None or now - ends < OVERDUE_SECONDS or not objects.injected(pod):
        return None
    ill = (
        {tier.name for tier in report.tiers if tier.state is not TierState.HEALTHY}
        if report is not None
        else set()
    )
    mounts = _mounts(pod, [tier for tier in tiers if tier in ill]) or _mounts(pod, tiers)
    return Overdue(pod, str(objects.spec(pod).get("nodeName") or ""), mounts)


def due_seconds(pod: Object, now: float) -> float | None:
    """In how many seconds a terminating pod is overdue; None where it is not terminating, or overdue already."""
    ends = objects.parse_time(objects.metadata(pod).get("deletionTimestamp"))
    if ends is None or now - ends >= OVERDUE_SECONDS:
        return None
    return ends + OVERDUE_SECONDS - now


def _node_is_lost(pod: Object) -> bool:
    evicted = objects.condition(pod, "DisruptionTarget").get("reason") == "DeletionByTaintManager"
    return evicted or objects.status(pod).get("reason") == "NodeLost"


def _mounts(pod: Object, tiers: Sequence[str]) -> tuple[str, ...]:
    volumes = {str(volume.get("name")): volume for volume in objects.spec(pod).get("volumes") or ()}
    return tuple(
        f"{_source(volumes[tier_volume(tier)])} (tier {tier})"
        for tier in tiers
        if tier_volume(tier) in volumes
    )


def _source(volume: Any) -> str:
    if "hostPath" in volume:
        return f"hostPath {volume['hostPath'].get('path')}"
    if "persistentVolumeClaim" in volume:
        return f"claim {volume['persistentVolumeClaim'].get('claimName')}"
    if "nfs" in volume:
        return f"nfs {volume['nfs'].get('server')}:{volume['nfs'].get('path')}"
    return f"volume {volume.get('name')}"
