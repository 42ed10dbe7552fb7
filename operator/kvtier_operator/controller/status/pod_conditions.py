"""Conditions that are about pods: Attached, UpToDate, Tuned, EnginesCompatible, TiersHealthy. Pure.

Messages hold nothing that changes while the state does not, since a changed message is a written status.
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
from kvtier_operator.controller.injection_breaker.detectors import InjectionFailure
from kvtier_operator.controller.objects import listed, plural
from kvtier_operator.controller.pods.pod_view import PodState, PodView, mixed_groups
from kvtier_operator.controller.pods.terminating import Overdue
from kvtier_operator.controller.rollout import NO_ROLLOUT, Rollout, outdated
from kvtier_operator.controller.status.conditions import ConditionUpdate, PlanFacts, Verdict

NO_PODS_MESSAGE = "The selector matches no running pod."
NOT_SERVED = {"PoolMissing": Reason.POOL_MISSING, "TierNotServed": Reason.TIER_NOT_SERVED}
"""Conditions of tierd that are about its tiers."""
ENGINE_CONDITIONS = "Engine"
"""Conditions of tierd whose type begins so are about an engine that it, or the connector, cannot serve."""


@dataclass(frozen=True, slots=True)
class PodFacts:
    """Everything that is known of a policy's pods. ``pods``: those that live, in the order of their names."""

    pods: Sequence[PodView] = ()
    troubles: Sequence[InjectionFailure] = ()
    suspended: Sequence[SuspendedOwner] = ()
    overdue: Sequence[Overdue] = ()
    rollout: Rollout = NO_ROLLOUT

    def in_state(self, state: PodState) -> list[PodView]:
        """Those pods."""
        return [pod for pod in self.pods if pod.state is state]


def attached(policy: KVTierPolicy, facts: PlanFacts, found: PodFacts) -> ConditionUpdate:
    """Whether pods have tiers. What is wrong comes first, the gravest first."""
    has = f"{len(found.in_state(PodState.ATTACHED))} of {plural(len(found.pods), 'pod')} attached"

    def answer(status: Verdict, reason: str, message: str) -> ConditionUpdate:
        return ConditionUpdate("Attached", status, reason, message)

    if found.troubles:
        first = found.troubles[0]
        more = f" (and {len(found.troubles) - 1} more)" if len(found.troubles) > 1 else ""
        left = f"; the next pods of {first.owner} are left alone" if first.owner is not None else ""
        return answer(
            "False",
            first.reason.value,
            f"Attaching keeps a pod from starting: {first.message}{more}{left}.",
        )
    if found.suspended:
        entry = found.suspended[0]
        whom = listed(f"{each.kind} {each.name} until {each.until}" for each in found.suspended)
        message = f"Attaching kept pods from starting, so new ones are left alone: {whom}. {has}."
        return answer("False", entry.reason or Reason.CONTAINER_NOT_STARTED.value, message)
    if not found.pods:
        if facts.conflicted:
            return answer("False", Reason.CONFLICTED.value, _conflict(facts))
        return answer("Unknown", Reason.NO_PODS.value, NO_PODS_MESSAGE)
    for state in (PodState.ENGINE_CRASHED, PodState.NOT_ATTACHED, PodState.TIERD_FAILED):
        pods = found.in_state(state)
        if pods:
            return answer("False", pods[0].reason, f"{has}; {_names(pods)}: {pods[0].message}.")
    skipped = found.in_state(PodState.SKIPPED)
    if skipped:
        reason = _most_common(pod.reason for pod in skipped)
        those = [pod for pod in skipped if pod.reason == reason]
        others = (
            f" ({len(skipped) - len(those)} more were left alone for other reasons)"
            if len(skipped) > len(those)
            else ""
        )
        return answer("False", reason, f"{has}; {_names(those)}: {those[0].message}{others}.")
    silent = found.in_state(PodState.UNREACHABLE)
    if silent:
        return answer(
            "Unknown",
            Reason.UNREACHABLE.value,
            f"{has}; {_names(silent)} cannot be asked: {silent[0].message}.",
        )
    starting = [pod for pod in found.pods if pod.state is not PodState.ATTACHED]
    if len(starting) == len(found.pods):
        return answer(
            "False", Reason.STARTING.value, f"{has}; {_names(starting)}: {starting[0].message}."
        )
    caveat = _caveat(policy)
    if starting:
        return answer(
            "True", Reason.STARTING.value, f"{has}; starting: {_names(starting)}.{caveat}"
        )
    if facts.conflicted:
        return answer("True", Reason.CONFLICTED.value, f"{has}. {_conflict(facts)}{caveat}")
    return answer("True", Reason.ATTACHED.value, f"{has}.{caveat}")


def _caveat(policy: KVTierPolicy) -> str:
    """What does not hold where the engine's own container mounts the storage."""
    engine = policy.spec.engine
    mounts = any(tier.memory is None for tier in policy.spec.tiers)
    if not mounts or (engine.connector is Connector.KVTIER and engine.daemon is Daemon.SIDECAR):
        return ""
    return " The engine's own container mounts the tiers, so a mount that hangs can keep it from ending."


def _conflict(facts: PlanFacts) -> str:
    others = listed(name for _, name in facts.conflicted)
    belonging = "belongs" if len(facts.conflicted) == 1 else "belong"
    return f"{plural(len(facts.conflicted), 'pod')} that the selector matches {belonging} to an older policy: {others}."


def up_to_date(policy: KVTierPolicy, facts: PlanFacts, found: PodFacts) -> ConditionUpdate:
    """Whether every pod with tiers has the policy's structure."""
    given = [pod for pod in found.pods if pod.injected]
    mixed = mixed_groups(found.pods)
    if mixed:
        message = (
            f"Pods of one group differ, which KVTier cannot serve: {mixed[0]}. Restart the group."
        )
        return ConditionUpdate("UpToDate", "False", Reason.MIXED_GROUP.value, message)
    if not given:
        return ConditionUpdate("UpToDate", "Unknown", Reason.NO_PODS.value, "No pod has tiers.")
    late = outdated(policy, found.pods, facts.structural_hash)
    old = f"{len(late)} of {plural(len(given), 'pod', 'have')} an older structure than {facts.structural_hash}"
    rollout = found.rollout
    if rollout.under_way:
        left = f"; {plural(rollout.remaining, 'workload', 'wait')}" if rollout.remaining else ""
        return ConditionUpdate(
            "UpToDate", "False", Reason.ROLLING_OUT.value, f"Restarting, {rollout.under_way}{left}."
        )
    if rollout.restart is not None:
        return ConditionUpdate(
            "UpToDate", "False", Reason.ROLLING_OUT.value, f"Restarting {rollout.restart}."
        )
    if not late:
        return ConditionUpdate(
            "UpToDate",
            "True",
            Reason.CURRENT.value,
            f"Every pod with tiers has structure {facts.structural_hash}.",
        )
    if rollout.unsupported:
        whom, why = rollout.unsupported[0]
        message = f"{old}; {whom} is not restarted: {why}. Restart it yourself."
        return ConditionUpdate("UpToDate", "False", Reason.RESTART_UNSUPPORTED.value, message)
    if rollout.held:
        message = f"{old}. Nothing is restarted while {rollout.held}."
        return ConditionUpdate("UpToDate", "False", Reason.OUTDATED.value, message)
    if rollout.tried:
        message = f"{old}, although {listed(rollout.tried)} was restarted for it."
        return ConditionUpdate("UpToDate", "False", Reason.OUTDATED.value, message)
    return ConditionUpdate(
        "UpToDate",
        "False",
        Reason.OUTDATED.value,
        f"{old}: {_names(late)}. They change when they are replaced.",
    )


def tuned(facts: PlanFacts, found: PodFacts) -> ConditionUpdate:
    """Whether attached pods have applied the live values in force."""
    pods = found.in_state(PodState.ATTACHED)
    if not pods:
        return ConditionUpdate("Tuned", "Unknown", Reason.NO_PODS.value, "No pod is attached.")
    pods = [pod for pod in pods if not pod.silent]
    if not pods:
        message = "The connector of these pods follows no live values."
        return ConditionUpdate("Tuned", "Unknown", Reason.NOT_REPORTED.value, message)
    refusing = [pod for pod in pods if pod.report is not None and pod.report.live_refusals]
    if refusing and refusing[0].report is not None:
        message = f"{_names(refusing)} refused live values: {refusing[0].report.live_refusals[0]}"
        return ConditionUpdate("Tuned", "False", Reason.LIVE_VALUES_REFUSED.value, message)
    done = [pod for pod in pods if is_tuned(pod, facts)]
    text = f"{len(done)} of {plural(len(pods), 'attached pod', 'have')} applied live generation {facts.live_generation}"
    if len(done) < len(pods):
        message = f"{text}; a kubelet passes changes on within about two minutes."
        return ConditionUpdate("Tuned", "False", Reason.APPLYING.value, message)
    return ConditionUpdate("Tuned", "True", Reason.APPLIED.value, f"{text}.")


def is_tuned(pod: PodView, facts: PlanFacts) -> bool:
    """Whether a pod says that it has applied the live values in force."""
    return pod.report is not None and pod.report.applied_generation == facts.live_generation


def engines_compatible(found: PodFacts) -> ConditionUpdate:
    """Whether tierd and the engines can work with each other."""
    kind = "EnginesCompatible"
    refused = [
        pod
        for pod in found.in_state(PodState.NOT_ATTACHED)
        if pod.report is not None and pod.report.sessions_refused
    ]
    for pod in found.pods:
        for condition, message in pod.report.conditions if pod.report is not None else ():
            if condition.startswith(ENGINE_CONDITIONS):
                return ConditionUpdate(
                    kind, "False", Reason.ENGINE_UNSUPPORTED.value, f"{pod.name}: {message}"
                )
    if refused:
        message = f"{_names(refused)}: {refused[0].message}."
        return ConditionUpdate(kind, "False", Reason.SESSIONS_REFUSED.value, message)
    if not found.pods:
        return ConditionUpdate(kind, "Unknown", Reason.NO_PODS.value, NO_PODS_MESSAGE)
    if not found.in_state(PodState.ATTACHED):
        return ConditionUpdate(
            kind, "Unknown", Reason.NOT_REPORTED.value, "No engine has attached yet."
        )
    engines = {
        engine for pod in found.pods if pod.report is not None for engine in pod.report.engines
    }
    which = f": {listed(engines)}" if engines else ""
    return ConditionUpdate(
        kind, "True", Reason.COMPATIBLE.value, f"Every engine that attached was accepted{which}."
    )


def tiers_healthy(found: PodFacts, tiers: Sequence[TierStatus]) -> ConditionUpdate:
    """Whether all tiers are well everywhere, and whether one keeps a pod from ending."""
    kind = "TiersHealthy"
    if found.overdue:
        more = f" (and {len(found.overdue) - 1} more)" if len(found.overdue) > 1 else ""
        return ConditionUpdate(
            kind, "False", Reason.STUCK_TERMINATING.value, f"{found.overdue[0].message}{more}."
        )
    for pod in found.pods:
        for condition, message in pod.report.conditions if pod.report is not None else ():
            if condition in NOT_SERVED:
                return ConditionUpdate(
                    kind, "False", NOT_SERVED[condition].value, f"{pod.name}: {message}"
                )
    for state, reason in (
        (TierState.BREAKER_OPEN, Reason.BREAKER_OPEN),
        (TierState.DEGRADED, Reason.DEGRADED),
    ):
        ill = [tier.name for tier in tiers if tier.state is state]
        if ill:
            return ConditionUpdate(kind, "False", reason.value, _ill(found.pods, state, ill))
    if not found.pods:
        return ConditionUpdate(kind, "Unknown", Reason.NO_PODS.value, NO_PODS_MESSAGE)
    unknown = [tier.name for tier in tiers if tier.state is TierState.UNKNOWN]
    if unknown:
        return ConditionUpdate(
            kind, "Unknown", Reason.NOT_REPORTED.value, f"No pod says how {listed(unknown)} is."
        )
    return ConditionUpdate(
        kind, "True", Reason.HEALTHY.value, "Every tier of every pod that answers is healthy."
    )


def _ill(pods: Sequence[PodView], state: TierState, tiers: Sequence[str]) -> str:
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
    why = f": {errors[0]}" if errors else ""
    return f"{listed(tiers)} is {state.value} in {_names(affected)}{why}. Its hits are recomputed meanwhile."


def _names(pods: Sequence[PodView]) -> str:
    return listed(pod.name for pod in pods)


def _most_common(words: Iterable[str]) -> str:
    counts = Counter(words)
    return min(counts, key=lambda word: (-counts[word], word))
