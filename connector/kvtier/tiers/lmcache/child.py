"""The process that runs LMCache's connectors, started by the tier (``process.py``).

Each lane is a thread with an event loop and a connector of its own. The main thread is the
watchdog: it answers on the control socket, interrupts operations that have missed their deadlines,
and ends the process when the tier's process has ended.

    python -m kvtier.tiers.lmcache.child CONTROL_FD LANE_FD,SEGMENT_FD ...
"""

from __future__ import annotations

import contextlib
import mmap
import os
import resource
import select
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from kvtier.tiers.lmcache import wire

if TYPE_CHECKING:
    from kvtier.tiers.base import ObjectRef
    from kvtier.tiers.lmcache.backends import StorageBackend

WATCH_SECONDS = 0.1


class LaneThread:
    """Serves the requests of one lane. ``deadline``: of the current operation, None while idle."""

    def __init__(self, channel: socket.socket, segment: int) -> None:
        self._channel = channel
        self._segment = segment
        self._map: mmap.mmap | None = None
        self._backend: StorageBackend | None = None
        self._target: wire.OpenRequest | None = None
        self._listing: Iterator[tuple[ObjectRef, int]] = iter(())
        self._listed = -1
        self.deadline: float | None = None

    def open(self, target: wire.OpenRequest) -> None:
        """Uses another back end from the next request on."""
        self._target = target

    def interrupt(self) -> None:
        """Ends the current operation. On the watchdog's thread."""
        backend = self._backend
        if backend is not None:
            backend.interrupt()

    def serve(self) -> None:
        """Serves until the tier closes the lane."""
        while True:
            packet = self._channel.recv(wire.MAX_PACKET_BYTES)
            if not packet:
                return
            request = wire.decode_request(packet)
            self.deadline = time.monotonic() + request.seconds
            reply = self._answer(request)
            self.deadline = None
            self._channel.send(wire.encode(reply))

    def _answer(self, request: wire.LaneRequest) -> wire.LaneReply:
        """The reply to a request. A connection that was idle may have been closed meanwhile, so
        that an operation which fails on one is repeated on a new one, if there is time."""
        started = time.monotonic()
        idle = self._backend is not None and self._backend.connected
        reply = self._attempt(request)
        remaining = request.seconds - (time.monotonic() - started)
        if reply.outcome == "unavailable" and idle and remaining > request.seconds / 2:
            reply = self._attempt(msgspec.structs.replace(request, seconds=remaining))
        return reply

    def _attempt(self, request: wire.LaneRequest) -> wire.LaneReply:
        from kvtier.tiers.lmcache.backends import failure

        try:
            reply = self._perform(request)
        except Exception as error:  # noqa: BLE001
            # The connectors raise whatever their libraries raise.
            reply = failure(error)
        if reply.outcome == "unavailable" and self._backend is not None:
            with contextlib.suppress(Exception):
                self._backend.drop()
        return reply

    def _perform(self, request: wire.LaneRequest) -> wire.LaneReply:
        from kvtier.tiers.lmcache.backends import BACKENDS, engine_key

        target = self._target
        if target is None:
            return wire.LaneReply("unavailable", text="no back end was chosen")
        if self._backend is None or self._backend.target is not target:
            self._backend = BACKENDS[target.url.partition(":")[0]](target)
        backend, seconds = self._backend, request.seconds
        if request.operation == "list":
            return self._list(backend, request)
        key = engine_key(request.space, request.key)
        if request.operation == "get":
            return backend.get(key, self._view(request), seconds)
        if request.operation == "put":
            return backend.put(key, self._view(request), seconds)
        if request.operation == "exists":
            return backend.exists(key, seconds)
        return backend.delete(key, seconds)

    def _list(self, backend: StorageBackend, request: wire.LaneRequest) -> wire.LaneReply:
        if not backend.can_list:
            return wire.LaneReply("unsupported")
        if request.start == 0:
            self._listing = backend.entries(request.seconds)
        elif request.start != self._listed:
            # The list was started by another process, or has failed: it cannot be continued.
            return wire.LaneReply("unavailable", text="the list of objects was interrupted")
        self._listed = -1
        view, part = self._view(request), []
        room = len(view) // wire.ENTRY_BYTES
        for entry in self._listing:
            part.append(entry)
            if len(part) == room:
                break
        content = wire.pack_entries(part)
        view[: len(content)] = content
        self._listed = request.start + len(part)
        return wire.LaneReply("done", len(content), more=len(part) == room)

    def _view(self, request: wire.LaneRequest) -> memoryview:
        if self._map is None or len(self._map) < request.segment_bytes:
            self._map = mmap.mmap(self._segment, request.segment_bytes)
        return memoryview(self._map)[: request.size_bytes]


def _version() -> str:
    """LMCache's version; importing it takes seconds. Raises ``ImportError``."""
    import importlib.metadata

    import kvtier.tiers.lmcache.backends  # noqa: F401

    return importlib.metadata.version("lmcache")


def _open(target: wire.OpenRequest, lanes: list[LaneThread]) -> wire.OpenReply:
    try:
        version = _version()
        from kvtier.tiers.lmcache.backends import BACKENDS

        kind = BACKENDS[target.url.partition(":")[0]]
    except Exception as error:  # noqa: BLE001
        return wire.OpenReply(error=f"{type(error).__name__}: {error}"[:500])
    for lane in lanes:
        lane.open(target)
    return wire.OpenReply(version, can_list=kind.can_list, can_delete=kind.can_delete)


def _watch(control: socket.socket, lanes: list[LaneThread]) -> None:
    """The main thread, until the tier's process closes the control socket."""
    while True:
        ready, _, _ = select.select([control], [], [], WATCH_SECONDS)
        if ready:
            packet = control.recv(wire.MAX_PACKET_BYTES)
            if not packet:
                return
            control.send(wire.encode(_open(wire.decode_open(packet), lanes)))
        now = time.monotonic()
        for lane in lanes:
            deadline = lane.deadline
            if deadline is not None and now > deadline:
                lane.interrupt()


def _prepare() -> None:
    """Limits and environment of this process, before LMCache is imported."""
    # tierd limits its own memory, and this process is not part of that.
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
    with contextlib.suppress(OSError):
        # When the container runs out of memory, the kernel ends this process and not tierd.
        Path("/proc/self/oom_score_adj").write_text("1000")
    os.environ["LMCACHE_TRACK_USAGE"] = "false"
    os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    socket.setdefaulttimeout(1.0)
    threading.stack_size(1 << 20)


def main(arguments: list[str]) -> None:
    """Serves; never returns normally."""
    _prepare()
    control = _channel(int(arguments[0]))
    lanes = []
    for argument in arguments[1:]:
        channel, segment = map(int, argument.split(","))
        lanes.append(LaneThread(_channel(channel), segment))
    for number, lane in enumerate(lanes):
        name = f"kvtier-lmcache-{number}"
        threading.Thread(target=lane.serve, name=name, daemon=True).start()
    try:
        _watch(control, lanes)
    finally:
        # Without waiting for threads that hang in a connector.
        os._exit(0)


def _channel(descriptor: int) -> socket.socket:
    channel = socket.socket(fileno=descriptor)
    channel.settimeout(None)
    return channel


if __name__ == "__main__":
    main(sys.argv[1:])
