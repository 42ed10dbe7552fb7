"""What waits to be sent, per session: tierd's loop never waits for a reader.

ZeroMQ keeps ``SEND_MESSAGES`` per connection; beyond that a bounded queue here. A session whose queue is full, or has not moved for
``LOST_SECONDS``, is lost: a process that does not read for that long does not run.
"""

from __future__ import annotations

import errno
from collections import deque

import zmq

from kvtier.tierd.wire import LOST_SECONDS, Message, encode

SEND_MESSAGES = 256
QUEUE_MESSAGES = 8_192


class _Queue:
    __slots__ = ("messages", "moved")

    def __init__(self, now: float) -> None:
        self.messages: deque[bytes] = deque()
        self.moved = now


class Outbox:
    """Owner's thread only. ``failed`` collects (route, reason) of sessions that are lost, until the owner takes them."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._queues: dict[bytes, _Queue] = {}
        self.failed: dict[bytes, str] = {}

    @property
    def blocked(self) -> bool:
        """Whether anything waits."""
        return bool(self._queues)

    def waiting(self, route: bytes) -> int:
        """How many messages wait for one session."""
        queue = self._queues.get(route)
        return 0 if queue is None else len(queue.messages)

    def send(self, route: bytes, message: Message, now: float) -> None:
        """Sends, or queues behind what waits already."""
        data = encode(message)
        queue = self._queues.get(route)
        if queue is None:
            if self._try_send(route, data):
                return
            queue = self._queues[route] = _Queue(now)
        if len(queue.messages) >= QUEUE_MESSAGES:
            self._fail(route, f"it has not read {QUEUE_MESSAGES} messages")
            return
        queue.messages.append(data)

    def flush(self, now: float) -> None:
        """Sends what can be sent."""
        for route, queue in list(self._queues.items()):
            while queue.messages and self._try_send(route, queue.messages[0]):
                queue.messages.popleft()
                queue.moved = now
            if not queue.messages:
                self._queues.pop(route, None)
            elif now - queue.moved > LOST_SECONDS:
                self._fail(route, f"it has read nothing for {LOST_SECONDS:g} s")

    def forget(self, route: bytes) -> None:
        """Drops what waits for a session."""
        self._queues.pop(route, None)

    def take_failed(self) -> dict[bytes, str]:
        """Sessions lost since the last call, with reasons."""
        failed, self.failed = self.failed, {}
        return failed

    def _try_send(self, route: bytes, data: bytes) -> bool:
        """True: nothing more to do with it. False: its reader is slow."""
        try:
            self._socket.send_multipart((route, data), zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            reason = "its connection is closed" if error.errno == errno.EHOSTUNREACH else str(error)
            self._fail(route, reason)
        return True

    def _fail(self, route: bytes, reason: str) -> None:
        self._queues.pop(route, None)
        self.failed.setdefault(route, reason)
