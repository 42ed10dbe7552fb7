"""tierd's event loop. One thread owns the socket, the sessions and the store, and never blocks on a
peer.

An iteration receives messages, processes completed I/O, publishes store events and sends. Twice a
second it sends heartbeats and checks the sessions. What may take long runs on other threads: tier
I/O on the store's, the allocation of the pool on its own, HTTP on its own.
"""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import zmq

from kvtier.config.models import Live
from kvtier.errors import KVTierError
from kvtier.processes import own_identity
from kvtier.store.types import StoreCounters
from kvtier.tierd.channel import Outbox
from kvtier.tierd.dispatcher import Dispatcher
from kvtier.tierd.sessions import (
    EngineSessions,
    Session,
    SessionDependencies,
    Sessions,
    SessionTimeouts,
)
from kvtier.tierd.status import HitCounters
from kvtier.tierd.wire import (
    HEARTBEAT_SECONDS,
    PROTOCOL,
    Bye,
    FromEngine,
    Heartbeat,
    Hello,
    LiveSettings,
    Message,
    SessionRefused,
    Welcome,
    decode_from_engine,
)

MESSAGES_PER_TURN = 512
MAX_WAITING_FOR_POOL = 256
"""How many processes may wait for the allocation of the pool."""
SUSPENDED_SECONDS = 1.5
"""An iteration that starts this late shows that this process did not run. Silence of sessions is
not counted then."""
_BLOCKED_POLL_SECONDS = 0.01

_log = logging.getLogger("kvtier.tierd")


@dataclass(frozen=True, slots=True)
class Pool:
    """The published pool, and the names of the tiers in the order of their bits."""

    path: str
    bytes: int
    tiers: tuple[str, ...]


class ServerLoop:
    """The protocol over one ROUTER socket, which it owns. All methods except ``wake`` are for the
    loop's thread."""

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        dependencies: SessionDependencies,
        timeouts: SessionTimeouts,
        counters: StoreCounters,
        live: Live,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._socket = socket
        self._clock = clock
        self._fence = dependencies.fence
        self._counters = counters
        self._live = live
        self._wake_descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # Closed with the object, not before: I/O threads and signal handlers may wake a loop that
        # has ended.
        weakref.finalize(self, os.close, self._wake_descriptor)
        self._poller = zmq.Poller()
        self._poller.register(socket, zmq.POLLIN)
        self._poller.register(self._wake_descriptor, zmq.POLLIN)
        self._outbox = Outbox(socket)
        self.sessions = Sessions(self, dependencies, counters, timeouts)
        self.hits = HitCounters()
        self.dispatcher: Dispatcher | None = None
        """The dispatcher of the open store; None while the pool is being allocated."""
        self.pool_error = ""
        """Why the pool could not be allocated; empty: it is allocated, or being allocated."""
        self._stopping = False
        self._pool = Pool("", 0, ())
        self._waiting_for_pool: dict[bytes, Hello] = {}
        self._next_check_at = 0.0
        self._more = False
        self._unfence: Callable[[], None] | None = None

    # Control.

    def wake(self) -> None:
        """Ends a wait. For any thread and for signal handlers."""
        try:
            os.eventfd_write(self._wake_descriptor, 1)
        except BlockingIOError:
            # Woken 2**64 times already.
            return

    def pool_ready(
        self, dispatcher: Dispatcher, pool: Pool, unfence: Callable[[], None] | None
    ) -> None:
        """The store is open: admits the processes that wait for the pool.

        ``unfence`` is called once, when no worker of an earlier epoch has to be waited for; None:
        the store is not fenced.
        """
        self.dispatcher, self._pool, self._unfence = dispatcher, pool, unfence
        if self._stopping:
            dispatcher.stop_reservations()
        waiting, self._waiting_for_pool = self._waiting_for_pool, {}
        for route, hello in waiting.items():
            self.sessions.hello(route, hello, self._clock())

    def stop_sessions(self) -> None:
        """Stops new sessions and new reservations."""
        self._stopping = True
        self.stop_reservations()

    def stop_reservations(self) -> None:
        """Stops new reservations. Sessions, loads and pending stores continue."""
        if self.dispatcher is not None:
            self.dispatcher.stop_reservations()

    def pool_failed(self, reason: str) -> None:
        """Refuses every session with the reason why the pool could not be allocated."""
        self.pool_error = reason
        waiting, self._waiting_for_pool = self._waiting_for_pool, {}
        for route in waiting:
            self.send(route, SessionRefused(reason=reason))

    def configure(self, live: Live) -> None:
        """Applies live values and sends them to all sessions."""
        self._live = live
        if self.dispatcher is not None:
            self.dispatcher.store.configure(live)
        message = LiveSettings(settings=self.settings)
        for session in self.sessions.all():
            self.send(session.route, message)

    @property
    def settings(self) -> str:
        """The live values as JSON."""
        return self._live.model_dump_json(by_alias=True)

    @property
    def waiting_for_pool(self) -> int:
        """How many processes wait for the pool."""
        return len(self._waiting_for_pool)

    def close(self, reason: str) -> None:
        """Sends ``Bye`` to every session. Must be the last call."""
        now = self._clock()
        for session in self.sessions.all():
            self._queue(session.route, Bye(reason=reason))
        self._outbox.flush(now)

    # One iteration.

    def run_once(self, longest_wait_seconds: float) -> None:
        """Waits until there is work, at most ``longest_wait_seconds``, and does it."""
        self._wait(longest_wait_seconds)
        now = self._clock()
        drained = self._receive(now)
        if drained:
            self._drop_unreachable(now)
        self._lift_fence()
        if self.dispatcher is not None:
            self._more = self.dispatcher.run_once(now)
        self._outbox.flush(now)
        if now >= self._next_check_at:
            self._check(now, drained)

    def _wait(self, longest_wait_seconds: float) -> None:
        now = self._clock()
        wait = min(longest_wait_seconds, self._next_check_at - now)
        if self.dispatcher is not None:
            due = self.dispatcher.store.next_wake()
            if due is not None:
                wait = min(wait, due - now)
        if self._outbox.has_queued:
            wait = min(wait, _BLOCKED_POLL_SECONDS)
        if self._more or self._outbox.failed:
            wait = 0.0
        # Rounded up: waking a fraction of a millisecond before something is due would spin until it
        # is.
        events = dict(self._poller.poll(max(0, int(wait * 1000 + 0.999))))
        if self._wake_descriptor in events:
            try:
                os.eventfd_read(self._wake_descriptor)
            except BlockingIOError:
                return

    def _receive(self, now: float) -> bool:
        """Handles received messages; True if none is left."""
        for _ in range(MESSAGES_PER_TURN):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return True
            if len(frames) != 2:
                self._counters.add("protocol_violations", "", "frames")
                continue
            route, data = frames
            try:
                message = decode_from_engine(data)
            except msgspec.MsgspecError as error:
                self._undecodable(route, error, now)
                continue
            self._handle(route, message, now)
        return False

    def _undecodable(self, route: bytes, error: Exception, now: float) -> None:
        self._counters.add("protocol_violations", "", "undecodable")
        _log.error("cannot decode a message: %s", error)
        session = self.sessions.get(route)
        if session is None:
            self.send(
                route,
                SessionRefused(
                    reason=f"tierd {PROTOCOL} cannot decode the connector's message: {error}"
                ),
            )
        else:
            self.sessions.unreachable(session, now, "a message from it cannot be decoded")

    def _handle(self, route: bytes, message: FromEngine, now: float) -> None:
        if isinstance(message, Hello):
            self._hello(route, message, now)
            return
        session = self.sessions.get(route)
        if isinstance(message, Bye):
            self._waiting_for_pool.pop(route, None)
            self.sessions.bye(route)
        elif session is not None:
            self.sessions.touch(session, now)
            if isinstance(message, Heartbeat) and session.is_scheduler:
                started_later = session.process.start >= own_identity().start
                self.hits.record(
                    session.hello.engine,
                    message.prompt_tokens,
                    message.loaded_tokens,
                    now,
                    started_later,
                )
            self._dispatch(session, message, now)
        elif route not in self._waiting_for_pool:
            # The session ended, or belonged to a previous tierd.
            self._counters.add("messages_without_session")
            self.send(route, Bye(reason="unknown session"))

    def _hello(self, route: bytes, hello: Hello, now: float) -> None:
        if self._stopping:
            self._counters.add("hello_while_stopping")
        elif self.pool_error:
            self.send(route, SessionRefused(reason=self.pool_error))
        elif self.dispatcher is not None or hello.protocol != PROTOCOL:
            self.sessions.hello(route, hello, now)
        elif len(self._waiting_for_pool) < MAX_WAITING_FOR_POOL:
            self._waiting_for_pool[route] = hello
            # The heartbeat keeps it waiting.
            self.send(route, Heartbeat())
        else:
            self._counters.add("sessions_refused")
            self.send(
                route,
                SessionRefused(
                    reason=f"{MAX_WAITING_FOR_POOL} processes are already waiting for the host pool"
                ),
            )

    def _dispatch(self, session: Session, message: FromEngine, now: float) -> None:
        engine = self.sessions.engine_of(session)
        if (
            engine is not None
            and self.dispatcher is not None
            and not isinstance(message, Heartbeat)
        ):
            self.dispatcher.handle(session, engine, message, now)

    def _check(self, now: float, drained: bool) -> None:
        """Heartbeats and timeouts, every ``HEARTBEAT_SECONDS``."""
        if self._next_check_at and now - self._next_check_at > SUSPENDED_SECONDS:
            self._counters.add("loop_asleep")
            _log.warning("process was suspended for %.1f s", now - self._next_check_at)
            self.sessions.reset_timeouts(now)
        self._next_check_at = now + HEARTBEAT_SECONDS
        beat = Heartbeat()
        for session in self.sessions.all():
            # A session with queued messages gets those first; a heartbeat would only fill its
            # queue.
            if not self._outbox.queued(session.route):
                self._queue(session.route, beat)
        for route in self._waiting_for_pool:
            self._queue(route, beat)
        if drained:
            self.sessions.check(now)
        self._fence.check(now)

    def _lift_fence(self) -> None:
        if self.dispatcher is not None and self._unfence is not None and not self._fence.is_active:
            unfence, self._unfence = self._unfence, None
            unfence()

    @property
    def fenced(self) -> bool:
        """Whether the store waits for workers of earlier epochs."""
        return self._unfence is not None

    # Listener of the sessions.

    def _queue(self, route: bytes, message: Message) -> None:
        self._outbox.send(route, message, self._clock())

    def send(self, route: bytes, message: Message) -> None:
        """Sends, or queues behind earlier messages."""
        self._queue(route, message)

    def welcome(self, session: Session) -> None:
        """Answers ``Hello`` with the session's values."""
        self.send(
            session.route,
            Welcome(
                protocol=PROTOCOL,
                epoch=session.worker.epoch,
                session=session.number,
                pool_path=self._pool.path,
                pool_bytes=self._pool.bytes,
                tiers=self._pool.tiers,
                settings=self.settings,
            ),
        )

    def engine_opened(self, engine: EngineSessions) -> None:
        """Opens a complete engine in the store. Raises ``KVTierError``."""
        if self.dispatcher is None:
            raise KVTierError("the host pool is not allocated")
        self.dispatcher.open(engine, self._clock())

    def engine_closed(self, engine: EngineSessions, proven: bool) -> None:
        """Closes the engine in the store."""
        if self.dispatcher is not None:
            self.dispatcher.close(engine, proven)

    def engine_confirmed_dead(self, name: str) -> None:
        """Releases the slots of a closed engine."""
        if self.dispatcher is not None:
            self.dispatcher.store.confirm_engine_dead(name)

    def session_removed(self, session: Session) -> None:
        """Drops queued messages for a session and acknowledgements expected from it."""
        self._outbox.forget(session.route)
        if self.dispatcher is not None:
            self.dispatcher.session_removed(session.route)

    def _drop_unreachable(self, now: float) -> None:
        """Ends sessions that could not be sent to. Their received messages come first: the last one
        may be ``Bye``."""
        for route, reason in self._outbox.take_failed().items():
            self._waiting_for_pool.pop(route, None)
            session = self.sessions.get(route)
            if session is not None:
                self.sessions.unreachable(session, now, reason)
