"""Computes a policy's status from its plan and its pods, and decides how much of it is written now.
Pure.

Status writes are rare. A changed condition status or reason, tier state, number of pods, or the
first hits are written at once; changed bytes, percentages and messages wait
(``defer_minor_changes``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from kvtier_operator.api.conditions import PolicyReason, Reason
from kvtier_operator.api.policy import KVTierPolicy
from kvtier_operator.api.status import Condition, PodCounts, PolicyStatus, TierState, TierStatus
from kvtier_operator.controller.conditions import (
    READY_MESSAGE,
    ConditionUpdate,
    ReconcileInput,
    ready,
)
from kvtier_operator.controller.pods.pod_view import PodState, PodView
from kvtier_operator.controller.rollout import outdated
from kvtier_operator.controller.status import pod_conditions
from kvtier_operator.controller.status.pod_conditions import ObservedPods
from kvtier_operator.controller.status.serialize import to_conditions
from kvtier_operator.controller.status.tiers import hit_percent, tier_statuses

MAX_SKIPPED = 16
MAX_TIERS_TEXT = 1024
MESSAGE_SECONDS = 30.0
"""How long a changed message of a condition about pods waits while the condition's status and
reason stay the same.
"""
POD_CONDITIONS = ("Attached", "UpToDate", "Tuned", "EnginesCompatible", "TiersHealthy")
REPORTED_CONDITIONS = ("Attached", "Tuned", "EnginesCompatible", "TiersHealthy")
"""Conditions that depend on reports: they are not known before the pods were polled."""
REPORTED_COUNTS = ("attached", "current", "outdated", "tuned")
USAGE_FIELDS = ("used_bytes", "capacity_bytes", "hit_tokens_percent")


@dataclass(frozen=True, slots=True)
class StatusInputs:
    """Everything that a status depends on. ``previous``: the status in force; ``now``: seconds
    since 1970.
    """

    plan: ReconcileInput
    pods: ObservedPods = field(default_factory=ObservedPods)
    previous: PolicyStatus | None = None
    now: float = 0.0


def compute_status(policy: KVTierPolicy, inputs: StatusInputs) -> PolicyStatus:
    """The complete status, with all current values.

    While some pods have not been polled yet (after a start of the operator), the values that depend
    on reports stay as they are in force.
    """
    plan, pods, previous = inputs.plan, inputs.pods, inputs.previous
    generation = policy.metadata.generation or 0
    some_not_polled = bool(pods.in_state(PodState.NOT_POLLED))
    keep_reported = previous is not None and some_not_polled and not pods.failures
    if some_not_polled and not keep_reported:
        pods = replace(pods, views=tuple(_as_starting(pod) for pod in pods.views))
    tiers = tier_statuses(policy, pods.views, plan.claims)
    conditions = [
        *plan.conditions,
        pod_conditions.attached(policy, plan, pods),
        pod_conditions.up_to_date(policy, plan, pods),
        pod_conditions.tuned(plan, pods),
        pod_conditions.engines_compatible(pods),
        pod_conditions.tiers_healthy(pods, tiers),
    ]
    counts = _counts(policy, plan, pods)
    hits = hit_percent(pods.views)
    if keep_reported and previous is not None:
        conditions = _previous_conditions(conditions, previous)
        counts = _previous_counts(counts, previous)
        tiers = _previous_tiers(tiers, previous)
        hits = _hits(previous)
    no_reports = all(pod.cannot_report for pod in pods.in_state(PodState.ATTACHED))
    conditions.append(_ready(conditions, plan.not_written, no_reports))
    return PolicyStatus.model_validate(
        {
            "observedGeneration": generation,
            "structuralHash": plan.structural_hash or None,
            "liveGeneration": plan.live_generation,
            "summary": {
                "pods": f"{counts.attached}/{counts.selected}",
                "tiers": ",".join(_tier_text(tier) for tier in tiers)[:MAX_TIERS_TEXT],
                "hitTokensPercent": hits,
            },
            "pods": counts,
            "skippedPods": [
                {"name": pod.name, "reason": pod.reason, "message": pod.message[:1024]}
                for pod in pods.in_state(PodState.SKIPPED)[:MAX_SKIPPED]
            ]
            or None,
            "suspendedOwners": list(pods.suspended) or None,
            "tiers": tiers,
            "conditions": to_conditions(
                conditions,
                previous.conditions if previous is not None else None,
                generation,
                inputs.now,
            ),
        }
    )


def defer_minor_changes(
    previous: PolicyStatus | None,
    computed: PolicyStatus,
    seconds_since: float,
    period_seconds: float,
) -> tuple[PolicyStatus, float | None]:
    """The part of a computed status to write now, and the seconds until the rest may be written.
    ``seconds_since``: the last change of the status; ``period_seconds``: between changes of bytes
    and percentages.
    """
    if previous is None or _major(previous) != _major(computed) or _first_hits(previous, computed):
        return computed, None
    status, wake = computed, None
    if seconds_since < period_seconds and _usage(previous) != _usage(computed):
        status = _with_usage(status, previous)
        wake = period_seconds - seconds_since
    message_seconds = min(MESSAGE_SECONDS, period_seconds)
    if seconds_since < message_seconds and _messages(previous) != _messages(computed):
        status = _with_messages(status, previous)
        wake = min(wake or message_seconds, message_seconds - seconds_since)
    return status, wake


def _ready(
    conditions: Sequence[ConditionUpdate], not_written: str, no_reports: bool
) -> ConditionUpdate:
    """Ready with the most useful reason: what keeps the policy from being in force, else what the
    conditions about pods report, else that the policy is in force. ``not_written``: why the live
    values could not be written. ``no_reports``: no attached pod can be polled.
    """
    summary = ready(conditions)
    if summary.status != "True":
        return summary
    if not_written:
        message = f"The live values are not written: {not_written}"
        return ConditionUpdate("Ready", "False", PolicyReason.PARTLY_APPLIED.value, message)
    by_type = {condition.type: condition for condition in conditions}
    attached = by_type["Attached"]
    # Without an engine that reports, the state of tiers is unknown. That is a consequence and not
    # the cause.
    consequences = (
        {"EnginesCompatible", "TiersHealthy"} if attached.status != "True" or no_reports else set()
    )
    found = [
        by_type[name]
        for name in ("EnginesCompatible", "Attached", "TiersHealthy")
        if name not in consequences or by_type[name].status != "Unknown"
    ]
    later = [each for each in (by_type["UpToDate"], by_type["Tuned"]) if each.status == "False"]
    for status in ("False", "Unknown"):
        for condition in found:
            if condition.status == status:
                return _in_force(condition.reason, f"{condition.type}: {condition.message}")
    if later:
        return _in_force(later[0].reason, f"{later[0].type}: {later[0].message}")
    if attached.reason != Reason.ATTACHED.value:
        return _in_force(attached.reason, attached.message)
    return summary


def _in_force(reason: str, message: str) -> ConditionUpdate:
    return ConditionUpdate("Ready", "True", reason, f"{READY_MESSAGE} {message}")


def _as_starting(pod: PodView) -> PodView:
    return replace(pod, state=PodState.STARTING) if pod.state is PodState.NOT_POLLED else pod


def _counts(policy: KVTierPolicy, plan: ReconcileInput, pods: ObservedPods) -> PodCounts:
    attached = pods.in_state(PodState.ATTACHED)
    number_outdated = len(outdated(policy, attached, plan.structural_hash))
    return PodCounts(
        selected=len(pods.views),
        attached=len(attached),
        current=len(attached) - number_outdated,
        outdated=number_outdated,
        skipped=len(pods.in_state(PodState.SKIPPED)),
        tuned=sum(pod_conditions.is_tuned(pod, plan) for pod in attached),
    )


def _previous_conditions(
    conditions: Sequence[ConditionUpdate], previous: PolicyStatus
) -> list[ConditionUpdate]:
    before = {condition.type: condition for condition in previous.conditions or ()}
    result = []
    for condition in conditions:
        old = before.get(condition.type) if condition.type in REPORTED_CONDITIONS else None
        result.append(
            condition
            if old is None
            else ConditionUpdate(old.type, old.status, old.reason, old.message)
        )
    return result


def _previous_counts(counts: PodCounts, previous: PolicyStatus) -> PodCounts:
    old = previous.pods
    if old is None:
        return counts
    return counts.model_copy(
        update={name: min(getattr(old, name), counts.selected) for name in REPORTED_COUNTS}
    )


def _previous_tiers(tiers: Sequence[TierStatus], previous: PolicyStatus) -> list[TierStatus]:
    before = {tier.name: tier for tier in previous.tiers or ()}
    return [
        before[tier.name].model_copy(update={"claim_name": tier.claim_name})
        if tier.name in before
        else tier
        for tier in tiers
    ]


def _tier_text(tier: TierStatus) -> str:
    if tier.state in (TierState.HEALTHY, TierState.UNKNOWN):
        return tier.name
    return f"{tier.name}({tier.state.value})"


def _first_hits(previous: PolicyStatus, computed: PolicyStatus) -> bool:
    """Whether there are hits after a time without: people test whether tiers work, and a short test
    is over before the next period. That hits stop is written after a period, so this does not write
    more than once a period.
    """
    return not _hits(previous) and bool(_hits(computed))


def _hits(status: PolicyStatus) -> int | None:
    return status.summary.hit_tokens_percent if status.summary is not None else None


def _usage(status: PolicyStatus) -> object:
    tiers = [tuple(getattr(tier, name) for name in USAGE_FIELDS) for tier in status.tiers or ()]
    return tiers, _hits(status)


def _messages(status: PolicyStatus) -> object:
    skipped = [(pod.name, pod.message) for pod in status.skipped_pods or ()]
    return [(each.type, each.message) for each in status.conditions or ()], skipped


def _major(status: PolicyStatus) -> PolicyStatus:
    """The status without the parts that may wait."""
    return _with_messages(_with_usage(status, None), None)


def _with_usage(status: PolicyStatus, source: PolicyStatus | None) -> PolicyStatus:
    """``status`` with the bytes and percentages of ``source``; None: without."""
    source_tiers = {
        tier.name: tier for tier in (source.tiers if source is not None else None) or ()
    }
    empty = TierStatus(name="-")
    tiers = []
    for tier in status.tiers or ():
        other = source_tiers.get(tier.name, empty)
        tiers.append(tier.model_copy(update={name: getattr(other, name) for name in USAGE_FIELDS}))
    summary = status.summary
    if summary is not None:
        hits = _hits(source) if source is not None else None
        summary = summary.model_copy(update={"hit_tokens_percent": hits})
    return status.model_copy(update={"tiers": tiers, "summary": summary})


def _with_messages(status: PolicyStatus, source: PolicyStatus | None) -> PolicyStatus:
    """``status`` with the messages of ``source`` in conditions about pods and in skipped pods;
    None: without.
    """
    messages = {
        each.type: each.message
        for each in (source.conditions if source is not None else None) or ()
    }
    conditions = [
        _with_message(each, messages.get(each.type, ""))
        if each.type in (*POD_CONDITIONS, "Ready")
        else each
        for each in status.conditions or ()
    ]
    skipped_messages = {
        pod.name: pod.message for pod in (source.skipped_pods if source is not None else None) or ()
    }
    skipped = [
        pod.model_copy(update={"message": skipped_messages.get(pod.name)})
        for pod in status.skipped_pods or ()
    ] or None
    return status.model_copy(update={"conditions": conditions, "skipped_pods": skipped})


def _with_message(condition: Condition, message: str) -> Condition:
    return condition.model_copy(update={"message": message})
