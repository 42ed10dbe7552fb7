"""Reconciles a policy's pods: status and Events from their reports, the injection breaker, and
workload restarts.

``PodReconciler.reconcile`` runs once per reconcile of the policy, after the plan was applied. It is
level-triggered: it decides from the objects, from the status in force and from the pods' last
reports. The history that it keeps of each policy only saves work and status writes; after a restart
of the operator it is rebuilt.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from kvtier_operator.api.conditions import EventReason, Reason
from kvtier_operator.api.pods import Pod
from kvtier_operator.api.policy import KVTierPolicy
from kvtier_operator.api.settings import AttachMode, RolloutStrategy
from kvtier_operator.api.status import PolicyStatus, SuspendedOwner
from kvtier_operator.controller import objects
from kvtier_operator.controller.conditions import ReconcileInput
from kvtier_operator.controller.events import (
    NORMAL,
    WARNING,
    Event,
    EventRecorder,
    pod_events,
    pod_reference,
    policy_events,
    policy_reference,
)
from kvtier_operator.controller.injection_breaker.breaker import (
    FailureDetector,
    deletable_pods,
    suspended_owners,
)
from kvtier_operator.controller.injection_breaker.detectors import InjectionFailure
from kvtier_operator.controller.injection_breaker.rejections import RejectionMemory
from kvtier_operator.controller.lookups import ClusterAccess
from kvtier_operator.controller.pods import pod_view, terminating
from kvtier_operator.controller.pods.pod_view import PodState, PodView
from kvtier_operator.controller.pods.poll import PodPoller, poll_target
from kvtier_operator.controller.rollout import (
    RECHECK_SECONDS,
    RolloutProgress,
    plan_rollout,
    restart_patch,
)
from kvtier_operator.controller.status.compute import (
    StatusInputs,
    compute_status,
    defer_minor_changes,
)
from kvtier_operator.controller.status.pod_conditions import ObservedPods
from kvtier_operator.kube.queue import Key
from kvtier_operator.kube.resources import PODS, ApiError
from kvtier_operator.rbac import ROLLOUT
from kvtier_operator.settings import Settings

logger = logging.getLogger(__name__)
MAX_DELETIONS = 8
"""Blocked pods that one reconcile deletes."""
RETRY_SECONDS = 5.0
"""After a deletion or a restart that the API server rejected."""


@dataclass(frozen=True, slots=True)
class PodReconcileResult:
    """``status``: the status to write if it differs from the one in force. ``wake_seconds``: until
    the policy needs another reconcile without any event; None: at the next resync.
    """

    status: PolicyStatus
    wake_seconds: float | None = None


@dataclass(slots=True)
class _PolicyHistory:
    """What is remembered of a policy between reconciles.

    ``written_at``: when the status last changed (seconds since 1970; None: not known).
    ``generation`` and ``changed_at``: the newest generation, and since when; 0 if it was in force
    when this process started. ``pod_states``: by uid, as of the last reconcile; None before the
    first.
    """

    written_at: float | None = None
    generation: int | None = None
    rejections: RejectionMemory = field(default_factory=RejectionMemory)
    pod_states: dict[str, str] | None = None

    @property
    def changed_at(self) -> float:
        """When the policy last changed, in seconds since 1970."""
        return self.rejections.changed_at

    def record_generation(self, generation: int, observed: int | None, now: float) -> None:
        """``observed``: the generation that the status in force is about."""
        if self.generation is None:
            self.rejections.record_change(0.0 if observed in (None, generation) else now)
        elif self.generation != generation:
            self.rejections.record_change(now)
        self.generation = generation

    def record_pod_states(self, views: Sequence[PodView]) -> None:
        """Keeps the last known state of pods that have not been polled since."""
        not_polled = {view.uid for view in views if view.state is PodState.NOT_POLLED}
        known = {uid: each for uid, each in (self.pod_states or {}).items() if uid in not_polled}
        states = {view.uid: view.state.value for view in views if view.uid not in not_polled}
        self.pod_states = {**known, **states}


class PodReconciler:
    """For one event loop. ``clock``: seconds since 1970."""

    def __init__(
        self,
        cluster: ClusterAccess,
        settings: Settings,
        poller: PodPoller,
        recorder: EventRecorder,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.cluster = cluster
        self.settings = settings
        self.poller = poller
        self.recorder = recorder
        self._clock = clock
        self._histories: dict[Key, _PolicyHistory] = {}

    async def reconcile(self, policy: KVTierPolicy, inputs: ReconcileInput) -> PodReconcileResult:
        """Reconciles the pods of ``policy`` once. ``policy.status`` is the status in force.

        Posts Events, deletes blocked pods and restarts workloads. A call that fails is logged and
        retried after ``wake_seconds``; ``ApiError`` is not raised. The caller writes the returned
        status: bytes and percentages in it are those in force until they may change.
        """
        key = (policy.namespace, policy.metadata.name)
        history = self._histories.setdefault(key, _PolicyHistory())
        return await _PodReconcile(self, history, policy, inputs, self._clock()).run()

    def forget(self, key: Key) -> None:
        """Drops what is known of a policy, because it is gone."""
        self._histories.pop(key, None)
        self.poller.forget(key)


@dataclass(slots=True)
class _PodReconcile:
    """One reconcile of one policy's pods: its inputs, and the Events and wake-ups that its steps
    collect.
    """

    deps: PodReconciler
    history: _PolicyHistory
    policy: KVTierPolicy
    inputs: ReconcileInput
    now: float
    wakes: list[float] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)

    async def run(self) -> PodReconcileResult:
        previous, generation = self.policy.status, self.policy.metadata.generation or 0
        observed = previous.observed_generation if previous is not None else None
        self.history.record_generation(generation, observed, self.now)
        pods = sorted(
            (pod for pod in self.inputs.pods if not pod.has_ended),
            key=lambda pod: pod.metadata.name,
        )
        self._set_poll_targets(pods)
        views = await self._views([pod for pod in pods if not pod.is_terminating])
        overdue = self._overdue_pods(pods)
        # A changed policy ends all suspensions: it may have fixed the cause.
        suspended_now = (
            list(previous.suspended_owners or ())
            if previous is not None and observed == generation
            else []
        )
        cleared = set(self.history.rejections.cleared)
        failures = await FailureDetector(
            self.deps.cluster,
            self.deps.settings,
            self.policy,
            self.inputs,
            self.now,
            self.history.rejections,
        ).detect(suspended_now)
        suspended_now = self._without_cleared(suspended_now, cleared)
        current = [each for each in failures if not each.predates(self.history.changed_at)]
        suspended = suspended_owners(self.policy, suspended_now, current, self.now)
        await self._delete_blocked_pods(suspended_now, failures)
        rollout = await self._roll_out(views, blocked=bool(failures or suspended))
        rejections = [each.text for each in self.history.rejections.cleared.values()]
        observed_pods = ObservedPods(views, failures, suspended, overdue, rollout, rejections)
        status = self._status(observed_pods)
        self._collect_events(observed_pods, status)
        await self.deps.recorder.post(self.events, self.now)
        self._schedule(pods, observed_pods)
        return PodReconcileResult(status, min(self.wakes, default=None))

    def _without_cleared(
        self, suspended: Sequence[SuspendedOwner], before: Collection[str]
    ) -> list[SuspendedOwner]:
        """Ends the suspension of owners whose pods were rejected without tiers too. ``before``:
        those that were known.
        """
        cleared = self.history.rejections.cleared
        for entry in suspended:
            if entry.uid in cleared and entry.uid not in before:
                message = f"injection resumes: {cleared[entry.uid].text}"
                self._policy_event(NORMAL, EventReason.RESUMED.value, message)
        return [entry for entry in suspended if entry.uid not in cleared]

    def _set_poll_targets(self, pods: Sequence[Pod]) -> None:
        """Terminating pods are polled too: their last report says which mount they may hang in."""
        polled = [
            pod
            for pod in pods
            if (objects.is_injected(pod) and objects.has_tierd(pod))
            or pod_view.mounts_config_maps(self.policy, pod)
        ]
        targets = [target for target in map(poll_target, polled) if target is not None]
        key = (self.policy.namespace, self.policy.metadata.name)
        self.deps.poller.set_targets(key, targets, self.inputs.token)

    async def _views(self, pods: Sequence[Pod]) -> list[PodView]:
        enabled: bool | None = None
        if self.policy.spec.attach.mode is AttachMode.WEBHOOK and not all(
            map(objects.is_injected, pods)
        ):
            enabled = await self.deps.cluster.lookups.injection_enabled(self.policy.namespace)
        last_report = self.deps.poller.last_report
        return [
            pod_view.view(self.policy, pod, last_report(pod.metadata.uid), self.now, enabled)
            for pod in pods
        ]

    def _overdue_pods(self, pods: Sequence[Pod]) -> list[terminating.OverduePod]:
        tiers = [each.key for tier in self.policy.spec.tiers for each in tier.volumes]
        overdue = []
        for pod in pods:
            report = self.deps.poller.last_report(pod.metadata.uid).report
            found = terminating.overdue_pod(pod, report, tiers, self.now)
            if found is not None:
                overdue.append(found)
                self._pod_warning(pod, Reason.STUCK_TERMINATING.value, found.message)
        return overdue

    async def _delete_blocked_pods(
        self, suspended: Iterable[SuspendedOwner], failures: Sequence[InjectionFailure]
    ) -> None:
        """Deletes blocked pods whose replacements will not be injected the same way."""
        due, wake = deletable_pods(
            self.policy, suspended, failures, self.now, self.history.changed_at
        )
        if wake is not None:
            self.wakes.append(wake)
        for failure in due[:MAX_DELETIONS]:
            if failure.pod is None:
                continue
            metadata = failure.pod.metadata
            try:
                await self.deps.cluster.client.delete(
                    PODS,
                    metadata.namespace,
                    metadata.name,
                    uid=metadata.uid,
                    resource_version=metadata.resource_version,
                )
            except ApiError as error:
                logger.warning("could not delete blocked pod %s: %s", metadata.name, error)
                self.wakes.append(RETRY_SECONDS)
                continue
            logger.warning(
                "deleted pod %s: injection prevented it from starting: %s",
                metadata.name,
                failure.message,
            )
            self._pod_warning(
                failure.pod,
                EventReason.STUCK_POD_DELETED.value,
                f"Deleted, so that its owner replaces it: {failure.message}",
            )
        if len(due) > MAX_DELETIONS:
            self.wakes.append(1.0)

    async def _roll_out(self, views: Sequence[PodView], blocked: bool) -> RolloutProgress:
        restarts = self.policy.spec.rollout.strategy is RolloutStrategy.RESTART_WORKLOADS
        if restarts and not self.deps.settings.rollout.enabled:
            return RolloutProgress(paused=f"{ROLLOUT} is false in the values of the chart")
        client, cache = self.deps.cluster.client, self.deps.cluster.cache
        namespace, structural_hash = self.policy.namespace, self.inputs.structural_hash
        rollout = plan_rollout(
            self.policy,
            views,
            structural_hash,
            lambda kind, name: cache.get(kind, namespace, name),
            self._rollout_paused(blocked),
        )
        if rollout.in_progress:
            self.wakes.append(RECHECK_SECONDS)
        workload = rollout.restart
        if workload is None:
            return rollout
        patch = restart_patch(workload, structural_hash)
        try:
            await client.patch(workload.kind, namespace, objects.name(workload.body), patch)
        except ApiError as error:
            logger.warning("could not restart %s: %s", workload, error)
            self.wakes.append(RETRY_SECONDS)
            return rollout
        self.wakes.append(RECHECK_SECONDS)
        message = f"restarted {workload} for structure {structural_hash}"
        logger.info("%s", message)
        self._policy_event(NORMAL, EventReason.WORKLOAD_RESTARTED.value, message)
        return rollout

    def _rollout_paused(self, blocked: bool) -> str:
        """Why no workload may be restarted; empty: it may."""
        if not self.inputs.accepted:
            return "the policy is not accepted"
        if any(
            each.type == "StorageReady" and each.status == "False"
            for each in self.inputs.conditions
        ):
            return "StorageReady is False"
        return "injection prevents pods from starting" if blocked else ""

    def _status(self, pods: ObservedPods) -> PolicyStatus:
        previous = self.policy.status
        computed = compute_status(self.policy, StatusInputs(self.inputs, pods, previous, self.now))
        if self.history.written_at is None:
            self.history.written_at = self.now
        status, wake = defer_minor_changes(
            previous,
            computed,
            self.now - self.history.written_at,
            self.deps.settings.controller.status_bytes_seconds,
        )
        if status != previous:
            self.history.written_at = self.now
        if wake is not None:
            self.wakes.append(wake)
        return status

    def _collect_events(self, pods: ObservedPods, status: PolicyStatus) -> None:
        previous = self.policy.status
        for failure in pods.failures:
            if failure.pod is not None:
                self._pod_warning(failure.pod, failure.reason.value, failure.message)
        known = {entry.uid for entry in (previous.suspended_owners if previous else None) or ()}
        causes = {each.owner.uid: each.message for each in pods.failures if each.owner is not None}
        for entry in pods.suspended:
            if entry.uid not in known:
                cause = f": {causes[entry.uid]}" if entry.uid in causes else ""
                self._policy_event(
                    WARNING,
                    EventReason.SUSPENDED.value,
                    f"{entry.kind} {entry.name}: new pods get no tiers until {entry.until} "
                    f"({entry.reason}){cause}",
                )
        self.events += policy_events(self.policy, previous, status)
        self.events += pod_events(pods.views, self.history.pod_states)
        self.history.record_pod_states(pods.views)

    def _pod_warning(self, pod: Pod, reason: str, message: str) -> None:
        self.events.append(Event(pod_reference(pod), WARNING, reason, message))

    def _policy_event(self, event_type: str, reason: str, message: str) -> None:
        self.events.append(Event(policy_reference(self.policy), event_type, reason, message))

    def _schedule(self, pods: Sequence[Pod], observed: ObservedPods) -> None:
        """Adds a wake-up for each change that only the passing of time causes."""
        timeout = self.policy.spec.attach.start_timeout_seconds
        for view in observed.views:
            if view.state in (PodState.STARTING, PodState.NOT_ATTACHED) and view.has_tiers:
                since = pod_view.waiting_since(self.policy, view.pod)
                if since is not None and since + timeout > self.now:
                    self.wakes.append(since + timeout - self.now + 0.5)
                elif not pod_view.engine_status(self.policy, view.pod).has_run:
                    # The cause may not be visible yet.
                    self.wakes.append(self.deps.settings.controller.poll_seconds)
        for pod in pods:
            remaining = terminating.seconds_until_overdue(pod, self.now)
            if remaining is not None:
                self.wakes.append(remaining + 0.5)
        for entry in observed.suspended:
            until = objects.parse_time(entry.until)
            if until is not None:
                self.wakes.append(max(0.5, until - self.now + 0.5))
