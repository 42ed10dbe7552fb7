"""Copies of objects, kept by list and watch.

For each kind (and namespace, where only some are watched) a ``Reflector`` lists page by page, replaces what it held by
what it got, so that nothing outlives an object that was deleted while nobody watched, and then follows the changes. A
version that is too old (410) ends in another list. A watch that says nothing, bookmarks included, for
``idle_seconds`` is taken for dead and begun again where it was. Failures are followed by pauses that double, with
jitter. What was known before a failure stays known: a stale copy is better than none, and who deletes asks the API
server first.

Everything runs on one event loop. Objects are handed out as they are and never changed in place.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from kvtier_operator.kube import trim
from kvtier_operator.kube.client import Page, WatchEvent
from kvtier_operator.kube.resources import ApiError, Cache, Kind, Object

FIRST_PAUSE_SECONDS = 0.5
LAST_PAUSE_SECONDS = 30.0
ABSENT_SECONDS = 60.0
"""How often a kind that the cluster does not know is asked for again."""
WATCH_SECONDS = 300
IDLE_SECONDS = 100.0
"""The API server sends a bookmark about every minute."""
FAILURES_BEFORE_LIST = 5
"""Watches in a row that failed without an event, after which the state is listed anew."""


class Change(StrEnum):
    """What happened to an object."""

    ADDED = "ADDED"
    MODIFIED = "MODIFIED"
    DELETED = "DELETED"


OnChange = Callable[[Kind, Object, Change], None]


@dataclass(frozen=True, slots=True)
class Watch:
    """What to hold copies of. ``namespaces``: empty is all. ``optional``: a cluster need not know the kind, and then the
    cache counts as complete without it.
    """

    kind: Kind
    namespaces: tuple[str, ...] = ()
    labels: str = ""
    fields: str = ""
    optional: bool = False
    trim: trim.Trim = trim.metadata


class Source(Protocol):
    """What a cache needs of a client."""

    async def page(
        self,
        kind: Kind,
        namespace: str | None = None,
        *,
        labels: str = "",
        fields: str = "",
        next_page: str = "",
        limit: int = 500,
    ) -> Page: ...

    def watch(
        self,
        kind: Kind,
        namespace: str | None,
        resource_version: str,
        *,
        labels: str = "",
        fields: str = "",
        seconds: int,
        idle_seconds: float,
    ) -> Any: ...


@dataclass(frozen=True, slots=True)
class Pace:
    """Times of a cache; tests make them short."""

    watch_seconds: int = WATCH_SECONDS
    idle_seconds: float = IDLE_SECONDS
    first_pause_seconds: float = FIRST_PAUSE_SECONDS
    last_pause_seconds: float = LAST_PAUSE_SECONDS
    absent_seconds: float = ABSENT_SECONDS
    page_objects: int = 500


class Store:
    """Objects by kind, namespace and name. A cluster-wide kind has the namespace ``""``."""

    def __init__(self) -> None:
        self._kinds: dict[Kind, dict[str, dict[str, Object]]] = {}

    def get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        """One object."""
        return self._kinds.get(kind, {}).get(namespace, {}).get(name)

    def of(self, kind: Kind, namespace: str | None) -> Sequence[Object]:
        """Those of a namespace, or all."""
        spaces = self._kinds.get(kind, {})
        if namespace is not None and kind.namespaced:
            return list(spaces.get(namespace, {}).values())
        return list(itertools.chain.from_iterable(space.values() for space in spaces.values()))

    def put(self, kind: Kind, found: Object) -> None:
        """Takes or replaces one."""
        namespace, name = place(found)
        self._kinds.setdefault(kind, {}).setdefault(namespace, {})[name] = found

    def drop(self, kind: Kind, namespace: str, name: str) -> Object | None:
        """Forgets one."""
        spaces = self._kinds.get(kind, {})
        space = spaces.get(namespace, {})
        found = space.pop(name, None)
        if not space:
            spaces.pop(namespace, None)
        return found

    def namespaces(self, kind: Kind) -> Iterable[str]:
        """Namespaces with objects of the kind."""
        return list(self._kinds.get(kind, {}))


def place(found: Object) -> tuple[str, str]:
    """Namespace (``""`` for none) and name."""
    metadata = found["metadata"]
    return metadata.get("namespace") or "", metadata["name"]


def version(found: Object) -> int | None:
    """The resource version as a number: the API server's versions of one kind are ordered. None where it is none."""
    text = (found.get("metadata") or {}).get("resourceVersion") or ""
    return int(text) if text.isdigit() else None


@dataclass(slots=True)
class Reflector:
    """Keeps one kind, of one namespace or of all. ``heard_at``: when the server last said something about it."""

    watch: Watch
    namespace: str | None
    synced: bool = False
    resource_version: str = ""
    heard_at: float = float("-inf")
    error: str = ""
    lists: int = 0
    known: set[tuple[str, str]] = field(default_factory=set)


class WatchedCache(Cache):
    """A cache of what ``watches`` name. ``on_change`` is called on the loop for every change, in the order in which it
    is seen, deletions that a list has shown among them; it must be quick and not raise. ``on_restart`` is told of each
    list and each watch that had to be begun again, with the reason.
    """

    def __init__(
        self,
        client: Source,
        watches: Iterable[Watch],
        on_change: OnChange | None = None,
        *,
        pace: Pace = Pace(),
        on_restart: Callable[[Kind, str], None] = lambda kind, reason: None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._client = client
        self._on_change = on_change
        self._pace = pace
        self._on_restart = on_restart
        self._clock = clock
        self._sleep = sleep
        self._jitter = jitter
        self._store = Store()
        self._reflectors = [
            Reflector(each, namespace)
            for each in watches
            for namespace in (each.namespaces or (None,))
        ]
        self._kinds = {each.watch.kind for each in self._reflectors}
        self._complete = asyncio.Event()

    def get(self, kind: Kind, namespace: str | None, name: str) -> Object | None:
        return self._store.get(kind, (namespace or "") if kind.namespaced else "", name)

    def list(self, kind: Kind, namespace: str | None = None) -> Sequence[Object]:
        return self._store.of(kind, namespace)

    def synced(self) -> bool:
        return all(each.synced for each in self._reflectors)

    async def wait_synced(self) -> None:
        """Returns once ``synced()``."""
        await self._complete.wait()

    def problems(self, stale_seconds: float = 300.0) -> Mapping[str, str]:
        """Kinds that could not be listed yet, or of which nothing was heard for so long, with the last error."""
        now = self._clock()
        return {
            f"{each.watch.kind.plural}{f' in {each.namespace}' if each.namespace else ''}": each.error
            or "not listed yet"
            for each in self._reflectors
            if not each.synced or (now - each.heard_at > stale_seconds and not each.watch.optional)
        }

    def fresh(self, kind: Kind, within_seconds: float) -> bool:
        """Whether all of a kind was listed, and its watches spoke within the time."""
        now = self._clock()
        parts = [each for each in self._reflectors if each.watch.kind == kind]
        return bool(parts) and all(
            each.synced and now - each.heard_at <= within_seconds for each in parts
        )

    def note(self, kind: Kind, found: Object) -> None:
        """Takes over what a call answered, before a watch brings it, so that the next look does not see the past.

        Of a watched kind only what is newer than all the watch has brought: then a later deletion is still to come from
        it. Of a kind that is not watched the copy stays until ``forget`` or the next ``note``.
        """
        namespace, name = place(found)
        if kind in self._kinds:
            each = next(
                (
                    each
                    for each in self._reflectors
                    if each.watch.kind == kind and each.namespace in (None, namespace)
                ),
                None,
            )
            if each is None or not each.synced:
                return
            number, seen = version(found), each.resource_version
            if number is None or not seen.isdigit() or number <= int(seen):
                return
            held = self._store.get(kind, namespace, name)
            if held is not None and (version(held) or 0) >= number:
                return
            each.known.add((namespace, name))
            found = each.watch.trim(dict(found))
        self._store.put(kind, found)

    def forget(self, kind: Kind, namespace: str, name: str) -> None:
        """Drops the copy of an object of a kind that is not watched."""
        if kind not in self._kinds:
            self._store.drop(kind, namespace, name)

    async def run(self) -> None:
        """Follows everything until it is cancelled."""
        async with asyncio.TaskGroup() as group:
            for each in self._reflectors:
                group.create_task(self._follow(each))

    async def _follow(self, each: Reflector) -> None:
        pause = self._pace.first_pause_seconds
        reason = "Start"
        while True:
            try:
                self._on_restart(each.watch.kind, reason)
                await self._list(each)
                pause = self._pace.first_pause_seconds
                reason = await self._watch(each)
            except ApiError as error:
                each.error, reason = str(error), error.reason
                longest = self._pace.last_pause_seconds
                if error.status == 404 and each.watch.optional:
                    # A definition that is being installed is served in a moment, one that nobody wants never.
                    self._replace(each, {}, "")
                    longest = self._pace.absent_seconds
                await self._sleep(pause * (0.5 + self._jitter()))
                pause = min(pause * 2, longest)

    async def _list(self, each: Reflector) -> None:
        found: dict[tuple[str, str], Object] = {}
        next_page, kind = "", each.watch.kind
        while True:
            page = await self._client.page(
                kind,
                each.namespace,
                labels=each.watch.labels,
                fields=each.watch.fields,
                next_page=next_page,
                limit=self._pace.page_objects,
            )
            each.heard_at = self._clock()
            for item in page.items:
                found[place(item)] = each.watch.trim(item)
            next_page = page.next_page
            if not next_page:
                break
        self._replace(each, found, page.resource_version)

    def _replace(
        self, each: Reflector, found: Mapping[tuple[str, str], Object], resource_version: str
    ) -> None:
        """What is held becomes what was found; who is gone is reported as deleted."""
        kind = each.watch.kind
        each.resource_version, each.synced, each.lists = resource_version, True, each.lists + 1
        each.heard_at = self._clock()
        if resource_version:
            each.error = ""
        for key in list(each.known - found.keys()):
            gone = self._store.drop(kind, *key)
            if gone is not None:
                self._tell(kind, gone, Change.DELETED)
        changes: list[tuple[Object, Change]] = []
        for key, item in found.items():
            held = self._store.get(kind, *key)
            if held is not None and held["metadata"].get("uid") != item["metadata"].get("uid"):
                self._store.drop(kind, *key)
                self._tell(kind, held, Change.DELETED)
                held = None
            if held is None:
                changes.append((item, Change.ADDED))
            elif held["metadata"].get("resourceVersion") != item["metadata"].get("resourceVersion"):
                changes.append((item, Change.MODIFIED))
            self._store.put(kind, item)
        each.known = set(found)
        # Told once all is in place, so that who listens sees the whole.
        for item, change in changes:
            self._tell(kind, item, change)
        if self.synced():
            self._complete.set()

    async def _watch(self, each: Reflector) -> str:
        """Follows changes until they have to be listed anew; returns why."""
        pause, failures = self._pace.first_pause_seconds, 0
        while True:
            began, heard = self._clock(), False
            # Spread, so that a restarted API server is not asked by everybody at once for ever.
            seconds = int(self._pace.watch_seconds * (0.75 + 0.5 * self._jitter())) or 1
            try:
                changes = self._client.watch(
                    each.watch.kind,
                    each.namespace,
                    each.resource_version,
                    labels=each.watch.labels,
                    fields=each.watch.fields,
                    seconds=seconds,
                    idle_seconds=self._pace.idle_seconds,
                )
                # Closed at once, and with it its connection, also when an event ends the watch.
                async with contextlib.aclosing(changes):
                    async for event in changes:
                        if event.type == "ERROR":
                            code = int(event.object.get("code") or 500)
                            raise ApiError(
                                code,
                                str(event.object.get("reason") or "Unknown"),
                                str(event.object),
                            )
                        heard, failures, pause = True, 0, self._pace.first_pause_seconds
                        self._take(each, event)
                each.heard_at, each.error = self._clock(), ""
                if not heard and self._clock() - began < 1.0:
                    await self._sleep(pause * (0.5 + self._jitter()))
            except ApiError as error:
                each.error = str(error)
                self._on_restart(each.watch.kind, error.reason)
                if error.status == 410 or error.reason in ("Gone", "Expired"):
                    return "Gone"
                failures += 1
                if failures >= FAILURES_BEFORE_LIST or error.status in (401, 403, 404):
                    raise
                await self._sleep(pause * (0.5 + self._jitter()))
                pause = min(pause * 2, self._pace.last_pause_seconds)

    def _take(self, each: Reflector, event: WatchEvent) -> None:
        kind, found = each.watch.kind, event.object
        each.heard_at, each.error = self._clock(), ""
        newest = found["metadata"]["resourceVersion"]
        each.resource_version = newest
        if event.type == "BOOKMARK":
            return
        key = place(found)
        held = self._store.get(kind, *key)
        number = version(found)
        if event.type == "DELETED":
            each.known.discard(key)
            gone = self._store.drop(kind, *key)
            if gone is not None:
                self._tell(kind, each.watch.trim(found), Change.DELETED)
            return
        known = version(held) if held is not None else None
        if known is not None and number is not None and known >= number:
            # A call's answer was faster; what the watch brings is the same or older. Who listens was not told yet.
            if held is not None and known == number:
                self._tell(kind, held, Change.MODIFIED)
            return
        each.known.add(key)
        kept = each.watch.trim(found)
        self._store.put(kind, kept)
        self._tell(kind, kept, Change.MODIFIED if held is not None else Change.ADDED)

    def _tell(self, kind: Kind, found: Object, change: Change) -> None:
        if self._on_change is not None:
            self._on_change(kind, found, change)
