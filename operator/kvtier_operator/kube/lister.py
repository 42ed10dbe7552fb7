"""The lister: copies of the watched objects, read without waiting.

A watcher fills it. The answers of calls are taken over as well (``note``), so that a reconcile
reads its own writes before the watch delivers them. Deleted objects are remembered for a while by
uid and version, so that a late event or answer does not bring them back.

Everything runs on one event loop. The objects are shared and never modified.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from kvtier_operator.kube import trim
from kvtier_operator.kube.resources import Kind, NotingCache, Object

TOMBSTONE_SECONDS = 300.0
"""How long a deletion is remembered: longer than any call and any delay of an event."""
MAX_TOMBSTONES = 100_000
STALE_SECONDS = 300.0
"""A source whose requests have failed for this long makes the process unready."""


class ChangeType(StrEnum):
    """What happened to an object."""

    ADDED = "ADDED"
    MODIFIED = "MODIFIED"
    DELETED = "DELETED"


OnChange = Callable[[Kind, Object, ChangeType], None]


@dataclass(frozen=True, slots=True)
class Watch:
    """A kind to watch. Without ``namespaces``, all namespaces are watched.

    ``optional``: the cluster may not serve the kind, and the lister is synced without it.
    """

    kind: Kind
    namespaces: tuple[str, ...] = ()
    labels: str = ""
    fields: str = ""
    optional: bool = False
    trim: trim.Trim = trim.metadata


@dataclass(slots=True, eq=False)
class Source:
    """A watched kind in one namespace or in all, and the state of its watch.

    ``absent``: the kind is not served. ``failing_since``: set while requests fail; see ``error``.
    """

    watch: Watch
    namespace: str | None
    synced: bool = False
    absent: bool = False
    error: str = ""
    failing_since: float | None = None

    def __str__(self) -> str:
        plural = self.watch.kind.plural
        return f"{plural} in {self.namespace}" if self.namespace else plural


class Store:
    """Objects by kind, namespace and name; the namespace of a cluster-scoped object is empty."""

    def __init__(self) -> None:
        self._kinds: dict[Kind, dict[str, dict[str, Object]]] = {}

    def get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        """One object."""
        return self._kinds.get(kind, {}).get(namespace, {}).get(name)

    def of(self, kind: Kind, namespace: str | None) -> Sequence[Object]:
        """The objects of a namespace, or all objects of the kind."""
        spaces = self._kinds.get(kind, {})
        if namespace is not None and kind.namespaced:
            return list(spaces.get(namespace, {}).values())
        return list(itertools.chain.from_iterable(space.values() for space in spaces.values()))

    def put(self, kind: Kind, found: Object) -> None:
        """Adds or replaces an object."""
        namespace, name = place(found)
        self._kinds.setdefault(kind, {}).setdefault(namespace, {})[name] = found

    def drop(self, kind: Kind, namespace: str, name: str) -> Object | None:
        """Removes an object and returns it."""
        spaces = self._kinds.get(kind, {})
        space = spaces.get(namespace, {})
        found = space.pop(name, None)
        if not space:
            spaces.pop(namespace, None)
        return found


def place(found: Object) -> tuple[str, str]:
    """The namespace (empty for none) and the name of an object."""
    metadata = found["metadata"]
    return metadata.get("namespace") or "", metadata["name"]


def version(found: Object) -> int:
    """The resource version, which the API server orders within a kind; 0 if there is none."""
    text = (found.get("metadata") or {}).get("resourceVersion") or ""
    return int(text) if text.isdigit() else 0


class Lister(NotingCache):
    """The objects of ``watches``.

    ``on_change`` is called on the event loop for each change, after the lister has it. It must be
    quick and must not raise. ``reduce`` returns what is kept of a new object. ``clock`` is
    monotonic.
    """

    def __init__(
        self,
        watches: Iterable[Watch],
        on_change: OnChange = lambda kind, found, change: None,
        clock: Callable[[], float] = time.monotonic,
        reduce: Callable[[Kind, Object], Object] = lambda kind, found: found,
    ) -> None:
        self._on_change = on_change
        self._reduce = reduce
        self._clock = clock
        self._store = Store()
        self._tombstones: dict[str, tuple[int, float]] = {}
        self._noted: set[str] = set()
        self._synced = asyncio.Event()
        self.sources = [
            Source(watch, namespace)
            for watch in watches
            for namespace in ((watch.namespaces if watch.kind.namespaced else ()) or (None,))
        ]

    def get(self, kind: Kind, namespace: str | None, name: str) -> Object | None:
        return self._store.get(kind, (namespace or "") if kind.namespaced else "", name)

    def list(self, kind: Kind, namespace: str | None = None) -> Sequence[Object]:
        return self._store.of(kind, namespace)

    def synced(self) -> bool:
        return all(each.synced for each in self.sources)

    async def wait_synced(self) -> None:
        """Returns once ``synced()``."""
        await self._synced.wait()

    def problems(self, stale_seconds: float = STALE_SECONDS) -> Mapping[str, str]:
        """Errors of sources that are not synced, or whose requests have failed for that long."""
        now = self._clock()
        return {
            str(each): each.error or "not listed yet"
            for each in self.sources
            if not each.synced
            or (each.failing_since is not None and now - each.failing_since > stale_seconds)
        }

    def report(self, source: Source, error: str = "") -> None:
        """Records the result of a request for a source. An empty ``error`` means success."""
        source.error = error
        if not error:
            source.failing_since = None
        elif source.failing_since is None:
            source.failing_since = self._clock()

    def mark_synced(self, source: Source) -> None:
        """Records that the lister has all objects of the source, or that its kind is not served."""
        self.report(source)
        source.synced = True
        if self.synced():
            self._synced.set()

    def by_uid(self, source: Source) -> dict[str, Object]:
        """The objects of a source."""
        held = self._store.of(source.watch.kind, source.namespace)
        return {each["metadata"]["uid"]: each for each in held}

    def is_gone(self, uid: str) -> bool:
        """Whether the object was deleted a short time ago."""
        return uid in self._tombstones

    def put(self, kind: Kind, found: Object) -> None:
        """Takes over an object from a watch or a list, trimmed."""
        uid = found["metadata"].get("uid") or ""
        held = self._store.get(kind, *place(found))
        if not self._is_newer(uid, found, held):
            if uid in self._noted and held is not None and version(held) == version(found):
                # The response of a call came first, and ``on_change`` was not called for it.
                self._noted.discard(uid)
                self._on_change(kind, held, ChangeType.MODIFIED)
            return
        self._noted.discard(uid)
        found = self._reduce(kind, found)
        change = self._replace(kind, found, held)
        self._on_change(kind, found, change)

    def note(self, kind: Kind, found: Object) -> None:
        """Takes over an object from a response, if its kind and namespace are watched."""
        namespace, _ = place(found)
        source = next(
            (
                each
                for each in self.sources
                if each.watch.kind == kind and each.namespace in (None, namespace)
            ),
            None,
        )
        if source is None:
            return
        uid = found["metadata"].get("uid") or ""
        held = self._store.get(kind, *place(found))
        if self._is_newer(uid, found, held):
            self._replace(kind, self._reduce(kind, source.watch.trim(dict(found))), held)
            self._noted.add(uid)

    def complete(self, kind: Kind, found: Object) -> None:
        """Replaces what was reduced before, by the same version of the object from a response."""
        held = self._store.get(kind, *place(found))
        if (
            held is not None
            and held["metadata"].get("uid") == found["metadata"].get("uid")
            and version(held) == version(found)
        ):
            trims = [each.watch.trim for each in self.sources if each.watch.kind == kind]
            self._store.put(kind, trims[0](dict(found)))
        else:
            self.note(kind, found)

    def reduce_again(self, kind: Kind, namespace: str) -> None:
        """Reduces the objects of a namespace, because fewer of them are needed whole."""
        for each in self._store.of(kind, namespace):
            self._store.put(kind, self._reduce(kind, each))

    def drop(self, kind: Kind, found: Object, deleted_at: int = 0) -> None:
        """Removes the object with this uid. ``deleted_at``: a version at which it did not exist."""
        uid = found["metadata"].get("uid") or ""
        now = self._clock()
        self._tombstones.pop(uid, None)
        self._tombstones[uid] = (max(deleted_at, version(found)), now)
        while len(self._tombstones) > MAX_TOMBSTONES or (
            now - next(iter(self._tombstones.values()))[1] > TOMBSTONE_SECONDS
        ):
            del self._tombstones[next(iter(self._tombstones))]
        self._noted.discard(uid)
        held = self._store.get(kind, *place(found))
        if held is not None and (held["metadata"].get("uid") or "") == uid:
            self._store.drop(kind, *place(found))
            self._on_change(kind, found, ChangeType.DELETED)

    def drop_all(self, source: Source) -> None:
        """Removes all objects of a source, because its kind is no longer served."""
        for each in self._store.of(source.watch.kind, source.namespace):
            self.drop(source.watch.kind, each)

    def _is_newer(self, uid: str, found: Object, held: Object | None) -> bool:
        number = version(found)
        deleted_at, _ = self._tombstones.get(uid, (-1, 0.0))
        if number <= deleted_at:
            return False
        return held is None or number > version(held) or not number

    def _replace(self, kind: Kind, found: Object, held: Object | None) -> ChangeType:
        uid = found["metadata"].get("uid") or ""
        # A newer version means that the object exists: it matches the selector again.
        self._tombstones.pop(uid, None)
        if held is not None and (held["metadata"].get("uid") or "") != uid:
            self.drop(kind, held)
            held = None
        self._store.put(kind, found)
        return ChangeType.ADDED if held is None else ChangeType.MODIFIED
