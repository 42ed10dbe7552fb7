"""Calls to the API server over aiohttp.

Each call has a deadline that covers all of its attempts, and takes one of a bounded number of places. Attempts are
repeated only where that cannot do harm: reads, server-side applies, merge patches and deletions that name what they
delete; a creation only after a 429, which says that nothing was done. Between attempts the pause doubles, with jitter,
or is what ``Retry-After`` says. A conflict (409) is the caller's: it means that somebody else was faster.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self
from urllib.parse import quote

import aiohttp
import msgspec

from kvtier_operator.api.names import FIELD_MANAGER
from kvtier_operator.kube.credentials import Access, from_kubeconfig, in_cluster
from kvtier_operator.kube.resources import ApiError, Client, Kind, Object

JSON = "application/json"
APPLY = "application/apply-patch+yaml"
MERGE = "application/merge-patch+json"
PAGE_OBJECTS = 500
"""Objects per page of a list, as kubectl asks for."""
MAX_PAUSE_SECONDS = 10.0
RETRIED = frozenset({429, 500, 502, 503, 504})
"""Answers after which the same call may succeed."""
USER_AGENT = "kvtier-operator"
MAX_EVENT_BYTES = 16 << 20
"""etcd refuses objects above 1.5 MiB; a longer line of a watch is no event."""


class Observer(Protocol):
    """Told of every attempt: HTTP status (0: no answer) and seconds until the answer's head."""

    def __call__(self, verb: str, kind: str, status: int, seconds: float) -> None: ...


def unobserved(verb: str, kind: str, status: int, seconds: float) -> None:
    """Forgets it."""


@dataclass(frozen=True, slots=True)
class Page:
    """One page of a list. ``next_page`` is empty on the last one."""

    items: Sequence[dict[str, Any]]
    resource_version: str
    next_page: str


@dataclass(frozen=True, slots=True)
class WatchEvent:
    """``type``: ADDED, MODIFIED, DELETED, BOOKMARK, or ERROR with a Status as the object."""

    type: str
    object: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of a client. ``deadline_seconds``: of a call, with all its attempts."""

    deadline_seconds: float = 30.0
    attempt_seconds: float = 15.0
    attempts: int = 5
    concurrency: int = 16
    first_pause_seconds: float = 0.1


class ApiClient(Client):
    """A client of one API server; use it from one event loop, and close it. ``async with`` closes it."""

    def __init__(
        self,
        access: Access,
        limits: Limits = Limits(),
        observer: Observer = unobserved,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._access = access
        self._limits = limits
        self._observer = observer
        self._jitter = jitter
        self._places = asyncio.Semaphore(limits.concurrency)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends all connections."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def get(self, kind: Kind, namespace: str | None, name: str) -> Object:
        return await self._call("get", kind, "GET", kind.path(namespace, name))

    async def list(
        self, kind: Kind, namespace: str | None = None, *, labels: str = "", fields: str = ""
    ) -> Sequence[Object]:
        found: list[Object] = []
        page = await self.page(kind, namespace, labels=labels, fields=fields)
        found += page.items
        while page.next_page:
            page = await self.page(
                kind, namespace, labels=labels, fields=fields, next_page=page.next_page
            )
            found += page.items
        return found

    async def page(
        self,
        kind: Kind,
        namespace: str | None = None,
        *,
        labels: str = "",
        fields: str = "",
        next_page: str = "",
        limit: int = PAGE_OBJECTS,
    ) -> Page:
        """One page of a list. A ``next_page`` that has become too old raises 410."""
        query = (
            _selection(labels, fields)
            | {"limit": str(limit)}
            | ({"continue": next_page} if next_page else {})
        )
        answer = await self._call("list", kind, "GET", kind.path(namespace), query)
        metadata = answer.get("metadata") or {}
        items = answer.get("items") or []
        for item in items:
            # Items of a list do not say what they are; objects of a watch do.
            item.setdefault("apiVersion", kind.api_version)
            item.setdefault("kind", kind.kind)
        return Page(items, metadata.get("resourceVersion", ""), metadata.get("continue", ""))

    async def create(self, kind: Kind, namespace: str | None, body: Object) -> Object:
        query = {"fieldManager": FIELD_MANAGER}
        return await self._call(
            "create", kind, "POST", kind.path(namespace), query, body, JSON, repeatable=False
        )

    async def apply(
        self, kind: Kind, body: Object, *, subresource: str | None = None, force: bool = True
    ) -> Object:
        metadata = body["metadata"]
        path = kind.path(metadata.get("namespace"), metadata["name"], subresource)
        query = {"fieldManager": FIELD_MANAGER, "force": "true" if force else "false"}
        return await self._call("apply", kind, "PATCH", path, query, body, APPLY)

    async def patch(
        self,
        kind: Kind,
        namespace: str | None,
        name: str,
        body: Object,
        *,
        subresource: str | None = None,
    ) -> Object:
        query = {"fieldManager": FIELD_MANAGER}
        return await self._call(
            "patch", kind, "PATCH", kind.path(namespace, name, subresource), query, body, MERGE
        )

    async def delete(
        self, kind: Kind, namespace: str | None, name: str, *, uid: str, resource_version: str = ""
    ) -> None:
        preconditions = {"uid": uid} | (
            {"resourceVersion": resource_version} if resource_version else {}
        )
        body = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": preconditions}
        try:
            await self._call("delete", kind, "DELETE", kind.path(namespace, name), None, body, JSON)
        except ApiError as error:
            # 409 with only a uid asked for: another object has the name, the one that was seen is gone.
            if error.status != 404 and not (error.status == 409 and not resource_version):
                raise

    async def watch(
        self,
        kind: Kind,
        namespace: str | None,
        resource_version: str,
        *,
        labels: str = "",
        fields: str = "",
        seconds: int,
        idle_seconds: float,
    ) -> AsyncIterator[WatchEvent]:
        """Changes since a version, bookmarks among them, for about ``seconds``. Ends without an error when the server
        ends it. Raises ``ApiError``; with reason ``Idle`` where nothing was heard for ``idle_seconds``.
        """
        query = _selection(labels, fields) | {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": resource_version,
            "timeoutSeconds": str(seconds),
        }
        timeout = aiohttp.ClientTimeout(total=seconds + 60, sock_connect=10, sock_read=idle_seconds)
        began = time.monotonic()
        status = 0
        try:
            async with self._request(
                "GET", kind.path(namespace), query, None, JSON, timeout
            ) as response:
                status = response.status
                self._observer("watch", kind.kind, status, time.monotonic() - began)
                if status != 200:
                    raise await self._refusal(response)
                async for line in _lines(response.content):
                    event = msgspec.json.decode(line)
                    yield WatchEvent(event["type"], event["object"])
        except TimeoutError as error:
            raise ApiError(
                0, "Idle", f"nothing was heard of {kind.plural} for {idle_seconds:g} s"
            ) from error
        except (aiohttp.ClientError, OSError, msgspec.DecodeError, KeyError, TypeError) as error:
            if status == 0:
                self._observer("watch", kind.kind, 0, time.monotonic() - began)
            raise ApiError(0, "Disconnected", f"watch of {kind.plural}: {_words(error)}") from error

    def _request(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None,
        body: Object | None,
        content_type: str,
        timeout: aiohttp.ClientTimeout,
    ) -> Any:
        if self._session is None or self._session.closed:
            tls = self._access.make_tls() if self._access.make_tls is not None else None
            # The connector's own bound would make watches, which never end, wait for one another.
            connector = aiohttp.TCPConnector(limit=0, ssl=tls if tls is not None else False)
            self._session = aiohttp.ClientSession(
                connector=connector, headers={"User-Agent": USER_AGENT}
            )
        headers = {"Accept": JSON, "Content-Type": content_type}
        token = self._access.token()
        if token:
            headers["Authorization"] = f"Bearer {token}"
        data = msgspec.json.encode(body) if body is not None else None
        options: dict[str, Any] = {
            "params": query,
            "data": data,
            "headers": headers,
            "timeout": timeout,
        }
        if self._access.server_name:
            options["server_hostname"] = self._access.server_name
        return self._session.request(
            method, self._access.server + quote(path), allow_redirects=False, **options
        )

    async def _call(
        self,
        verb: str,
        kind: Kind,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: Object | None = None,
        content_type: str = JSON,
        *,
        repeatable: bool = True,
    ) -> dict[str, Any]:
        last: ApiError | None = None
        try:
            async with asyncio.timeout(self._limits.deadline_seconds):
                pause = self._limits.first_pause_seconds
                for attempt in range(self._limits.attempts):
                    if attempt:
                        asked = last.retry_after_seconds if last is not None else None
                        wait = (
                            pause * (0.5 + self._jitter())
                            if asked is None
                            else asked + pause * self._jitter()
                        )
                        await asyncio.sleep(min(wait, MAX_PAUSE_SECONDS))
                        pause *= 2
                    try:
                        async with self._places:
                            return await self._attempt(
                                verb, kind, method, path, query, body, content_type
                            )
                    except ApiError as error:
                        last = error
                        # A token that has just been replaced is refused once; it is read again for the next attempt.
                        again = (
                            error.status in RETRIED
                            or error.status == 0
                            or (error.status == 401 and attempt == 0)
                        )
                        if not again or (not repeatable and error.status not in (401, 429)):
                            raise
        except TimeoutError as error:
            if last is None:
                text = f"{method} {path} took longer than {self._limits.deadline_seconds:g} s"
                raise ApiError(0, "Timeout", text) from error
        raise last if last is not None else ApiError(0, "Timeout", f"{method} {path}")

    async def _attempt(
        self,
        verb: str,
        kind: Kind,
        method: str,
        path: str,
        query: Mapping[str, str] | None,
        body: Object | None,
        content_type: str,
    ) -> dict[str, Any]:
        timeout = aiohttp.ClientTimeout(total=self._limits.attempt_seconds, sock_connect=10)
        began, status = time.monotonic(), 0
        try:
            async with self._request(method, path, query, body, content_type, timeout) as response:
                status = response.status
                if not 200 <= status < 300:
                    raise await self._refusal(response)
                answer: dict[str, Any] = msgspec.json.decode(await response.read())
                return answer
        except TimeoutError as error:
            status = 0
            text = f"{method} {path} was not answered in {self._limits.attempt_seconds:g} s"
            raise ApiError(0, "Timeout", text) from error
        except (aiohttp.ClientError, OSError, msgspec.DecodeError) as error:
            status = 0
            raise ApiError(0, "Disconnected", f"{method} {path}: {_words(error)}") from error
        finally:
            self._observer(verb, kind.kind, status, time.monotonic() - began)

    async def _refusal(self, response: aiohttp.ClientResponse) -> ApiError:
        content = await response.read()
        try:
            answer = msgspec.json.decode(content)
        except msgspec.DecodeError:
            answer = {}
        if not isinstance(answer, dict):
            answer = {}
        if response.status == 401:
            self._access.refused()
        message = str(
            answer.get("message") or content[:200].decode(errors="replace") or response.reason or ""
        )
        error = ApiError(
            response.status, str(answer.get("reason") or response.reason or "Unknown"), message
        )
        header = response.headers.get("Retry-After", "")
        if header.isdigit():
            error.retry_after_seconds = float(header)
        return error


def _selection(labels: str, fields: str) -> dict[str, str]:
    return ({"labelSelector": labels} if labels else {}) | (
        {"fieldSelector": fields} if fields else {}
    )


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Lines of a stream; ``readline`` of aiohttp refuses lines beyond its buffer, and objects are longer."""
    rest: list[bytes] = []
    held = 0
    async for chunk in content.iter_any():
        *complete, tail = chunk.split(b"\n")
        for part in complete:
            line = b"".join([*rest, part])
            rest, held = [], 0
            if line.strip():
                yield line
        rest.append(tail)
        held += len(tail)
        if held > MAX_EVENT_BYTES:
            raise OSError(f"an event of more than {MAX_EVENT_BYTES} bytes")


def connect(
    kubeconfig: Path | None = None,
    context: str | None = None,
    *,
    limits: Limits = Limits(),
    observer: Observer = unobserved,
) -> ApiClient:
    """A client by a kubeconfig or a context of one, else by the pod's service account. Raises
    ``ConfigurationError``.
    """
    access = (
        in_cluster()
        if kubeconfig is None and context is None
        else from_kubeconfig(kubeconfig, context)
    )
    return ApiClient(access, limits, observer)
