"""One DEALER socket towards tierd, and whether its peer is still there. One thread.

What waits to be sent, per session: tierd's loop never waits for a reader.

ZeroMQ keeps ``SEND_QUEUE_MESSAGES`` per connection; beyond that a bounded queue here. A session whose queue is full, or has not progress_at for
``SESSION_TIMEOUT_SECONDS``, is lost: a process that does not read for that long does not run.
"""

from __future__ import annotations

import errno
from collections import deque

import zmq
from zmq.utils.monitor import recv_monitor_message

from kvtier.tierd.wire import SESSION_TIMEOUT_SECONDS, Message, encode

HIGH_WATER_MESSAGES = 4096
FIRST_RETRY_SECONDS = 0.2
LAST_RETRY_SECONDS = 2.0
CLOSE_MILLISECONDS = 500
"""How long the last message may take into the kernel; a peer that lives takes it in microseconds."""


class Connection:
    """Connects in the background, again and again until somebody listens. Raises ``zmq.ZMQError`` for an impossible address."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> None:
        self._socket = context.socket(zmq.DEALER)
        self._monitor: zmq.Socket[bytes] | None = None
        try:
            self._socket.setsockopt(zmq.LINGER, 0)
            # Nothing is queued for a peer that is not there: what waits in a socket is out of control.
            self._socket.setsockopt(zmq.IMMEDIATE, 1)
            self._socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MESSAGES)
            self._socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MESSAGES)
            self._socket.setsockopt(zmq.RECONNECT_IVL, int(FIRST_RETRY_SECONDS * 1000))
            self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, int(LAST_RETRY_SECONDS * 1000))
            self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            self._socket.connect(endpoint)
        except zmq.ZMQError:
            self.close()
            raise

    def register(self, poller: zmq.Poller, until_connected: bool) -> None:
        """``until_connected``: being able to send is the news; afterwards it would be news all the time."""
        poller.register(self._socket, zmq.POLLIN | zmq.POLLOUT if until_connected else zmq.POLLIN)
        if self._monitor is not None:
            poller.register(self._monitor, zmq.POLLIN)

    @property
    def writable(self) -> bool:
        """Whether there is a peer that takes messages."""
        return bool(int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLOUT)

    def send(self, data: bytes) -> bool:
        """False: the peer does not take it now. Raises ``zmq.ZMQError``."""
        try:
            self._socket.send(data, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def receive(self) -> bytes | None:
        """The next message; None: there is none."""
        try:
            return self._socket.recv(zmq.NOBLOCK)
        except zmq.ZMQError:
            return None

    def disconnected(self) -> bool:
        """Whether a connection that stood has ended since the last call. Messages that came before can still be received."""
        monitor, ended = self._monitor, False
        while monitor is not None:
            try:
                recv_monitor_message(monitor, zmq.NOBLOCK)
            except zmq.ZMQError:
                break
            ended = True
        return ended

    def close(self, final_message: bytes = b"") -> None:
        """Ends it, after ``final_message`` if the peer takes it. Returns at once."""
        linger = 0
        if final_message:
            try:
                self._socket.send(final_message, zmq.NOBLOCK)
                linger = CLOSE_MILLISECONDS
            except zmq.ZMQError:
                linger = 0
        if self._monitor is not None:
            self._socket.disable_monitor()
            self._monitor.close(0)
            self._monitor = None
        self._socket.close(linger)


SEND_QUEUE_MESSAGES = 256
QUEUE_MESSAGES = 8_192


class _Queue:
    __slots__ = ("messages", "progress_at")

    def __init__(self, now: float) -> None:
        self.messages: deque[bytes] = deque()
        self.progress_at = now


class Outbox:
    """Owner's thread only. ``failed`` collects (route, reason) of sessions that are lost, until the owner takes them."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._queues: dict[bytes, _Queue] = {}
        self.failed: dict[bytes, str] = {}

    @property
    def has_queued(self) -> bool:
        """Whether anything waits."""
        return bool(self._queues)

    def queued(self, route: bytes) -> int:
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
                queue.progress_at = now
            if not queue.messages:
                self._queues.pop(route, None)
            elif now - queue.progress_at > SESSION_TIMEOUT_SECONDS:
                self._fail(route, f"it has read nothing for {SESSION_TIMEOUT_SECONDS:g} s")

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
