"""The engine's end of the conversation with tierd.

One I/O thread owns the socket, because ZeroMQ sockets belong to one thread. Callers put messages into a bounded queue and never wait;
what tierd sends is handed to ``sink`` on the I/O thread.

States::

    absent ──socket connects, Hello──▶ greeting ──Welcome──▶ attached ──lost──▶ waiting ──reattach()──▶ absent
                                          └─────Refused────▶ refused ──30 s──▶ absent

*Lost* is: no word for ``LOST_SECONDS``, the peer's socket is gone, tierd said ``Bye``, or the queue towards it is full. Each loss is
reported once through ``on_lost``; nothing is sent or received until ``reattach`` says that everything of the lost epoch is behind
the caller (DATAPATH 4), because tierd gives the slots to others on that word.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from enum import Enum
from pathlib import Path

import msgspec
import zmq

from kvtier.tierd.channel import FIRST_RETRY_SECONDS, LAST_RETRY_SECONDS, Connection
from kvtier.tierd.run_directory import is_private
from kvtier.tierd.wire import (
    BEAT_SECONDS,
    LOST_SECONDS,
    PROTOCOL,
    SOCKET_NAME,
    Bye,
    FromDaemon,
    Heartbeat,
    Hello,
    Message,
    Ready,
    Refused,
    Welcome,
    decode_from_daemon,
    encode,
)

QUEUE_MESSAGES = 16_384
"""Messages of a few hundred engine steps. If tierd has not taken that many, it is not taking any."""
REFUSED_RETRY_SECONDS = 30.0
_IDLE_SECONDS = 60.0
_FULL_RETRY_SECONDS = 0.05
_MAX_RECEIVED_AT_ONCE = 256

_log = logging.getLogger("kvtier.tierd.client")


class ClientState(Enum):
    """See the module's text. ``REFUSED``: attached to nothing, and tierd has said why."""

    ABSENT = "absent"
    GREETING = "greeting"
    ATTACHED = "attached"
    WAITING = "waiting"
    REFUSED = "refused"
    CLOSED = "closed"


class TierdClient:
    """One session after another with whatever tierd lives in ``run_directory``.

    ``hello`` is called on the I/O thread before every attempt. ``sink`` gets every message except beats, ``on_lost`` the reason of each
    loss, both on the I/O thread and in order. They must not block for long: heartbeats go out from the same thread. ``reattach``:
    "manual" (after a loss, wait for ``reattach()``) or "auto" (do not wait; only for a process that copies nothing). ``private``: nothing is said
    to whatever serves in a directory that others may write to.
    """

    def __init__(
        self,
        run_directory: Path | str,
        hello: Callable[[], Hello],
        sink: Callable[[Message], None],
        on_lost: Callable[[str], None],
        heartbeat: Callable[[], Heartbeat] = Heartbeat,
        reattach: str = "manual",
        clock: Callable[[], float] = time.monotonic,
        lost_seconds: float = LOST_SECONDS,
        refused_retry_seconds: float = REFUSED_RETRY_SECONDS,
        private: bool = False,
    ) -> None:
        if reattach not in ("manual", "auto"):
            raise ValueError(f"reattach: {reattach!r} is not accepted; 'manual' or 'auto'")
        self._run_directory = Path(run_directory)
        self._private = private
        self._endpoint = f"ipc://{self._run_directory / SOCKET_NAME}"
        self._hello = hello
        self._sink = sink
        self._on_lost = on_lost
        self._auto = reattach == "auto"
        self._clock = clock
        self._lost_seconds = lost_seconds
        self._refused_retry_seconds = refused_retry_seconds

        self.ready: Ready | None = None
        """The last ``Ready`` of this session; None without one."""
        self.welcome: Welcome | None = None
        """The ``Welcome`` of this session; None while not attached."""
        self.refusal = ""
        """Why tierd refused; empty unless the state is REFUSED."""
        self.beat = heartbeat
        """Makes each heartbeat; called on the I/O thread."""
        self.state = ClientState.ABSENT
        self.counters: dict[str, int] = {
            "lost": 0,
            "refused": 0,
            "undecodable": 0,
            "callback_failed": 0,
            "queue_full": 0,
            "foreign": 0,
        }

        self._outgoing: deque[bytes] = deque()
        self._overflow = False
        self._drained_epoch = 0
        self._may_attach = True
        self._closing = False
        self._lock = threading.Lock()
        """Guards the hand-over between callers and the I/O thread: queue against state. Never held during I/O."""
        self._wake_descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread: threading.Thread | None = None
        self._pid = 0

        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._connection: Connection | None = None
        self._heard = 0.0
        self._next_beat = 0.0
        self._retry_at = 0.0
        self._retry_seconds = FIRST_RETRY_SECONDS

    # Any thread.

    def start(self) -> None:
        """Starts the I/O thread. Call once, in the process that is to be attached."""
        if self._thread is not None:
            raise RuntimeError("the client has been started")
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="kvtier-client", daemon=True)
        self._thread.start()

    @property
    def attached(self) -> bool:
        """Whether there is a session. It may end at any moment; ``send`` says whether a message got into it."""
        return self.state is ClientState.ATTACHED

    @property
    def epoch(self) -> int:
        """Epoch of the session; 0 without one."""
        welcome = self.welcome
        return 0 if welcome is None else welcome.epoch

    def send(self, message: Message) -> bool:
        """Queues a message. False: there is no session, or tierd does not take what it is sent. Never blocks.

        True is no promise that it arrives: a session that is lost takes its queue with it, and ``on_lost`` tells.
        """
        data = encode(message)
        with self._lock:
            if (
                self.state is not ClientState.ATTACHED
                or self._overflow
                or self._closing
                or self._pid != os.getpid()
            ):
                return False
            if len(self._outgoing) >= QUEUE_MESSAGES:
                self._overflow = True
                self.counters["queue_full"] += 1
                accepted = False
            else:
                self._outgoing.append(data)
                accepted = True
        self._wake()
        return accepted

    def reattach(self, drained_epoch: int) -> None:
        """After a loss: no copy of any epoch up to ``drained_epoch`` runs in this process, its grants are forgotten; attach again."""
        with self._lock:
            self._drained_epoch = max(self._drained_epoch, drained_epoch)
            # A call that comes twice must not speak for the next loss.
            self._may_attach = self._may_attach or self.state is ClientState.WAITING
        self._wake()

    def close(self, timeout_seconds: float = 2.0) -> None:
        """Sends what is queued and ``Bye``, and ends the I/O thread. Returns within the timeout, done or not."""
        with self._lock:
            self._closing = True
        thread = self._thread
        if thread is None or self._pid != os.getpid():
            return
        self._wake()
        if thread is not threading.current_thread():
            thread.join(timeout_seconds)

    def _wake(self) -> None:
        with self._lock:
            if self._wake_descriptor < 0:
                return
            try:
                os.eventfd_write(self._wake_descriptor, 1)
            except BlockingIOError:
                # Woken 2**64 times already.
                return

    # The I/O thread.

    def _run(self) -> None:
        self._context = zmq.Context()
        try:
            while not (self._closing and self._finished()):
                self._wait()
                self._step()
        finally:
            self._disconnect()
            with self._lock:
                self.state = ClientState.CLOSED
                self.welcome = None
                descriptor, self._wake_descriptor = self._wake_descriptor, -1
            os.close(descriptor)
            self._context.destroy(linger=0)

    def _wait(self) -> None:
        now = self._clock()
        poller = zmq.Poller()
        poller.register(self._wake_descriptor, zmq.POLLIN)
        if self._connection is not None:
            until = self._heard + self._lost_seconds
            if self.state is ClientState.ATTACHED:
                until = min(until, self._next_beat)
            self._connection.register(poller, until_connected=self.state is ClientState.ABSENT)
        elif self.state is ClientState.WAITING and not (self._may_attach or self._auto):
            until = now + _IDLE_SECONDS
        else:
            until = self._retry_at
        events = dict(poller.poll(max(0, int((until - now) * 1000) + 1)))
        if self._wake_descriptor in events:
            try:
                os.eventfd_read(self._wake_descriptor)
            except BlockingIOError:
                return

    def _step(self) -> None:
        now = self._clock()
        connection = self._connection
        if connection is None:
            if not self._closing:
                self._try_connect(now)
            return
        disconnected = connection.disconnected()
        # What has arrived is read before silence or the end is judged: this process may have been asleep, not tierd.
        self._receive(connection)
        if self._connection is not connection:
            return
        if disconnected and self.state is not ClientState.ABSENT:
            self._lose("the connection is closed")
        elif self.state is ClientState.ABSENT:
            self._greet(connection, now)
        elif self.state is ClientState.ATTACHED:
            self._send_queued(connection, now)
        if self._connection is connection and self._clock() - self._heard > self._lost_seconds:
            if self.state is ClientState.ABSENT:
                self._heard = now  # Nobody is there yet; ZeroMQ goes on trying.
            else:
                self._lose(f"no word for {self._lost_seconds:g} s")

    def _try_connect(self, now: float) -> None:
        with self._lock:
            if self.state is ClientState.WAITING and not (self._may_attach or self._auto):
                return
            if now < self._retry_at or self._context is None:
                return
            self.state = ClientState.ABSENT
            self.refusal = ""
        if self._private and not self._may_enter():
            self._retry_later(now)
            return
        try:
            self._connection = Connection(self._context, self._endpoint)
        except zmq.ZMQError as error:
            _log.error("%s: %s", self._endpoint, error)
            self._retry_later(now)
            return
        self._heard = now

    def _may_enter(self) -> bool:
        """Looked at before each connection: once the directory is this user's, nobody else can put another one in its place."""
        try:
            if is_private(self._run_directory):
                return True
        except OSError:
            return False
        if not self.counters["foreign"]:
            _log.warning(
                "%s may be written to by others; this process serves without tiers",
                self._run_directory,
            )
        self.counters["foreign"] += 1
        return False

    def _greet(self, connection: Connection, now: float) -> None:
        if not connection.writable:
            return
        try:
            hello = self._hello()
        except Exception as error:  # noqa: BLE001
            # A caller's bug must not end the thread that has to report it.
            self.counters["callback_failed"] += 1
            _log.exception("hello failed: %s", error)
            self._retry_later(now)
            return
        if self._drained_epoch > hello.drained_epoch:
            hello = msgspec.structs.replace(hello, drained_epoch=self._drained_epoch)
        try:
            if not connection.send(encode(hello)):
                return
        except zmq.ZMQError as error:
            _log.warning("hello could not be sent: %s", error)
            self._retry_later(now)
            return
        self.state = ClientState.GREETING
        self._heard = now
        self._next_beat = now + BEAT_SECONDS

    def _send_queued(self, connection: Connection, now: float) -> None:
        if self._overflow:
            self._lose("the queue towards it is full")
            return
        try:
            while self._outgoing and connection.send(self._outgoing[0]):
                self._outgoing.popleft()
            if self._outgoing:
                # tierd does not read. Its silence, or a full queue, decides.
                self._next_beat = now + _FULL_RETRY_SECONDS
            elif now >= self._next_beat:
                self._next_beat = now + BEAT_SECONDS
                connection.send(encode(self._beat_now()))
        except zmq.ZMQError as error:
            self._lose(str(error))

    def _beat_now(self) -> Heartbeat:
        try:
            return self.beat()
        except Exception as error:  # noqa: BLE001
            # As in ``_call``.
            self.counters["callback_failed"] += 1
            _log.exception("beat failed: %s", error)
            return Heartbeat()

    def _receive(self, connection: Connection) -> None:
        for _ in range(_MAX_RECEIVED_AT_ONCE):
            data = connection.receive()
            if data is None:
                return
            self._heard = self._clock()
            try:
                message = decode_from_daemon(data)
            except msgspec.MsgspecError as error:
                self.counters["undecodable"] += 1
                self._refuse(f"tierd sent what this version ({PROTOCOL}) cannot read: {error}")
                return
            self._take(message)
            if self._connection is not connection:
                return

    def _take(self, message: FromDaemon) -> None:
        if isinstance(message, Heartbeat):
            return
        if isinstance(message, Bye):
            self._lose(f"it ended the session: {message.reason or 'no reason given'}")
            return
        if isinstance(message, Refused):
            self._refuse(message.reason)
            return
        if isinstance(message, Welcome):
            if message.protocol != PROTOCOL:
                self._refuse(f"tierd is version {message.protocol}, this connector is {PROTOCOL}")
                return
            with self._lock:
                self._outgoing.clear()
                self._overflow = False
                self.welcome = message
                self.ready = None
                self.refusal = ""
                self._may_attach = self._auto
                self.state = ClientState.ATTACHED
            self._retry_seconds = FIRST_RETRY_SECONDS
        elif self.state is not ClientState.ATTACHED:
            return
        elif isinstance(message, Ready):
            self.ready = message
        self._call(lambda: self._sink(message))

    def _call(self, callback: Callable[[], None]) -> None:
        try:
            callback()
        except Exception as error:  # noqa: BLE001
            # A caller's bug must not end the thread that beats for it: that would look like a death.
            self.counters["callback_failed"] += 1
            _log.exception("a callback failed: %s", error)

    def _lose(self, reason: str) -> None:
        was_attached = self.state is ClientState.ATTACHED
        with self._lock:
            self.state = ClientState.WAITING if was_attached else ClientState.ABSENT
            self.welcome = None
            self.ready = None
            self._outgoing.clear()
            self._overflow = False
        if not was_attached:
            self._retry_later(self._clock())
            return
        self._disconnect()
        self._retry_at = self._clock() + self._retry_seconds
        self.counters["lost"] += 1
        if not self._closing:
            _log.warning("tierd is lost: %s", reason)
            self._call(lambda: self._on_lost(reason))

    def _refuse(self, reason: str) -> None:
        was_attached = self.state is ClientState.ATTACHED
        if was_attached:
            self._lose(f"it refuses: {reason}")
        self._disconnect()
        with self._lock:
            self.refusal = reason
            self._outgoing.clear()
            # After a session, draining comes first; then its own time limit holds as well.
            self.state = ClientState.WAITING if was_attached else ClientState.REFUSED
        self._retry_at = self._clock() + self._refused_retry_seconds
        self.counters["refused"] += 1
        _log.warning("tierd refuses this process, which serves without tiers: %s", reason)
        if not was_attached:
            self._call(lambda: self._sink(Refused(reason=reason)))

    def _retry_later(self, now: float) -> None:
        self._disconnect()
        self._retry_at = now + self._retry_seconds
        self._retry_seconds = min(LAST_RETRY_SECONDS, self._retry_seconds * 2)

    def _disconnect(self, last_word: bytes = b"") -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close(last_word)

    def _finished(self) -> bool:
        """Closing: says ``Bye`` once the queue is empty; True when there is nothing left to do."""
        if self._connection is None or self.state not in (
            ClientState.ATTACHED,
            ClientState.GREETING,
        ):
            return True
        if self._outgoing:
            return False
        self._disconnect(encode(Bye()))
        return True
