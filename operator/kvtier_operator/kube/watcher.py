"""The watcher: keeps a lister up to date with kopf's watches.

A watch that is interrupted resumes without losing events, but a new list does not report objects
that were deleted before it. So after each list, and at every resync, the uids of the source are
listed, and cached objects that are missing there are dropped. The same comparison shows that a
source is synced.

kopf runs with the kinds that the cluster serves. Custom resource definitions may be installed or
removed at any time: discovery is repeated, and kopf is restarted when the set of kinds changes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from kvtier_operator.kube.client import Observer
from kvtier_operator.kube.credentials import Credentials
from kvtier_operator.kube.kopf_thread import (
    DEFAULT_PACE,
    STOP_SECONDS,
    KopfThread,
    Mailbox,
    Pace,
    jittered,
    quiet_kopf,
)
from kvtier_operator.kube.lister import Lister, Source, Watch
from kvtier_operator.kube.resources import ApiError, Kind, Object

logger = logging.getLogger(__name__)

STUCK_SECONDS = 300.0
REASONS = {
    0: "Disconnected",
    401: "Unauthorized",
    403: "Forbidden",
    404: "NotFound",
    410: "Expired",
}

OnRestart = Callable[[Kind, str], None]


class Reader(Protocol):
    """What the watcher needs of a client."""

    @property
    def credentials(self) -> Credentials: ...

    @property
    def observer(self) -> Observer: ...

    async def identities(
        self, kind: Kind, namespace: str | None = None, *, labels: str = "", fields: str = ""
    ) -> tuple[frozenset[str], int]: ...

    async def served(self, group: str, version: str) -> frozenset[str]: ...


class Follows(Protocol):
    """Fills a lister."""

    async def run(self) -> None: ...

    def stuck(self) -> str: ...


class MakeWatcher(Protocol):
    """``Watcher``, or a replacement in tests."""

    def __call__(
        self, client: Any, lister: Lister, *, pace: Pace = DEFAULT_PACE, on_restart: OnRestart
    ) -> Follows: ...


class Watcher:
    """Watches the sources of ``lister``. Use from one event loop.

    ``on_restart`` is called for each list (``Start`` for the first one), each failed request and
    each restart of kopf, with the reason.
    """

    def __init__(
        self,
        client: Reader,
        lister: Lister,
        *,
        pace: Pace = DEFAULT_PACE,
        on_restart: OnRestart = lambda kind, reason: None,
    ) -> None:
        self._client = client
        self._lister = lister
        self._pace = pace
        self._on_restart = on_restart
        self._threads: list[KopfThread] = []
        self._listed = {each: asyncio.Event() for each in lister.sources}
        self._started: set[Source] = set()
        self._discover_now = asyncio.Event()

    def stuck(self) -> str:
        """Why the process should be restarted; empty: it should not."""
        silent = max((each.silent_seconds() for each in self._threads), default=0.0)
        return (
            f"kopf's event loop has been blocked for {silent:.0f} s"
            if silent > STUCK_SECONDS
            else ""
        )

    async def run(self) -> None:
        """Watches until it is cancelled."""
        quiet_kopf()
        mailbox = Mailbox()
        self._threads = [
            KopfThread(self._client.credentials, sources, self._pace, mailbox, self)
            for sources in _by_scope(self._lister.sources)
        ]
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._discover())
                for each in self._lister.sources:
                    group.create_task(self._verify(each))
        finally:
            for thread in self._threads:
                thread.stop()
            deadline = time.monotonic() + STOP_SECONDS + 0.5
            for thread in self._threads:
                while thread.is_alive() and time.monotonic() < deadline:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)

    async def _discover(self) -> None:
        """Finds which kinds are served. Starts kopf, and restarts it when a kind comes or goes."""
        known: frozenset[Kind] | None = None
        pause = self._pace.first_pause_seconds
        while True:
            try:
                absent = await self._absent()
            except ApiError as error:
                for each in self._lister.sources:
                    if not each.synced:
                        self._lister.report(each, str(error))
                pause = min(pause * 2, self._pace.last_pause_seconds)
            else:
                if absent != known:
                    self._serve(absent, absent ^ (known or frozenset()))
                    pause = self._pace.first_pause_seconds
                known = absent
                pause = (
                    min(pause * 2, self._pace.absent_seconds)
                    if absent
                    else self._pace.discovery_seconds
                )
            self._discover_now.clear()
            await _wait(self._discover_now, jittered(pause))

    async def _absent(self) -> frozenset[Kind]:
        """The watched kinds that are not served. Those of Kubernetes itself always are."""
        kinds = [each.watch.kind for each in self._lister.sources if "." in each.watch.kind.group]
        groups = sorted({(each.group, each.version) for each in kinds})
        served = {each: await self._client.served(*each) for each in groups}
        return frozenset(
            each for each in kinds if each.plural not in served[each.group, each.version]
        )

    def _serve(self, absent: frozenset[Kind], changed: frozenset[Kind]) -> None:
        for each in self._lister.sources:
            kind = each.watch.kind
            each.absent = kind in absent
            if each.absent and each.watch.optional:
                self._lister.drop_all(each)
                self._lister.mark_synced(each)
            elif each.absent:
                self._lister.report(each, f"the API server does not serve {kind.plural}")
        for thread in self._threads:
            if not thread.is_alive():
                thread.start()
            elif any(each.watch.kind in changed for each in thread.sources):
                thread.restart()

    async def _verify(self, source: Source) -> None:
        """Compares the lister with the API server after each list, and at every resync."""
        listed = self._listed[source]
        while True:
            await _wait(listed, jittered(self._pace.resync_seconds))
            listed.clear()
            if source.absent:
                continue
            try:
                complete = await self._compare(source)
            except ApiError as error:
                self._lister.report(source, str(error))
                await asyncio.sleep(jittered(self._pace.first_pause_seconds))
                listed.set()
                continue
            if complete:
                self._lister.mark_synced(source)
                continue
            logger.error(
                "%s: the watch did not deliver objects that exist; restarting kopf", source
            )
            self._on_restart(source.watch.kind, "Undelivered")
            for thread in self._threads:
                if source in thread.sources:
                    thread.restart()

    async def _compare(self, source: Source) -> bool:
        """Drops deleted objects and waits for undelivered ones.

        Returns False if some stay undelivered. Raises ``ApiError``.
        """
        watch = source.watch
        # Read before the list, which says nothing about objects that are created after it.
        held = self._lister.by_uid(source)
        there, version = await self._client.identities(
            watch.kind, source.namespace, labels=watch.labels, fields=watch.fields
        )
        for uid in held.keys() - there:
            self._lister.drop(watch.kind, held[uid], version)
        deadline = time.monotonic() + self._pace.undelivered_seconds
        while True:
            missing = there - self._lister.by_uid(source).keys()
            if all(self._lister.is_gone(uid) for uid in missing):
                return True
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(0.05)

    def delivered(self, watch: Watch, found: Object, *, deleted: bool) -> None:
        """See ``Listener``."""
        if deleted:
            self._lister.drop(watch.kind, found)
        else:
            self._lister.put(watch.kind, found)

    def listing(self, source: Source) -> None:
        """See ``Listener``."""
        self._on_restart(source.watch.kind, "List" if source in self._started else "Start")
        self._started.add(source)

    def listed(self, source: Source) -> None:
        """See ``Listener``."""
        self._listed[source].set()

    def responded(self, source: Source | None, verb: str, status: int, seconds: float) -> None:
        """See ``Listener``."""
        kind = source.watch.kind if source is not None else None
        self._client.observer(
            verb, kind.kind if kind is not None else "APIResourceList", status, seconds
        )
        if source is None or kind is None:
            return
        reason = REASONS.get(status, f"HTTP{status}")
        self._lister.report(source, "" if status == 200 else f"{verb}: {reason}")
        if status != 200:
            self._on_restart(kind, reason)
        if status == 404:
            self._discover_now.set()

    def stopped(self, sources: Sequence[Source], error: BaseException) -> None:
        """See ``Listener``."""
        logger.warning("kopf stopped, restarting it: %s: %.200s", type(error).__name__, error)
        for kind in {each.watch.kind for each in sources}:
            self._on_restart(kind, "Stopped")


def _by_scope(sources: Sequence[Source]) -> list[list[Source]]:
    """The sources grouped by their namespaces, because a kopf operator has one set of namespaces.

    Cluster-scoped kinds join the first group.
    """
    scopes: dict[tuple[str, ...], list[Source]] = {}
    for each in sources:
        if each.watch.kind.namespaced:
            scopes.setdefault(each.watch.namespaces, []).append(each)
    for each in sources:
        if not each.watch.kind.namespaced:
            scopes.setdefault(next(iter(scopes), ()), []).append(each)
    return list(scopes.values())


async def _wait(event: asyncio.Event, seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
