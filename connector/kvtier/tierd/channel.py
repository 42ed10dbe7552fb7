"""The two ends of the ZeroMQ channel: the engine's ``Connection`` and tierd's ``Outbox``.

An engine process has one DEALER socket, whose connection state it must observe itself. tierd has
one ROUTER socket for all sessions and must never wait for one that does not read: ZeroMQ queues
``SEND_QUEUE_MESSAGES`` per connection, and beyond that the outbox queues up to ``QUEUE_MESSAGES``.
A session whose queue is full, or makes no progress for ``SESSION_TIMEOUT_SECONDS``, is lost. Each
object belongs to the thread that made it.
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
"""How long closing waits for the last message to leave. A running peer takes it in microseconds."""


class Connection:
    """Connects in the background and retries until a peer listens. Raises ``zmq.ZMQError`` for an
    invalid address."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> None:
        self._socket = context.socket(zmq.DEALER)
        self._monitor: zmq.Socket[bytes] | None = None
        try:
            self._socket.setsockopt(zmq.LINGER, 0)
            # Without a peer nothing is queued: messages inside a socket cannot be taken back.
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
        """``until_connected``: also wake when the socket becomes writable, which later it always
        is."""
        poller.register(self._socket, zmq.POLLIN | zmq.POLLOUT if until_connected else zmq.POLLIN)
        if self._monitor is not None:
            poller.register(self._monitor, zmq.POLLIN)

    @property
    def writable(self) -> bool:
        """Whether a peer is connected and accepts messages."""
        return bool(int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLOUT)

    def send(self, data: bytes) -> bool:
        """False: the peer does not accept it now. Raises ``zmq.ZMQError``."""
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
        """Whether the connection was closed since the last call. Messages received before can still
        be read."""
        monitor, ended = self._monitor, False
        while monitor is not None:
            try:
                recv_monitor_message(monitor, zmq.NOBLOCK)
            except zmq.ZMQError:
                break
            ended = True
        return ended

    def close(self, final_message: bytes = b"") -> None:
        """Closes, after ``final_message`` if the peer accepts it. Does not wait."""
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
    """Sends to sessions by route. ``failed`` collects lost sessions and reasons until the owner
    takes them."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._queues: dict[bytes, _Queue] = {}
        self.failed: dict[bytes, str] = {}

    @property
    def has_queued(self) -> bool:
        """Whether any message is queued."""
        return bool(self._queues)

    def queued(self, route: bytes) -> int:
        """How many messages are queued for one session."""
        queue = self._queues.get(route)
        return 0 if queue is None else len(queue.messages)

    def send(self, route: bytes, message: Message, now: float) -> None:
        """Sends, or queues behind earlier messages."""
        data = encode(message)
        queue = self._queues.get(route)
        if queue is None:
            if self._try_send(route, data):
                return
            queue = self._queues[route] = _Queue(now)
        if len(queue.messages) >= QUEUE_MESSAGES:
            self._fail(route, f"the session has {QUEUE_MESSAGES} unread messages")
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
                self._fail(
                    route, f"the session has read no message for {SESSION_TIMEOUT_SECONDS:g} s"
                )

    def forget(self, route: bytes) -> None:
        """Drops the queue of a session."""
        self._queues.pop(route, None)

    def take_failed(self) -> dict[bytes, str]:
        """Sessions lost since the last call, with reasons."""
        failed, self.failed = self.failed, {}
        return failed

    def _try_send(self, route: bytes, data: bytes) -> bool:
        """False: the session does not read at present. ``failed`` records a failed session."""
        try:
            self._socket.send_multipart((route, data), zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            reason = "the connection is closed" if error.errno == errno.EHOSTUNREACH else str(error)
            self._fail(route, reason)
        return True

    def _fail(self, route: bytes, reason: str) -> None:
        self._queues.pop(route, None)
        self.failed.setdefault(route, reason)
