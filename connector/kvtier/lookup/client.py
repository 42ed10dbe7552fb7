"""The client of a lookup server: one I/O thread, and calls that never wait beyond a deadline.

The scheduler's thread calls ``ask``, which waits for the answer at most as long as it says. A
server that does not answer costs that once: until it has spoken again, and for longer after each
such loss, ``ask`` returns at once. All other calls only queue.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import msgspec
import zmq

from kvtier.lookup.endpoint import LookupUnavailableError, require_private, socket_path
from kvtier.lookup.wire import (
    MAX_KEYS,
    PING_SECONDS,
    PROTOCOL,
    SILENCE_SECONDS,
    Accepted,
    Answer,
    Ask,
    Declined,
    Greeting,
    LookupMessage,
    Lost,
    Ping,
    Stored,
    Stranger,
    decode_from_server,
    encode,
)
from kvtier.tierd.channel import Connection

QUEUE_MESSAGES = 4096
RETRY_SECONDS = 0.2
DECLINED_RETRY_SECONDS = 30.0
FIRST_PAUSE_SECONDS = 0.1
LAST_PAUSE_SECONDS = 10.0
MAX_WAITING = 1024
"""Questions without an answer that are remembered."""
_log = logging.getLogger("kvtier.lookup")
Items = Sequence[tuple[bytes, int]]


@dataclass(frozen=True, slots=True)
class LookupCallbacks:
    """Called on the I/O thread, in order; none may block. ``on_attached`` gets the server's
    instance. ``on_answer`` gets (keys, stores) of every answer, before ``ask`` returns them."""

    on_attached: Callable[[str], None] = lambda _instance: None
    on_lost: Callable[[str], None] = lambda _reason: None
    on_answer: Callable[[tuple[bytes, ...], tuple[int, ...]], None] = lambda _keys, _stores: None


NO_CALLBACKS = LookupCallbacks()


class LookupClient:
    """Attaches to the server of ``greeting.engine``, and again after a restart of either end."""

    def __init__(
        self,
        directory: Path,
        greeting: Greeting,
        callbacks: LookupCallbacks = NO_CALLBACKS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises ``LookupUnavailableError`` for a path that no socket can have."""
        self._directory = directory
        self._endpoint = f"ipc://{socket_path(directory, greeting.engine)}"
        self._greeting = encode(greeting)
        self._callbacks = callbacks
        self._clock = clock
        self._numbers = count(1)
        self._condition = threading.Condition()
        """Guards what follows, between callers and the I/O thread. Never held during I/O."""
        self._outgoing: deque[bytes] = deque()
        self._waiting: dict[int, tuple[bytes, ...]] = {}
        self._answers: dict[int, tuple[int, ...]] = {}
        self._wanted: set[int] = set()
        self._attached = False
        self._instance = ""
        self._unanswered = 0
        self._pause_until = 0.0
        self._closing = False
        self._wake_descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread: threading.Thread | None = None
        # The I/O thread's own.
        self._connection: Connection | None = None
        self._greeted = False
        self._heard_at = 0.0
        self._ping_at = 0.0
        self._retry_at = 0.0
        self.declined_reason = ""
        """Why the server does not serve this process; empty if it does or was not reached."""
        self.counts: Counter[str] = Counter()

    # Any thread.

    def start(self) -> None:
        """Starts to attach, in the background."""
        self._thread = threading.Thread(target=self._run, name="kvtier-lookup", daemon=True)
        self._thread.start()

    @property
    def attached(self) -> bool:
        """Whether the server has accepted this process, and has not been lost since."""
        return self._attached

    @property
    def instance(self) -> str:
        """Differs between starts of the server; empty while there is none."""
        return self._instance if self._attached else ""

    def ask(self, keys: Sequence[bytes], seconds: float) -> tuple[int, ...] | None:
        """Returns the stores of ``keys`` as ``Answer`` has them; None: no answer in time."""
        now = self._clock()
        if not self._attached or now < self._pause_until or not keys:
            return None
        until = now + seconds
        with self._condition:
            number = self._ask(keys, seconds, wanted=True)
            if number is None:
                return None
            while number not in self._answers and number in self._wanted:
                left = until - self._clock()
                if left <= 0 or not self._condition.wait(left):
                    break
            self._wanted.discard(number)
            found = self._answers.pop(number, None)
            if found is None:
                self.counts["unanswered"] += 1
                self._unanswered += 1
                pause = FIRST_PAUSE_SECONDS * 2 ** min(self._unanswered - 1, 10)
                self._pause_until = self._clock() + min(pause, LAST_PAUSE_SECONDS)
            else:
                self._unanswered = 0
        return found

    def ask_later(self, keys: Sequence[bytes], seconds: float) -> bool:
        """Asks without waiting; ``on_answer`` gets the answer. False: it could not be asked."""
        if not self._attached or not keys:
            return False
        with self._condition:
            return self._ask(keys, seconds, wanted=False) is not None

    def _ask(self, keys: Sequence[bytes], seconds: float, wanted: bool) -> int | None:
        """The number of the question, which is queued. Callers hold the condition."""
        asked = tuple(keys[:MAX_KEYS])
        number = next(self._numbers)
        if not self._queue(Ask(request=number, keys=asked, seconds=seconds)):
            return None
        self._waiting[number] = asked
        while len(self._waiting) > MAX_WAITING:
            self._waiting.pop(next(iter(self._waiting)))
        if wanted:
            self._wanted.add(number)
        return number

    def stored(self, items: Items) -> bool:
        """This rank holds its shards of these (key, store). False: the report was dropped."""
        return self._report(Stored(items=tuple(items)))

    def lost(self, items: Items) -> bool:
        """These (key, store) cannot be loaded. False: the report was dropped."""
        return self._report(Lost(items=tuple(items)))

    def _report(self, message: Stored | Lost) -> bool:
        if not message.items:
            return True
        with self._condition:
            return self._attached and self._queue(message)

    def close(self, timeout_seconds: float = 1.0) -> None:
        """Ends the I/O thread, within the timeout."""
        with self._condition:
            self._closing = True
            self._condition.notify_all()
        self._wake()
        if self._thread is not None:
            self._thread.join(timeout_seconds)

    def _queue(self, message: LookupMessage) -> bool:
        """Callers hold the condition."""
        if len(self._outgoing) >= QUEUE_MESSAGES or self._closing:
            self.counts["queue_full"] += 1
            return False
        self._outgoing.append(encode(message))
        self._wake()
        return True

    def _wake(self) -> None:
        descriptor = self._wake_descriptor
        if descriptor >= 0:
            try:
                os.eventfd_write(descriptor, 1)
            except OSError:
                return

    # The I/O thread.

    def _run(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            while not self._closing:
                self._wait()
                self._step(context)
        except Exception:  # noqa: BLE001 - the engine serves without lookups
            _log.exception("the lookup client has ended")
            self.counts["failed"] += 1
        finally:
            self._drop("this process detaches")
            with self._condition:
                descriptor, self._wake_descriptor = self._wake_descriptor, -1
            os.close(descriptor)
            context.destroy(linger=0)

    def _wait(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake_descriptor, zmq.POLLIN)
        now = self._clock()
        until = self._retry_at
        if self._connection is not None:
            self._connection.register(poller, until_connected=not self._greeted)
            until = (
                min(self._ping_at, self._heard_at + SILENCE_SECONDS)
                if self._greeted
                else (now + RETRY_SECONDS)
            )
        events = dict(poller.poll(max(0, int((until - now) * 1000) + 1)))
        if self._wake_descriptor in events:
            try:
                os.eventfd_read(self._wake_descriptor)
            except BlockingIOError:
                return

    def _step(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        now = self._clock()
        connection = self._connection
        if connection is None:
            if now >= self._retry_at and not self._closing:
                self._connect(context, now)
            return
        ended = connection.disconnected()
        self._receive(connection)
        if self._connection is not connection:
            return
        if self._greeted and (ended or self._clock() - self._heard_at > SILENCE_SECONDS):
            self.counts["lost"] += 1
            self._drop("the connection is closed" if ended else "the server is silent")
        elif not self._greeted:
            if connection.writable and connection.send(self._greeting):
                self._greeted, self._heard_at, self._ping_at = True, now, now + PING_SECONDS
        else:
            self._send_queued(connection, now)

    def _connect(self, context: zmq.Context[zmq.Socket[bytes]], now: float) -> None:
        try:
            require_private(self._directory)
            self._connection = Connection(context, self._endpoint)
        except (LookupUnavailableError, zmq.ZMQError) as error:
            self.counts["not_connected"] += 1
            _log.debug("no lookup server: %s", error)
            self._retry_at = now + RETRY_SECONDS

    def _send_queued(self, connection: Connection, now: float) -> None:
        while self._attached:
            with self._condition:
                data = self._outgoing.popleft() if self._outgoing else b""
            if not data:
                break
            if not connection.send(data):
                with self._condition:
                    self._outgoing.appendleft(data)
                break
        if now >= self._ping_at:
            self._ping_at = now + PING_SECONDS
            connection.send(encode(Ping()))

    def _receive(self, connection: Connection) -> None:
        while self._connection is connection:
            data = connection.receive()
            if data is None:
                return
            try:
                message = decode_from_server(data)
            except (msgspec.DecodeError, msgspec.ValidationError):
                self.counts["undecodable"] += 1
                continue
            self._heard_at = self._clock()
            self._handle(message)

    def _handle(self, message: LookupMessage) -> None:
        if isinstance(message, Answer):
            self._take_answer(message)
        elif isinstance(message, Accepted):
            with self._condition:
                self._outgoing.clear()
                self._waiting.clear()
                self._instance = message.instance
                self._pause_until = 0.0
                self._attached = True
            self.declined_reason = ""
            self.counts["attached"] += 1
            self._callbacks.on_attached(message.instance)
        elif isinstance(message, Stranger):
            self._drop("the server was started again")
        elif isinstance(message, Declined):
            self.counts["declined"] += 1
            if message.reason != self.declined_reason:
                _log.warning("no lookups: %s", message.reason)
            self.declined_reason = message.reason
            self._drop(message.reason)
            self._retry_at = self._clock() + DECLINED_RETRY_SECONDS

    def _take_answer(self, answer: Answer) -> None:
        with self._condition:
            keys = self._waiting.pop(answer.request, None)
        if keys is None or len(answer.stores) > len(keys):
            self.counts["unexpected"] += 1
            return
        self._callbacks.on_answer(keys, answer.stores)
        with self._condition:
            if answer.request in self._wanted:
                self._answers[answer.request] = answer.stores
                self._condition.notify_all()

    def _drop(self, reason: str) -> None:
        """Ends the connection. What was queued is void, and who waits gets no answer."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
        self._greeted = False
        self._retry_at = self._clock() + RETRY_SECONDS
        with self._condition:
            attached, self._attached = self._attached, False
            self._outgoing.clear()
            self._waiting.clear()
            self._wanted.clear()
            self._condition.notify_all()
        if attached:
            self._callbacks.on_lost(reason)


def greeting(role: str, engine: str, ranks: int, rank: int = 0, identity: str = "") -> Greeting:
    """Returns the first message of a process."""
    return Greeting(
        protocol=PROTOCOL, role=role, engine=engine, ranks=ranks, rank=rank, identity=identity
    )
