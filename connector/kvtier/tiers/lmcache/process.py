"""The tier's side of the child process that runs LMCache.

LMCache's connectors block without limits, so they run in a process that can be killed: one that
misses a deadline and a grace period is killed, and its operations fail. The process is started with
exec and shares nothing with tierd but its lanes' segments. It never sees a slot of the host pool:
a process that hangs cannot write into memory that an engine reads.

Threads: any, except that ``start`` and ``kill`` exclude each other.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import msgspec

from kvtier.config.models import LMCacheTierDocument
from kvtier.errors import TierUnavailableError
from kvtier.tiers.base import aligned
from kvtier.tiers.lmcache import wire

LANES = {
    "read": LMCacheTierDocument.read_threads,
    "write": LMCacheTierDocument.write_threads,
    "service": 1,
    "check": 1,
}
"""Concurrent operations by kind. Hung writes leave the lanes of reads free, and a check passes
both."""
START_SECONDS = 120.0
"""Importing LMCache takes 4 s on an idle machine, and a minute on a cold and busy one."""
GRACE_SECONDS = 2.0
"""The child ends an operation at its deadline. What takes this much longer hangs."""
KILL_SECONDS = 2.0
_log = logging.getLogger("kvtier.tiers.lmcache")


class ChildLane:
    """A socket pair and a segment. Used by one thread at a time."""

    def __init__(self, name: str) -> None:
        self.channel, self.remote = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.segment = os.memfd_create(f"kvtier-lmcache-{name}", os.MFD_CLOEXEC)
        self._map: mmap.mmap | None = None
        self.segment_bytes = 0

    def view(self, size_bytes: int) -> memoryview:
        """The segment's first bytes. The segment grows to the largest object so far.

        Raises ``TierUnavailableError`` if there is no memory for it.
        """
        if self._map is None or self.segment_bytes < size_bytes:
            needed = aligned(max(size_bytes, 1))
            try:
                os.ftruncate(self.segment, needed)
                self._map = mmap.mmap(self.segment, needed)
            except (OSError, ValueError, MemoryError) as error:
                raise TierUnavailableError(f"no segment of {needed} bytes: {error}") from error
            self.segment_bytes = needed
        return memoryview(self._map)[:size_bytes]

    def trim(self) -> None:
        """Returns the segment's memory to the system; its size stays."""
        if self._map is not None:
            with contextlib.suppress(OSError):
                self._map.madvise(mmap.MADV_REMOVE)

    def __del__(self) -> None:
        # Not before: a thread may have this lane while the process is killed, and a number that was
        # closed under it could be another file's.
        self.channel.close()
        self.remote.close()
        os.close(self.segment)


class ChildProcess:
    """One child process, running or not. ``opened``: what it has reported about the back end.

    ``kills`` counts processes that were killed because an operation hung.
    """

    def __init__(self) -> None:
        self.opened = wire.OpenReply()
        self.kills = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._lanes: dict[str, queue.SimpleQueue[ChildLane]] = {}
        self._all: list[ChildLane] = []
        self._lock = threading.Lock()
        self._starting = threading.Lock()
        self._closed = False

    @property
    def pid(self) -> int | None:
        """The process id, None if no process runs."""
        process = self._process
        return None if process is None or process.poll() is not None else process.pid

    def start(self, target: wire.OpenRequest) -> None:
        """Starts a process, unless one runs, and opens the back end. Takes seconds.

        Raises ``TierUnavailableError``; then no process runs.
        """
        with self._starting:
            self._start(target)

    def _start(self, target: wire.OpenRequest) -> None:
        with self._lock:
            if self.pid is None:
                self._stop()
                self._spawn()
            control = self._control
        try:
            if control is None:
                raise OSError("the process was stopped")
            control.settimeout(START_SECONDS)
            control.send(wire.encode(target))
            packet = control.recv(wire.MAX_PACKET_BYTES)
            if not packet:
                raise OSError("the process has exited")
            self.opened = wire.decode_opened(packet)
        except (OSError, msgspec.DecodeError) as error:
            self.kill()
            raise TierUnavailableError(f"cannot start LMCache's process: {error}") from error
        if self.opened.error:
            self.kill()
            raise TierUnavailableError(f"cannot use LMCache: {self.opened.error}")

    def _spawn(self) -> None:
        if self._closed:
            return
        control, remote = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        lanes = {
            kind: [ChildLane(f"{kind}-{number}") for number in range(count)]
            for kind, count in LANES.items()
        }
        self._all = [lane for group in lanes.values() for lane in group]
        arguments = [str(remote.fileno())]
        arguments += [f"{lane.remote.fileno()},{lane.segment}" for lane in self._all]
        inherited = [remote.fileno()]
        for lane in self._all:
            inherited += [lane.remote.fileno(), lane.segment]
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "kvtier.tiers.lmcache.child", *arguments],
                stdin=subprocess.DEVNULL,
                pass_fds=inherited,
                start_new_session=True,
                env=_environment(),
            )
        except OSError as error:
            control.close()
            self._stop()
            raise TierUnavailableError(f"cannot start LMCache's process: {error}") from error
        finally:
            remote.close()
        for lane in self._all:
            # Only the child may hold its ends: their end is how its death is noticed.
            lane.remote.close()
        self._control = control
        self._lanes = {}
        for kind, group in lanes.items():
            self._lanes[kind] = queue.SimpleQueue()
            for lane in group:
                self._lanes[kind].put(lane)

    @contextlib.contextmanager
    def lane(self, kind: str, seconds: float) -> Iterator[ChildLane]:
        """A free lane, which the caller has until the block ends. Raises ``TierUnavailableError``
        if there is none within ``seconds``."""
        lanes = self._lanes.get(kind)
        if lanes is None or self.pid is None:
            raise TierUnavailableError("LMCache's process does not run")
        try:
            lane = lanes.get(timeout=seconds)
        except queue.Empty:
            raise TierUnavailableError(f"no {kind} lane became free within {seconds:g} s") from None
        try:
            yield lane
        finally:
            lanes.put(lane)

    def call(self, lane: ChildLane, request: wire.LaneRequest) -> wire.LaneReply:
        """Sends a request and waits for its reply, ``GRACE_SECONDS`` longer than the request may
        take. Then the process is killed.

        Raises ``TierUnavailableError``.
        """
        try:
            lane.channel.settimeout(request.seconds + GRACE_SECONDS)
            lane.channel.send(wire.encode(request))
            packet = lane.channel.recv(wire.MAX_PACKET_BYTES)
        except TimeoutError:
            self.kills += 1
            _log.error("LMCache's process hangs in %s and is killed", request.operation)
            self.kill()
            raise TierUnavailableError(
                f"{request.operation} hung for {request.seconds + GRACE_SECONDS:g} s; "
                "LMCache's process was killed"
            ) from None
        except OSError as error:
            raise TierUnavailableError(f"LMCache's process is gone: {error}") from error
        if not packet:
            raise TierUnavailableError("LMCache's process has exited")
        try:
            return wire.decode_reply(packet)
        except msgspec.DecodeError as error:
            self.kill()
            raise TierUnavailableError(f"LMCache's process sends garbage: {error}") from error

    def trim(self) -> None:
        """Returns the memory of idle lanes to the system."""
        for lanes in self._lanes.values():
            for _ in range(lanes.qsize()):
                try:
                    lane = lanes.get_nowait()
                except queue.Empty:
                    break
                lane.trim()
                lanes.put(lane)

    def kill(self) -> None:
        """Kills the process, if one runs. Operations in progress fail."""
        with self._lock:
            self._stop()

    def close(self) -> None:
        """As ``kill``, for good."""
        with self._lock:
            self._closed = True
            self._stop()

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            try:
                process.wait(KILL_SECONDS)
            except subprocess.TimeoutExpired:
                # It hangs in the kernel. Its segments belong to it alone from now on.
                _log.error("LMCache's process %d does not end", process.pid)
        self._lanes = {}
        if self._control is not None:
            with contextlib.suppress(OSError):
                self._control.shutdown(socket.SHUT_RDWR)
            self._control.close()
            self._control = None
        for lane in self._all:
            # Wakes the thread that waits for a reply; it still has the lane.
            with contextlib.suppress(OSError):
                lane.channel.shutdown(socket.SHUT_RDWR)
        self._all = []


def _environment() -> dict[str, str]:
    """The child imports KVTier from where this process has it, and logs warnings at most."""
    found = dict(os.environ)
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(__file__))))
    paths = [root, *filter(None, found.get("PYTHONPATH", "").split(os.pathsep))]
    found["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    return found


class Backoff:
    """When a process may be started again after failures: 1 s after the first, then twice as long
    each time, up to 60 s."""

    FIRST_SECONDS = 1.0
    MAX_SECONDS = 60.0

    def __init__(self) -> None:
        self._seconds = 0.0
        self._due = 0.0

    def failed(self) -> None:
        """The process did not start, or was killed."""
        self._seconds = min(max(self._seconds * 2, self.FIRST_SECONDS), self.MAX_SECONDS)
        self._due = time.monotonic() + self._seconds

    def succeeded(self) -> None:
        """An operation has succeeded."""
        self._seconds = self._due = 0.0

    @property
    def remaining_seconds(self) -> float:
        """How long to wait before the next start."""
        return max(0.0, self._due - time.monotonic())
