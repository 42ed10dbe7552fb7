"""tierd's loop: one thread owns the socket, the sessions and the store, and never waits for anybody.

One turn: take what has arrived, let the store take in finished I/O, pass on what it says, send. Twice a second: heartbeats, a look at
who is still there, a snapshot for /status. What may take long happens elsewhere: tier I/O on the store's threads, allocating the
pool on one of its own, HTTP on its own.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import replace

import msgspec
import zmq

from kvtier.errors import KVTierError
from kvtier.store.contract import (
    CreditsGranted,
    KeysLeaving,
    LoadReady,
    PresenceChanged,
    PromotionEnded,
    StoreCounters,
    StoreEvent,
)
from kvtier.store.core import TierStore
from kvtier.tierd.feed import Feeds
from kvtier.tierd.fence import Fence
from kvtier.tierd.outbox import Outbox
from kvtier.tierd.sessions import Engine, Session, Sessions
from kvtier.tierd.wire import (
    BEAT_SECONDS,
    PROTOCOL,
    Abort,
    Beat,
    Bye,
    Cancel,
    Credits,
    Deliver,
    Drained,
    FromEngine,
    Hello,
    LeftAck,
    Load,
    Loaded,
    Message,
    Promote,
    Promoted,
    Ready,
    Refused,
    Reserve,
    ResetCache,
    Resync,
    Settings,
    Slots,
    Welcome,
    decode_from_engine,
)
from kvtier.topology.models import Live

MESSAGES_PER_TURN = 512
MAX_EARLY = 256
"""Processes that may wait for the pool to be allocated."""
ASLEEP_SECONDS = 1.5
"""A turn that begins this much too late means that this process did not run; nobody's silence counts then."""
_BLOCKED_POLL_SECONDS = 0.01

_log = logging.getLogger("kvtier.tierd")


class Place:
    """Where the pool is and what is in the tiers: filled in once the pool is allocated."""

    __slots__ = ("pool_bytes", "pool_path", "store", "tiers")

    def __init__(self, store: TierStore, pool_path: str, pool_bytes: int, tiers: tuple[str, ...]) -> None:
        self.store = store
        self.pool_path = pool_path
        self.pool_bytes = pool_bytes
        self.tiers = tiers


class Loop:
    """The protocol over one ROUTER socket, which it owns. Everything but ``wake`` belongs to the thread that calls ``turn``.

    ``make_sessions(host)`` builds the state machine with this loop as its host. ``describe(namespace, text)`` is told what a namespace
    stands for. ``fence`` is the predecessor's workers.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        fence: Fence,
        make_sessions: Callable[[Loop], Sessions],
        counters: StoreCounters,
        live: Live,
        describe: Callable[[str, str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._socket = socket
        self._clock = clock
        self._fence = fence
        self._counters = counters
        self._live = live
        self._describe = describe
        self._wake_descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = zmq.Poller()
        self._poller.register(socket, zmq.POLLIN)
        self._poller.register(self._wake_descriptor, zmq.POLLIN)
        self._outbox = Outbox(socket)
        self._feeds = Feeds(self._queue, self._presence, self._left)
        self.sessions = make_sessions(self)
        self.place: Place | None = None
        self.no_place = ""
        """Why there never will be a pool; empty: there is one, or it is being allocated."""
        self.stopping = False
        """No session begins and nothing is reserved any more."""
        self._early: dict[bytes, Hello] = {}
        self._names: dict[str, Engine] = {}
        self._next_check = 0.0
        self._more = False
        self._unfence: Callable[[], None] | None = None

    # From outside the turn.

    def wake(self) -> None:
        """Ends a wait. Any thread, and signal handlers."""
        try:
            os.eventfd_write(self._wake_descriptor, 1)
        except OSError:
            # Awake already, or ended.
            return

    def begin(self, place: Place) -> None:
        """The pool is there: whoever waited for it is welcome."""
        self.place = place
        early, self._early = self._early, {}
        for route, hello in early.items():
            self.sessions.hello(route, hello, self._clock())

    def give_up(self, reason: str) -> None:
        """There will be no pool: everybody is refused, with the reason."""
        self.no_place = reason
        early, self._early = self._early, {}
        for route in early:
            self.send(route, Refused(reason=reason))

    def configure(self, live: Live) -> None:
        """Live values changed."""
        self._live = live
        if self.place is not None:
            self.place.store.configure(live)
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
        descriptor, self._wake_descriptor = self._wake_descriptor, -1
        os.close(descriptor)

    # The turn.

    def turn(self, longest_wait_seconds: float) -> None:
        """Waits until there is something to do, at most so long, and does it."""
        self._wait(longest_wait_seconds)
        now = self._clock()
        drained = self._receive(now)
        if drained:
            self._drop_unreachable(now)
        place = self.place
        if place is not None:
            place.store.pump()
            self._pass_on(place.store.take_events(), now)
        self._more = self._feeds.turn(now)
        self._outbox.flush(now)
        if now >= self._next_check:
            self._check(now, drained)

    def _wait(self, longest_wait_seconds: float) -> None:
        now = self._clock()
        wait = min(longest_wait_seconds, self._next_check - now)
        if self.place is not None:
            due = self.place.store.next_wake()
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
            self.send(route, Refused(reason=f"tierd is version {PROTOCOL} and cannot read what the connector says: {error}"))
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
            self._act(session, message, now)
        elif route not in self._early:
            # It speaks to a tierd that was before this one, or to a session that ended.
            self._counters.add("messages_without_session")
            self.send(route, Bye(reason="there is no such session"))

    def _hello(self, route: bytes, hello: Hello, now: float) -> None:
        if self.stopping:
            self._counters.add("hello_while_stopping")
        elif self.no_place:
            self.send(route, Refused(reason=self.no_place))
        elif self.place is not None or hello.protocol != PROTOCOL:
            self.sessions.hello(route, hello, now)
        elif len(self._early) < MAX_EARLY:
            self._early[route] = hello
            # A word, so that it goes on waiting.
            self.send(route, Beat())

    def _act(self, session: Session, message: FromEngine, now: float) -> None:
        if isinstance(message, Beat):
            return
        engine, place = self.sessions.engine_of(session), self.place
        if engine is None or place is None:
            return
        if session.is_scheduler:
            self._act_scheduler(session, engine, place.store, message, now)
        else:
            self._act_worker(session, engine, place.store, message)

    def _act_scheduler(self, session: Session, engine: Engine, store: TierStore, message: FromEngine, now: float) -> None:
        name = engine.name
        if isinstance(message, LeftAck):
            self._feeds.acknowledged(session.route, message.token)
        elif isinstance(message, Promote) and not engine.open:
            self.send(session.route, Promoted(promotion=message.promotion, usable=0, outcome="failed"))
        elif not engine.open:
            self._counters.add("messages_while_not_open", "", type(message).__name__)
        elif isinstance(message, Reserve):
            if self.stopping:
                self._counters.add("reservations_while_stopping", "", "", len(message.items))
                return
            for reservation, group, key, slot in message.items:
                store.reserve(name, reservation, group, key, slot)
        elif isinstance(message, Promote):
            store.promote(name, message.promotion, message.keys, message.budget_seconds)
        elif isinstance(message, Cancel):
            store.cancel(name, message.promotion)
        elif isinstance(message, Load):
            store.load(name, message.load, message.promotion, message.keys, message.ranks)
        elif isinstance(message, Resync):
            self._counters.add("resyncs")
            self._start_feed(session, engine, now)
        elif isinstance(message, ResetCache):
            self._reset(session, engine, store, now)
        else:
            self._counters.add("protocol_violations", "", f"scheduler_{type(message).__name__}")

    def _act_worker(self, session: Session, engine: Engine, store: TierStore, message: FromEngine) -> None:
        rank = session.hello.rank
        if isinstance(message, Drained):
            return
        if not engine.open:
            self._counters.add("messages_while_not_open", "", type(message).__name__)
        elif isinstance(message, Deliver):
            for reservation in message.reservations:
                store.deliver(engine.name, rank, reservation)
        elif isinstance(message, Abort):
            for reservation in message.reservations:
                store.abort(engine.name, rank, reservation)
        elif isinstance(message, Loaded):
            store.loaded(engine.name, rank, message.load)
        else:
            self._counters.add("protocol_violations", "", f"worker_{type(message).__name__}")

    def _reset(self, session: Session, engine: Engine, store: TierStore, now: float) -> None:
        if engine.info is None:
            return
        self._pass_on(store.take_events(), now)
        engine.info = replace(engine.info, namespace=secrets.token_hex(16), persistent=False)
        store.reset_engine(engine.name, engine.info.namespace)
        self._counters.add("engines_reset")
        for member in engine.members():
            self._send_ready(member, engine)
        self._start_feed(session, engine, now)

    def _check(self, now: float, drained: bool) -> None:
        """Twice a second."""
        if self._next_check and now - self._next_check > ASLEEP_SECONDS:
            self._counters.add("loop_asleep")
            _log.warning("this process did not run for %.1f s", now - self._next_check)
            self.sessions.forgive(now)
        self._next_check = now + BEAT_SECONDS
        beat = Beat()
        for session in self.sessions.all():
            # Whoever has words waiting gets them first, and one more would only fill the queue.
            if not self._outbox.waiting(session.route):
                self._queue(session.route, beat)
        for route in self._early:
            self._queue(route, beat)
        if drained:
            self.sessions.check(now)
        self._fence.check(now)
        place = self.place
        if place is not None and not self._fence.closed and self._unfence is not None:
            unfence, self._unfence = self._unfence, None
            unfence()

    def unfence_with(self, unfence: Callable[[], None]) -> None:
        """Called once when nobody of an earlier epoch has to be waited for any more."""
        self._unfence = unfence

    @property
    def fenced(self) -> bool:
        """Whether workers of an earlier epoch are waited for."""
        return self._unfence is not None

    # What the store says.

    def _pass_on(self, events: Iterable[StoreEvent], now: float) -> None:
        for event in events:
            if isinstance(event, PresenceChanged):
                self._feeds.changed(event.namespace, event.key, event.bits, event.present)
            elif isinstance(event, KeysLeaving):
                self._feeds.leaving(event.namespace, event.token, event.keys, now)
            elif isinstance(event, LoadReady):
                self._slots(event)
            else:
                self._to_scheduler(event)

    def _to_scheduler(self, event: CreditsGranted | PromotionEnded) -> None:
        engine = self._names.get(event.engine)
        if engine is None or engine.scheduler is None:
            return
        route = engine.scheduler.route
        if isinstance(event, CreditsGranted):
            self.send(route, Credits(group=event.group, slots=event.slots))
        else:
            # A scheduler that is told of a promotion must find its keys in the replica.
            self._feeds.flush()
            self.send(
                route,
                Promoted(
                    promotion=event.promotion, usable=event.usable, outcome=event.outcome.value, tiers=event.tiers
                ),
            )

    def _slots(self, event: LoadReady) -> None:
        engine = self._names.get(event.engine)
        if engine is None:
            return
        message = Slots(load=event.load, slots=event.slots, tiers=event.tiers)
        for rank in event.ranks:
            worker = engine.workers.get(rank)
            if worker is not None:
                self.send(worker.route, message)

    def _presence(self, namespace: str) -> Iterable[tuple[bytes, int]]:
        return () if self.place is None else self.place.store.presence(namespace)

    def _left(self, token: int) -> None:
        if self.place is not None:
            self.place.store.left(token)

    # Host of the sessions.

    def _queue(self, route: bytes, message: Message) -> None:
        self._outbox.send(route, message, self._clock())

    def send(self, route: bytes, message: Message) -> None:
        """Sends, or queues behind what waits already."""
        self._queue(route, message)

    def welcome(self, session: Session) -> None:
        """Tells a session what it has got."""
        place = self.place
        if place is None:
            return
        self.send(
            session.route,
            Welcome(
                protocol=PROTOCOL,
                epoch=session.worker.epoch,
                session=session.number,
                pool_path=place.pool_path,
                pool_bytes=place.pool_bytes,
                tiers=place.tiers,
                settings=self.settings,
            ),
        )

    def opened(self, engine: Engine) -> None:
        """Opens an engine in the store and tells its members. Raises ``KVTierError``."""
        place = self.place
        if place is None or engine.info is None or engine.scheduler is None:
            raise KVTierError("the engine is not described")
        largest = max(engine.info.slot_bytes)
        if largest > place.pool_bytes:
            raise KVTierError(f"an object has {largest} bytes, the host pool {place.pool_bytes}; the memory tier is too small")
        now = self._clock()
        self._pass_on(place.store.take_events(), now)
        place.store.open_engine(engine.info)
        self._names[engine.name] = engine
        if engine.info.persistent:
            self._describe(engine.info.namespace, engine.canonical)
        for member in engine.members():
            self._send_ready(member, engine)
        self._start_feed(engine.scheduler, engine, now)

    def _send_ready(self, member: Session, engine: Engine) -> None:
        info = engine.info
        if info is not None:
            self.send(
                member.route, Ready(namespace=info.namespace, slot_bytes=info.slot_bytes, persistent=info.persistent)
            )

    def _start_feed(self, scheduler: Session, engine: Engine, now: float) -> None:
        if engine.info is None or self.place is None:
            return
        self._pass_on(self.place.store.take_events(), now)
        self._feeds.start(scheduler.route, engine.info.namespace)

    def closed(self, engine: Engine, proven: bool) -> None:
        """Closes an engine in the store."""
        self._names.pop(engine.name, None)
        if self.place is not None:
            self.place.store.close_engine(engine.name, proven)

    def proven_gone(self, name: str) -> None:
        """Ends an engine's quarantine."""
        if self.place is not None:
            self.place.store.engine_proven_gone(name)

    def dropped(self, session: Session) -> None:
        """Forgets what waits for a session, and what is waited for from it."""
        self._outbox.forget(session.route)
        self._feeds.stop(session.route)

    def _drop_unreachable(self, now: float) -> None:
        """Ends the sessions that could not be sent to, once all they said before has been read: the last word may be ``Bye``."""
        for route, reason in self._outbox.take_failed().items():
            self._early.pop(route, None)
            session = self.sessions.get(route)
            if session is not None:
                self.sessions.unreachable(session, now, reason)
