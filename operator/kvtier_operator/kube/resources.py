"""The kinds that the operator reads and writes, and the interfaces of client and cache.

Objects are mappings as the API server sends them. Readers never modify them. A cache answers from
memory on the event loop's thread without waiting. A client waits, and each call has a deadline.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Object = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Kind:
    """One resource of the API. ``group`` is empty for the core group."""

    group: str
    version: str
    plural: str
    kind: str
    namespaced: bool = True

    @property
    def api_version(self) -> str:
        """``apiVersion`` of its objects."""
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(
        self, namespace: str | None = None, name: str | None = None, subresource: str | None = None
    ) -> str:
        """The URL path of a collection or, with ``name``, of an object."""
        parts = ["apis", self.group] if self.group else ["api"]
        parts.append(self.version)
        if self.namespaced and namespace:
            parts += ["namespaces", namespace]
        parts.append(self.plural)
        parts += [part for part in (name, subresource) if part]
        return "/" + "/".join(parts)


POLICIES = Kind("kvtier.io", "v1alpha1", "kvtierpolicies", "KVTierPolicy")
PODS = Kind("", "v1", "pods", "Pod")
NAMESPACES = Kind("", "v1", "namespaces", "Namespace", namespaced=False)
NODES = Kind("", "v1", "nodes", "Node", namespaced=False)
LIMIT_RANGES = Kind("", "v1", "limitranges", "LimitRange")
QUOTAS = Kind("", "v1", "resourcequotas", "ResourceQuota")
CONFIG_MAPS = Kind("", "v1", "configmaps", "ConfigMap")
SECRETS = Kind("", "v1", "secrets", "Secret")
EVENTS = Kind("", "v1", "events", "Event")
CLAIMS = Kind("", "v1", "persistentvolumeclaims", "PersistentVolumeClaim")
VOLUMES = Kind("", "v1", "persistentvolumes", "PersistentVolume", namespaced=False)
STORAGE_CLASSES = Kind("storage.k8s.io", "v1", "storageclasses", "StorageClass", namespaced=False)
DEPLOYMENTS = Kind("apps", "v1", "deployments", "Deployment")
STATEFUL_SETS = Kind("apps", "v1", "statefulsets", "StatefulSet")
REPLICA_SETS = Kind("apps", "v1", "replicasets", "ReplicaSet")
LEADER_WORKER_SETS = Kind("leaderworkerset.x-k8s.io", "v1", "leaderworkersets", "LeaderWorkerSet")
MUTATING_WEBHOOKS = Kind(
    "admissionregistration.k8s.io",
    "v1",
    "mutatingwebhookconfigurations",
    "MutatingWebhookConfiguration",
    False,
)
VALIDATING_WEBHOOKS = Kind(
    "admissionregistration.k8s.io",
    "v1",
    "validatingwebhookconfigurations",
    "ValidatingWebhookConfiguration",
    False,
)


class ApiError(Exception):
    """A call failed. ``status``: the HTTP status; 0 if there was no response. ``reason``: of the
    response, or ``Timeout``, ``Disconnected`` or ``NotLeader``. ``retry_after_seconds``: the
    server's ``Retry-After``, if it sent one.
    """

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(f"{status} {reason}: {message}")
        self.status = status
        self.reason = reason
        self.message = message
        self.retry_after_seconds: float | None = None


class Cache(Protocol):
    """Copies of objects, kept up to date by watches. For one event loop."""

    def get(self, kind: Kind, namespace: str | None, name: str) -> Object | None:
        """One object, or None."""

    def list(self, kind: Kind, namespace: str | None = None) -> Sequence[Object]:
        """All objects of a kind, or those of a namespace, in no particular order.

        The cost grows with the result, not with the cache.
        """

    def synced(self) -> bool:
        """Whether every watched kind has been listed once."""


class NotingCache(Cache, Protocol):
    """A cache that takes over the responses of calls, so that a reconcile reads its own writes."""

    def note(self, kind: Kind, found: Object) -> None:
        """Takes over an object from a response, if it is newer than the cached one."""

    def complete(self, kind: Kind, found: Object) -> None:
        """Takes over an object from a response, of which the cache may hold only a part."""


class Client(Protocol):
    """Calls to the API server. Each raises ``ApiError``; none waits longer than its deadline."""

    async def get(self, kind: Kind, namespace: str | None, name: str) -> Object:
        """Reads one object."""

    async def list(
        self, kind: Kind, namespace: str | None = None, *, labels: str = "", fields: str = ""
    ) -> Sequence[Object]:
        """Reads all objects of a kind, page by page."""

    async def read_guarded(self, kind: Kind, namespace: str | None, name: str) -> Object:
        """Reads one object by a dry run of an empty patch: admission policies see it, as they do
        not see a get, and can limit it to objects of KVTier.
        """

    async def create(self, kind: Kind, namespace: str | None, body: Object) -> Object:
        """Creates an object."""

    async def apply(
        self, kind: Kind, body: Object, *, subresource: str | None = None, force: bool = True
    ) -> Object:
        """Server-side apply with the operator's field manager. The body has namespace and name."""

    async def patch(
        self,
        kind: Kind,
        namespace: str | None,
        name: str,
        body: Object,
        *,
        subresource: str | None = None,
    ) -> Object:
        """Applies a merge patch."""

    async def delete(
        self, kind: Kind, namespace: str | None, name: str, *, uid: str, resource_version: str = ""
    ) -> None:
        """Deletes the object with that uid and version. It is not an error if it is gone."""
