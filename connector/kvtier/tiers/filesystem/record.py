"""Small documents that one process rewrites and others read.

They are rewritten in place, not replaced: a reader opens the file anew each time, and opening is what makes an NFS client ask the server
whether the content has changed. A new file under an old name could stay unseen for as long as the client trusts its directory. What is
half written does not have its checksum and counts as not there.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import blake3

_DIGEST_CHARACTERS = 32
_HEAD_BYTES = _DIGEST_CHARACTERS + 12
_ATTEMPTS = 3


def _encoded(document: dict[str, Any]) -> bytes:
    body = json.dumps(document, separators=(",", ":")).encode()
    digest = blake3.blake3(body).hexdigest()[:_DIGEST_CHARACTERS]
    return f"{digest} {len(body):010d}\n".encode() + body


def create(path: Path, document: dict[str, Any], mode: int, gid: int | None) -> None:
    """Makes the file. Raises ``OSError``, ``FileExistsError`` among them."""
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, mode)
    try:
        if gid is not None:
            os.fchown(descriptor, -1, gid)
            os.fchmod(descriptor, mode)
        os.pwrite(descriptor, _encoded(document), 0)
    finally:
        os.close(descriptor)


def rewrite(path: Path, document: dict[str, Any]) -> float:
    """Writes over the file, which must be there: the file system's time of it. Raises ``OSError``."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        os.pwrite(descriptor, _encoded(document), 0)
        return os.fstat(descriptor).st_mtime
    finally:
        os.close(descriptor)


def read(path: Path) -> dict[str, Any] | None:
    """The document; None if it is not whole. Raises ``OSError``."""
    for _ in range(_ATTEMPTS):
        found = _decoded(path.read_bytes())
        if found is not None:
            return found
    return None


def _decoded(content: bytes) -> dict[str, Any] | None:
    head, body = content[:_HEAD_BYTES], content[_HEAD_BYTES:]
    try:
        digest, length = head.decode().split()
        body = body[: int(length)]
        if blake3.blake3(body).hexdigest()[:_DIGEST_CHARACTERS] != digest:
            return None
        document = json.loads(body)
    except ValueError:
        return None
    return document if isinstance(document, dict) else None
