"""The watches of the controller, and the policies that each change of an object enqueues.

Secrets are not watched: the operator has no right to list them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from kvtier_operator.api.settings import RolloutStrategy
from kvtier_operator.controller.cached_policy import CachedPolicy
from kvtier_operator.controller.children.observe import volume_owner
from kvtier_operator.controller.index import PolicyIndex
from kvtier_operator.kube import trim
from kvtier_operator.kube.lister import ChangeType, Watch
from kvtier_operator.kube.queue import Key
from kvtier_operator.kube.resources import (
    CLAIMS,
    CONFIG_MAPS,
    DEPLOYMENTS,
    EVENTS,
    LEADER_WORKER_SETS,
    PODS,
    POLICIES,
    REPLICA_SETS,
    STATEFUL_SETS,
    VOLUMES,
    Cache,
    Kind,
    NotingCache,
    Object,
)
from kvtier_operator.render.volumes import MANAGED_BY, POLICY_LABEL
from kvtier_operator.settings import Settings

MANAGED = ",".join(f"{key}={value}" for key, value in MANAGED_BY.items())
"""Selects the objects that KVTier created."""


def watches(settings: Settings) -> list[Watch]:
    """The watches for the settings. PersistentVolumes are included only if the operator may create
    them, and Deployments and LeaderWorkerSets only if it may restart workloads, because otherwise
    it has no right to list them.
    """
    spaces = settings.watch_namespaces
    found = [
        Watch(POLICIES, spaces),
        Watch(PODS, spaces, trim=trim.pod),
        Watch(CONFIG_MAPS, spaces, labels=MANAGED),
        Watch(CLAIMS, spaces),
        Watch(EVENTS, spaces, fields="reason=FailedCreate"),
        Watch(REPLICA_SETS, spaces, trim=trim.workload),
        Watch(STATEFUL_SETS, spaces, trim=trim.workload),
    ]
    if settings.rollout.enabled:
        found += [
            Watch(DEPLOYMENTS, spaces, trim=trim.workload),
            Watch(LEADER_WORKER_SETS, spaces, optional=True, trim=trim.workload),
        ]
    if settings.storage.create_volumes:
        found.append(Watch(VOLUMES, labels=MANAGED))
    return found


AHEAD_SECONDS = -3600.0
"""A policy that was just changed is reconciled before all that wait."""
POD_SECONDS = 1.0
"""A rollout changes many pods of a policy at once; one reconcile handles all of them."""


class Enqueuer:
    """Keeps the index up to date and adds policies to the queue.

    ``add`` is called with a key and the seconds from now. ``gone`` is called with the key and the
    last version of a policy that was deleted.
    """

    def __init__(
        self, add: Callable[[Key, float], None], gone: Callable[[Key, CachedPolicy], None]
    ) -> None:
        self.index = PolicyIndex()
        self._add = add
        self._gone = gone

    def add_policies(self) -> None:
        """Adds every policy. A policy whose latest generation has no status goes first."""
        for key in self.index.keys():  # noqa: SIM118  (no mapping)
            cached = self.index.get(key)
            observed = cached is not None and _is_observed(cached.raw)
            self._add(key, 0.0 if observed else AHEAD_SECONDS)

    def has_policy(self, namespace: str, name: str, uid: str) -> bool:
        """Whether a policy with that uid exists."""
        cached = self.index.get((namespace, name))
        return cached is not None and cached.uid == uid

    def changed(self, kind: Kind, found: Object, change: ChangeType, cache: Cache) -> None:
        """Handles a change that the cache already has."""
        metadata = found["metadata"]
        namespace, name = metadata.get("namespace") or "", metadata["name"]
        gone = change is ChangeType.DELETED
        if kind is POLICIES:
            self._policy(found, gone, cache)
        elif kind is PODS:
            affected = self.index.drop_pod(namespace, name) if gone else self.index.put_pod(found)
            self._add_all(affected, POD_SECONDS)
        elif kind is VOLUMES:
            self._add_if_exists(volume_owner(found))
        elif kind in (CONFIG_MAPS, CLAIMS):
            owner = (metadata.get("labels") or {}).get(POLICY_LABEL)
            if owner:
                self._add_if_exists((namespace, owner))
            if kind is CLAIMS:
                self._add_all(self.index.using_claim(namespace, name))
        elif kind is EVENTS:
            if not gone:
                self._add_all(self.index.in_namespace(namespace), POD_SECONDS)
        else:
            self._add_all(
                (
                    key
                    for key in self.index.in_namespace(namespace)
                    if self._restarts_workloads(key)
                ),
                POD_SECONDS,
            )

    def note(self, answer: Object, cache: NotingCache) -> None:
        """Handles a policy that a call returned."""
        cache.note(POLICIES, answer)
        found = cache.get(POLICIES, answer["metadata"]["namespace"], answer["metadata"]["name"])
        if found is not None:
            self._policy(found, False, cache)

    def _policy(self, found: Object, gone: bool, cache: Cache) -> None:
        metadata = found["metadata"]
        key = (metadata["namespace"], metadata["name"])
        before = self.index.get(key)
        if gone:
            self._add_all(self.index.drop_policy(*key))
            if before is not None:
                self._gone(key, before)
            return
        affected = self.index.put_policy(found, cache)
        self._add_all(affected - {key})
        # A status is written by a reconcile, so a new status does not need another one.
        if before is None or _inputs(before.raw) != _inputs(found) or not found.get("status"):
            self._add(key, AHEAD_SECONDS)

    def _restarts_workloads(self, key: Key) -> bool:
        cached = self.index.get(key)
        policy = cached.policy if cached is not None else None
        return (
            policy is not None and policy.spec.rollout.strategy is RolloutStrategy.RESTART_WORKLOADS
        )

    def _add_if_exists(self, key: Key) -> None:
        if self.index.get(key) is not None:
            self._add(key, 0.0)

    def _add_all(self, keys: Iterable[Key], after_seconds: float = 0.0) -> None:
        for key in keys:
            self._add(key, after_seconds)


def _is_observed(raw: Object) -> bool:
    """Whether the status is about the policy's latest generation."""
    status = raw.get("status")
    seen = status.get("observedGeneration") if isinstance(status, Mapping) else None
    return seen is not None and seen == raw["metadata"].get("generation")


def _inputs(raw: Object) -> tuple[Any, ...]:
    """What a reconcile depends on.

    The spec instead of its generation, because a new version of the CRD may add fields to the spec
    of the same generation.
    """
    metadata = raw["metadata"]
    return (
        metadata.get("uid"),
        metadata.get("deletionTimestamp"),
        metadata.get("annotations"),
        raw.get("spec"),
    )
