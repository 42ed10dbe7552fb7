"""A container registry in memory, as much of its protocol as pushing and pulling need."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar
from urllib.parse import parse_qs, urlsplit


class Registry:
    """``blobs`` by digest; ``manifests`` by (repository, tag or digest): media type and content."""

    def __init__(self) -> None:
        self.blobs: dict[str, bytes] = {}
        self.manifests: dict[tuple[str, str], tuple[str, bytes]] = {}
        self.uploads: dict[str, bytes] = {}
        self.numbers = itertools.count()
        self.address = ""


def digest_of(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    registry: ClassVar[Registry]

    def log_message(self, *_: object) -> None:
        pass

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        found = b""
        while size := int(self.rfile.readline(), 16):
            found += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return found

    def _send(self, status: int, content: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _serve(self) -> None:
        body = self._body()
        parts = urlsplit(self.path)
        if parts.path == "/v2/":
            return self._send(200)
        match = re.match(r"^/v2/(.+)/(blobs/uploads|blobs|manifests)/(.*)$", parts.path)
        if match is None:
            return self._send(404)
        repository, kind, name = match.groups()
        if kind == "blobs/uploads":
            return self._upload(repository, name, body, parse_qs(parts.query))
        if kind == "blobs":
            content = self.registry.blobs.get(name)
            return self._send(404) if content is None else self._found(name, "", content)
        if self.command == "PUT":
            digest = digest_of(body)
            entry = (self.headers["Content-Type"], body)
            self.registry.manifests[repository, name] = entry
            self.registry.manifests[repository, digest] = entry
            return self._send(201, Docker_Content_Digest=digest, Location=self.path)
        found = self.registry.manifests.get((repository, name))
        return self._send(404) if found is None else self._found(digest_of(found[1]), *found)

    def _found(self, digest: str, media_type: str, content: bytes) -> None:
        media_type = media_type or "application/octet-stream"
        self._send(200, content, Content_Type=media_type, Docker_Content_Digest=digest)

    def _upload(self, repository: str, name: str, body: bytes, query: dict[str, list[str]]) -> None:
        uploads = self.registry.uploads
        name = name or str(next(self.registry.numbers))
        uploads[name] = uploads.get(name, b"") + body
        if "digest" in query:
            content = uploads.pop(name)
            if digest_of(content) != query["digest"][0]:
                return self._send(400)
            self.registry.blobs[query["digest"][0]] = content
            return self._send(201, Docker_Content_Digest=query["digest"][0], Location=self.path)
        location = f"/v2/{repository}/blobs/uploads/{name}"
        size = max(len(uploads[name]) - 1, 0)
        return self._send(202, Location=location, Docker_Upload_UUID=name, Range=f"0-{size}")

    do_GET = do_HEAD = do_POST = do_PATCH = do_PUT = _serve


@contextlib.contextmanager
def served() -> Iterator[Registry]:
    """A registry on this machine, without TLS, while the block runs."""
    registry = Registry()
    handler = type("Handler", (_Handler,), {"registry": registry})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    registry.address = f"127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield registry
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
