"""The controller: reconciles policies.

It is level-triggered: an event only adds the key of a policy to the queue, and every reconcile
observes, plans, applies, reconciles the pods, and writes the status if it differs. All state is in
the cluster and all writes follow from what is observed, so the process may be killed at any point,
and two controllers that run by accident write the same objects.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from prometheus_client import CollectorRegistry

from kvtier.errors import KVTierError
from kvtier_operator.api.policy import KVTierPolicy
from kvtier_operator.api.selector import describe
from kvtier_operator.api.status import PolicyStatus
from kvtier_operator.certs.rotate import rotate_certificates
from kvtier_operator.controller import conditions
from kvtier_operator.controller.cached_policy import CachedPolicy
from kvtier_operator.controller.children.apply import ApplyFailure, apply_plan
from kvtier_operator.controller.children.gc import collect_garbage, orphaned_data_events
from kvtier_operator.controller.children.observe import (
    Observed,
    observe,
    unused_storage_class,
)
from kvtier_operator.controller.children.plan import Plan, plan
from kvtier_operator.controller.children.tokens import PolicyTokens, Token
from kvtier_operator.controller.conditions import ConditionUpdate, ReconcileInput
from kvtier_operator.controller.enqueue import Enqueuer, watches
from kvtier_operator.controller.events import EventRecorder
from kvtier_operator.controller.lookups import ClusterAccess, Lookups
from kvtier_operator.controller.metrics import ControllerMetrics, PodMetrics, PolicyMetrics
from kvtier_operator.controller.objects import is_terminating
from kvtier_operator.controller.pod_reconciler import PodReconciler
from kvtier_operator.controller.pods.poll import PodPoller
from kvtier_operator.controller.status.serialize import (
    apply_body,
    invalid_policy_status,
    parse_status,
    to_dict,
    without_undeclared,
)
from kvtier_operator.kube import trim
from kvtier_operator.kube.election import Elector
from kvtier_operator.kube.kopf_thread import DEFAULT_PACE, Pace
from kvtier_operator.kube.lister import ChangeType, Lister
from kvtier_operator.kube.queue import Key, Pauses, WorkQueue
from kvtier_operator.kube.resources import PODS, POLICIES, ApiError, Kind, Object
from kvtier_operator.kube.trim import Outline, Outliner
from kvtier_operator.kube.watcher import MakeWatcher, Watcher
from kvtier_operator.runtime import Health, about
from kvtier_operator.settings import CertificateMode, Settings

logger = logging.getLogger(__name__)
WORKERS = 4
"""Policies that are reconciled concurrently. The client bounds their calls."""
RECONCILE_SECONDS = 60.0
"""The deadline of a reconcile. One that exceeds it fails and is retried."""
REJECTED_RETRY_SECONDS = 30.0
"""The pause before a call that the API server rejected is retried without any event."""
MAX_DELETED = 1000
"""Deleted policies that wait for their Events while the API server accepts none."""
FIRST_READ_SECONDS = 10.0
MAX_STATUS_CALLS = 16
"""Calls for one status: an earlier CustomResourceDefinition may lack several fields of it."""
STATUS_ATTEMPTS = 3
"""Attempts to write a status while other clients change the same policy."""
INTERNAL_ERRORS = (
    ArithmeticError,
    AttributeError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
    KVTierError,
)
"""What a bug in the operator raises (``RecursionError`` is a ``RuntimeError``).

Only the reconcile in which it occurs fails; other policies are not affected.
"""
DEFAULT_PAUSES = Pauses()
STUCK_SECONDS = 300.0
"""An event loop that has not run for this long is stuck."""


class Reconciler:
    """Reconciles one policy at a time. What it keeps in memory only saves work."""

    def __init__(
        self,
        cluster: ClusterAccess,
        settings: Settings,
        enqueuer: Enqueuer,
        tokens: PolicyTokens,
        pods: PodReconciler,
        metrics: ControllerMetrics,
    ) -> None:
        self._cache = cluster.cache
        self._client = cluster.client
        self._lookups = cluster.lookups
        self._settings = settings
        self._enqueuer = enqueuer
        self._tokens = tokens
        self._pods = pods
        self._metrics = metrics

    async def reconcile(self, key: Key) -> float | None:
        """Reconciles the policy once.

        Returns the seconds until it must be reconciled again without any event; None: at the next
        resync. Raises ``ApiError`` for failures that a retry may solve.
        """
        cached = self._enqueuer.index.get(key)
        if cached is None or is_terminating(cached.raw):
            return None
        planned = plan(await self._observe(cached), self._settings)
        if cached.policy is None or not planned.accepted:
            return await self._reconcile_rejected(cached, planned, key)
        failures = await apply_plan(planned, self._client, self._cache)
        if planned.apply:
            # Otherwise the status would say that the objects that were just created are missing.
            planned = plan(await self._observe(cached), self._settings)
        token = await self._tokens.get(cached)
        await self._complete_pods(key, cached.policy)
        reconcile_input = self._input(key, planned, failures, token)
        result = await self._pods.reconcile(cached.policy, reconcile_input)
        await self._write_status(cached, result.status)
        wakes = [result.wake_seconds] if result.wake_seconds is not None else []
        if failures or token.error:
            wakes.append(REJECTED_RETRY_SECONDS)
        return min(wakes, default=None)

    async def _complete_pods(self, key: Key, policy: KVTierPolicy) -> None:
        """Reads the pods that the policy selects, if they were there before it."""
        if self._enqueuer.index.has_outlines(key, self._cache):
            selector = describe(policy.spec.pod_selector)
            for each in await self._client.list(PODS, key[0], labels=selector):
                self._cache.complete(PODS, each)

    async def _observe(self, cached: CachedPolicy) -> Observed:
        observed, lookups = observe(cached, self._cache), self._lookups
        first_use = [
            name
            for name, claim in observed.claims.items()
            if (storage_class := unused_storage_class(claim))
            and await lookups.binds_on_first_use(storage_class)
        ]
        return replace(observed, first_use_claims=frozenset(first_use))

    def _input(
        self, key: Key, planned: Plan, failures: Sequence[ApplyFailure], token: Token | None
    ) -> ReconcileInput:
        not_written = [each.message for each in failures if not each.affects_storage]
        problems = [*not_written, *([token.error] if token is not None and token.error else [])]
        updates: dict[str, ConditionUpdate] = {each.type: each for each in planned.conditions}
        storage = [each.message for each in failures if each.affects_storage]
        if storage:
            updates[conditions.STORAGE_READY] = conditions.storage_apply_failed(storage)
        if problems and planned.accepted:
            updates[conditions.ACCEPTED] = conditions.partly_applied(problems)
        pods = self._enqueuer.index.pods(key, self._cache)
        return ReconcileInput(
            structural_hash=planned.structural_hash,
            live_generation=planned.live_generation,
            accepted=planned.accepted,
            conditions=tuple(updates.values()),
            pods=pods.governed,
            governed_by_others=pods.governed_by_others,
            claims=planned.claims,
            token=token.value if token is not None else None,
            not_written="; ".join(not_written),
        )

    async def _reconcile_rejected(
        self, cached: CachedPolicy, planned: Plan, key: Key
    ) -> float | None:
        """Applies nothing. Existing objects stay, because running pods use them."""
        if cached.policy is None:
            status = invalid_policy_status(cached, planned.conditions, time.time())
            await self._write_status(cached, status)
            return None
        # Pods that were injected before the policy became invalid are still polled.
        token = await self._tokens.get(cached) if planned.live_generation else None
        reconcile_input = self._input(key, planned, [], token)
        result = await self._pods.reconcile(cached.policy, reconcile_input)
        await self._write_status(cached, result.status)
        return result.wake_seconds

    async def _write_status(self, cached: CachedPolicy, status: PolicyStatus) -> None:
        document = to_dict(status)
        if document == (cached.raw.get("status") or {}):
            return
        answer = await self._apply_status(cached, document)
        if answer is not None:
            self._metrics.statuses.inc()
            self._enqueuer.note(answer, self._cache)

    async def _apply_status(self, cached: CachedPolicy, document: dict[str, Any]) -> Object | None:
        """Writes the status and returns the policy; None if it is gone. Raises ``ApiError``."""
        metadata = cached.raw["metadata"]
        current: Object = cached.raw
        for attempt in itertools.count(1):
            version = str(current["metadata"].get("resourceVersion") or "")
            try:
                return await self._client.apply(
                    POLICIES, apply_body(cached, document, version), subresource="status"
                )
            except ApiError as error:
                if error.status == 404:
                    return None
                known = without_undeclared(document, error.message)
                if known is not None and attempt < MAX_STATUS_CALLS:
                    document = known
                    continue
                if error.status != 409 or attempt >= STATUS_ATTEMPTS:
                    raise
            # Another client changed the policy, which triggers another reconcile. Until then the
            # status describes the version that was reconciled.
            try:
                current = await self._client.get(POLICIES, metadata["namespace"], metadata["name"])
            except ApiError as error:
                if error.status == 404:
                    return None
                raise
            if current["metadata"].get("uid") != cached.uid:
                return None
        return None


@dataclass(frozen=True, slots=True)
class ControllerOptions:
    """What tests replace in a controller. ``clock`` is monotonic."""

    make_watcher: MakeWatcher = Watcher
    on_restart: Callable[[Kind, str], None] = lambda kind, reason: None
    pace: Pace = DEFAULT_PACE
    pauses: Pauses = DEFAULT_PAUSES
    clock: Callable[[], float] = time.monotonic


class Controller:
    """Lister, queue and workers around a ``Reconciler``.

    With an ``elector``, policies are reconciled only while this replica is the leader. The lister
    is always kept up to date.
    """

    def __init__(
        self,
        settings: Settings,
        client: Any,
        registry: CollectorRegistry,
        *,
        elector: Elector | None = None,
        options: ControllerOptions = ControllerOptions(),
    ) -> None:
        clock = options.clock
        self._settings = settings
        self._client = client
        self._clock = clock
        self._metrics = ControllerMetrics(registry)
        self.queue = WorkQueue(
            settings.controller.max_reconciles_per_second, options.pauses, clock=clock
        )
        self.enqueuer = Enqueuer(self.queue.add, self._gone)
        self._outliner = Outliner()
        self.cache = Lister(watches(settings), self._changed, clock, self._kept)
        self._watcher = options.make_watcher(
            client, self.cache, pace=options.pace, on_restart=options.on_restart
        )
        self._elector = elector
        self._leads = elector is None
        self._tokens = PolicyTokens(client, settings.controller.resync_seconds, clock)
        self._poller = PodPoller(settings, self.queue.add)
        recorder = EventRecorder(client, clock)
        lookups = Lookups(client, clock, settings.webhook.namespace_selector)
        cluster = ClusterAccess(self.cache, client, lookups)
        self._pods = PodReconciler(cluster, settings, self._poller, recorder)
        PodMetrics(registry, self._poller, recorder)
        self._reconciler = Reconciler(
            cluster, settings, self.enqueuer, self._tokens, self._pods, self._metrics
        )
        self._deleted: asyncio.Queue[CachedPolicy] = asyncio.Queue(MAX_DELETED)
        self._numbers = itertools.count(1)
        self._seen = clock()
        PolicyMetrics(registry, lambda: len(self.queue), self._statuses)

    def problem(self) -> str:
        """Why the controller cannot reconcile at the moment; empty: it can."""
        return "; ".join(f"{kind}: {text}" for kind, text in sorted(self.cache.problems().items()))

    def stuck(self) -> str:
        """Why the process should be restarted; empty: it should not."""
        silent = self._clock() - self._seen
        if silent > STUCK_SECONDS:
            return f"the event loop has been blocked for {silent:.0f} s"
        return self._watcher.stuck()

    def add_checks(self, health: Health) -> None:
        """Adds the controller's liveness and readiness checks."""
        health.live("loop", self.stuck)
        health.ready("caches", self.problem)

    async def run(self, stop: asyncio.Event) -> None:
        """Runs until ``stop`` is set.

        Then reconciles in progress are cancelled. The next leader continues from what is in the
        cluster.
        """

        async def work() -> None:
            await self._work_as_leader(stop)

        await self._read_policies()
        lead = work() if self._elector is None else self._elector.run(work)
        parts = (self._watcher.run(), self._beat(), lead, _until(stop))
        running = [asyncio.ensure_future(each) for each in parts]
        try:
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for each in done:
                each.result()
        finally:
            for each in running:
                each.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _read_policies(self) -> None:
        """Before the watches deliver pods: whether a pod has a policy decides what is kept of it.

        Without an answer, the pods of each policy are read with its first reconcile.
        """
        try:
            async with asyncio.timeout(FIRST_READ_SECONDS):
                for namespace in self._settings.watch_namespaces or (None,):
                    for each in await self._client.list(POLICIES, namespace):
                        self.cache.put(POLICIES, trim.metadata(dict(each)))
        except (ApiError, TimeoutError) as error:
            logger.info("policies are read with the first watch: %s", error)

    async def _work_as_leader(self, stop: asyncio.Event) -> None:
        """Runs until it is cancelled. Starts with a reconcile of every policy, because the previous
        leader may have been interrupted at any point. Policies that changed since are the first.
        """
        parts: list[Coroutine[Any, Any, None]] = [
            self._poller.run(stop),
            self._reconcile_policies(),
        ]
        if self._settings.webhook.certificates.mode is CertificateMode.SELF_MANAGED:
            parts.append(
                rotate_certificates(self._client, self._settings, stop, metrics=self._metrics)
            )
        self._leads = True
        # A replica that follows adds keys and handles none. How long they have waited here says
        # nothing about what is urgent.
        self.queue.clear()
        self.enqueuer.add_policies()
        try:
            async with asyncio.TaskGroup() as group:
                for each in parts:
                    group.create_task(each)
        finally:
            self._leads = False

    async def _reconcile_policies(self) -> None:
        """Starts when the lister is synced, because an object that is not listed yet would count as
        missing.
        """
        await self.cache.wait_synced()
        logger.info("caches are synced", extra={"policies": len(self.enqueuer.index.keys())})
        async with asyncio.TaskGroup() as group:
            for _ in range(WORKERS):
                group.create_task(self._run_worker())
            group.create_task(self._resync())
            group.create_task(self._report_orphaned_data())

    async def _run_worker(self) -> None:
        while True:
            key = await self.queue.get()
            with about(namespace=key[0], policy=key[1], reconcile=next(self._numbers)):
                await self._process(key)

    async def _process(self, key: Key) -> None:
        began = time.perf_counter()
        try:
            async with asyncio.timeout(RECONCILE_SECONDS):
                wake = await self._reconciler.reconcile(key)
        except ApiError as error:
            self._failed(
                key, error.reason or str(error.status), str(error), error.retry_after_seconds or 0.0
            )
            return
        except TimeoutError:
            self._failed(key, "Deadline", f"it took longer than {RECONCILE_SECONDS:g} s", 0.0)
            return
        except INTERNAL_ERRORS as error:
            logger.exception("internal error")
            self._failed(key, "Fault", repr(error), 0.0)
            return
        except asyncio.CancelledError:
            self.queue.done(key)
            raise
        finally:
            self._metrics.seconds.observe(time.perf_counter() - began)
        self.queue.done(key)
        if wake is not None:
            self.queue.add(key, wake)

    def _failed(self, key: Key, reason: str, text: str, at_least_seconds: float) -> None:
        self._metrics.errors.labels(reason).inc()
        pause = self.queue.failed(key, at_least_seconds)
        # A single failure is often a conflict with another client, which the retry resolves.
        level = logging.INFO if self.queue.failures(key) == 1 else logging.WARNING
        logger.log(
            level, "reconcile failed, retrying in %.1f s: %s", pause, text, extra={"reason": reason}
        )

    async def _resync(self) -> None:
        while True:
            await self._collect_garbage()
            # Jitter spreads the load; it does not have to be secret.
            period = self._settings.controller.resync_seconds
            await asyncio.sleep(period * (0.9 + 0.2 * random.random()))  # noqa: S311
            for key in self.enqueuer.index.keys():  # noqa: SIM118  (no mapping)
                self.queue.add(key, random.random() * min(period / 4, 30.0))  # noqa: S311

    async def _collect_garbage(self) -> None:
        try:
            removed = await collect_garbage(self.cache, self._client, self._is_kept)
        except ApiError as error:
            self._metrics.errors.labels(error.reason or str(error.status)).inc()
            logger.warning("could not delete objects of policies that no longer exist: %s", error)
            return
        except INTERNAL_ERRORS:
            self._metrics.errors.labels("Fault").inc()
            logger.exception("internal error during garbage collection")
            return
        self._metrics.removed.inc(removed)

    def _is_kept(self, namespace: str, name: str, uid: str) -> bool:
        """Whether the objects of a policy are kept: it exists, or its namespace is not watched."""
        watched = self._settings.watch_namespaces
        return (bool(watched) and namespace not in watched) or self.enqueuer.has_policy(
            namespace, name, uid
        )

    async def _beat(self) -> None:
        while True:
            self._seen = self._clock()
            await asyncio.sleep(1.0)

    def _kept(self, kind: Kind, found: Object) -> Object:
        """What the lister keeps of an object: of a pod without a policy its outline, so that memory
        follows what is governed.
        """
        whole = kind is not PODS or isinstance(found, Outline)
        if whole or self.enqueuer.index.selects_any(found):
            return found
        return self._outliner.outline(found)

    def _changed(self, kind: Kind, found: Object, change: ChangeType) -> None:
        self.enqueuer.changed(kind, found, change, self.cache)

    def _gone(self, key: Key, cached: CachedPolicy) -> None:
        self.queue.forget(key)
        self.cache.reduce_again(PODS, key[0])
        self._tokens.forget(cached.uid)
        self._pods.forget(key)
        if self._elector is not None and not self._leads:
            return
        try:
            self._deleted.put_nowait(cached)
        except asyncio.QueueFull:
            self._metrics.errors.labels("OrphanedDataUnreported").inc()
            logger.warning(
                "the data that policy %s/%s leaves behind is not reported: %d policies are waiting",
                *key,
                MAX_DELETED,
            )

    async def _report_orphaned_data(self) -> None:
        # A separate recorder, so that deleted policies do not use up the Events of existing ones.
        recorder = EventRecorder(self._client, self._clock)
        while True:
            gone = await self._deleted.get()
            metadata = gone.raw["metadata"]
            with about(namespace=metadata["namespace"], policy=metadata["name"]):
                try:
                    events = orphaned_data_events(gone, self._settings.allowed_volumes)
                    # Also logged: Events expire, and a terminating namespace accepts none.
                    for event in events:
                        logger.info("policy deleted: %s", event.message)
                    await recorder.post(events, time.time())
                except INTERNAL_ERRORS:
                    self._metrics.errors.labels("Fault").inc()
                    logger.exception("internal error while reporting orphaned data")

    def _statuses(self) -> Iterable[tuple[Key, PolicyStatus]]:
        for key in self.enqueuer.index.keys():  # noqa: SIM118  (no mapping)
            cached = self.enqueuer.index.get(key)
            status = parse_status(cached) if cached is not None else None
            if status is not None:
                yield key, status


async def _until(stop: asyncio.Event) -> None:
    await stop.wait()
