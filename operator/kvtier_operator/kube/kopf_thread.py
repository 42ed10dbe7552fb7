"""kopf in its own thread and event loop, with settings for lists and watches only.

In the process's own loop kopf cancels tasks that it did not create, replaces the SIGTERM handler,
and may not return. Here, if kopf stops for any reason, it gets one second to clean up. Then its
loop is closed, and kopf is started again.

The HTTP session is created here, so that every request passes ``_send``: it adds the current token,
reports each response, and replaces the responses after which kopf would stop all of its watches.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import urlsplit

import aiohttp
import kopf
from kopf._core.reactor.inventory import ResourceMemories, ResourceMemory

from kvtier_operator.kube.client import USER_AGENT
from kvtier_operator.kube.credentials import Credentials
from kvtier_operator.kube.lister import Source, Watch
from kvtier_operator.kube.resources import Object

MAX_MESSAGES = 10_000
"""Events that wait for the process's loop; above this, kopf's handlers wait."""
MESSAGES_PER_TURN = 200
STOP_SECONDS = 1.0
"""How long kopf may take to stop. Then its remaining tasks are cancelled and its loop is closed."""
CANCEL_SECONDS = 0.3
HEALTHY_SECONDS = 60.0
"""After this time without a failure, the pause before a restart is short again."""
LOGIN_SECONDS = 2.0
"""The shortest time between two logins."""
CHUNK_OBJECTS = 100
IDENTITY: Any = "kvtier"
"""Without an identity kopf looks up the user name, which some containers do not have."""
UNUSED_FINALIZER = "kvtier.io/unused"
"""kopf removes its finalizer from watched objects. The default may belong to another operator."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Times of a watcher; tests use shorter ones."""

    first_pause_seconds: float = 0.5
    last_pause_seconds: float = 10.0
    restart_seconds: float = 30.0
    absent_seconds: float = 60.0
    """How often a kind that the cluster does not serve is looked for."""
    discovery_seconds: float = 300.0
    resync_seconds: float = 600.0
    undelivered_seconds: float = 30.0
    """How long an object may be listed and not delivered before kopf is started again."""
    watch_seconds: int = 300
    inactivity_seconds: float = 100.0
    """The API server sends a bookmark about every minute."""


DEFAULT_PACE = Pace()


def jittered(seconds: float) -> float:
    """A time close to the given one, so that replicas do not act at the same moment."""
    return seconds * (0.75 + 0.5 * random.random())  # noqa: S311  (spread, not secret)


class Listener(Protocol):
    """Receives what kopf observes: called on the process's loop, in order. Must not raise."""

    def delivered(self, watch: Watch, found: Object, *, deleted: bool) -> None:
        """An object was listed, changed or deleted."""

    def listing(self, source: Source) -> None:
        """A new list begins."""

    def listed(self, source: Source) -> None:
        """A list is complete. The watch reports changes from its version on."""

    def responded(self, source: Source | None, verb: str, status: int, seconds: float) -> None:
        """A request got a response, or none (status 0); ``source`` is None for kopf's discovery."""

    def stopped(self, sources: Sequence[Source], error: BaseException) -> None:
        """kopf has ended and is started again."""


class Mailbox:
    """Calls functions on the process's loop for another thread, in order."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._messages: deque[tuple[Callable[..., None], tuple[Any, ...], dict[str, Any]]] = deque()
        self._scheduled = False

    @property
    def full(self) -> bool:
        """Whether the sender has to wait before the next event."""
        return len(self._messages) >= MAX_MESSAGES

    def post(self, function: Callable[..., None], *arguments: Any, **named: Any) -> None:
        """Schedules a call. Called from another thread."""
        self._messages.append((function, arguments, named))
        if not self._scheduled:
            self._scheduled = True
            # A loop that is closed no longer needs messages.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._read)

    def _read(self) -> None:
        try:
            for _ in range(min(MESSAGES_PER_TURN, len(self._messages))):
                function, arguments, named = self._messages.popleft()
                function(*arguments, **named)
        finally:
            self._scheduled = False
            if self._messages:
                self._scheduled = True
                self._loop.call_soon(self._read)


class KopfThread(threading.Thread):
    """Runs a kopf operator, and restarts it when it ends. Each run has the sources that are served.

    All namespaced sources have the same ``namespaces``.
    """

    def __init__(
        self,
        credentials: Credentials,
        sources: Sequence[Source],
        pace: Pace,
        mailbox: Mailbox,
        listener: Listener,
    ) -> None:
        super().__init__(name="kopf", daemon=True)
        self.sources = sources
        self._credentials = credentials
        self._pace = pace
        self._mailbox = mailbox
        self._listener = listener
        self._stopping = threading.Event()
        self._running: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None
        self._sessions: list[aiohttp.ClientSession] = []
        self._logged_in_at = self._seen_at = float("-inf")

    def restart(self) -> None:
        """Stops kopf; it is started again at once. Called from any thread."""
        if self._running is not None:
            loop, stop_flag = self._running
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(stop_flag.set)

    def stop(self) -> None:
        """Ends the thread, which takes ``STOP_SECONDS`` at most. Called from any thread."""
        self._stopping.set()
        self.restart()

    def silent_seconds(self) -> float:
        """For how long kopf's event loop has been blocked."""
        seen_at = self._seen_at
        return time.monotonic() - seen_at if seen_at > float("-inf") else 0.0

    def run(self) -> None:
        """The thread's function."""
        pause = self._pace.first_pause_seconds
        while not self._stopping.is_set():
            began, loop = time.monotonic(), asyncio.new_event_loop()
            loop.set_exception_handler(_ignore_leftovers)
            try:
                error = loop.run_until_complete(self._run_kopf())
            finally:
                # Whatever kopf leaves behind ends with its loop.
                loop.close()
            self._seen_at = float("-inf")
            if error is not None:
                self._mailbox.post(self._listener.stopped, self.sources, error)
                healthy = time.monotonic() - began > HEALTHY_SECONDS
                pause = (
                    self._pace.first_pause_seconds
                    if healthy
                    else min(pause * 2, self._pace.restart_seconds)
                )
                self._stopping.wait(pause)

    async def _run_kopf(self) -> BaseException | None:
        """Runs kopf until it stops; returns why, or None if it was asked to."""
        stop_flag = asyncio.Event()
        self._running, self._sessions = (asyncio.get_running_loop(), stop_flag), []
        own = {
            each for each in (asyncio.current_task(), asyncio.ensure_future(self._beat())) if each
        }
        served = [each for each in self.sources if not each.absent]
        if self._stopping.is_set():
            return None
        if not served:
            await stop_flag.wait()
            return None
        namespaces = next(
            (each.watch.namespaces for each in served if each.watch.kind.namespaced), ()
        )
        scope: dict[str, Any] = (
            {"namespaces": list(namespaces)} if namespaces else {"clusterwide": True}
        )
        registry, settings = self._registry(served), kopf_settings(served, self._pace)
        try:
            roots = await kopf.spawn_tasks(
                identity=IDENTITY,
                registry=registry,
                settings=settings,
                memories=_NoMemories(),
                standalone=True,
                stop_flag=stop_flag,
                **scope,
            )
            running = asyncio.ensure_future(kopf.run_tasks(roots, ignored=own))
            await asyncio.wait(roots, return_when=asyncio.FIRST_COMPLETED)
            error = _first_error(roots)
            # kopf may wait 5 s for a task that it lost, and may not return at all.
            await asyncio.wait({running}, timeout=STOP_SECONDS)
            leftovers = asyncio.all_tasks() - own
            for task in leftovers:
                task.cancel()
            if leftovers:
                await asyncio.wait(leftovers, timeout=CANCEL_SECONDS)
        finally:
            for session in self._sessions:
                await session.close()
        return error or (None if stop_flag.is_set() else RuntimeError("it ended without an error"))

    async def _beat(self) -> None:
        while True:
            self._seen_at = time.monotonic()
            await asyncio.sleep(1.0)

    def _registry(self, served: Sequence[Source]) -> Any:
        registry = kopf.OperatorRegistry()
        kopf.on.login(registry=registry)(self._login(served))
        for watch in {each.watch.kind: each.watch for each in served}.values():
            kind = watch.kind
            handler = self._handler(watch)
            kopf.on.event(kind.group, kind.version, kind.plural, id="lister", registry=registry)(
                handler
            )
        return registry

    def _handler(self, watch: Watch) -> Any:
        async def handle(event: Any, **_: Any) -> None:
            # Not a plain function (kopf runs those in a pool), returns None (anything else would be
            # written to the status), and does not raise (the event would be lost).
            while self._mailbox.full:  # noqa: ASYNC110  (another thread makes room)
                await asyncio.sleep(0.02)
            found = watch.trim(dict(event["object"]))
            self._mailbox.post(
                self._listener.delivered, watch, found, deleted=event["type"] == "DELETED"
            )

        return handle

    def _login(self, served: Sequence[Source]) -> Any:
        base = urlsplit(self._credentials.server).path
        paths = {base + each.watch.kind.path(each.namespace): each for each in served}
        listing: set[Source] = set()

        async def send(request: aiohttp.ClientRequest, handler: Any) -> aiohttp.ClientResponse:
            source = paths.get(request.url.path)
            query = request.url.query
            if source is not None and "watch" not in query and "continue" not in query:
                self._mailbox.post(self._listener.listing, source)
                listing.add(source)
            elif source in listing and "watch" in query:
                listing.discard(source)
                self._mailbox.post(self._listener.listed, source)
            return await self._send(request, handler, source)

        async def login(**_: Any) -> Any:
            # A new session each time: kopf closes it, and refuses credentials that it saw fail.
            await asyncio.sleep(max(0.0, self._logged_in_at + LOGIN_SECONDS - time.monotonic()))
            self._logged_in_at = time.monotonic()
            connector = aiohttp.TCPConnector(limit=0, ssl=self._credentials.tls())
            headers = {"User-Agent": USER_AGENT}
            session = aiohttp.ClientSession(
                connector=connector, headers=headers, middlewares=(send,)
            )
            self._sessions.append(session)
            return kopf.AiohttpSession(server=self._credentials.server, aiohttp_session=session)

        return login

    async def _send(
        self, request: aiohttp.ClientRequest, handler: Any, source: Source | None
    ) -> aiohttp.ClientResponse:
        watches = "watch" in request.url.query
        verb = "get" if source is None else "watch" if watches else "list"
        began, status = time.monotonic(), 0
        try:
            value = await self._credentials.authorization()
            if value:
                request.headers["Authorization"] = value
            if self._credentials.server_name:
                request.server_hostname = self._credentials.server_name
            response: aiohttp.ClientResponse = await handler(request)
            status = response.status
        finally:
            self._mailbox.post(
                self._listener.responded, source, verb, status, time.monotonic() - began
            )
        if status == 401:
            self._credentials.expire()
        if source is not None and status in (401, 403, 404):
            response.release()
            # kopf retries this without end.
            raise aiohttp.ClientConnectionError(f"HTTP {status}")
        if source is not None and status == 410 and not watches:
            response.release()
            # kopf lists again.
            raise aiohttp.ClientPayloadError(f"HTTP {status}")
        return response


def kopf_settings(sources: Sequence[Source], pace: Pace) -> Any:
    """Settings with which kopf lists and watches, and does nothing else."""
    settings = kopf.OperatorSettings()
    settings.scanning.disabled = True
    settings.posting.enabled = False
    settings.process.ultimate_exiting_timeout = None  # else SIGKILL ten minutes after a failure
    settings.persistence.finalizer = UNUSED_FINALIZER
    settings.persistence.diffbase_storage = _NoDiffBase()
    settings.persistence.progress_storage = _NoProgress()
    settings.watching.chunk_size = CHUNK_OBJECTS
    settings.watching.connect_timeout = 10
    settings.watching.server_timeout = pace.watch_seconds
    settings.watching.inactivity_timeout = pace.inactivity_seconds
    settings.networking.request_timeout = 60
    settings.networking.error_backoffs = _Backoffs(pace)
    settings.queueing.idle_timeout = 0.1  # a worker keeps its object for so long
    settings.queueing.exit_timeout = 0.5
    for watch in (each.watch for each in sources):
        key = watch.kind.group, watch.kind.version, watch.kind.plural
        if watch.labels:
            settings.watching.label_selectors[key] = watch.labels
        if watch.fields:
            settings.watching.field_selectors[key] = watch.fields
    return settings


class _Backoffs:
    """An endless sequence of pauses, because kopf stops retrying after the last one."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace

    def __iter__(self) -> Iterator[float]:
        pause = self._pace.first_pause_seconds
        while True:
            yield jittered(pause)
            pause = min(pause * 2, self._pace.last_pause_seconds)


class _NoMemories(ResourceMemories):
    """Remembers nothing of an object: kopf's record is as large as a pod's outline, and only
    handlers that KVTier does not have read it.
    """

    async def recall(self, raw_body: Any, **options: Any) -> ResourceMemory:
        return await super().recall(raw_body, **{**options, "ephemeral": True})


class _NoDiffBase(kopf.DiffBaseStorage):
    """Stores nothing: no handler compares objects."""

    def build(self, *, body: Any, extra_fields: Any = None) -> Any:
        return {}

    def fetch(self, *, body: Any) -> None:
        return None

    def store(self, *, body: Any, patch: Any, essence: Any) -> None:
        raise RuntimeError("nothing is stored")


class _NoProgress(kopf.ProgressStorage):
    """Stores nothing: no handler is retried."""

    def fetch(self, *, key: Any, body: Any) -> None:
        return None

    def store(self, *, key: Any, record: Any, body: Any, patch: Any) -> None:
        raise RuntimeError("nothing is stored")

    def purge(self, *, key: Any, body: Any, patch: Any) -> None:
        return None

    def touch(self, *, body: Any, patch: Any, value: Any) -> None:
        return None

    def clear(self, *, essence: Any) -> Any:
        return essence


def quiet_kopf() -> None:
    """Silences log lines of kopf that the watcher reports itself."""
    logging.getLogger("kopf").setLevel(logging.WARNING)
    logging.getLogger("kopf.objects").setLevel(logging.ERROR)
    for name in (
        "_cogs.clients",
        "_core.reactor.running",
        "_core.engines.activities",
        "activities",
    ):
        logging.getLogger(f"kopf.{name}").setLevel(logging.CRITICAL)


def _first_error(tasks: Collection[asyncio.Task[Any]]) -> BaseException | None:
    ended = [each for each in tasks if each.done() and not each.cancelled()]
    return next((error for each in ended if (error := each.exception()) is not None), None)


def _ignore_leftovers(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Ignores tasks of kopf that are destroyed with their loop. Nothing else runs in it."""
