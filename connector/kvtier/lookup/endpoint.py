"""Where the lookup server of an engine listens, and who may: one process per host.

The directory must belong to this user, or be a volume of the pod: a process that can write to it
could answer in the server's place. There is no other authentication, as for tierd's own socket.
"""

from __future__ import annotations

import fcntl
import os
import re
from pathlib import Path

from kvtier.errors import KVTierError
from kvtier.lookup.wire import SUFFIX
from kvtier.tierd.run_directory import is_private

MAX_SOCKET_PATH_BYTES = 107
"""Of a Unix domain socket."""


class LookupUnavailableError(KVTierError):
    """There can be no lookup server or client here."""


def socket_path(directory: Path, engine: str) -> Path:
    """Returns where the server of ``engine`` listens. Raises ``LookupUnavailableError``."""
    name = re.sub(r"[^A-Za-z0-9_.-]", "-", engine)
    path = directory / f"{name}{SUFFIX}"
    if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
        raise LookupUnavailableError(
            f"{path}: the path of a socket must have at most {MAX_SOCKET_PATH_BYTES} bytes"
        )
    return path


def require_private(directory: Path) -> None:
    """Raises ``LookupUnavailableError`` unless only this user, or the pod, can write there."""
    try:
        if is_private(directory):
            return
    except OSError as error:
        raise LookupUnavailableError(f"{directory}: {error.strerror}") from error
    raise LookupUnavailableError(f"{directory}: other users may write to it")


def make_private(directory: Path) -> None:
    """Creates the directory if needed. Raises ``LookupUnavailableError``."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise LookupUnavailableError(f"{directory}: {error.strerror}") from error
    require_private(directory)


class SocketLock:
    """Held by the process that answers at a socket, until it ends."""

    def __init__(self, socket: Path) -> None:
        """Raises ``LookupUnavailableError`` if another process holds it."""
        path = socket.with_name(f"{socket.name}.lock")
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise LookupUnavailableError(f"{path}: {error.strerror}") from error
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._descriptor)
            raise LookupUnavailableError(f"{socket}: another process answers there") from error

    def release(self) -> None:
        """Lets another process answer. Idempotent."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
