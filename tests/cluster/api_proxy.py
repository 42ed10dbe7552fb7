"""An HTTP proxy in front of an API server that records requests and answers some of them itself."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import aiohttp
import yaml
from aiohttp import web

from kvtier_operator.kube import credentials

HOP_HEADERS = {
    "transfer-encoding",
    "content-encoding",
    "content-length",
    "connection",
    "host",
    "authorization",
}


@dataclass(frozen=True, slots=True)
class Request:
    """A request that the proxy got. ``verb`` is ``list``, ``watch``, ``get`` or the HTTP method."""

    method: str
    path: str
    query: dict[str, str]

    @property
    def watches(self) -> bool:
        return "watch" in self.query

    def __str__(self) -> str:
        return f"{self.method} {self.path} {self.query}"


Fault = Callable[[web.Request], Awaitable[web.StreamResponse]]


def status(code: int, reason: str = "Injected", **headers: str) -> Fault:
    """Answers with an HTTP error."""

    async def answer(request: web.Request) -> web.StreamResponse:
        body = {
            "kind": "Status",
            "apiVersion": "v1",
            "status": "Failure",
            "code": code,
            "reason": reason,
        }
        return web.json_response({**body, "message": "injected"}, status=code, headers=headers)

    return answer


def error_event(code: int, reason: str = "Injected", after: asyncio.Event | None = None) -> Fault:
    """Answers a watch with an ERROR event, once ``after`` is set."""

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        if after is not None:
            await after.wait()
        event = {
            "type": "ERROR",
            "object": {"kind": "Status", "code": code, "reason": reason, "message": "injected"},
        }
        await response.write(json.dumps(event).encode() + b"\n")
        return response

    return answer


def silence() -> Fault:
    """Takes the request and never answers."""

    async def answer(request: web.Request) -> web.StreamResponse:
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    return answer


@dataclass
class Rule:
    """Answers the next ``times`` requests that ``matches`` accepts. The first sets ``struck``."""

    matches: Callable[[Request], bool]
    fault: Fault
    times: int = 1
    struck: asyncio.Event = field(default_factory=asyncio.Event)
    count: int = 0


class ApiProxy:
    """Use ``async with ApiProxy(kubeconfig, context, home) as proxy`` and ``proxy.kubeconfig``."""

    def __init__(self, kubeconfig: Path, context: str, home: Path) -> None:
        self._upstream = (kubeconfig, context)
        self.kubeconfig = home / "proxy-kubeconfig"
        self.requests: list[Request] = []
        self.tokens: list[str] = []
        self.rules: list[Rule] = []
        self._watches: list[web.Request] = []

    async def __aenter__(self) -> Self:
        self._access = await credentials.from_kubeconfig(*self._upstream)
        connector = aiohttp.TCPConnector(limit=0, ssl=self._access.tls())
        self._session = aiohttp.ClientSession(connector=connector, auto_decompress=False)
        application = web.Application(client_max_size=16 << 20)
        application.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(
            application, access_log=None, shutdown_timeout=0.1, handler_cancellation=True
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        server = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "proxy", "cluster": {"server": server}}],
            "users": [{"name": "proxy", "user": {"token": "secret"}}],
            "contexts": [{"name": "proxy", "context": {"cluster": "proxy", "user": "proxy"}}],
            "current-context": "proxy",
        }
        self.kubeconfig.write_text(yaml.safe_dump(document))
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.cut()
        await self._session.close()
        await self._runner.cleanup()

    def fail(self, matches: Callable[[Request], bool], fault: Fault, times: int = 1) -> Rule:
        """Adds a rule."""
        rule = Rule(matches, fault, times)
        self.rules.append(rule)
        return rule

    def cut(self) -> None:
        """Ends all watches."""
        for request in self._watches:
            if request.transport is not None:
                request.transport.abort()
        self._watches.clear()

    def request_count(self, matches: Callable[[Request], bool]) -> int:
        """The number of requests so far that ``matches`` accepts."""
        return sum(matches(each) for each in self.requests)

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        seen = Request(request.method, request.path, dict(request.query))
        self.requests.append(seen)
        self.tokens.append(request.headers.get("Authorization", ""))
        if seen.watches:
            self._watches.append(request)
        for rule in self.rules:
            if rule.count < rule.times and rule.matches(seen):
                rule.count += 1
                rule.struck.set()
                return await rule.fault(request)
        headers = {
            key: value for key, value in request.headers.items() if key.lower() not in HOP_HEADERS
        }
        headers["Authorization"] = await self._access.authorization() or ""
        url = self._access.server + str(request.rel_url)
        timeout = aiohttp.ClientTimeout(total=None)
        async with self._session.request(
            request.method,
            url,
            headers=headers,
            data=await request.read() or None,
            timeout=timeout,
            allow_redirects=False,
        ) as upstream:
            kept = {
                key: value
                for key, value in upstream.headers.items()
                if key.lower() not in HOP_HEADERS
            }
            if "Content-Encoding" in upstream.headers:
                kept["Content-Encoding"] = upstream.headers["Content-Encoding"]
            response = web.StreamResponse(status=upstream.status, headers=kept)
            await response.prepare(request)
            async for chunk in upstream.content.iter_any():
                await response.write(chunk)
            await response.write_eof()
            return response
