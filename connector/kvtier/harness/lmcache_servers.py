"""Real servers on loopback for the lmcache tier, and a proxy that makes them slow, hanging, lying
or absent.

The proxy stands between tier and server, so that a fault is one of the network or of what the
server answers, while the server is real.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from pathlib import Path

START_SECONDS = 120.0
_CHUNK_BYTES = 65_536
_LOOPBACK = "127.0.0.1"


class ServerProcess(ABC):
    """A server process. ``scheme`` begins its URL. Each start takes a free port, because some
    servers cannot bind one that was used a moment ago; a proxy keeps its own."""

    scheme = ""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self.port = 0
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """What an lmcache tier is given."""
        return f"{self.scheme}://{_LOOPBACK}:{self.port}"

    @abstractmethod
    def command(self) -> list[str]:
        """The command line."""

    def start(self) -> None:
        """Starts the server and waits until it listens. Raises ``TimeoutError``."""
        with socket.socket() as probe:
            probe.bind((_LOOPBACK, 0))
            self.port = int(probe.getsockname()[1])
        with open(self.directory / "server.log", "ab") as log:
            self.process = subprocess.Popen(
                self.command(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.directory,
                env={**os.environ, "LMCACHE_TRACK_USAGE": "false", "LMCACHE_LOG_LEVEL": "WARNING"},
                start_new_session=True,
            )
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection((_LOOPBACK, self.port), 1):
                return
            if self.process.poll() is not None:
                break
            time.sleep(0.05)
        self.kill()
        raise TimeoutError(f"{self.command()[0]} does not listen on port {self.port}")

    def kill(self) -> None:
        """Ends the server with SIGKILL, stopped or not."""
        process, self.process = self.process, None
        if process is not None:
            process.kill()
            process.wait(30)

    def suspend(self) -> None:
        """Stops the process (SIGSTOP): connections stay, and nothing is answered."""
        if self.process is not None:
            os.kill(self.process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Ends ``suspend``."""
        if self.process is not None:
            os.kill(self.process.pid, signal.SIGCONT)


class RedisProcess(ServerProcess):
    """Debian's ``redis-server`` or ``valkey-server``."""

    scheme = "redis"

    @staticmethod
    def program() -> str | None:
        """The installed server, None if there is none."""
        return shutil.which("redis-server") or shutil.which("valkey-server")

    def __init__(self, directory: Path, *options: str) -> None:
        super().__init__(directory)
        self._options = options

    def command(self) -> list[str]:
        return [
            self.program() or "redis-server",
            *("--port", str(self.port), "--bind", _LOOPBACK, "--save", "", *self._options),
        ]


class LMCacheProcess(ServerProcess):
    """LMCache's own server, which keeps objects in memory."""

    scheme = "lm"

    def command(self) -> list[str]:
        return [sys.executable, "-P", "-m", "lmcache.v1.server", _LOOPBACK, str(self.port)]


class FaultyProxy:
    """Forwards TCP connections to a server, with a fault that may change at any time.

    ``mode``: "" (none), "hang" (nothing is forwarded), "slow" (``bytes_per_second`` to the tier),
    "lie" (bytes of answers are changed), "garble" (answers are random bytes), "cut" (connections
    are closed, and new ones too).
    """

    def __init__(self, server: ServerProcess) -> None:
        self.mode = ""
        self.bytes_per_second = 100_000
        self._server = server
        self._closed = threading.Event()
        self._open: set[socket.socket] = set()
        self._listener = socket.create_server((_LOOPBACK, 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, name="kvtier-proxy", daemon=True).start()

    @property
    def url(self) -> str:
        """What an lmcache tier is given."""
        return f"{self._server.scheme}://{_LOOPBACK}:{self.port}"

    def set(self, mode: str) -> None:
        """Replaces the fault."""
        self.mode = mode
        if mode == "cut":
            self._cut()

    def close(self) -> None:
        """Ends the proxy and its connections."""
        self._closed.set()
        self._listener.close()
        self._cut()

    def _cut(self) -> None:
        for each in list(self._open):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                if self.mode == "cut":
                    raise ConnectionRefusedError
                server = socket.create_connection((_LOOPBACK, self._server.port), 5)
                server.settimeout(None)
            except OSError:
                client.close()
                continue
            self._open |= {client, server}
            for source, sink, to_tier in ((client, server, False), (server, client, True)):
                threading.Thread(
                    target=self._forward, args=(source, sink, to_tier), daemon=True
                ).start()

    def _forward(self, source: socket.socket, sink: socket.socket, to_tier: bool) -> None:
        try:
            while data := source.recv(_CHUNK_BYTES):
                while self.mode == "hang" and not self._closed.is_set():
                    time.sleep(0.02)
                sink.sendall(self._changed(data) if to_tier else data)
        except OSError:
            pass
        finally:
            for each in (source, sink):
                self._open.discard(each)
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
                each.close()

    def _changed(self, data: bytes) -> bytes:
        mode = self.mode
        if mode == "slow":
            time.sleep(len(data) / self.bytes_per_second)
        elif mode == "lie" and len(data) > 200:
            # Within the bytes of an object; the short answers before it stay intact.
            middle = len(data) // 2
            return data[:middle] + bytes([data[middle] ^ 0x40]) + data[middle + 1 :]
        elif mode == "garble":
            return os.urandom(len(data))
        return data
