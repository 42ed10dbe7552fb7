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
from kvtier.tierd.fencing import StartupFence
from kvtier.tierd.sessions import EngineSessions, Session, Sessions
from kvtier.tierd.status import Hits
from kvtier.tierd.wire import (
    BEAT_SECONDS,
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
MAX_EARLY = 256
"""Processes that may wait for the pool to be allocated."""
ASLEEP_SECONDS = 1.5
"""A turn that begins this much too late means that this process did not run; nobody's silence counts then."""
_BLOCKED_POLL_SECONDS = 0.01

_log = logging.getLogger("kvtier.tierd")


@dataclass(frozen=True, slots=True)
class Pool:
    """The published pool, and the names of the tiers in the order of their bits."""

    path: str
    bytes: int
    tiers: tuple[str, ...]


class Loop:
    """The protocol over one ROUTER socket, which it owns. Everything but ``wake`` belongs to the thread that calls ``turn``.

    ``make_sessions(host)`` builds the state machine with this loop as its host. ``fence`` is the predecessor's workers.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        fence: StartupFence,
        make_sessions: Callable[[Loop], Sessions],
        counters: StoreCounters,
        live: Live,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._socket = socket
        self._clock = clock
        self._fence = fence
        self._counters = counters
        self._live = live
        self._wake_descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # Closed with the object, not before: I/O threads and signal handlers may wake a loop that has ended.
        weakref.finalize(self, os.close, self._wake_descriptor)
        self._poller = zmq.Poller()
        self._poller.register(socket, zmq.POLLIN)
        self._poller.register(self._wake_descriptor, zmq.POLLIN)
        self._outbox = Outbox(socket)
        self.sessions = make_sessions(self)
        self.hits = Hits()
        self.exchange: Dispatcher | None = None
        """The open store; None while the pool is being allocated."""
        self.no_pool = ""
        """Why there never will be a pool; empty: there is one, or it is being allocated."""
        self._stopping = False
        self._pool = Pool("", 0, ())
        self._early: dict[bytes, Hello] = {}
        self._next_check = 0.0
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

    def begin(self, exchange: Dispatcher, pool: Pool) -> None:
        """The pool is there: whoever waited for it is welcome."""
        self.exchange, self._pool = exchange, pool
        exchange.stopping = self._stopping
        early, self._early = self._early, {}
        for route, hello in early.items():
            self.sessions.hello(route, hello, self._clock())

    def stop_accepting(self) -> None:
        """No session begins and nothing is reserved any more."""
        self._stopping = True
        if self.exchange is not None:
            self.exchange.stopping = True

    def stop_reserving(self) -> None:
        """Nothing is reserved any more; sessions, loads and what is pending go on."""
        if self.exchange is not None:
            self.exchange.stopping = True

    def give_up(self, reason: str) -> None:
        """There will be no pool: everybody is refused, with the reason."""
        self.no_pool = reason
        early, self._early = self._early, {}
        for route in early:
            self.send(route, Refused(reason=reason))

    def configure(self, live: Live) -> None:
        """Live values changed."""
        self._live = live
        if self.exchange is not None:
            self.exchange.store.configure(live)
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
        return len(self._early)

    def close(self, reason: str) -> None:
        """Says ``Bye`` to everybody. The loop must not be turned afterwards."""
        now = self._clock()
        for session in self.sessions.all():
            self._queue(session.route, Bye(reason=reason))
        self._outbox.flush(now)

    # The turn.

    def turn(self, longest_wait_seconds: float) -> None:
        """Waits until there is something to do, at most so long, and does it."""
        self._wait(longest_wait_seconds)
        now = self._clock()
        drained = self._receive(now)
        if drained:
            self._drop_unreachable(now)
        self._open_fence()
        if self.exchange is not None:
            self._more = self.exchange.turn(now)
        self._outbox.flush(now)
        if now >= self._next_check:
            self._check(now, drained)

    def _wait(self, longest_wait_seconds: float) -> None:
        now = self._clock()
        wait = min(longest_wait_seconds, self._next_check - now)
        if self.exchange is not None:
            due = self.exchange.store.next_wake()
            if due is not None:
                wait = min(wait, due - now)
        if self._outbox.blocked:
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
            self._take(route, message, now)
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

    def _take(self, route: bytes, message: FromEngine, now: float) -> None:
        if isinstance(message, Hello):
            self._hello(route, message, now)
            return
        session = self.sessions.get(route)
        if isinstance(message, Bye):
            self._early.pop(route, None)
            self.sessions.bye(route)
        elif session is not None:
            self.sessions.heard(session, now)
            if isinstance(message, Heartbeat) and session.is_scheduler:
                younger = session.process.start >= own_identity().start
                self.hits.heard(
                    session.hello.engine, message.prompt_tokens, message.loaded_tokens, now, younger
                )
            self._act(session, message, now)
        elif route not in self._early:
            # It speaks to a tierd that was before this one, or to a session that ended.
            self._counters.add("messages_without_session")
            self.send(route, Bye(reason="there is no such session"))

    def _hello(self, route: bytes, hello: Hello, now: float) -> None:
        if self._stopping:
            self._counters.add("hello_while_stopping")
        elif self.no_pool:
            self.send(route, Refused(reason=self.no_pool))
        elif self.exchange is not None or hello.protocol != PROTOCOL:
            self.sessions.hello(route, hello, now)
        elif len(self._early) < MAX_EARLY:
            self._early[route] = hello
            # A word, so that it goes on waiting.
            self.send(route, Heartbeat())
        else:
            self._counters.add("sessions_refused")
            self.send(
                route,
                Refused(reason=f"{MAX_EARLY} processes wait for the host pool, which is the limit"),
            )

    def _act(self, session: Session, message: FromEngine, now: float) -> None:
        engine = self.sessions.engine_of(session)
        if engine is not None and self.exchange is not None and not isinstance(message, Heartbeat):
            self.exchange.act(session, engine, message, now)

    def _check(self, now: float, drained: bool) -> None:
        """Twice a second."""
        if self._next_check and now - self._next_check > ASLEEP_SECONDS:
            self._counters.add("loop_asleep")
            _log.warning("this process did not run for %.1f s", now - self._next_check)
            self.sessions.forgive(now)
        self._next_check = now + BEAT_SECONDS
        beat = Heartbeat()
        for session in self.sessions.all():
            # Whoever has words waiting gets them first, and one more would only fill the queue.
            if not self._outbox.waiting(session.route):
                self._queue(session.route, beat)
        for route in self._early:
            self._queue(route, beat)
        if drained:
            self.sessions.check(now)
        self._fence.check(now)

    def _open_fence(self) -> None:
        if self.exchange is not None and self._unfence is not None and not self._fence.closed:
            unfence, self._unfence = self._unfence, None
            unfence()

    def unfence_with(self, unfence: Callable[[], None]) -> None:
        """Called once when nobody of an earlier epoch has to be waited for any more."""
        self._unfence = unfence

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

    def opened(self, engine: EngineSessions) -> None:
        """All members are there. Raises ``KVTierError``."""
        if self.exchange is None:
            raise KVTierError("there is no host pool")
        self.exchange.open(engine, self._clock())

    def closed(self, engine: EngineSessions, proven: bool) -> None:
        """The engine is not there any more."""
        if self.exchange is not None:
            self.exchange.close(engine, proven)

    def proven_gone(self, name: str) -> None:
        """Nobody of this engine touches a slot any more."""
        if self.exchange is not None:
            self.exchange.store.confirm_engine_dead(name)

    def dropped(self, session: Session) -> None:
        """Forgets what waits for a session, and what is waited for from it."""
        self._outbox.forget(session.route)
        if self.exchange is not None:
            self.exchange.dropped(session.route)

    def _drop_unreachable(self, now: float) -> None:
        """Ends the sessions that could not be sent to, once all they said before has been read: the last word may be ``Bye``."""
        for route, reason in self._outbox.take_failed().items():
            self._early.pop(route, None)
            session = self.sessions.get(route)
            if session is not None:
                self.sessions.unreachable(session, now, reason)
