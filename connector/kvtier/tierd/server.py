"""tierd's loop: one thread owns the socket, the sessions and the store, and never waits for anybody.

One turn: take what has arrived, let the store take in finished I/O, pass on what it says, send. Twice a second: heartbeats, a look at
who is still there, a snapshot for /status. What may take long happens elsewhere: tier I/O on the store's threads, allocating the
pool on one of its own, HTTP on its own.
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
    Message,
    Refused,
    Settings,
    Welcome,
    decode_from_engine,
)

MESSAGES_PER_TURN = 512
MAX_WAITING_FOR_POOL = 256
"""Processes that may wait for the pool to be allocated."""
SUSPENDED_SECONDS = 1.5
"""A turn that begins this much too late means that this process did not run; nobody's silence counts then."""
_BLOCKED_POLL_SECONDS = 0.01

_log = logging.getLogger("kvtier.tierd")


@dataclass(frozen=True, slots=True)
class Pool:
    """The published pool, and the names of the tiers in the order of their bits."""

    path: str
    bytes: int
    tiers: tuple[str, ...]


class ServerLoop:
    """The protocol over one ROUTER socket, which it owns. Everything but ``wake`` belongs to the thread that calls ``turn``.

    ``make_sessions(host)`` builds the state machine with this loop as its host. ``fence`` is the predecessor's workers.
    """

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
        # Closed with the object, not before: I/O threads and signal handlers may wake a loop that has ended.
        weakref.finalize(self, os.close, self._wake_descriptor)
        self._poller = zmq.Poller()
        self._poller.register(socket, zmq.POLLIN)
        self._poller.register(self._wake_descriptor, zmq.POLLIN)
        self._outbox = Outbox(socket)
        self.sessions = Sessions(self, dependencies, counters, timeouts)
        self.hits = HitCounters()
        self.dispatcher: Dispatcher | None = None
        """The open store; None while the pool is being allocated."""
        self.pool_error = ""
        """Why there never will be a pool; empty: there is one, or it is being allocated."""
        self._stopping = False
        self._pool = Pool("", 0, ())
        self._waiting_for_pool: dict[bytes, Hello] = {}
        self._next_check_at = 0.0
        self._more = False
        self._unfence: Callable[[], None] | None = None

    # From outside the turn.

    def wake(self) -> None:
        """Ends a wait. Any thread, and signal handlers."""
        try:
            os.eventfd_write(self._wake_descriptor, 1)
        except BlockingIOError:
            # Woken 2**64 times already.
            return

    def pool_ready(
        self, dispatcher: Dispatcher, pool: Pool, unfence: Callable[[], None] | None
    ) -> None:
        """The store is open: admits the processes that wait for the pool.

        ``unfence`` is called once, when no worker of an earlier epoch has to be waited for; None: the store is not fenced.
        """
        self.dispatcher, self._pool, self._unfence = dispatcher, pool, unfence
        if self._stopping:
            dispatcher.stop_reservations()
        waiting, self._waiting_for_pool = self._waiting_for_pool, {}
        for route, hello in waiting.items():
            self.sessions.hello(route, hello, self._clock())

    def stop_sessions(self) -> None:
        """No session begins and nothing is reserved any more."""
        self._stopping = True
        self.stop_reservations()

    def stop_reservations(self) -> None:
        """Nothing is reserved any more; sessions, loads and what is pending go on."""
        if self.dispatcher is not None:
            self.dispatcher.stop_reservations()

    def pool_failed(self, reason: str) -> None:
        """There will be no pool: everybody is refused, with the reason."""
        self.pool_error = reason
        waiting, self._waiting_for_pool = self._waiting_for_pool, {}
        for route in waiting:
            self.send(route, Refused(reason=reason))

    def configure(self, live: Live) -> None:
        """Live values changed."""
        self._live = live
        if self.dispatcher is not None:
            self.dispatcher.store.configure(live)
        message = Settings(settings=self.settings)
        for session in self.sessions.all():
            self.send(session.route, message)

    @property
    def settings(self) -> str:
        """The live values as they go to engines."""
        return self._live.model_dump_json(by_alias=True)

    @property
    def waiting_for_pool(self) -> int:
        """How many processes wait for the pool."""
        return len(self._waiting_for_pool)

    def close(self, reason: str) -> None:
        """Says ``Bye`` to everybody. The loop must not be turned afterwards."""
        now = self._clock()
        for session in self.sessions.all():
            self._queue(session.route, Bye(reason=reason))
        self._outbox.flush(now)

    # The turn.

    def run_once(self, longest_wait_seconds: float) -> None:
        """Waits until there is something to do, at most so long, and does it."""
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
        # Rounded up: waking a fraction of a millisecond before something is due would spin until it is.
        events = dict(self._poller.poll(max(0, int(wait * 1000 + 0.999))))
        if self._wake_descriptor in events:
            try:
                os.eventfd_read(self._wake_descriptor)
            except BlockingIOError:
                return

    def _receive(self, now: float) -> bool:
        """Takes messages; True if none is left."""
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
        _log.error("a message cannot be read: %s", error)
        session = self.sessions.get(route)
        if session is None:
            self.send(
                route,
                Refused(
                    reason=f"tierd is version {PROTOCOL} and cannot read what the connector says: {error}"
                ),
            )
        else:
            self.sessions.unreachable(session, now, "it sent what cannot be read")

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
            # It speaks to a tierd that was before this one, or to a session that ended.
            self._counters.add("messages_without_session")
            self.send(route, Bye(reason="there is no such session"))

    def _hello(self, route: bytes, hello: Hello, now: float) -> None:
        if self._stopping:
            self._counters.add("hello_while_stopping")
        elif self.pool_error:
            self.send(route, Refused(reason=self.pool_error))
        elif self.dispatcher is not None or hello.protocol != PROTOCOL:
            self.sessions.hello(route, hello, now)
        elif len(self._waiting_for_pool) < MAX_WAITING_FOR_POOL:
            self._waiting_for_pool[route] = hello
            # A word, so that it goes on waiting.
            self.send(route, Heartbeat())
        else:
            self._counters.add("sessions_refused")
            self.send(
                route,
                Refused(
                    reason=f"{MAX_WAITING_FOR_POOL} processes wait for the host pool, which is the limit"
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
        """Twice a second."""
        if self._next_check_at and now - self._next_check_at > SUSPENDED_SECONDS:
            self._counters.add("loop_asleep")
            _log.warning("this process did not run for %.1f s", now - self._next_check_at)
            self.sessions.reset_timeouts(now)
        self._next_check_at = now + HEARTBEAT_SECONDS
        beat = Heartbeat()
        for session in self.sessions.all():
            # Whoever has words waiting gets them first, and one more would only fill the queue.
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
        """Whether workers of an earlier epoch are waited for."""
        return self._unfence is not None

    # Host of the sessions.

    def _queue(self, route: bytes, message: Message) -> None:
        self._outbox.send(route, message, self._clock())

    def send(self, route: bytes, message: Message) -> None:
        """Sends, or queues behind what waits already."""
        self._queue(route, message)

    def welcome(self, session: Session) -> None:
        """Tells a session what it has got."""
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
        """All members are there. Raises ``KVTierError``."""
        if self.dispatcher is None:
            raise KVTierError("there is no host pool")
        self.dispatcher.open(engine, self._clock())

    def engine_closed(self, engine: EngineSessions, proven: bool) -> None:
        """The engine is not there any more."""
        if self.dispatcher is not None:
            self.dispatcher.close(engine, proven)

    def engine_confirmed_dead(self, name: str) -> None:
        """Nobody of this engine touches a slot any more."""
        if self.dispatcher is not None:
            self.dispatcher.store.confirm_engine_dead(name)

    def session_removed(self, session: Session) -> None:
        """Forgets what waits for a session, and what is waited for from it."""
        self._outbox.forget(session.route)
        if self.dispatcher is not None:
            self.dispatcher.session_removed(session.route)

    def _drop_unreachable(self, now: float) -> None:
        """Ends the sessions that could not be sent to, once all they said before has been read: the last word may be ``Bye``."""
        for route, reason in self._outbox.take_failed().items():
            self._waiting_for_pool.pop(route, None)
            session = self.sessions.get(route)
            if session is not None:
                self.sessions.unreachable(session, now, reason)
