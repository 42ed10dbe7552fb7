"""The engine's end of a session with tierd.

One I/O thread owns the socket, because a ZeroMQ socket belongs to one thread. Callers put messages
into a bounded queue and never block; received messages go to ``sink`` on the I/O thread.

States::

    absent ──connected──▶ greeting ──Welcome──▶ attached ──lost──▶ waiting ──reattach()──▶ absent
                             └─────SessionRefused────▶ refused ──30 s──▶ absent

A session is *lost* when no message arrives for ``SESSION_TIMEOUT_SECONDS``, the socket closes,
tierd sends ``Bye``, the queue is full, or the caller gives it up with ``drop``. Each loss is
reported once through ``on_lost``. Nothing is sent or received until the caller confirms with
``reattach`` that it has drained the lost epoch: tierd then gives its slots to others.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import msgspec
import zmq

from kvtier.tierd.channel import FIRST_RETRY_SECONDS, LAST_RETRY_SECONDS, Connection
from kvtier.tierd.run_directory import is_private
from kvtier.tierd.wire import (
    HEARTBEAT_SECONDS,
    PROTOCOL,
    SESSION_TIMEOUT_SECONDS,
    SOCKET_NAME,
    Bye,
    FromDaemon,
    Heartbeat,
    Hello,
    Message,
    Ready,
    SessionRefused,
    Welcome,
    decode_from_daemon,
    encode,
)

QUEUE_MESSAGES = 16_384
"""Messages of a few hundred engine steps. A tierd that has not read that many does not read."""
REFUSED_RETRY_SECONDS = 30.0
_IDLE_SECONDS = 60.0
_FULL_RETRY_SECONDS = 0.05
_MAX_RECEIVED_AT_ONCE = 256

_log = logging.getLogger("kvtier.tierd.client")


class ClientState(Enum):
    """The state of a client, as the module describes. ``REFUSED``: tierd refused the session."""

    ABSENT = "absent"
    GREETING = "greeting"
    ATTACHED = "attached"
    WAITING = "waiting"
    REFUSED = "refused"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """How a client attaches.

    ``auto_reattach``: after a loss, attach again without waiting for ``reattach``; only for a
    process that copies nothing. ``require_private``: do not attach in a run directory that other
    users may write to, because another process could answer there in tierd's place.
    """

    auto_reattach: bool = False
    require_private: bool = False
    session_timeout_seconds: float = SESSION_TIMEOUT_SECONDS
    refused_retry_seconds: float = REFUSED_RETRY_SECONDS


DEFAULT_OPTIONS = ClientOptions()


class TierdClient:
    """Attaches this process to the tierd of ``run_directory``, and attaches again when the session
    is lost.

    ``hello`` makes the first message of each session. ``sink`` receives every message except
    heartbeats, ``on_lost`` the reason of each loss. All three run on the I/O thread, in order, and
    must not block: it also sends the heartbeats.
    """

    def __init__(
        self,
        run_directory: Path | str,
        hello: Callable[[], Hello],
        sink: Callable[[Message], None],
        on_lost: Callable[[str], None],
        heartbeat: Callable[[], Heartbeat] = Heartbeat,
        options: ClientOptions = DEFAULT_OPTIONS,
    ) -> None:
        self._run_directory = Path(run_directory)
        self._options = options
        self._endpoint = f"ipc://{self._run_directory / SOCKET_NAME}"
        self._hello = hello
        self._sink = sink
        self._on_lost = on_lost
        self._make_heartbeat = heartbeat
        self._clock = time.monotonic

        self.ready: Ready | None = None
        """The last ``Ready`` of this session; None without one."""
        self.welcome: Welcome | None = None
        """The ``Welcome`` of this session; None while not attached."""
        self.refusal = ""
        """Why tierd refused the session; empty unless the state is REFUSED."""
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
        self._drop_reason = ""
        self._drained_epoch = 0
        self._reattach_allowed = True
        self._closing = False
        self._lock = threading.Lock()
        """Guards queue and state between callers and the I/O thread. Never held during I/O."""
        self._wake_descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread: threading.Thread | None = None
        self._pid = 0

        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._connection: Connection | None = None
        self._last_received_at = 0.0
        self._next_heartbeat_at = 0.0
        self._retry_at = 0.0
        self._retry_seconds = FIRST_RETRY_SECONDS

    # Any thread.

    def start(self) -> None:
        """Starts the I/O thread. Call once, in the process to attach."""
        if self._thread is not None:
            raise RuntimeError("the client has been started")
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="kvtier-client", daemon=True)
        self._thread.start()

    @property
    def attached(self) -> bool:
        """Whether there is a session. It may end at any moment; ``send`` tells whether a message
        was queued."""
        return self.state is ClientState.ATTACHED

    @property
    def epoch(self) -> int:
        """Epoch of the session; 0 without one."""
        welcome = self.welcome
        return 0 if welcome is None else welcome.epoch

    def send(self, message: Message) -> bool:
        """Queues a message. False: there is no session, or the queue is full. Never blocks.

        True does not guarantee delivery: a lost session drops its queue, and ``on_lost`` reports
        it.
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
        """Allows the client to reattach: this process has drained up to ``drained_epoch``."""
        with self._lock:
            self._drained_epoch = max(self._drained_epoch, drained_epoch)
            # A second call must not count for the next loss.
            self._reattach_allowed = self._reattach_allowed or self.state is ClientState.WAITING
        self._wake()

    def drop(self, reason: str) -> None:
        """Gives up the session, whatever its state, as if tierd were lost: ``on_lost`` is called,
        and nothing is sent before ``reattach``. tierd closes the engine."""
        with self._lock:
            self._drop_reason = reason
        self._wake()

    def close(self, timeout_seconds: float = 2.0) -> None:
        """Sends queued messages and ``Bye`` and ends the I/O thread, within the timeout."""
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
            while not (self._closing and self._close_session()):
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
            until = self._last_received_at + self._options.session_timeout_seconds
            if self.state is ClientState.ATTACHED:
                until = min(until, self._next_heartbeat_at)
            self._connection.register(poller, until_connected=self.state is ClientState.ABSENT)
        elif self.state is ClientState.WAITING and not (
            self._reattach_allowed or self._options.auto_reattach
        ):
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
        if self._drop_reason:
            self._give_up()
        connection = self._connection
        if connection is None:
            if not self._closing:
                self._try_connect(now)
            return
        disconnected = connection.disconnected()
        # Received messages come before silence counts: this process may have been suspended, not
        # tierd.
        self._receive(connection)
        if self._connection is not connection:
            return
        if disconnected and self.state is not ClientState.ABSENT:
            self._session_lost("the connection is closed")
        elif self.state is ClientState.ABSENT:
            self._send_hello(connection, now)
        elif self.state is ClientState.ATTACHED:
            self._send_queued(connection, now)
        if (
            self._connection is connection
            and self._clock() - self._last_received_at > self._options.session_timeout_seconds
        ):
            if self.state is ClientState.ABSENT:
                self._last_received_at = now  # There is no peer yet; ZeroMQ keeps retrying.
            else:
                self._session_lost(f"no message for {self._options.session_timeout_seconds:g} s")

    def _try_connect(self, now: float) -> None:
        with self._lock:
            if self.state is ClientState.WAITING and not (
                self._reattach_allowed or self._options.auto_reattach
            ):
                return
            if now < self._retry_at or self._context is None:
                return
            self.state = ClientState.ABSENT
            self.refusal = ""
        if self._options.require_private and not self._is_trusted():
            self._retry_later(now)
            return
        try:
            self._connection = Connection(self._context, self._endpoint)
        except zmq.ZMQError as error:
            _log.error("cannot connect to %s: %s", self._endpoint, error)
            self._retry_later(now)
            return
        self._last_received_at = now

    def _is_trusted(self) -> bool:
        """Checked before each connection. A directory of this user cannot be replaced by another
        user."""
        try:
            if is_private(self._run_directory):
                return True
        except OSError:
            return False
        if not self.counters["foreign"]:
            _log.warning(
                "serving without tiers: other users may write to %s",
                self._run_directory,
            )
        self.counters["foreign"] += 1
        return False

    def _send_hello(self, connection: Connection, now: float) -> None:
        if not connection.writable:
            return
        try:
            hello = self._hello()
        except Exception as error:  # noqa: BLE001
            # A bug of the caller must not end the thread.
            self.counters["callback_failed"] += 1
            _log.exception("cannot build the Hello message: %s", error)
            self._retry_later(now)
            return
        if self._drained_epoch > hello.drained_epoch:
            hello = msgspec.structs.replace(hello, drained_epoch=self._drained_epoch)
        try:
            if not connection.send(encode(hello)):
                return
        except zmq.ZMQError as error:
            _log.warning("cannot send the Hello message: %s", error)
            self._retry_later(now)
            return
        self.state = ClientState.GREETING
        self._last_received_at = now
        self._next_heartbeat_at = now + HEARTBEAT_SECONDS

    def _send_queued(self, connection: Connection, now: float) -> None:
        if self._overflow:
            self._session_lost("the send queue is full")
            return
        try:
            while self._outgoing and connection.send(self._outgoing[0]):
                self._outgoing.popleft()
            if self._outgoing:
                # tierd does not read. Silence or a full queue ends the session.
                self._next_heartbeat_at = now + _FULL_RETRY_SECONDS
            elif now >= self._next_heartbeat_at:
                self._next_heartbeat_at = now + HEARTBEAT_SECONDS
                connection.send(encode(self._next_heartbeat()))
        except zmq.ZMQError as error:
            self._session_lost(str(error))

    def _next_heartbeat(self) -> Heartbeat:
        try:
            return self._make_heartbeat()
        except Exception as error:  # noqa: BLE001
            # As in ``_call``.
            self.counters["callback_failed"] += 1
            _log.exception("cannot build a heartbeat: %s", error)
            return Heartbeat()

    def _receive(self, connection: Connection) -> None:
        for _ in range(_MAX_RECEIVED_AT_ONCE):
            data = connection.receive()
            if data is None:
                return
            self._last_received_at = self._clock()
            try:
                message = decode_from_daemon(data)
            except msgspec.MsgspecError as error:
                self.counters["undecodable"] += 1
                self._rejected(
                    f"this version ({PROTOCOL}) cannot decode a message of tierd: {error}"
                )
                return
            self._handle(message)
            if self._connection is not connection:
                return

    def _handle(self, message: FromDaemon) -> None:
        if isinstance(message, Heartbeat):
            return
        if isinstance(message, Bye):
            self._session_lost(f"tierd ended the session: {message.reason or 'no reason given'}")
            return
        if isinstance(message, SessionRefused):
            self._rejected(message.reason)
            return
        if isinstance(message, Welcome):
            if message.protocol != PROTOCOL:
                self._rejected(
                    f"version mismatch: tierd has {message.protocol}, this connector {PROTOCOL}"
                )
                return
            with self._lock:
                self._outgoing.clear()
                self._overflow = False
                self.welcome = message
                self.ready = None
                self.refusal = ""
                self._reattach_allowed = self._options.auto_reattach
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
            # A bug of the caller must not end the heartbeats: tierd would take the process for
            # lost.
            self.counters["callback_failed"] += 1
            _log.exception("unexpected error in a callback: %s", error)

    def _session_lost(self, reason: str) -> None:
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
            _log.warning("lost the session with tierd: %s", reason)
            self._call(lambda: self._on_lost(reason))

    def _give_up(self) -> None:
        with self._lock:
            reason, self._drop_reason = self._drop_reason, ""
            # Also a client that is connecting, or may reattach, waits.
            self.state, self._reattach_allowed = ClientState.ATTACHED, False
        self._session_lost(reason)

    def _rejected(self, reason: str) -> None:
        was_attached = self.state is ClientState.ATTACHED
        if was_attached:
            self._session_lost(f"tierd refused the session: {reason}")
        self._disconnect()
        with self._lock:
            self.refusal = reason
            self._outgoing.clear()
            # After a session the caller drains first; then the retry interval applies as well.
            self.state = ClientState.WAITING if was_attached else ClientState.REFUSED
        self._retry_at = self._clock() + self._options.refused_retry_seconds
        self.counters["refused"] += 1
        _log.warning("serving without tiers: tierd refused the session: %s", reason)
        if not was_attached:
            self._call(lambda: self._sink(SessionRefused(reason=reason)))

    def _retry_later(self, now: float) -> None:
        self._disconnect()
        self._retry_at = now + self._retry_seconds
        self._retry_seconds = min(LAST_RETRY_SECONDS, self._retry_seconds * 2)

    def _disconnect(self, final_message: bytes = b"") -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close(final_message)

    def _close_session(self) -> bool:
        """Sends ``Bye`` once the queue is empty; True when the session is closed."""
        if self._connection is None or self.state not in (
            ClientState.ATTACHED,
            ClientState.GREETING,
        ):
            return True
        if self._outgoing:
            return False
        self._disconnect(encode(Bye()))
        return True
