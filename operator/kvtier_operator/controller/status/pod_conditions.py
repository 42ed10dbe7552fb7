"""Conditions about pods: Attached, UpToDate, Tuned, EnginesCompatible, TiersHealthy. Pure.

A message contains nothing that changes while the state does not, since a changed message is a
status write.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvtier.config.models import Daemon
from kvtier_operator.api.conditions import Reason
from kvtier_operator.api.engine import Connector
from kvtier_operator.api.policy import KVTierPolicy
from kvtier_operator.api.status import SuspendedOwner, TierState, TierStatus
from kvtier_operator.controller.conditions import ConditionStatus, ConditionUpdate, ReconcileInput
from kvtier_operator.controller.injection_breaker.detectors import InjectionFailure
from kvtier_operator.controller.objects import join_names, owner_text, plural
from kvtier_operator.controller.pods.pod_view import PodState, PodView, mixed_groups
from kvtier_operator.controller.pods.terminating import OverduePod
from kvtier_operator.controller.rollout import NO_ROLLOUT, RolloutProgress, outdated

NO_PODS_MESSAGE = "The selector matches no running pod."
NOT_SERVED = {
    "PoolMissing": Reason.POOL_MISSING,
    "TierNotServed": Reason.TIER_NOT_SERVED,
    "KeyMissing": Reason.KEY_MISSING,
    "KeyInvalid": Reason.KEY_INVALID,
}
"""Conditions of tierd about its tiers."""
LIMITED_BY_DISK = {
    "MinFreeReached": Reason.MIN_FREE_REACHED,
    "CapacityExceedsDisk": Reason.CAPACITY_EXCEEDS_DISK,
}
"""Conditions of tierd about the sizes of file systems, the most severe first."""
ENGINE_CONDITIONS = "Engine"
"""Prefix of the conditions of tierd about an engine that tierd or the connector cannot serve."""


@dataclass(frozen=True, slots=True)
class ObservedPods:
    """What a reconcile found out about a policy's pods. ``views``: pods that are not terminating,
    sorted by name. ``rejections``: of pods by the API server, which injection did not cause.
    """

    views: Sequence[PodView] = ()
    failures: Sequence[InjectionFailure] = ()
    suspended: Sequence[SuspendedOwner] = ()
    overdue: Sequence[OverduePod] = ()
    rollout: RolloutProgress = NO_ROLLOUT
    rejections: Sequence[str] = ()

    def in_state(self, state: PodState) -> list[PodView]:
        """The pods in that state."""
        return [pod for pod in self.views if pod.state is state]


def attached(policy: KVTierPolicy, plan: ReconcileInput, pods: ObservedPods) -> ConditionUpdate:
    """Whether the engines of all pods have attached. Problems come first, the most severe first."""
    number_attached = len(pods.in_state(PodState.ATTACHED))
    progress = f"{number_attached} of {plural(len(pods.views), 'pod')} attached"

    def answer(status: ConditionStatus, reason: str, message: str) -> ConditionUpdate:
        return ConditionUpdate("Attached", status, reason, message)

    if pods.failures:
        first = pods.failures[0]
        more = f" (and {len(pods.failures) - 1} more)" if len(pods.failures) > 1 else ""
        consequence = (
            f"; new pods of {owner_text(first.owner)} get no tiers"
            if first.owner is not None
            else ""
        )
        verb = "prevents" if first.is_certain else "may prevent"
        message = f"Injection {verb} a pod from starting: {first.message}{more}{consequence}."
        return answer("False", first.reason.value, message)
    if pods.suspended:
        entry = pods.suspended[0]
        owners = join_names(
            f"{each.kind} {each.name} until {each.until}" for each in pods.suspended
        )
        cause = (
            "The API server rejected pods with tiers"
            if entry.reason == Reason.REFUSED.value
            else "Injection prevented pods from starting"
        )
        message = f"{cause}, so new pods get no tiers: {owners}. {progress}."
        return answer("False", entry.reason or Reason.CONTAINER_NOT_STARTED.value, message)
    if not pods.views:
        if plan.governed_by_others:
            return answer("False", Reason.CONFLICTED.value, _conflict(plan))
        rejected = "".join(f" {text[:1].upper()}{text[1:]}." for text in pods.rejections[:1])
        return answer("Unknown", Reason.NO_PODS.value, NO_PODS_MESSAGE + rejected)
    for state in (PodState.ENGINE_CRASHED, PodState.NOT_ATTACHED, PodState.TIERD_FAILED):
        failed = pods.in_state(state)
        if failed:
            message = f"{progress}; {_names(failed)}: {failed[0].message}."
            return answer("False", failed[0].reason, message)
    skipped = pods.in_state(PodState.SKIPPED)
    if skipped:
        reason = _most_common(pod.reason for pod in skipped)
        same_reason = [pod for pod in skipped if pod.reason == reason]
        others = len(skipped) - len(same_reason)
        more = f" ({others} more skipped for other reasons)" if others else ""
        message = f"{progress}; {_names(same_reason)}: {same_reason[0].message}{more}."
        return answer("False", reason, message)
    unreachable = pods.in_state(PodState.UNREACHABLE)
    if unreachable:
        message = f"{progress}; {_names(unreachable)} cannot be polled: {unreachable[0].message}."
        return answer("Unknown", Reason.UNREACHABLE.value, message)
    starting = [pod for pod in pods.views if pod.state is not PodState.ATTACHED]
    if len(starting) == len(pods.views):
        message = f"{progress}; {_names(starting)}: {starting[0].message}."
        return answer("False", Reason.STARTING.value, message)
    caveat = _caveat(policy)
    if starting:
        message = f"{progress}; starting: {_names(starting)}.{caveat}"
        return answer("True", Reason.STARTING.value, message)
    if plan.governed_by_others:
        message = f"{progress}. {_conflict(plan)}{caveat}"
        return answer("True", Reason.CONFLICTED.value, message)
    return answer("True", Reason.ATTACHED.value, f"{progress}.{caveat}")


def _caveat(policy: KVTierPolicy) -> str:
    """A warning if the engine's own container mounts the storage."""
    engine = policy.spec.engine
    mounts = any(tier.memory is None for tier in policy.spec.tiers)
    if not mounts or (engine.connector is Connector.KVTIER and engine.daemon is Daemon.SIDECAR):
        return ""
    return (
        " The engine's container mounts the tiers, "
        "so a hanging mount can prevent it from terminating."
    )


def _conflict(plan: ReconcileInput) -> str:
    others = join_names(plan.governed_by_others)
    number = len(plan.governed_by_others)
    verb = "is" if number == 1 else "are"
    return (
        f"{plural(number, 'pod')} that the selector matches {verb} governed "
        f"by an older policy: {others}."
    )


def up_to_date(policy: KVTierPolicy, plan: ReconcileInput, pods: ObservedPods) -> ConditionUpdate:
    """Whether every pod with tiers has the policy's structure."""
    with_tiers = [pod for pod in pods.views if pod.has_tiers]
    mixed = mixed_groups(pods.views)
    if mixed:
        message = f"Pods of a group must have the same structure: {mixed[0]}. Restart the group."
        return ConditionUpdate("UpToDate", "False", Reason.MIXED_GROUP.value, message)
    if not with_tiers:
        return ConditionUpdate("UpToDate", "Unknown", Reason.NO_PODS.value, "No pod has tiers.")
    late = outdated(policy, pods.views, plan.structural_hash)
    number = plural(len(with_tiers), "pod", "have")
    old = f"{len(late)} of {number} an older structure than {plan.structural_hash}"
    rollout = pods.rollout
    if rollout.in_progress:
        waiting = f"; {plural(rollout.waiting, 'workload', 'wait')}" if rollout.waiting else ""
        message = f"Restarting {rollout.in_progress}{waiting}."
        return ConditionUpdate("UpToDate", "False", Reason.ROLLING_OUT.value, message)
    if rollout.restart is not None:
        message = f"Restarting {rollout.restart}."
        return ConditionUpdate("UpToDate", "False", Reason.ROLLING_OUT.value, message)
    if not late:
        message = f"Every pod with tiers has structure {plan.structural_hash}."
        return ConditionUpdate("UpToDate", "True", Reason.CURRENT.value, message)
    if rollout.unsupported:
        first = rollout.unsupported[0]
        message = (
            f"{old}; KVTier does not restart {first.owner}: {first.reason}. Restart it manually."
        )
        return ConditionUpdate("UpToDate", "False", Reason.RESTART_UNSUPPORTED.value, message)
    if rollout.paused:
        message = f"{old}. Restarts are paused: {rollout.paused}."
        return ConditionUpdate("UpToDate", "False", Reason.OUTDATED.value, message)
    if rollout.ineffective:
        message = f"{old}, although {join_names(rollout.ineffective)} was restarted for it."
        return ConditionUpdate("UpToDate", "False", Reason.OUTDATED.value, message)
    return ConditionUpdate(
        "UpToDate",
        "False",
        Reason.OUTDATED.value,
        f"{old}: {_names(late)}. Replace the pods to update them.",
    )


def tuned(plan: ReconcileInput, pods: ObservedPods) -> ConditionUpdate:
    """Whether attached pods have applied the live values in force."""
    attached_pods = pods.in_state(PodState.ATTACHED)
    if not attached_pods:
        return ConditionUpdate("Tuned", "Unknown", Reason.NO_PODS.value, "No pod is attached.")
    reporting = [pod for pod in attached_pods if not pod.cannot_report]
    if not reporting:
        message = "The connector of these pods does not apply live values."
        return ConditionUpdate("Tuned", "Unknown", Reason.NOT_REPORTED.value, message)
    rejecting = [pod for pod in reporting if pod.report is not None and pod.report.live_errors]
    if rejecting and rejecting[0].report is not None:
        message = f"{_names(rejecting)} rejected live values: {rejecting[0].report.live_errors[0]}"
        return ConditionUpdate("Tuned", "False", Reason.LIVE_VALUES_REFUSED.value, message)
    done = [pod for pod in reporting if is_tuned(pod, plan)]
    number = plural(len(reporting), "attached pod", "have")
    progress = f"{len(done)} of {number} applied live generation {plan.live_generation}"
    if len(done) < len(reporting):
        message = f"{progress}; the kubelet updates mounted ConfigMaps within about two minutes."
        return ConditionUpdate("Tuned", "False", Reason.APPLYING.value, message)
    return ConditionUpdate("Tuned", "True", Reason.APPLIED.value, f"{progress}.")


def is_tuned(pod: PodView, plan: ReconcileInput) -> bool:
    """Whether a pod reports that it has applied the live values in force."""
    return pod.report is not None and pod.report.applied_generation == plan.live_generation


def engines_compatible(pods: ObservedPods) -> ConditionUpdate:
    """Whether tierd and the engines are compatible."""
    kind = "EnginesCompatible"
    rejecting = [
        pod
        for pod in pods.in_state(PodState.NOT_ATTACHED)
        if pod.report is not None and pod.report.sessions_refused
    ]
    for pod in pods.views:
        for condition, message in pod.report.conditions if pod.report is not None else ():
            if condition.startswith(ENGINE_CONDITIONS):
                return ConditionUpdate(
                    kind, "False", Reason.ENGINE_UNSUPPORTED.value, f"{pod.name}: {message}"
                )
    if rejecting:
        message = f"{_names(rejecting)}: {rejecting[0].message}."
        return ConditionUpdate(kind, "False", Reason.SESSIONS_REFUSED.value, message)
    if not pods.views:
        return ConditionUpdate(kind, "Unknown", Reason.NO_PODS.value, NO_PODS_MESSAGE)
    if not pods.in_state(PodState.ATTACHED):
        return ConditionUpdate(
            kind, "Unknown", Reason.NOT_REPORTED.value, "No engine has attached yet."
        )
    engines = {
        engine for pod in pods.views if pod.report is not None for engine in pod.report.engines
    }
    versions = f": {join_names(engines)}" if engines else ""
    message = f"Every engine that attached is compatible{versions}."
    return ConditionUpdate(kind, "True", Reason.COMPATIBLE.value, message)


def tiers_healthy(pods: ObservedPods, tiers: Sequence[TierStatus]) -> ConditionUpdate:
    """Whether all tiers of all pods are healthy, and none prevents a pod from terminating."""
    kind = "TiersHealthy"
    if pods.overdue:
        more = f" (and {len(pods.overdue) - 1} more)" if len(pods.overdue) > 1 else ""
        return ConditionUpdate(
            kind, "False", Reason.STUCK_TERMINATING.value, f"{pods.overdue[0].message}{more}."
        )
    for pod in pods.views:
        for condition, message in pod.report.conditions if pod.report is not None else ():
            if condition in NOT_SERVED:
                return ConditionUpdate(
                    kind, "False", NOT_SERVED[condition].value, f"{pod.name}: {message}"
                )
    for state, reason in (
        (TierState.BREAKER_OPEN, Reason.BREAKER_OPEN),
        (TierState.DEGRADED, Reason.DEGRADED),
    ):
        unhealthy = [tier.name for tier in tiers if tier.state is state]
        if unhealthy:
            message = _unhealthy(pods.views, state, unhealthy)
            return ConditionUpdate(kind, "False", reason.value, message)
    if not pods.views:
        return ConditionUpdate(kind, "Unknown", Reason.NO_PODS.value, NO_PODS_MESSAGE)
    limited = _limited_by_disk(pods.views)
    if limited is not None:
        return ConditionUpdate(kind, "False", *limited)
    unknown = [tier.name for tier in tiers if tier.state is TierState.UNKNOWN]
    if unknown:
        return ConditionUpdate(
            kind,
            "Unknown",
            Reason.NOT_REPORTED.value,
            f"No pod reports the state of {join_names(unknown)}.",
        )
    return ConditionUpdate(
        kind, "True", Reason.HEALTHY.value, "Every tier of every reporting pod is healthy."
    )


def _limited_by_disk(views: Sequence[PodView]) -> tuple[str, str] | None:
    """Reason and message if a disk has less room than its tier's capacity; None otherwise."""
    for condition, reason in LIMITED_BY_DISK.items():
        for pod in views:
            for kind, message in pod.report.conditions if pod.report is not None else ():
                if kind == condition:
                    return reason.value, f"{pod.name}: {message}"
    return None


def _unhealthy(pods: Sequence[PodView], state: TierState, tiers: Sequence[str]) -> str:
    affected = [
        pod
        for pod in pods
        if pod.report is not None
        and any(tier.state is state and tier.name in tiers for tier in pod.report.tiers)
    ]
    errors = [
        tier.last_error
        for pod in affected
        for tier in (pod.report.tiers if pod.report is not None else ())
        if tier.state is state and tier.last_error
    ]
    error = f": {errors[0]}" if errors else ""
    return (
        f"{join_names(tiers)} is {state.value} in {_names(affected)}{error}. "
        "Engines recompute what the tier cannot serve."
    )


def _names(pods: Sequence[PodView]) -> str:
    return join_names(pod.name for pod in pods)


def _most_common(words: Iterable[str]) -> str:
    counts = Counter(words)
    return min(counts, key=lambda word: (-counts[word], word))
