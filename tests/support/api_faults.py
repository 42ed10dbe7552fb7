"""A client that injects faults. It wraps the client of a real or an in-memory API server."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from kvtier_operator.kube.resources import ApiError, Client, Kind, Object


class Fault(StrEnum):
    """What happens to a call.

    ``KILLED_BEFORE`` and ``KILLED_AFTER`` end the process (``KilledError``) before the call reaches
    the API server, or after it took effect and before its answer was read. ``LOST`` has the effect,
    but no answer comes.
    """

    CONFLICT = "Conflict"
    SERVER_ERROR = "ServerError"
    TIMEOUT = "Timeout"
    LOST = "Lost"
    SLOW = "Slow"
    FORBIDDEN = "Forbidden"
    KILLED_BEFORE = "KilledBefore"
    KILLED_AFTER = "KilledAfter"


class KilledError(BaseException):
    """The operator was killed here. A BaseException, so that no code catches it."""


SLOW_SECONDS = 0.3
_ERRORS = {
    Fault.CONFLICT: (409, "Conflict"),
    Fault.SERVER_ERROR: (500, "InternalError"),
    Fault.TIMEOUT: (0, "Timeout"),
    Fault.LOST: (0, "Timeout"),
    Fault.FORBIDDEN: (403, "Forbidden"),
}


@dataclass(frozen=True, slots=True)
class Call:
    """One call that was made: ``verb`` is the client's method."""

    verb: str
    kind: Kind
    namespace: str | None
    name: str
    subresource: str | None = None

    def __str__(self) -> str:
        rest = f"/{self.subresource}" if self.subresource else ""
        return f"{self.verb} {self.kind.kind}{rest} {self.namespace}/{self.name}"


@dataclass(slots=True)
class FaultyClient(Client):
    """``faults``: number of a call, from 1, to what happens to it. ``calls``: all that were made.
    ``on_killed``: called before ``KilledError`` is raised. Pages and watches, which caches use, are
    the wrapped client's own.
    """

    client: Any
    faults: Mapping[int, Fault] = field(default_factory=dict)
    every: Callable[[Call], Fault | None] = lambda call: None
    on_killed: Callable[[], None] = lambda: None
    calls: list[Call] = field(default_factory=list)
    dead: bool = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.client, name)

    async def _do(self, call: Call, make: Callable[[], Awaitable[Any]]) -> Any:
        if self.dead:
            raise KilledError
        self.calls.append(call)
        fault = self.faults.get(len(self.calls)) or self.every(call)
        if fault is Fault.KILLED_BEFORE:
            self._die()
        if fault in (Fault.CONFLICT, Fault.SERVER_ERROR, Fault.TIMEOUT, Fault.FORBIDDEN):
            raise ApiError(*_ERRORS[fault], f"injected: {call}")
        if fault is Fault.SLOW:
            await asyncio.sleep(SLOW_SECONDS)
        answer = await make()
        if fault is Fault.KILLED_AFTER:
            self._die()
        if fault is Fault.LOST:
            raise ApiError(*_ERRORS[fault], f"injected: {call}")
        return answer

    def _die(self) -> None:
        self.dead = True
        self.on_killed()
        raise KilledError

    async def get(self, kind: Kind, namespace: str | None, name: str) -> Object:
        answer: Object = await self._do(
            Call("get", kind, namespace, name), lambda: self.client.get(kind, namespace, name)
        )
        return answer

    async def read_guarded(self, kind: Kind, namespace: str | None, name: str) -> Object:
        answer: Object = await self._do(
            Call("get", kind, namespace, name),
            lambda: self.client.read_guarded(kind, namespace, name),
        )
        return answer

    async def list(
        self, kind: Kind, namespace: str | None = None, *, labels: str = "", fields: str = ""
    ) -> Sequence[Object]:
        answer: Sequence[Object] = await self._do(
            Call("list", kind, namespace, ""),
            lambda: self.client.list(kind, namespace, labels=labels, fields=fields),
        )
        return answer

    async def create(self, kind: Kind, namespace: str | None, body: Object) -> Object:
        name = body["metadata"].get("name") or body["metadata"].get("generateName", "")
        answer: Object = await self._do(
            Call("create", kind, namespace, name), lambda: self.client.create(kind, namespace, body)
        )
        return answer

    async def apply(
        self, kind: Kind, body: Object, *, subresource: str | None = None, force: bool = True
    ) -> Object:
        metadata = body["metadata"]
        answer: Object = await self._do(
            Call("apply", kind, metadata.get("namespace"), metadata["name"], subresource),
            lambda: self.client.apply(kind, body, subresource=subresource, force=force),
        )
        return answer

    async def patch(
        self,
        kind: Kind,
        namespace: str | None,
        name: str,
        body: Object,
        *,
        subresource: str | None = None,
    ) -> Object:
        answer: Object = await self._do(
            Call("patch", kind, namespace, name, subresource),
            lambda: self.client.patch(kind, namespace, name, body, subresource=subresource),
        )
        return answer

    async def delete(
        self, kind: Kind, namespace: str | None, name: str, *, uid: str, resource_version: str = ""
    ) -> None:
        await self._do(
            Call("delete", kind, namespace, name),
            lambda: self.client.delete(
                kind, namespace, name, uid=uid, resource_version=resource_version
            ),
        )
