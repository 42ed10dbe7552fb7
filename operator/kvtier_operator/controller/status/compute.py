"""From what is known of a policy and its pods to its status. Pure.

A status is written rarely: a condition's status or reason, a state, a number of pods or the first hits change it at once;
bytes, percentages and the words of messages wait (``settled``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from kvtier_operator.api.conditions import Reason
from kvtier_operator.api.policy import KVTierPolicy
from kvtier_operator.api.status import Condition, PodCounts, PolicyStatus, TierState, TierStatus
from kvtier_operator.controller.pods.pod_view import PodState, PodView
from kvtier_operator.controller.rollout import outdated
from kvtier_operator.controller.status import pod_conditions
from kvtier_operator.controller.status.conditions import (
    READY_MESSAGE,
    ConditionUpdate,
    PlanFacts,
    ready,
    stamped,
)
from kvtier_operator.controller.status.pod_conditions import PodFacts
from kvtier_operator.controller.status.tiers import tier_statuses, total_percent

MAX_SKIPPED = 16
MESSAGE_SECONDS = 30.0
"""Words of a condition about pods that change while its status and reason stay: an error's text, say."""
OF_PODS = ("Attached", "UpToDate", "Tuned", "EnginesCompatible", "TiersHealthy")
FROM_ANSWERS = ("Attached", "Tuned", "EnginesCompatible", "TiersHealthy")
"""What cannot be said before the pods were asked."""
MAX_TIERS_TEXT = 1024


@dataclass(frozen=True, slots=True)
class StatusInputs:
    """Everything a status is made of. ``now``: seconds since 1970; ``previous``: the status in force."""

    facts: PlanFacts
    now: float
    previous: PolicyStatus | None = None
    found: PodFacts = field(default_factory=PodFacts)


def compute_status(policy: KVTierPolicy, inputs: StatusInputs) -> PolicyStatus:
    """The whole status, as if it could be written at any time.

    While pods have not been asked yet (just after a start), what their answers decide stays as it is in force.
    """
    facts, found, previous = inputs.facts, inputs.found, inputs.previous
    generation = policy.metadata.generation or 0
    unasked = previous is not None and bool(found.in_state(PodState.UNASKED)) and not found.troubles
    if not unasked and found.in_state(PodState.UNASKED):
        found = replace(found, pods=tuple(_starting(pod) for pod in found.pods))
    tiers = tier_statuses(policy, found.pods, facts.claims)
    findings = [
        *facts.findings,
        pod_conditions.attached(policy, facts, found),
        pod_conditions.up_to_date(policy, facts, found),
        pod_conditions.tuned(facts, found),
        pod_conditions.engines_compatible(found),
        pod_conditions.tiers_healthy(found, tiers),
    ]
    counts = _counts(policy, facts, found)
    hits = total_percent(found.pods)
    if unasked and previous is not None:
        findings = _kept(findings, previous)
        counts = _kept_counts(counts, previous)
        tiers = _kept_tiers(tiers, previous)
        hits = _hits(previous)
    findings.append(_ready(findings, all(pod.silent for pod in found.in_state(PodState.ATTACHED))))
    skipped = [pod for pod in found.pods if pod.state is PodState.SKIPPED][:MAX_SKIPPED]
    return PolicyStatus.model_validate(
        {
            "observedGeneration": generation,
            "structuralHash": facts.structural_hash or None,
            "liveGeneration": facts.live_generation,
            "summary": {
                "pods": f"{counts.attached}/{counts.selected}",
                "tiers": ",".join(_tier_text(tier) for tier in tiers)[:MAX_TIERS_TEXT],
                "hitTokensPercent": hits,
            },
            "pods": counts,
            "skippedPods": [
                {"name": pod.name, "reason": pod.reason, "message": pod.message[:1024]}
                for pod in skipped
            ]
            or None,
            "suspendedOwners": list(found.suspended) or None,
            "tiers": tiers,
            "conditions": stamped(
                findings,
                previous.conditions if previous is not None else None,
                generation,
                inputs.now,
            ),
        }
    )


def settled(
    before: PolicyStatus | None, after: PolicyStatus, seconds_since: float, period_seconds: float
) -> tuple[PolicyStatus, float | None]:
    """What of a computed status is written, and in how many seconds the rest may be. ``seconds_since``: since the status
    last changed; ``period_seconds``: how often bytes and percentages may.
    """
    if before is None or _weighty(before) != _weighty(after) or _first_hits(before, after):
        return after, None
    held, wake = after, None
    if seconds_since < period_seconds and _bytes(before) != _bytes(after):
        held = _with_bytes(held, before)
        wake = period_seconds - seconds_since
    patience = min(MESSAGE_SECONDS, period_seconds)
    if seconds_since < patience and _messages(before) != _messages(after):
        held = _with_messages(held, before)
        wake = min(wake or patience, patience - seconds_since)
    return held, wake


def _ready(findings: Sequence[ConditionUpdate], silent: bool) -> ConditionUpdate:
    """The summary with the most useful reason: what is wrong, else what is not as wanted yet, else that all is well.
    ``silent``: no attached pod can be asked.
    """
    by_type = {finding.type: finding for finding in findings}
    attached = by_type["Attached"]
    # Without an engine that can be asked, that nothing is known of tiers is a consequence, not the reason.
    ours = {"EnginesCompatible", "TiersHealthy"} if attached.status != "True" or silent else set()
    summed = ready(each for each in findings if each.type not in ours or each.status != "Unknown")
    if summed.status != "True":
        return summed
    for finding in (by_type["UpToDate"], by_type["Tuned"]):
        if finding.status == "False":
            return ConditionUpdate(
                "Ready",
                "True",
                finding.reason,
                f"{READY_MESSAGE} {finding.type}: {finding.message}",
            )
    if attached.reason != Reason.ATTACHED.value:
        return ConditionUpdate(
            "Ready", "True", attached.reason, f"{READY_MESSAGE} {attached.message}"
        )
    return summed


def _starting(pod: PodView) -> PodView:
    return replace(pod, state=PodState.STARTING) if pod.state is PodState.UNASKED else pod


def _counts(policy: KVTierPolicy, facts: PlanFacts, found: PodFacts) -> PodCounts:
    attached = found.in_state(PodState.ATTACHED)
    late = len(outdated(policy, attached, facts.structural_hash))
    return PodCounts.model_validate(
        {
            "selected": len(found.pods),
            "attached": len(attached),
            "current": len(attached) - late,
            "outdated": late,
            "skipped": len(found.in_state(PodState.SKIPPED)),
            "tuned": sum(pod_conditions.is_tuned(pod, facts) for pod in attached),
        }
    )


def _kept(findings: Sequence[ConditionUpdate], previous: PolicyStatus) -> list[ConditionUpdate]:
    before = {condition.type: condition for condition in previous.conditions or ()}
    kept = []
    for finding in findings:
        old = before.get(finding.type) if finding.type in FROM_ANSWERS else None
        kept.append(
            finding
            if old is None
            else ConditionUpdate(old.type, old.status, old.reason, old.message)
        )
    return kept


def _kept_counts(counts: PodCounts, previous: PolicyStatus) -> PodCounts:
    old = previous.pods
    if old is None:
        return counts
    kept = {
        name: min(getattr(old, name), counts.selected)
        for name in ("attached", "current", "outdated", "tuned")
    }
    return counts.model_copy(update=kept)


def _kept_tiers(tiers: Sequence[TierStatus], previous: PolicyStatus) -> list[TierStatus]:
    before = {tier.name: tier for tier in previous.tiers or ()}
    return [
        before[tier.name].model_copy(update={"claim_name": tier.claim_name})
        if tier.name in before
        else tier
        for tier in tiers
    ]


def _first_hits(before: PolicyStatus, after: PolicyStatus) -> bool:
    """Whether there are hits where none were: "is it working" is asked just then, and hits of a short test would be over
    before their turn came. That they are no more has to wait, so this comes no oftener than once between two turns."""
    return not _hits(before) and bool(_hits(after))


def _hits(status: PolicyStatus) -> int | None:
    return status.summary.hit_tokens_percent if status.summary is not None else None


def _tier_text(tier: TierStatus) -> str:
    return (
        tier.name
        if tier.state in (TierState.HEALTHY, TierState.UNKNOWN)
        else f"{tier.name}({tier.state.value})"
    )


def _bytes(status: PolicyStatus) -> object:
    tiers = [
        (tier.used_bytes, tier.capacity_bytes, tier.hit_tokens_percent)
        for tier in status.tiers or ()
    ]
    return tiers, _hits(status)


def _messages(status: PolicyStatus) -> object:
    skipped = [(pod.name, pod.message) for pod in status.skipped_pods or ()]
    return [(each.type, each.message) for each in status.conditions or ()], skipped


def _weighty(status: PolicyStatus) -> PolicyStatus:
    """The status without what may wait."""
    return _with_messages(_with_bytes(status, None), None)


def _with_bytes(status: PolicyStatus, other: PolicyStatus | None) -> PolicyStatus:
    theirs = {tier.name: tier for tier in (other.tiers if other is not None else None) or ()}
    nothing = TierStatus.model_validate({"name": "-"})
    tiers = []
    for tier in status.tiers or ():
        old = theirs.get(tier.name, nothing)
        update = {
            name: getattr(old, name)
            for name in ("used_bytes", "capacity_bytes", "hit_tokens_percent")
        }
        tiers.append(tier.model_copy(update=update))
    summary = status.summary
    if summary is not None:
        summary = summary.model_copy(
            update={"hit_tokens_percent": _hits(other) if other is not None else None}
        )
    return status.model_copy(update={"tiers": tiers, "summary": summary})


def _with_messages(status: PolicyStatus, other: PolicyStatus | None) -> PolicyStatus:
    theirs = {
        each.type: each.message for each in (other.conditions if other is not None else None) or ()
    }
    conditions = [
        _worded(each, theirs.get(each.type, "")) if each.type in (*OF_PODS, "Ready") else each
        for each in status.conditions or ()
    ]
    reasons = {
        pod.name: pod.message for pod in (other.skipped_pods if other is not None else None) or ()
    }
    skipped = [
        pod.model_copy(update={"message": reasons.get(pod.name)})
        for pod in status.skipped_pods or ()
    ] or None
    return status.model_copy(update={"conditions": conditions, "skipped_pods": skipped})


def _worded(condition: Condition, message: str) -> Condition:
    return condition.model_copy(update={"message": message})
