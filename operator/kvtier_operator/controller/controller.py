"""The controller: level-triggered, so that an event only names a policy to look at.

Every look does the same, whatever brought it about: observe, plan, apply, look after the pods, write the status where
it differs. Killed at any point, or running twice by accident, it comes to the same objects: all state is in the
cluster, what is applied is decided from what is there, and two that decide from the same write the same.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import time
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from prometheus_client import CollectorRegistry

from kvtier.errors import KVTierError
from kvtier_operator.api.status import PolicyStatus
from kvtier_operator.certs.rotate import rotate_certificates
from kvtier_operator.controller import conditions
from kvtier_operator.controller.cached_policy import CachedPolicy
from kvtier_operator.controller.children.apply import (
    ApplyFailure,
    apply_plan,
)
from kvtier_operator.controller.children.gc import (
    collect_garbage,
    orphaned_data_events,
)
from kvtier_operator.controller.children.observe import observe
from kvtier_operator.controller.children.plan import Plan, plan
from kvtier_operator.controller.children.tokens import PolicyTokens
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
)
from kvtier_operator.kube.election import Elector
from kvtier_operator.kube.kopf_thread import DEFAULT_PACE, Pace
from kvtier_operator.kube.lister import Change, Lister
from kvtier_operator.kube.queue import Key, Pauses, WorkQueue
from kvtier_operator.kube.resources import POLICIES, ApiError, Client, Kind, NotingCache, Object
from kvtier_operator.kube.watcher import MakeWatcher, Watcher
from kvtier_operator.runtime import Health, about
from kvtier_operator.settings import CertificateMode, Settings

logger = logging.getLogger(__name__)
WORKERS = 4
"""Policies that are looked at side by side; the client bounds their calls."""
RECONCILE_SECONDS = 60.0
"""After which a look is given up and tried again."""
REFUSED_SECONDS = 30.0
"""Before what the API server refused is tried again without any event."""
MAX_LEFT = 1000
"""Policies that are gone and wait for being told of, while the API server takes no Events."""
STATUS_TRIES = 3
"""Of writing a status while others change the same policy."""
FAULTS = (
    ArithmeticError,
    AttributeError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
    KVTierError,
)
"""What a fault of ours raises (``RecursionError`` is a ``RuntimeError``). It concerns the policy at hand, and must not stop the others."""
DEFAULT_PAUSES = Pauses()
STUCK_SECONDS = 300.0
"""A worker that was not seen for so long is stuck."""


class Reconciler:
    """One look at one policy at a time, by ``reconcile``; it keeps nothing that it could not do without.

    ``clock``: seconds since 1970.
    """

    def __init__(
        self,
        cache: NotingCache,
        client: Client,
        settings: Settings,
        triggers: Enqueuer,
        tokens: PolicyTokens,
        pods: PodReconciler,
        metrics: ControllerMetrics,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._cache = cache
        self._client = client
        self._settings = settings
        self._triggers = triggers
        self._tokens = tokens
        self._pods = pods
        self._metrics = metrics
        self._clock = clock

    async def reconcile(self, key: Key) -> float | None:
        """Looks once. Returns in how many seconds another look is due, None: with the resync. Raises ``ApiError`` for
        what may work later.
        """
        known = self._triggers.index.get(key)
        if known is None or is_terminating(known.raw):
            return None
        planned = plan(observe(known, self._cache), self._settings)
        if known.policy is None or not planned.accepted:
            return await self._report_refused(known, planned, key)
        refused = await apply_plan(planned, self._client, self._cache)
        if planned.apply:
            # What was just made is there: a status about its absence would be out of date when it is written.
            planned = plan(observe(known, self._cache), self._settings)
        token = await self._tokens.get(known)
        problems = [each.message for each in refused if not each.affects_storage]
        if token.error:
            problems.append(token.error)
        facts = self._facts(key, planned, refused, problems, token.value)
        result = await self._pods.reconcile(known.policy, facts)
        await self._write_status(known, result.status)
        wakes = [result.wake_seconds] if result.wake_seconds is not None else []
        if refused or token.error:
            wakes.append(REFUSED_SECONDS)
        return min(wakes, default=None)

    def _facts(
        self,
        key: Key,
        planned: Plan,
        refused: list[ApplyFailure],
        problems: list[str],
        token: str | None,
    ) -> ReconcileInput:
        found: dict[str, ConditionUpdate] = {each.type: each for each in planned.conditions}
        storage = [each.message for each in refused if each.affects_storage]
        if storage:
            found[conditions.STORAGE_READY] = conditions.storage_apply_failed(storage)
        if problems:
            found[conditions.ACCEPTED] = conditions.partly_applied(problems)
        pods = self._triggers.index.pods(key, self._cache)
        return ReconcileInput(
            structural_hash=planned.structural_hash,
            live_generation=planned.live_generation,
            accepted=planned.accepted,
            conditions=tuple(found.values()),
            pods=pods.governed,
            governed_by_others=pods.governed_by_others,
            claims=planned.claims,
            token=token,
        )

    async def _report_refused(self, known: CachedPolicy, planned: Plan, key: Key) -> float | None:
        """Nothing is applied, and what is there stays for the pods that run with it."""
        if known.policy is None:
            status = invalid_policy_status(known, planned.conditions, self._clock())
            await self._write_status(known, status)
            return None
        # Pods of a policy that was accepted once are still asked how they are.
        token = await self._tokens.get(known) if planned.live_generation else None
        facts = self._facts(key, planned, [], [], token.value if token is not None else None)
        result = await self._pods.reconcile(known.policy, facts)
        await self._write_status(known, result.status)
        return result.wake_seconds

    async def _write_status(self, known: CachedPolicy, status: PolicyStatus) -> None:
        document = to_dict(status)
        if document == (known.raw.get("status") or {}):
            return
        answer = await self._apply_status(known, document)
        if answer is not None:
            self._metrics.statuses.inc()
            self._triggers.learn(answer, self._cache)

    async def _apply_status(self, known: CachedPolicy, document: dict[str, Any]) -> Object | None:
        """The policy with its status; None where it is gone and there is nobody to report about. Raises ``ApiError``."""
        metadata = known.raw["metadata"]
        current: Object = known.raw
        for tries in itertools.count(1):
            version = str(current["metadata"].get("resourceVersion") or "")
            try:
                return await self._client.apply(
                    POLICIES, apply_body(known, document, version), subresource="status"
                )
            except ApiError as error:
                if error.status == 404:
                    return None
                if error.status != 409 or tries == STATUS_TRIES:
                    raise
            # Somebody has changed it since. It is looked at anew because of that; until then this is what is known.
            try:
                current = await self._client.get(POLICIES, metadata["namespace"], metadata["name"])
            except ApiError as error:
                if error.status == 404:
                    return None
                raise
            if current["metadata"].get("uid") != known.uid:
                return None
        return None


class Controller:
    """Lister, queue and workers around a ``Reconciler``.

    Without ``elector`` it always works; with one, for as long as this replica is the leader. The
    lister is kept up to date in any case.
    """

    def __init__(
        self,
        settings: Settings,
        client: Any,
        registry: CollectorRegistry,
        *,
        elector: Elector | None = None,
        make_watcher: MakeWatcher = Watcher,
        on_restart: Callable[[Kind, str], None] = lambda kind, reason: None,
        pace: Pace = DEFAULT_PACE,
        pauses: Pauses = DEFAULT_PAUSES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._client = client
        self._clock = clock
        self._metrics = ControllerMetrics(registry)
        self.queue = WorkQueue(settings.controller.max_reconciles_per_second, pauses, clock=clock)
        self.triggers = Enqueuer(self.queue.add, self._gone)
        self.cache = Lister(watches(settings), self._changed, clock)
        self._watcher = make_watcher(client, self.cache, pace=pace, on_restart=on_restart)
        self._elector = elector
        self._leads = elector is None
        self._tokens = PolicyTokens(client, settings.controller.resync_seconds, clock)
        self._poller = PodPoller(settings, self.queue.add)
        recorder = EventRecorder(client, clock)
        cluster = ClusterAccess(self.cache, client, Lookups(client, clock))
        self._pods = PodReconciler(cluster, settings, self._poller, recorder)
        PodMetrics(registry, self._poller, recorder)
        self._reconciler = Reconciler(
            self.cache, client, settings, self.triggers, self._tokens, self._pods, self._metrics
        )
        self._left: asyncio.Queue[CachedPolicy] = asyncio.Queue(MAX_LEFT)
        self._numbers = itertools.count(1)
        self._seen = clock()
        PolicyMetrics(registry, lambda: len(self.queue), self._statuses)

    def problem(self) -> str:
        """Why the controller cannot do its work at the moment, or an empty text."""
        return "; ".join(f"{kind}: {text}" for kind, text in sorted(self.cache.problems().items()))

    def stuck(self) -> str:
        """Whether its loop has stopped turning."""
        silent = self._clock() - self._seen
        if silent > STUCK_SECONDS:
            return f"nothing was looked at for {silent:.0f} s"
        return self._watcher.stuck()

    async def run(self, stop: asyncio.Event) -> None:
        """Until ``stop`` is set: then no policy is begun any more, and those that are being looked at are finished or
        left where they are; the next start goes on from there.
        """

        async def work() -> None:
            await self._work_as_leader(stop)

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

    async def _work_as_leader(self, stop: asyncio.Event) -> None:
        """Until it is cancelled. All policies are reconciled, because another leader may have been
        interrupted at any point.
        """
        parts: list[Coroutine[Any, Any, None]] = [self._poller.run(stop), self._follow()]
        if self._settings.webhook.certificates.mode is CertificateMode.SELF_MANAGED:
            parts.append(
                rotate_certificates(self._client, self._settings, stop, metrics=self._metrics)
            )
        self._leads = True
        for key in self.triggers.index.keys():  # noqa: SIM118  (no mapping)
            self.queue.add(key)
        try:
            async with asyncio.TaskGroup() as group:
                for each in parts:
                    group.create_task(each)
        finally:
            self._leads = False

    async def _follow(self) -> None:
        """Works once the lister is synced: what is not known yet must not be taken for missing."""
        await self.cache.wait_synced()
        logger.info("caches are complete", extra={"policies": len(self.triggers.index.keys())})
        async with asyncio.TaskGroup() as group:
            for _ in range(WORKERS):
                group.create_task(self._work())
            group.create_task(self._resync())
            group.create_task(self._tell_of_leavings())

    async def _work(self) -> None:
        while True:
            key = await self.queue.get()
            with about(namespace=key[0], policy=key[1], reconcile=next(self._numbers)):
                await self._look(key)

    async def _look(self, key: Key) -> None:
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
        except FAULTS as error:
            logger.exception("a fault of the operator")
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
        # A conflict is how two find out about each other; once is nothing to report.
        level = logging.INFO if self.queue.failures(key) == 1 else logging.WARNING
        logger.log(level, "tried again in %.1f s: %s", pause, text, extra={"reason": reason})

    async def _resync(self) -> None:
        while True:
            await self._sweep()
            period = self._settings.controller.resync_seconds
            await asyncio.sleep(period * (0.9 + 0.2 * random.random()))  # noqa: S311  (spread, not secret)
            for key in self.triggers.index.keys():  # noqa: SIM118  (no mapping)
                self.queue.add(key, random.random() * min(period / 4, 30.0))  # noqa: S311

    async def _sweep(self) -> None:
        try:
            removed = await collect_garbage(self.cache, self._client, self._lives)
        except ApiError as error:
            self._metrics.errors.labels(error.reason or str(error.status)).inc()
            logger.warning("what dead policies left could not be removed: %s", error)
            return
        except FAULTS:
            self._metrics.errors.labels("Fault").inc()
            logger.exception("a fault of the operator, while it looked for what dead policies left")
            return
        self._metrics.removed.inc(removed)

    def _lives(self, namespace: str, name: str, uid: str) -> bool:
        """Whether what was made for that policy is to be left: it lives, or is not ours to judge."""
        watched = self._settings.watch_namespaces
        return (bool(watched) and namespace not in watched) or self.triggers.lives(
            namespace, name, uid
        )

    async def _beat(self) -> None:
        while True:
            self._seen = self._clock()
            await asyncio.sleep(1.0)

    def _changed(self, kind: Kind, found: Object, change: Change) -> None:
        self.triggers.changed(kind, found, change, self.cache)

    def _gone(self, key: Key, known: CachedPolicy) -> None:
        self.queue.forget(key)
        self._tokens.forget(known.uid)
        self._pods.forget(key)
        if self._elector is not None and not self._leads:
            return
        try:
            self._left.put_nowait(known)
        except asyncio.QueueFull:
            self._metrics.errors.labels("LeavingsUntold").inc()
            logger.warning(
                "what policy %s/%s leaves is not told of: %d others wait for it", *key, MAX_LEFT
            )

    async def _tell_of_leavings(self) -> None:
        # A recorder of its own: what is told of policies that are gone takes no Events from those that live.
        recorder = EventRecorder(self._client, self._clock)
        while True:
            gone = await self._left.get()
            metadata = gone.raw["metadata"]
            with about(namespace=metadata["namespace"], policy=metadata["name"]):
                try:
                    notes = orphaned_data_events(gone, self._settings.allowed_volumes)
                    # The log as well: Events last an hour, and none can be made in a namespace that goes.
                    for note in notes:
                        logger.info("the policy is gone: %s", note.message)
                    await recorder.post(notes, time.time())
                except FAULTS:
                    self._metrics.errors.labels("Fault").inc()
                    logger.exception("a fault of the operator, while it told what a policy leaves")

    def _statuses(self) -> Iterable[tuple[Key, PolicyStatus]]:
        for key in self.triggers.index.keys():  # noqa: SIM118  (no mapping)
            known = self.triggers.index.get(key)
            status = parse_status(known) if known is not None else None
            if status is not None:
                yield key, status


async def _until(stop: asyncio.Event) -> None:
    await stop.wait()


async def control(
    settings: Settings,
    client: Client,
    stop: asyncio.Event,
    *,
    registry: CollectorRegistry,
    health: Health,
    elector: Elector | None = None,
    on_restart: Callable[[Kind, str], None] = lambda kind, reason: None,
) -> None:
    """Follows policies until ``stop`` is set."""
    controller = Controller(settings, client, registry, elector=elector, on_restart=on_restart)
    health.live("loop", controller.stuck)
    health.ready("caches", controller.problem)
    await controller.run(stop)
