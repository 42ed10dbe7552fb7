"""From what pods say about their tiers to what a status says about each tier. Pure.

A directory that pods share is one directory: every pod reports all of it. So with ``sharing: Cluster`` used and capacity
are the largest that a pod reports, with ``sharing: Node`` the largest per node, summed over nodes; what each pod has for
itself is summed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from kvtier_operator.api.policy import KVTierPolicy
from kvtier_operator.api.status import TierState, TierStatus
from kvtier_operator.api.tiers import Sharing, Tier
from kvtier_operator.controller.pods.pod_view import PodView
from kvtier_operator.controller.pods.reports import MAX_NUMBER, TierReport

STEP_PERCENT = 5
"""Bytes and percentages are shown in such steps, so that a status is not written for every object stored."""
SEVERITY = (TierState.HEALTHY, TierState.UNKNOWN, TierState.DEGRADED, TierState.BREAKER_OPEN)


def worst(states: Iterable[TierState]) -> TierState:
    """The worst; UNKNOWN where there is none."""
    return max(states, key=SEVERITY.index, default=TierState.UNKNOWN)


def tier_statuses(
    policy: KVTierPolicy, pods: Sequence[PodView], claims: Mapping[str, str]
) -> list[TierStatus]:
    """One entry per tier of the policy, in its order. Outdated pods count too: what they have is in use."""
    prompt_tokens = sum(pod.report.prompt_tokens or 0 for pod in pods if pod.report is not None)
    return [
        _status(tier, _said(tier.name, pods), prompt_tokens, claims.get(tier.name))
        for tier in policy.spec.tiers
    ]


def total_percent(pods: Sequence[PodView]) -> int | None:
    """Of prompt tokens of the last five minutes, those loaded from any tier; None while there are none."""
    prompt_tokens = sum(pod.report.prompt_tokens or 0 for pod in pods if pod.report is not None)
    hits = sum(
        tier.hit_tokens or 0 for pod in pods if pod.report is not None for tier in pod.report.tiers
    )
    return percent(hits, prompt_tokens)


def percent(part: int, whole: int) -> int | None:
    """In steps of ``STEP_PERCENT``; None of nothing."""
    if whole <= 0:
        return None
    return min(100, STEP_PERCENT * round(100 * part / whole / STEP_PERCENT))


def rounded(used: int, capacity: int) -> int:
    """Bytes in steps of ``STEP_PERCENT`` of the capacity; what is there at all is not shown as nothing."""
    if capacity <= 0:
        return used
    steps = round(100 * used / (STEP_PERCENT * capacity)) or (1 if used else 0)
    return min(MAX_NUMBER, capacity * steps * STEP_PERCENT // 100)


def _said(name: str, pods: Sequence[PodView]) -> list[tuple[PodView, TierReport]]:
    return [
        (pod, tier)
        for pod in pods
        if pod.report is not None
        for tier in pod.report.tiers
        if tier.name == name
    ]


def _status(
    tier: Tier, said: list[tuple[PodView, TierReport]], prompt_tokens: int, claim: str | None
) -> TierStatus:
    found: dict[str, object] = {
        "name": tier.name,
        "state": worst(report.state for _, report in said),
        "reportingPods": len(said),
        "claimName": claim,
    }
    if said:
        used, capacity = _bytes(tier, said)
        found["usedBytes"] = rounded(used, capacity)
        found["capacityBytes"] = capacity
        if any(report.hit_tokens is not None for _, report in said):
            found["hitTokensPercent"] = percent(
                sum(report.hit_tokens or 0 for _, report in said), prompt_tokens
            )
    return TierStatus.model_validate(found)


def _bytes(tier: Tier, said: list[tuple[PodView, TierReport]]) -> tuple[int, int]:
    """Used and capacity over all pods."""
    places: dict[str, tuple[int, int]] = {}
    for pod, report in said:
        place = _place(tier, pod)
        used, capacity = places.get(place, (0, 0))
        places[place] = max(used, report.used_bytes), max(capacity, report.capacity_bytes)
    used = sum(each[0] for each in places.values())
    capacity = sum(each[1] for each in places.values())
    return min(used, MAX_NUMBER), min(capacity, MAX_NUMBER)


def _place(tier: Tier, pod: PodView) -> str:
    """Where the tier's bytes of this pod lie: pods with the same answer share them."""
    if tier.memory is not None:
        return pod.uid
    if tier.lmcache is not None:
        return ""
    files = tier.file_system
    if (
        files is None
        or files.sharing is Sharing.POD
        or set(files.volume.sources) & {"emptyDir", "ephemeral"}
    ):
        return pod.uid
    if files.sharing is Sharing.NODE:
        return f"node {pod.node}"
    return ""
