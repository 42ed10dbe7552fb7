"""Calls to the API server, made with the dynamic client of ``kubernetes.aio``.

A call has a deadline that covers all of its attempts, and at most ``Limits.concurrency`` calls run
at the same time. Only calls that are safe to repeat are retried: reads, server-side applies, merge
patches and deletions with preconditions; a create only after a 429 response, which means that
nothing was done. The pause between attempts doubles, with jitter; ``Retry-After`` takes precedence.
Conflicts (409) are left to the caller.

The dynamic client is used without its discovery, which keeps a cache file that never expires.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import aiohttp
import msgspec
from kubernetes.aio import client as kubernetes
from kubernetes.aio.client.exceptions import ApiException
from kubernetes.aio.dynamic import DynamicClient

from kvtier_operator.api.names import FIELD_MANAGER
from kvtier_operator.kube import credentials
from kvtier_operator.kube.resources import PODS, ApiError, Client, Kind, Object

PAGE_OBJECTS = 500
"""The number of objects in one page of a list; kubectl uses the same value."""
MAX_PAUSE_SECONDS = 10.0
MAX_LIST_RESTARTS = 3
"""How often a list starts again because its snapshot expired (410) between two pages."""
RETRIED = frozenset({0, 429, 500, 502, 503, 504})
"""Responses after which the same call may succeed; 0: no response."""
USER_AGENT = "kvtier-operator"
APPLY = "application/apply-patch+yaml"
MERGE = "application/merge-patch+json"
METADATA_ONLY = {"Accept": "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"}
JSON_OBJECT = dict[str, Any]
NOT_LEADER = "NotLeader"
"""The reason of the ``ApiError`` for a write that was not sent because another replica leads."""


T = TypeVar("T")


class Observer(Protocol):
    """Called after each attempt with the HTTP status (0: no response) and the duration."""

    def __call__(self, verb: str, kind: str, status: int, seconds: float) -> None: ...


def ignore(verb: str, kind: str, status: int, seconds: float) -> None:
    """The observer that does nothing."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of a client. ``deadline_seconds`` covers a call with all of its attempts."""

    deadline_seconds: float = 30.0
    attempt_seconds: float = 15.0
    attempts: int = 5
    concurrency: int = 16
    first_pause_seconds: float = 0.1


class _ListMetadata(msgspec.Struct):
    version: str = msgspec.field(default="", name="resourceVersion")
    next_page: str = msgspec.field(default="", name="continue")


class _Page(msgspec.Struct, Generic[T]):
    metadata: _ListMetadata
    items: list[T] | None = None


class _Identity(msgspec.Struct):
    uid: str


class _Item(msgspec.Struct):
    metadata: _Identity


class ApiClient(Client):
    """The calls of one process; use it from one event loop.

    ``write_seconds`` returns for how long this process may still write. A write is not sent once
    that is zero, and is abandoned when it ends.
    """

    def __init__(
        self,
        api: Any,
        access: credentials.Credentials,
        limits: Limits = Limits(),
        observer: Observer = ignore,
        *,
        write_seconds: Callable[[], float] = lambda: float("inf"),
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self.credentials = access
        self.observer = observer
        self._dynamic = DynamicClient(api)
        self._limits = limits
        self._write_seconds = write_seconds
        self._jitter = jitter
        self._slots = asyncio.Semaphore(limits.concurrency)

    async def get(self, kind: Kind, namespace: str | None, name: str) -> Object:
        return await self._object("get", kind, "get", kind.path(namespace, name))

    async def list(
        self, kind: Kind, namespace: str | None = None, *, labels: str = "", fields: str = ""
    ) -> Sequence[Object]:
        items, _ = await self._list(_Page[JSON_OBJECT], kind, namespace, labels, fields)
        for item in items:
            # Items of a list do not carry their kind; objects of a watch do.
            item.setdefault("apiVersion", kind.api_version)
            item.setdefault("kind", kind.kind)
        return items

    async def read_guarded(self, kind: Kind, namespace: str | None, name: str) -> Object:
        # It writes nothing, so metrics count it as a get.
        options = {"body": {}, "content_type": MERGE, "dry_run": "All"}
        return await self._object("get", kind, "patch", kind.path(namespace, name), **options)

    async def identities(
        self, kind: Kind, namespace: str | None = None, *, labels: str = "", fields: str = ""
    ) -> tuple[frozenset[str], int]:
        """The uids of a collection's objects, and its resource version. Only metadata is read."""
        items, version = await self._list(
            _Page[_Item], kind, namespace, labels, fields, METADATA_ONLY
        )
        uids = frozenset(item.metadata.uid for item in items)
        return uids, int(version) if version.isdigit() else 0

    async def served(self, group: str, version: str) -> frozenset[str]:
        """The plural names of the kinds that the API server serves in a group and version."""
        kind = Kind(group, version, "", "APIResourceList")
        try:
            answer = await self._object("get", kind, "get", kind.path().rstrip("/"))
        except ApiError as error:
            if error.status != 404:
                raise
            return frozenset()
        return frozenset(each["name"] for each in answer.get("resources") or ())

    async def create(self, kind: Kind, namespace: str | None, body: Object) -> Object:
        options = {"body": body, "field_manager": FIELD_MANAGER}
        return await self._object("create", kind, "post", kind.path(namespace), **options)

    async def apply(
        self, kind: Kind, body: Object, *, subresource: str | None = None, force: bool = True
    ) -> Object:
        path = kind.path(body["metadata"].get("namespace"), body["metadata"]["name"], subresource)
        options = {"content_type": APPLY, "field_manager": FIELD_MANAGER, "force_conflicts": force}
        return await self._object("apply", kind, "patch", path, body=body, **options)

    async def patch(
        self,
        kind: Kind,
        namespace: str | None,
        name: str,
        body: Object,
        *,
        subresource: str | None = None,
    ) -> Object:
        options = {"body": body, "content_type": MERGE, "field_manager": FIELD_MANAGER}
        return await self._object(
            "patch", kind, "patch", kind.path(namespace, name, subresource), **options
        )

    async def delete(
        self, kind: Kind, namespace: str | None, name: str, *, uid: str, resource_version: str = ""
    ) -> None:
        preconditions = {"uid": uid} | (
            {"resourceVersion": resource_version} if resource_version else {}
        )
        body = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": preconditions}
        try:
            await self._object("delete", kind, "delete", kind.path(namespace, name), body=body)
        except ApiError as error:
            # 409 with only a uid: another object has the name, so the given one is gone.
            if error.status != 404 and not (error.status == 409 and not resource_version):
                raise

    async def read_pod(
        self, namespace: str, pod: str, path: str, headers: Mapping[str, str], max_bytes: int
    ) -> bytes:
        """GET from a pod through the API server. ``pod`` is NAME:PORT. One attempt; an answer has
        at most ``max_bytes`` + 1 bytes. A pod that cannot be reached is a 503.
        """
        url = f"{PODS.path(namespace, pod, 'proxy')}{path}"
        seconds = self._limits.attempt_seconds
        options = {"header_params": {"Accept": "*/*", **headers}, "_request_timeout": seconds}
        try:
            async with self._slots, asyncio.timeout(seconds):
                response = await self._dynamic.request("get", url, serialize=False, **options)
                body = bytearray()
                async for piece in response.content.iter_chunked(64 << 10):
                    body += piece
                    if len(body) > max_bytes:
                        response.close()
                        break
                return bytes(body[: max_bytes + 1])
        except TimeoutError as error:
            raise ApiError(0, "Timeout", f"no response in {seconds:g} s") from error
        except ApiException as error:
            raise _api_error(error) from None
        except (aiohttp.ClientError, OSError) as error:
            raise ApiError(0, "Disconnected", f"{type(error).__name__}: {error}") from error

    async def _list(
        self,
        page_type: type[_Page[T]],
        kind: Kind,
        namespace: str | None,
        labels: str,
        fields: str,
        headers: dict[str, str] | None = None,
    ) -> tuple[Sequence[T], str]:
        """All items, page by page, and their resource version."""
        selectors = {
            "label_selector": labels or None,
            "field_selector": fields or None,
            "limit": PAGE_OBJECTS,
        }
        found: Any = []
        token, restarts = "", 0
        while True:
            # The dynamic client adds to the headers that it is given.
            options = {
                **selectors,
                "_continue": token or None,
                "header_params": dict(headers or {}),
            }
            try:
                page = await self._call(
                    "list", kind, "get", kind.path(namespace), page_type, **options
                )
            except ApiError as error:
                if error.status != 410 or not token or restarts == MAX_LIST_RESTARTS:
                    raise
                found, token, restarts = [], "", restarts + 1
                continue
            found += page.items or ()
            token = page.metadata.next_page
            if not token:
                return found, page.metadata.version

    async def _object(
        self, verb: str, kind: Kind, method: str, path: str, **options: Any
    ) -> Object:
        answer: Object = await self._call(verb, kind, method, path, JSON_OBJECT, **options)
        return answer

    async def _call(
        self, verb: str, kind: Kind, method: str, path: str, answer_type: Any, **options: Any
    ) -> Any:
        last: ApiError | None = None
        try:
            async with asyncio.timeout(self._limits.deadline_seconds):
                pause = self._limits.first_pause_seconds
                for attempt in range(self._limits.attempts):
                    if last is not None:
                        jitter = pause * (0.5 + self._jitter())
                        await asyncio.sleep(
                            min((last.retry_after_seconds or 0.0) + jitter, MAX_PAUSE_SECONDS)
                        )
                        pause *= 2
                    try:
                        async with self._slots:
                            return await self._attempt(
                                verb, kind, method, path, answer_type, options
                            )
                    except ApiError as error:
                        last = error
                        # The token may have been replaced. The second attempt reads it again.
                        retry = error.status in RETRIED or (error.status == 401 and attempt == 0)
                        safe = verb != "create" or error.status in (401, 429)
                        if not retry or not safe or error.reason == NOT_LEADER:
                            raise
        except TimeoutError:
            if last is None:
                text = f"{verb} {path} took longer than {self._limits.deadline_seconds:g} s"
                raise ApiError(0, "Timeout", text) from None
        raise last if last is not None else ApiError(0, "Timeout", f"{verb} {path}")

    async def _attempt(
        self,
        verb: str,
        kind: Kind,
        method: str,
        path: str,
        answer_type: Any,
        options: dict[str, Any],
    ) -> Any:
        seconds = self._limits.attempt_seconds
        if method != "get":
            seconds = min(seconds, self._write_seconds())
            if seconds <= 0:
                raise ApiError(0, NOT_LEADER, f"{verb} {path}: this replica is not the leader")
        began, status = time.monotonic(), 0
        try:
            async with asyncio.timeout(seconds):
                request = self._dynamic.request(
                    method, path, serialize=False, _request_timeout=seconds, **options
                )
                response = await request
                answer = msgspec.json.decode(await response.read(), type=answer_type)
            status = response.status
            return answer
        except TimeoutError as error:
            raise ApiError(0, "Timeout", f"{verb} {path}: no response in {seconds:g} s") from error
        except ApiException as error:
            status = int(error.status or 0)
            if status == 401:
                self.credentials.expire()
            raise _api_error(error) from None
        except (aiohttp.ClientError, OSError, msgspec.DecodeError) as error:
            raise ApiError(
                0, "Disconnected", f"{verb} {path}: {type(error).__name__}: {error}"
            ) from error
        finally:
            self.observer(verb, kind.kind, status, time.monotonic() - began)


def _api_error(error: Any) -> ApiError:
    """Reads the response body, because ``str(error)`` contains all headers."""
    try:
        answer = msgspec.json.decode(error.body or b"{}", type=JSON_OBJECT)
    except (msgspec.DecodeError, TypeError):
        answer = {}
    message = str(answer.get("message") or str(error.body or "")[:200] or error.reason or "")
    found = ApiError(
        int(error.status or 0), str(answer.get("reason") or error.reason or "Unknown"), message
    )
    header = str((error.headers or {}).get("Retry-After") or "")
    if header.isdigit():
        found.retry_after_seconds = float(header)
    return found


@contextlib.asynccontextmanager
async def open_api(access: credentials.Credentials) -> AsyncIterator[Any]:
    """The client of the Kubernetes client library, closed at the end of the block."""
    async with kubernetes.ApiClient(access.configuration) as api:
        api.user_agent = USER_AGENT
        yield api


@contextlib.asynccontextmanager
async def open_client(
    access: credentials.Credentials, limits: Limits = Limits(), observer: Observer = ignore
) -> AsyncIterator[ApiClient]:
    """A client with these credentials; closed at the end of the block."""
    async with open_api(access) as api:
        yield ApiClient(api, access, limits, observer)


@contextlib.asynccontextmanager
async def connect(
    kubeconfig: Path | None = None,
    context: str | None = None,
    *,
    limits: Limits = Limits(),
    observer: Observer = ignore,
) -> AsyncIterator[ApiClient]:
    """A client with the credentials of a kubeconfig or of the pod.

    Raises ``ConfigurationError``.
    """
    async with open_client(await credentials.load(kubeconfig, context), limits, observer) as client:
        yield client
