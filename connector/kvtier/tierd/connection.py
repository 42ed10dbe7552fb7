"""One DEALER socket towards tierd, and whether its peer is still there. One thread."""

from __future__ import annotations

import zmq
from zmq.utils.monitor import recv_monitor_message

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

    def close(self, last_word: bytes = b"") -> None:
        """Ends it, after ``last_word`` if the peer takes it. Returns at once."""
        linger = 0
        if last_word:
            try:
                self._socket.send(last_word, zmq.NOBLOCK)
                linger = CLOSE_MILLISECONDS
            except zmq.ZMQError:
                linger = 0
        if self._monitor is not None:
            self._socket.disable_monitor()
            self._monitor.close(0)
            self._monitor = None
        self._socket.close(linger)
