"""Looking after a policy's pods: what they say becomes status and Events, what keeps one from starting is undone, and
workloads are restarted where the policy asks for it.

Called once per reconcile, after the plan was applied. Level-triggered: everything is decided from the objects, the
status in force and the last answers of the pods; what is remembered beyond that (``PodReports``) only saves work.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

from kvtier_operator.api.conditions import EventReason, Reason
from kvtier_operator.api.policy import KVTierPolicy
from kvtier_operator.api.settings import AttachMode
from kvtier_operator.api.status import PolicyStatus, SuspendedOwner
from kvtier_operator.controller import events, objects
from kvtier_operator.controller.injection_breaker import detectors
from kvtier_operator.controller.injection_breaker.breaker import Search
from kvtier_operator.controller.injection_breaker.detectors import InjectionFailure
from kvtier_operator.controller.pods import pod_view, terminating
from kvtier_operator.controller.pods.pod_view import PodState, PodView
from kvtier_operator.controller.pods.poll import PodReports, target
from kvtier_operator.controller.rollout import LOOK_AGAIN_SECONDS, Rollout, restart_body, rollout
from kvtier_operator.controller.status.compute import StatusInputs, compute_status, settled
from kvtier_operator.controller.status.conditions import PlanFacts, StatusResult
from kvtier_operator.controller.status.pod_conditions import PodFacts
from kvtier_operator.kube.resources import PODS, ApiError, Cache, Client, Object
from kvtier_operator.settings import Settings

__all__ = ["PodReports", "StatusInputs", "StatusResult", "compute_status", "reconcile_pods"]
logger = logging.getLogger(__name__)
MAX_DELETIONS = 8
"""Stuck pods deleted per look."""
FAILED_SECONDS = 5.0
"""After a deletion or a restart that the API server did not do."""


async def reconcile_pods(
    policy: KVTierPolicy,
    cache: Cache,
    client: Client,
    reports: PodReports,
    clock: Callable[[], float],
    settings: Settings,
    plan_facts: PlanFacts,
) -> StatusResult:
    """Looks at the pods of ``policy`` once. ``policy.status`` is the status in force; ``clock``: seconds since 1970.

    The caller writes the returned status where it differs from the one in force; bytes and percentages in it are those
    in force until they may change. Events are posted, stuck pods deleted and workloads restarted in here. A call that
    fails is logged and tried again at ``wake_seconds``: ``ApiError`` is not raised.
    """
    look = _PodReconcile(policy, cache, client, reports, clock(), settings, plan_facts)
    return await look.run()


class _PodReconcile:
    """One look, so that its parts need not hand everything to one another."""

    def __init__(
        self,
        policy: KVTierPolicy,
        cache: Cache,
        client: Client,
        reports: PodReports,
        now: float,
        settings: Settings,
        facts: PlanFacts,
    ) -> None:
        self._policy = policy
        self._cache = cache
        self._client = client
        self._reports = reports
        self._now = now
        self._settings = settings
        self._facts = facts
        self._key = (policy.namespace, policy.metadata.name)
        self._memory = reports.memory(self._key)
        self._wakes: list[float] = []
        self._notes: list[events.Event] = []

    async def run(self) -> StatusResult:
        """Looks, acts, and answers with the status."""
        previous, generation = self._policy.status, self._policy.metadata.generation or 0
        reported = previous.observed_generation if previous is not None else None
        self._memory.see(generation, reported, self._now)
        pods = sorted((pod for pod in self._facts.pods if not objects.ended(pod)), key=objects.name)
        living = [pod for pod in pods if not objects.terminating(pod)]
        self._follow(pods)
        views = await self._views(living)
        overdue = self._overdue(pods)
        # A changed policy is tried at once: whom an earlier one suspended is not suspended any more.
        in_force = (
            list(previous.suspended_owners or ())
            if previous is not None and reported == generation
            else []
        )
        troubles = await self._troubles(in_force)
        new = [each for each in troubles if not detectors.older(each, self._memory.changed_at)]
        suspended = detectors.suspensions(self._policy, in_force, new, self._now)
        await self._free(in_force, troubles)
        rolled = await self._roll_out(views, bool(troubles or suspended))
        found = PodFacts(views, troubles, suspended, overdue, rolled)
        status = compute_status(self._policy, StatusInputs(self._facts, self._now, previous, found))
        if self._memory.written_at is None:
            self._memory.written_at = self._now
        period = self._settings.controller.status_bytes_seconds
        held, wake = settled(previous, status, self._now - self._memory.written_at, period)
        if held != previous:
            self._memory.written_at = self._now
        self._note(views, found, held)
        await self._reports.recorder.post(self._client, self._notes, self._now)
        self._schedule(views, pods, suspended, wake)
        return StatusResult(held, min(self._wakes, default=None))

    def _follow(self, pods: Sequence[Object]) -> None:
        """Asks those with tiers, also while they end: what they said last tells what they hang in."""
        asked = [
            pod
            for pod in pods
            if (objects.injected(pod) and objects.has_daemon(pod))
            or pod_view.mounts_documents(self._policy, pod)
        ]
        targets = [found for found in map(target, asked) if found is not None]
        self._reports.follow(self._key, targets, self._facts.token)

    async def _views(self, living: Sequence[Object]) -> list[PodView]:
        asks: bool | None = None
        if self._policy.spec.attach.mode is AttachMode.WEBHOOK and not all(
            map(objects.injected, living)
        ):
            asks = await self._reports.lookups.namespace_asks(self._client, self._policy.namespace)
        return [
            pod_view.view(self._policy, pod, self._reports.said(objects.uid(pod)), self._now, asks)
            for pod in living
        ]

    def _overdue(self, pods: Sequence[Object]) -> list[terminating.Overdue]:
        tiers = [tier.name for tier in self._policy.spec.tiers if tier.file_system is not None]
        found = (
            terminating.overdue(pod, self._reports.said(objects.uid(pod)).report, tiers, self._now)
            for pod in pods
        )
        overdue = [each for each in found if each is not None]
        for each in overdue:
            about = events.about_pod(each.pod)
            self._notes.append(
                events.Event(about, events.WARNING, Reason.STUCK_TERMINATING.value, each.message)
            )
        return overdue

    async def _troubles(self, in_force: Sequence[SuspendedOwner]) -> list[InjectionFailure]:
        search = Search(
            self._policy,
            self._facts,
            self._cache,
            self._client,
            self._reports.lookups,
            self._settings,
            self._now,
            self._memory.changed_at,
        )
        return await search.troubles(in_force)

    async def _free(
        self, in_force: Iterable[SuspendedOwner], troubles: Sequence[InjectionFailure]
    ) -> None:
        """Deletes stuck pods once their owner's next pods are left alone."""
        due, wake = detectors.deletable(
            self._policy, in_force, troubles, self._now, self._memory.changed_at
        )
        if wake is not None:
            self._wakes.append(wake)
        for trouble in due[:MAX_DELETIONS]:
            if trouble.pod is None:
                continue
            name, uid = objects.name(trouble.pod), objects.uid(trouble.pod)
            version = str(objects.metadata(trouble.pod).get("resourceVersion") or "")
            try:
                # The version too: a pod that has started since is not stuck.
                await self._client.delete(
                    PODS, self._policy.namespace, name, uid=uid, resource_version=version
                )
            except ApiError as error:
                logger.info("pod %s, which does not start, was not deleted: %s", name, error)
                self._wakes.append(FAILED_SECONDS)
                continue
            logger.warning(
                "pod %s was deleted: attaching kept it from starting: %s", name, trouble.message
            )
            reason = EventReason.STUCK_POD_DELETED.value
            message = f"Deleted, so that its owner makes another: {trouble.message}"
            self._notes.append(
                events.Event(events.about_pod(trouble.pod), events.WARNING, reason, message)
            )
        if len(due) > MAX_DELETIONS:
            self._wakes.append(1.0)

    async def _roll_out(self, views: Sequence[PodView], trouble: bool) -> Rollout:
        storage = {finding.type: finding.status for finding in self._facts.findings}.get(
            "StorageReady"
        )
        held = ""
        if not self._facts.accepted:
            held = "the policy is not accepted"
        elif storage == "False":
            held = "StorageReady is False"
        elif trouble:
            held = "attaching keeps pods from starting"
        namespace = self._policy.namespace
        found = rollout(
            self._policy,
            views,
            self._facts.structural_hash,
            lambda kind, name: self._cache.get(kind, namespace, name),
            held,
        )
        if found.under_way:
            self._wakes.append(LOOK_AGAIN_SECONDS)
        chosen = found.restart
        if chosen is None:
            return found
        body = restart_body(chosen.kind, chosen.found, self._facts.structural_hash)
        try:
            await self._client.patch(chosen.kind, namespace, objects.name(chosen.found), body)
        except ApiError as error:
            logger.warning("%s was not restarted: %s", chosen, error)
            self._wakes.append(FAILED_SECONDS)
            return found
        self._wakes.append(LOOK_AGAIN_SECONDS)
        message = f"{chosen} is restarted for structure {self._facts.structural_hash}"
        logger.info("%s", message)
        reason = EventReason.WORKLOAD_RESTARTED.value
        self._notes.append(
            events.Event(events.about_policy(self._policy), events.NORMAL, reason, message)
        )
        return found

    def _note(self, views: Sequence[PodView], found: PodFacts, status: PolicyStatus) -> None:
        for trouble in found.troubles:
            if trouble.pod is not None:
                about = events.about_pod(trouble.pod)
                self._notes.append(
                    events.Event(about, events.WARNING, trouble.reason.value, trouble.message)
                )
        before = {
            entry.uid
            for entry in (self._policy.status.suspended_owners if self._policy.status else None)
            or ()
        }
        for entry in found.suspended:
            if entry.uid not in before:
                message = f"{entry.kind} {entry.name}: its next pods get no tiers until {entry.until} ({entry.reason})"
                about = events.about_policy(self._policy)
                self._notes.append(
                    events.Event(about, events.WARNING, EventReason.SUSPENDED.value, message)
                )
        self._notes += events.of_policy(self._policy, self._policy.status, status)
        self._notes += events.of_pods(views, self._memory.pod_states)
        states = {
            view.uid: view.state.value for view in views if view.state is not PodState.UNASKED
        }
        self._memory.pod_states = {**_kept(self._memory.pod_states, views), **states}

    def _schedule(
        self,
        views: Sequence[PodView],
        pods: Sequence[Object],
        suspended: Sequence[SuspendedOwner],
        wake: float | None,
    ) -> None:
        """When time alone changes something."""
        if wake is not None:
            self._wakes.append(wake)
        timeout = self._policy.spec.attach.start_timeout_seconds
        for view in views:
            if view.state in (PodState.STARTING, PodState.NOT_ATTACHED) and view.injected:
                began = pod_view.waiting_since(self._policy, view.pod)
                if began is not None and began + timeout > self._now:
                    self._wakes.append(began + timeout - self._now + 0.5)
                elif not pod_view.engine_ran(self._policy, view.pod):
                    # It may be kept down by a part that did not say so yet.
                    self._wakes.append(self._settings.controller.poll_seconds)
        for pod in pods:
            due = terminating.due_seconds(pod, self._now)
            if due is not None:
                self._wakes.append(due + 0.5)
        for entry in suspended:
            until = objects.parse_time(entry.until)
            if until is not None:
                self._wakes.append(max(0.5, until - self._now + 0.5))


def _kept(states: dict[str, str] | None, views: Sequence[PodView]) -> dict[str, str]:
    """What was known of pods that have not been asked again."""
    unasked = {view.uid for view in views if view.state is PodState.UNASKED}
    return {uid: state for uid, state in (states or {}).items() if uid in unasked}
