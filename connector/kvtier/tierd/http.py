"""The HTTP server for ``/metrics``, ``/status`` and ``/healthz``: read-only, with bounds on
everything a client controls.

At most ``MAX_CLIENTS`` connections are served, further ones are closed. A connection carries one
request of at most ``MAX_REQUEST_BYTES``, which must arrive, and whose response must be read, within
a few seconds.

``/status`` and ``/metrics`` may require a bearer token. Its file is read again when it changes: the
kubelet updates a mounted Secret by swapping a symlink, within about a minute. Without a token every
request is unauthorized.
"""

from __future__ import annotations

import errno
import hmac
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kvtier.config.host_ports import HOST_POD_VARIABLE, host_ports
from kvtier.config.loader import read_bounded
from kvtier.config.models import HttpEndpoint
from kvtier.listening import listen

MAX_CLIENTS = 8
MAX_REQUEST_BYTES = 8_192
REQUEST_SECONDS = 5.0
PROXIED_HEADER = b"kvtier-authorization"
CRLF = "\r\n"
ANSWER_SECONDS = 10.0
"""A scrape over a slow link; the response has tens of kilobytes."""
_ACCEPT_SECONDS = 0.5
_log = logging.getLogger("kvtier.tierd")


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """One HTTP response."""

    status: int
    content_type: str
    body: bytes


Route = Callable[[], HttpResponse]
OPEN_PATHS = frozenset({"/healthz"})
"""Paths that need no token: kubelets have none."""


class Authorizer(Protocol):
    """Decides which requests are authorized."""

    def authorizes(self, authorization: bytes) -> bool:
        """Whether the ``Authorization`` header (empty: none) is valid. For any thread."""
        ...


_REASONS = {
    200: "OK",
    400: "Bad Request",
    401: "Unauthorized",
    404: "Not Found",
    405: "Method Not Allowed",
    408: "Request Timeout",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
    503: "Service Unavailable",
}


def text_response(status: int, message: str) -> HttpResponse:
    """A plain text response."""
    return HttpResponse(status, "text/plain; charset=utf-8", message.encode() + b"\n")


def bind(
    endpoint: HttpEndpoint, routes: dict[str, Route], authorizer: Authorizer | None = None
) -> HttpServer:
    """A server at ``endpoint``: in a pod with ``hostNetwork`` and without a port, on the first free
    one of the pod's ports. Raises ``OSError`` if none can be bound.
    """
    pod = os.environ.get(HOST_POD_VARIABLE, "")
    *first, last = (endpoint.port,) if endpoint.port or not pod else host_ports(pod)
    for port in first:
        try:
            return HttpServer(endpoint.host, port, routes, authorizer)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    return HttpServer(endpoint.host, last, routes, authorizer)


class HttpServer:
    """Serves ``routes`` (path -> handler, called on the request's thread) until ``close``.

    ``address`` is the bound address. ``authorizer`` checks every path except ``OPEN_PATHS``; None:
    no check. Raises ``OSError`` if the address cannot be bound.
    """

    def __init__(
        self, host: str, port: int, routes: dict[str, Route], authorizer: Authorizer | None = None
    ) -> None:
        self._routes = routes
        self._authorizer = authorizer
        self._listener = listen(host, port, MAX_CLIENTS)
        self._listener.settimeout(_ACCEPT_SECONDS)
        self.address: tuple[str, int] = (host, self._listener.getsockname()[1])
        self.rejected = 0
        self._slots = threading.BoundedSemaphore(MAX_CLIENTS)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._accept, name="kvtier-http", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops accepting. Requests in progress end by their own limits."""
        self._stop.set()
        self._listener.close()

    def _accept(self) -> None:
        while not self._stop.is_set():
            try:
                client, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError as error:
                if self._stop.is_set():
                    return
                _log.warning("http: %s", error)
                self._stop.wait(_ACCEPT_SECONDS)
                continue
            if not self._slots.acquire(blocking=False):
                self.rejected += 1
                client.close()
                continue
            try:
                threading.Thread(
                    target=self._serve, args=(client,), name="kvtier-http-client", daemon=True
                ).start()
            except RuntimeError as error:
                _log.warning("http: %s", error)
                self._slots.release()
                client.close()

    def _serve(self, client: socket.socket) -> None:
        try:
            with client:
                request = _receive(client, time.monotonic() + REQUEST_SECONDS)
                if request is None:
                    return
                answer, with_body = self._answer(request)
                client.settimeout(ANSWER_SECONDS)
                client.sendall(_render(answer, with_body))
                client.shutdown(socket.SHUT_WR)
        except OSError as error:
            _log.debug("http: %s", error)
        finally:
            self._slots.release()

    def _answer(self, request: bytes) -> tuple[HttpResponse, bool]:
        if not request:
            return text_response(431, f"a request may have at most {MAX_REQUEST_BYTES} bytes"), True
        parts = request.split(b"\r\n", 1)[0].split(b" ")
        if len(parts) != 3 or not parts[2].startswith(b"HTTP/1."):
            return text_response(400, "expected an HTTP/1 request"), True
        method, target = parts[0], parts[1].split(b"?", 1)[0]
        if method not in (b"GET", b"HEAD"):
            return text_response(405, "only GET and HEAD are allowed"), True
        route = self._routes.get(target.decode("latin-1"))
        if route is None:
            return text_response(
                404, "not found; paths are " + ", ".join(self._routes)
            ), method == b"GET"
        authorizer = None if target.decode("latin-1") in OPEN_PATHS else self._authorizer
        if authorizer is not None and not authorizer.authorizes(_authorization(request)):
            return text_response(401, "a valid bearer token is required"), method == b"GET"
        try:
            return route(), method == b"GET"
        except Exception as error:  # noqa: BLE001
            # A bug in a report must not look like a tierd that has exited.
            _log.exception("http: %s failed: %s", target, error)
            return text_response(500, "internal error; see the log"), method == b"GET"


def _authorization(request: bytes) -> bytes:
    """The ``Authorization`` header. The API server's proxy removes it, so ``kubectl kvtier`` sends
    the same value in a header of its own.
    """
    return _header(request, b"authorization") or _header(request, PROXIED_HEADER)


def _header(request: bytes, name: bytes) -> bytes:
    """The value of the first such header; empty if there is none."""
    for line in request.split(b"\r\n\r\n", 1)[0].split(b"\r\n")[1:]:
        key, _, value = line.partition(b":")
        if key.strip().lower() == name:
            return value.strip()
    return b""


def _receive(client: socket.socket, deadline: float) -> bytes | None:
    """The request's head; empty: too long; None: the client disconnected or is too slow."""
    received = b""
    while b"\r\n\r\n" not in received:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            return None
        client.settimeout(remaining)
        try:
            piece = client.recv(MAX_REQUEST_BYTES)
        except OSError:
            return None
        if not piece:
            return None
        received += piece
        if len(received) > MAX_REQUEST_BYTES:
            return b""
    return received


def _render(answer: HttpResponse, with_body: bool) -> bytes:
    head = (
        f"HTTP/1.1 {answer.status} {_REASONS.get(answer.status, 'Unknown')}\r\n"
        f"Content-Type: {answer.content_type}\r\n"
        f"Content-Length: {len(answer.body)}\r\n"
        f"{'WWW-Authenticate: Bearer' + CRLF if answer.status == 401 else ''}"
        "Cache-Control: no-store\r\n"
        "Connection: close\r\n\r\n"
    ).encode()
    return head + answer.body if with_body else head


MAX_TOKEN_BYTES = 4_096
REFRESH_SECONDS = 1.0
_PREFIX = b"bearer "
_Stamp = tuple[int, int, int, int] | None


class BearerToken:
    """The bearer token in a file. For any thread."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._lock = threading.Lock()
        """Only one thread at a time checks the file."""
        self._stamp: _Stamp = None
        self._refreshed_at = -REFRESH_SECONDS
        self._token = b""

    def authorizes(self, authorization: bytes) -> bool:
        """Whether an ``Authorization`` header has the token. Compares in constant time."""
        with self._lock:
            now = self._clock()
            if now - self._refreshed_at >= REFRESH_SECONDS:
                self._refreshed_at = now
                self._refresh()
            token = self._token
        given = authorization.strip()
        value = given[len(_PREFIX) :].strip() if given[: len(_PREFIX)].lower() == _PREFIX else b""
        same = hmac.compare_digest(value, token)
        return same and bool(token)

    def _refresh(self) -> None:
        try:
            status = os.stat(self._path)
        except OSError:
            self._stamp, self._token = None, b""
            return
        stamp = (status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size)
        if stamp == self._stamp:
            return
        try:
            self._token = read_bounded(self._path, limit_bytes=MAX_TOKEN_BYTES).strip()
        except OSError as error:
            _log.error("cannot read token file: %s", error)
            self._token = b""
            return
        self._stamp = stamp
