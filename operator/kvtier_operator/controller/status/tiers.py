"""Combines the pods' reports about a tier into the tier's status. Pure.

Pods that share a directory all report the whole directory. Used and capacity bytes are therefore
the largest that a pod reports with ``sharing: Cluster``, the largest of each node, summed over
nodes, with ``sharing: Node``, and the sum over all pods otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from kvtier_operator.api.file_tier import Sharing
from kvtier_operator.api.policy import KVTierPolicy
from kvtier_operator.api.status import TierState, TierStatus
from kvtier_operator.api.tiers import TierSpec
from kvtier_operator.controller.pods.pod_view import PodView
from kvtier_operator.controller.pods.reports import MAX_NUMBER, TierReport

STEP_PERCENT = 5
"""Bytes and percentages are rounded to such steps, so that not every stored object leads to a
status write.
"""
SEVERITY = (TierState.HEALTHY, TierState.UNKNOWN, TierState.DEGRADED, TierState.BREAKER_OPEN)


def worst_state(states: Iterable[TierState]) -> TierState:
    """The most severe state; UNKNOWN if there is none."""
    return max(states, key=SEVERITY.index, default=TierState.UNKNOWN)


def tier_statuses(
    policy: KVTierPolicy, pods: Sequence[PodView], claims: Mapping[str, str]
) -> list[TierStatus]:
    """One entry per tier, in the policy's order. Outdated pods count: their bytes are in use."""
    prompt_tokens = sum(pod.report.prompt_tokens or 0 for pod in pods if pod.report is not None)
    return [
        _status(tier, _reports(tier.name, pods), prompt_tokens, claims.get(tier.name))
        for tier in policy.spec.tiers
    ]


def hit_percent(pods: Sequence[PodView]) -> int | None:
    """Share of the prompt tokens of the last five minutes that were loaded from any tier; None if
    there were none.
    """
    prompt_tokens = sum(pod.report.prompt_tokens or 0 for pod in pods if pod.report is not None)
    hits = sum(
        tier.hit_tokens or 0 for pod in pods if pod.report is not None for tier in pod.report.tiers
    )
    return rounded_percent(hits, prompt_tokens)


def rounded_percent(part: int, whole: int) -> int | None:
    """In steps of ``STEP_PERCENT``; None if ``whole`` is 0."""
    if whole <= 0:
        return None
    return min(100, STEP_PERCENT * round(100 * part / whole / STEP_PERCENT))


def rounded_bytes(used: int, capacity: int) -> int:
    """In steps of ``STEP_PERCENT`` of the capacity. A small amount is not rounded to 0."""
    if capacity <= 0:
        return used
    steps = round(100 * used / (STEP_PERCENT * capacity)) or (1 if used else 0)
    return min(MAX_NUMBER, capacity * steps * STEP_PERCENT // 100)


def _reports(name: str, pods: Sequence[PodView]) -> list[tuple[PodView, TierReport]]:
    return [
        (pod, tier)
        for pod in pods
        if pod.report is not None
        for tier in pod.report.tiers
        if tier.name == name
    ]


def _status(
    tier: TierSpec, reports: list[tuple[PodView, TierReport]], prompt_tokens: int, claim: str | None
) -> TierStatus:
    found: dict[str, object] = {
        "name": tier.name,
        "state": worst_state(report.state for _, report in reports),
        "reportingPods": len(reports),
        "claimName": claim,
    }
    volumes = tier.file_system.volumes if tier.file_system is not None else None
    if volumes is not None:
        found["volumes"] = [
            {"name": each.name, "state": _volume_state(each.name, reports)} for each in volumes
        ]
    if reports:
        used, capacity = _bytes(tier, reports)
        found["usedBytes"] = rounded_bytes(used, capacity)
        found["capacityBytes"] = capacity
        if any(report.hit_tokens is not None for _, report in reports):
            found["hitTokensPercent"] = rounded_percent(
                sum(report.hit_tokens or 0 for _, report in reports), prompt_tokens
            )
    return TierStatus.model_validate(found)


def _volume_state(name: str, reports: list[tuple[PodView, TierReport]]) -> TierState:
    return worst_state(
        state for _, report in reports for volume, state in report.volumes if volume == name
    )


def _bytes(tier: TierSpec, reports: list[tuple[PodView, TierReport]]) -> tuple[int, int]:
    """Used and capacity bytes over all pods."""
    locations: dict[str, tuple[int, int]] = {}
    for pod, report in reports:
        location = _location(tier, pod)
        used, capacity = locations.get(location, (0, 0))
        locations[location] = max(used, report.used_bytes), max(capacity, report.capacity_bytes)
    used = sum(each[0] for each in locations.values())
    capacity = sum(each[1] for each in locations.values())
    return min(used, MAX_NUMBER), min(capacity, MAX_NUMBER)


def _location(tier: TierSpec, pod: PodView) -> str:
    """Identifies where the pod's bytes of the tier are stored: pods with the same location share
    them.
    """
    if tier.memory is not None:
        return pod.uid
    if tier.lmcache is not None:
        return ""
    files = tier.file_system
    if files is None or files.sharing is Sharing.POD or files.sources & {"emptyDir", "ephemeral"}:
        return pod.uid
    if files.sharing is Sharing.NODE:
        return f"node {pod.node}"
    return ""
