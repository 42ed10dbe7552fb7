"""What the controller holds copies of. Secrets are not among them: nobody may list those.

From a change of an object to the policies that should be looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from kvtier_operator.api.settings import RolloutStrategy
from kvtier_operator.controller.cached_policy import CachedPolicy
from kvtier_operator.controller.children.observe import volume_owner
from kvtier_operator.controller.index import PolicyIndex
from kvtier_operator.kube import trim
from kvtier_operator.kube.lister import Change, Watch
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

OURS = ",".join(f"{key}={value}" for key, value in MANAGED_BY.items())
"""Selects what KVTier made."""


def watches(settings: Settings) -> list[Watch]:
    """For the namespaces that are watched. Volumes only where the operator may make them: it has no right to list them
    otherwise.
    """
    spaces = settings.watch_namespaces
    found = [
        Watch(POLICIES, spaces),
        Watch(PODS, spaces, trim=trim.pod),
        Watch(CONFIG_MAPS, spaces, labels=OURS),
        Watch(CLAIMS, spaces),
        Watch(EVENTS, spaces, fields="reason=FailedCreate"),
        Watch(REPLICA_SETS, spaces, trim=trim.workload),
        Watch(DEPLOYMENTS, spaces, trim=trim.workload),
        Watch(STATEFUL_SETS, spaces, trim=trim.workload),
        Watch(LEADER_WORKER_SETS, spaces, optional=True, trim=trim.workload),
    ]
    if settings.storage.create_volumes:
        found.append(Watch(VOLUMES, labels=OURS))
    return found


AHEAD_SECONDS = -3600.0
"""A policy that somebody has just changed is looked at before all that waits."""
POD_SECONDS = 1.0
"""A rollout changes many pods of a policy in a moment; one look serves them all."""


class Enqueuer:
    """Keeps the index up with the cache and adds to the queue. ``add``: key and seconds from now. ``gone``: called with
    key when a policy is no more, and what it was.
    """

    def __init__(
        self, add: Callable[[Key, float], None], gone: Callable[[Key, CachedPolicy], None]
    ) -> None:
        self.index = PolicyIndex()
        self._add = add
        self._gone = gone

    def lives(self, namespace: str, name: str, uid: str) -> bool:
        """Whether a policy of that uid is known."""
        known = self.index.get((namespace, name))
        return known is not None and known.uid == uid

    def changed(self, kind: Kind, found: Object, change: Change, cache: Cache) -> None:
        """A change, as the cache has it already."""
        metadata = found["metadata"]
        namespace, name = metadata.get("namespace") or "", metadata["name"]
        gone = change is Change.DELETED
        if kind is POLICIES:
            self._policy(found, gone, cache)
        elif kind is PODS:
            affected = self.index.drop_pod(namespace, name) if gone else self.index.put_pod(found)
            self._all(affected, POD_SECONDS)
        elif kind is VOLUMES:
            self._if_known(volume_owner(found))
        elif kind in (CONFIG_MAPS, CLAIMS):
            owner = (metadata.get("labels") or {}).get(POLICY_LABEL)
            if owner:
                self._if_known((namespace, owner))
            if kind is CLAIMS:
                self._all(self.index.using_claim(namespace, name))
        elif kind is EVENTS:
            if not gone:
                self._all(self.index.in_namespace(namespace), POD_SECONDS)
        else:
            self._all(
                (key for key in self.index.in_namespace(namespace) if self._restarts(key)),
                POD_SECONDS,
            )

    def learn(self, answer: Object, cache: NotingCache) -> None:
        """Takes over a policy that a call answered."""
        cache.note(POLICIES, answer)
        found = cache.get(POLICIES, answer["metadata"]["namespace"], answer["metadata"]["name"])
        if found is not None:
            self._policy(found, False, cache)

    def _policy(self, found: Object, gone: bool, cache: Cache) -> None:
        metadata = found["metadata"]
        key = (metadata["namespace"], metadata["name"])
        before = self.index.get(key)
        if gone:
            self._all(self.index.drop_policy(*key))
            if before is not None:
                self._gone(key, before)
            return
        affected = self.index.put_policy(found, cache)
        self._all(affected - {key})
        # A status that was written is no reason to look again; it was written because somebody looked.
        if before is None or _intent(before.raw) != _intent(found) or not found.get("status"):
            self._add(key, AHEAD_SECONDS)

    def _restarts(self, key: Key) -> bool:
        known = self.index.get(key)
        policy = known.policy if known is not None else None
        return (
            policy is not None and policy.spec.rollout.strategy is RolloutStrategy.RESTART_WORKLOADS
        )

    def _if_known(self, key: Key) -> None:
        if self.index.get(key) is not None:
            self._add(key, 0.0)

    def _all(self, keys: Iterable[Key], after_seconds: float = 0.0) -> None:
        for key in keys:
            self._add(key, after_seconds)


def _intent(raw: Object) -> tuple[Any, ...]:
    """What a look depends on. The spec itself, not its generation: another schema shows other fields of the same."""
    metadata = raw["metadata"]
    return (
        metadata.get("uid"),
        metadata.get("deletionTimestamp"),
        metadata.get("annotations"),
        raw.get("spec"),
    )
