"""An API server in memory, with a client (``MemoryCluster``) and a cache
(``MemoryCluster.cached()``), for tests of the controller's decisions rather than of the API server.

Server-side apply merges as the server does for a single manager, without keeping who owns which
field: mappings by key, lists that are maps by their key, other lists as a whole. Answers 404 and
409 where the API server does, counts versions and generations, and validates nothing else: tests of
rejections use a real API server.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvtier_operator.kube.kopf_thread import DEFAULT_PACE, Pace
from kvtier_operator.kube.lister import ChangeType, Lister, Store, place
from kvtier_operator.kube.resources import ApiError, Client, Kind, NotingCache, Object

LIST_KEYS = {
    "ownerReferences": "uid",
    "conditions": "type",
    "skippedPods": "name",
    "suspendedOwners": "uid",
    "tiers": "name",
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
}
"""Lists that are maps, and the field that is their key."""
EPOCH = "2026-01-01T00:00:00Z"


class MemoryCluster(Client):
    """Calls ``on_change`` at each change, so its cache is current. ``clock``: creation times."""

    def __init__(
        self,
        objects: Sequence[tuple[Kind, Mapping[str, Any]]] = (),
        on_change: Callable[[Kind, Object, ChangeType], None] | None = None,
        clock: Callable[[], str] = lambda: EPOCH,
    ) -> None:
        self._store = Store()
        self._versions = itertools.count(1)
        self._uids = itertools.count(1)
        self._clock = clock
        self.on_change = on_change
        self.version = 0
        self.down = False
        for kind, each in objects:
            self.put(kind, each)

    def put(self, kind: Kind, body: Mapping[str, Any]) -> Object:
        """Sets an object as it is, status included, as another client would have made it."""
        found = copy.deepcopy(dict(body))
        metadata = found.setdefault("metadata", {})
        metadata.setdefault("uid", f"uid-{next(self._uids)}")
        metadata.setdefault("creationTimestamp", self._clock())
        metadata.setdefault("generation", 1)
        found.setdefault("apiVersion", kind.api_version)
        found.setdefault("kind", kind.kind)
        return self._keep(kind, found)

    def remove(self, kind: Kind, namespace: str | None, name: str) -> None:
        """Takes an object away, as a garbage collector would."""
        gone = self._store.drop(kind, namespace or "", name)
        if gone is not None:
            self.version = next(self._versions)
            metadata = {**gone["metadata"], "resourceVersion": str(self.version)}
            self._tell(kind, {**gone, "metadata": metadata}, ChangeType.DELETED)

    def get_now(self, kind: Kind, namespace: str | None, name: str) -> Object | None:
        """One object, without waiting."""
        return self._store.get(kind, namespace or "", name)

    def cached(self) -> MemoryCache:
        """Its cache."""
        return MemoryCache(self)

    def list_now(self, kind: Kind, namespace: str | None = None) -> Sequence[Object]:
        """Objects of a kind, without waiting."""
        return self._store.of(kind, namespace)

    async def get(self, kind: Kind, namespace: str | None, name: str) -> Object:
        found = self._store.get(kind, namespace or "", name)
        if found is None:
            raise self._missing(kind, name)
        return copy.deepcopy(found)

    async def read_guarded(self, kind: Kind, namespace: str | None, name: str) -> Object:
        return await self.get(kind, namespace, name)

    async def list(
        self, kind: Kind, namespace: str | None = None, *, labels: str = "", fields: str = ""
    ) -> Sequence[Object]:
        return [
            copy.deepcopy(each)
            for each in self._store.of(kind, namespace)
            if _selected(each, labels)
        ]

    async def create(self, kind: Kind, namespace: str | None, body: Object) -> Object:
        metadata = dict(body["metadata"])
        if namespace:
            metadata.setdefault("namespace", namespace)
        if "name" not in metadata:
            metadata["name"] = f"{metadata['generateName']}{next(self._uids)}"
        if self._store.get(kind, namespace or "", metadata["name"]) is not None:
            raise ApiError(
                409, "AlreadyExists", f"{kind.plural} {metadata['name']!r} already exists"
            )
        return copy.deepcopy(self.put(kind, {**body, "metadata": metadata}))

    async def apply(
        self, kind: Kind, body: Object, *, subresource: str | None = None, force: bool = True
    ) -> Object:
        namespace, name = place(body)
        found = self._store.get(kind, namespace, name)
        uid = body["metadata"].get("uid")
        if found is None:
            if subresource or uid:
                raise self._missing(kind, name)
            return copy.deepcopy(self.put(kind, body))
        if uid and uid != found["metadata"]["uid"]:
            raise ApiError(409, "Conflict", f"uid of {kind.plural} {name!r} differs")
        version = body["metadata"].get("resourceVersion")
        if version and version != found["metadata"]["resourceVersion"]:
            raise ApiError(409, "Conflict", f"{kind.plural} {name!r} has changed")
        return copy.deepcopy(self._merge(kind, found, body, subresource, merge))

    async def patch(
        self,
        kind: Kind,
        namespace: str | None,
        name: str,
        body: Object,
        *,
        subresource: str | None = None,
    ) -> Object:
        found = self._store.get(kind, namespace or "", name)
        if found is None:
            raise self._missing(kind, name)
        return copy.deepcopy(self._merge(kind, found, body, subresource, merge_patch))

    async def delete(
        self, kind: Kind, namespace: str | None, name: str, *, uid: str, resource_version: str = ""
    ) -> None:
        found = self._store.get(kind, namespace or "", name)
        if found is None or (found["metadata"]["uid"] != uid and not resource_version):
            return
        metadata = found["metadata"]
        if metadata["uid"] != uid or (
            resource_version and metadata["resourceVersion"] != resource_version
        ):
            raise ApiError(409, "Conflict", f"{kind.plural} {name!r} has changed")
        if metadata.get("finalizers"):
            self._keep(
                kind, {**found, "metadata": {**metadata, "deletionTimestamp": self._clock()}}
            )
            return
        self.remove(kind, namespace, name)

    def _merge(
        self,
        kind: Kind,
        found: Object,
        body: Object,
        subresource: str | None,
        how: Callable[[Any, Any], Any],
    ) -> Object:
        given = {"status": body.get("status")} if subresource == "status" else {**body}
        if subresource != "status":
            given.pop("status", None)
        merged = how(copy.deepcopy(dict(found)), copy.deepcopy(given))
        if merged == found:
            return found
        if merged.get("spec") != found.get("spec"):
            merged["metadata"]["generation"] = found["metadata"].get("generation", 1) + 1
        return self._keep(kind, merged)

    def _keep(self, kind: Kind, found: dict[str, Any]) -> Object:
        namespace, name = place(found)
        before = self._store.get(kind, namespace, name)
        self.version = next(self._versions)
        kept = {**found, "metadata": {**found["metadata"], "resourceVersion": str(self.version)}}
        self._store.put(kind, kept)
        self._tell(kind, kept, ChangeType.ADDED if before is None else ChangeType.MODIFIED)
        return kept

    def _tell(self, kind: Kind, found: Object, change: ChangeType) -> None:
        if self.on_change is not None:
            self.on_change(kind, found, change)

    @staticmethod
    def _missing(kind: Kind, name: str) -> ApiError:
        group = f".{kind.group}" if kind.group else ""
        return ApiError(404, "NotFound", f'{kind.plural}{group} "{name}" not found')


class MemoryWatcher:
    """Fills a lister from a ``MemoryCluster``, except while the cluster is ``down``."""

    def __init__(
        self,
        client: MemoryCluster,
        lister: Lister,
        *,
        pace: Pace = DEFAULT_PACE,
        on_restart: Callable[[Kind, str], None] = lambda kind, reason: None,
    ) -> None:
        self._cluster = client
        self._lister = lister

    def stuck(self) -> str:
        return ""

    async def run(self) -> None:
        seen = -1
        while True:
            if not self._cluster.down and seen != self._cluster.version:
                seen = self._cluster.version
                for source in self._lister.sources:
                    kind, labels = source.watch.kind, source.watch.labels
                    there = await self._cluster.list(kind, source.namespace, labels=labels)
                    uids = {each["metadata"]["uid"] for each in there}
                    for uid, held in self._lister.by_uid(source).items():
                        if uid not in uids:
                            self._lister.drop(kind, held)
                    for each in there:
                        self._lister.put(kind, source.watch.trim(dict(each)))
                    self._lister.mark_synced(source)
            await asyncio.sleep(0.005)


class MemoryCache(NotingCache):
    """The cache of a ``MemoryCluster``."""

    def __init__(self, cluster: MemoryCluster) -> None:
        self._cluster = cluster

    def get(self, kind: Kind, namespace: str | None, name: str) -> Object | None:
        return self._cluster.get_now(kind, namespace if kind.namespaced else None, name)

    def list(self, kind: Kind, namespace: str | None = None) -> Sequence[Object]:
        return self._cluster.list_now(kind, namespace)

    def synced(self) -> bool:
        return True

    def note(self, kind: Kind, found: Object) -> None:
        """Nothing to do: the cache is the cluster."""


def merge(found: Any, given: Any) -> Any:
    """Server-side apply with a single manager, except that absent fields are not removed."""
    if isinstance(found, dict) and isinstance(given, dict):
        result = dict(found)
        for key, value in given.items():
            if (
                key in LIST_KEYS
                and isinstance(value, list)
                and all(isinstance(item, dict) for item in value)
            ):
                result[key] = _merge_list(
                    found.get(key) or [], value, LIST_KEYS[key], replace=key != "ownerReferences"
                )
            elif key == "status" and isinstance(value, dict):
                result[key] = value
            else:
                result[key] = merge(found.get(key), value)
        return result
    return given


def _merge_list(found: list[Any], given: list[Any], key: str, *, replace: bool) -> list[Any]:
    names = {item.get(key) for item in given}
    before = {item.get(key): item for item in found}
    kept = [] if replace else [item for item in found if item.get(key) not in names]
    return kept + [merge(before.get(item.get(key), {}), item) for item in given]


def merge_patch(found: Any, given: Any) -> Any:
    """RFC 7386."""
    if not isinstance(given, dict):
        return given
    result = dict(found) if isinstance(found, dict) else {}
    for key, value in given.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merge_patch(result.get(key), value)
    return result


def _selected(found: Object, labels: str) -> bool:
    present = found["metadata"].get("labels") or {}
    return all(
        present.get(key) == value
        for key, _, value in (part.partition("=") for part in labels.split(",") if part)
    )
