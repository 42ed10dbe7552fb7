"""The bearer token that ``/status`` and ``/metrics`` want.

It is read anew when the file changes: the kubelet replaces a mounted Secret by swapping a link, within about a minute after the Secret
changed. As long as there is no token nobody has it, so nobody is let in.
"""

from __future__ import annotations

import hmac
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from kvtier.topology.loading import read_bounded

MAX_TOKEN_BYTES = 4_096
LOOK_SECONDS = 1.0
_PREFIX = b"bearer "

_log = logging.getLogger("kvtier.tierd")
_Seen = tuple[int, int, int, int] | None


class Token:
    """Any thread may ask."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._lock = threading.Lock()
        """Guards the look at the file, so that eight clients do not read it at once."""
        self._seen: _Seen = None
        self._looked = -LOOK_SECONDS
        self._token = b""

    def accepts(self, authorization: bytes) -> bool:
        """Whether the value of an ``Authorization`` header carries the token. Takes as long for a wrong one as for the right one."""
        with self._lock:
            now = self._clock()
            if now - self._looked >= LOOK_SECONDS:
                self._looked = now
                self._look()
            token = self._token
        given = authorization.strip()
        value = given[len(_PREFIX) :].strip() if given[: len(_PREFIX)].lower() == _PREFIX else b""
        same = hmac.compare_digest(value, token)
        return same and bool(token)

    def _look(self) -> None:
        try:
            status = os.stat(self._path)
        except OSError:
            self._seen, self._token = None, b""
            return
        seen = (status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size)
        if seen == self._seen:
            return
        try:
            self._token = read_bounded(self._path, limit_bytes=MAX_TOKEN_BYTES).strip()
        except OSError as error:
            _log.error("the token cannot be read: %s", error)
            self._token = b""
            return
        self._seen = seen
