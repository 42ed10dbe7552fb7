"""The lookup server: one thread in one process of each host.

It never waits for a client. A client whose queue is full loses messages, which costs it a miss or a
chunk that is stored again. While the storage hangs, clients get no answer and notice that.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import zmq

from kvtier.lookup.endpoint import LookupUnavailableError, SocketLock, make_private, socket_path
from kvtier.lookup.index import CommitIndex
from kvtier.lookup.wire import (
    MAX_KEY_BYTES,
    MAX_KEYS,
    MAX_MESSAGE_BYTES,
    MAX_STORE,
    PROTOCOL,
    RANK,
    SCHEDULER,
    SILENCE_SECONDS,
    Accepted,
    Answer,
    Ask,
    Declined,
    Greeting,
    LookupMessage,
    Lost,
    Ping,
    Pong,
    Stored,
    Stranger,
    decode_to_server,
    encode,
)

MAX_CLIENTS = 256
MAX_ASK_SECONDS = 1.0
QUEUE_MESSAGES = 4096
POLL_MILLISECONDS = 100
MESSAGES_PER_TURN = 256
_log = logging.getLogger("kvtier.lookup")


@dataclass(slots=True)
class _Client:
    greeting: Greeting
    heard_at: float


class LookupServer:
    """Answers for one engine, which ``greeting`` describes as its processes do. ``make_index`` runs
    on the server's thread."""

    def __init__(
        self,
        directory: Path,
        greeting: Greeting,
        make_index: Callable[[], CommitIndex],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._directory = directory
        self._path = socket_path(directory, greeting.engine)
        self._engine = greeting.engine
        self._ranks = greeting.ranks
        self._identity = greeting.identity
        self._make_index = make_index
        self._clock = clock
        self._clients: dict[bytes, _Client] = {}
        self._instance = secrets.token_hex(8)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._lock: SocketLock | None = None
        self.index: CommitIndex | None = None
        self.counts: Counter[str] = Counter()

    def start(self) -> None:
        """Starts to answer. Raises ``LookupUnavailableError``, also if another process answers."""
        make_private(self._directory)
        self._lock = SocketLock(self._path)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        socket = context.socket(zmq.ROUTER)
        try:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
            socket.setsockopt(zmq.SNDHWM, QUEUE_MESSAGES)
            socket.setsockopt(zmq.RCVHWM, QUEUE_MESSAGES)
            socket.bind(f"ipc://{self._path}")
        except zmq.ZMQError as error:
            socket.close(0)
            context.term()
            self._lock.release()
            raise LookupUnavailableError(f"{self._path}: {error}") from error
        name = "kvtier-lookup-server"
        self._thread = threading.Thread(
            target=self._run, args=(context, socket), name=name, daemon=True
        )
        self._thread.start()
        _log.info("answering lookups of engine %s at %s", self._engine, self._path)

    def close(self, timeout_seconds: float = 2.0) -> bool:
        """Stops; returns False if the storage hangs and the thread is left behind."""
        self._stop.set()
        thread = self._thread
        if thread is not None:
            thread.join(timeout_seconds)
            if thread.is_alive():
                return False
        return True

    def _run(self, context: zmq.Context[zmq.Socket[bytes]], socket: zmq.Socket[bytes]) -> None:
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        try:
            self.index = self._make_index()
            while not self._stop.is_set():
                if poller.poll(POLL_MILLISECONDS):
                    self._receive(socket)
                self._forget_silent()
        except Exception:  # noqa: BLE001 - clients notice, and the engine serves without lookups
            _log.exception("the lookup server has ended")
            self.counts["failed"] += 1
        finally:
            socket.close(0)
            context.destroy(linger=0)
            if self._lock is not None:
                self._lock.release()

    def _receive(self, socket: zmq.Socket[bytes]) -> None:
        for _ in range(MESSAGES_PER_TURN):
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.ZMQError:
                return
            if len(frames) != 2:
                self.counts["undecodable"] += 1
                continue
            route, data = frames
            try:
                message = decode_to_server(data)
            except (msgspec.DecodeError, msgspec.ValidationError):
                self.counts["undecodable"] += 1
                continue
            answer = self._handle(route, message)
            if answer is not None:
                self._send(socket, route, answer)

    def _send(self, socket: zmq.Socket[bytes], route: bytes, message: LookupMessage) -> None:
        try:
            socket.send_multipart((route, encode(message)), zmq.NOBLOCK)
        except zmq.ZMQError:
            self.counts["not_sent"] += 1

    def _handle(self, route: bytes, message: LookupMessage) -> LookupMessage | None:
        now = self._clock()
        if isinstance(message, Greeting):
            return self._greet(route, message, now)
        client = self._clients.get(route)
        if client is None:
            self.counts["strangers"] += 1
            return Stranger()
        client.heard_at = now
        if isinstance(message, Ping):
            return Pong()
        index = self.index
        if index is None:
            return None
        if isinstance(message, Ask):
            return self._answer(index, message, now)
        if isinstance(message, Stored | Lost):
            self._take(index, client, message)
        return None

    def _greet(self, route: bytes, greeting: Greeting, now: float) -> LookupMessage:
        reason = self._declined(greeting)
        if not reason and route not in self._clients and len(self._clients) >= MAX_CLIENTS:
            reason = f"{MAX_CLIENTS} processes are attached"
        if reason:
            self.counts["declined"] += 1
            _log.warning("declined %s of engine %s: %s", greeting.role, greeting.engine, reason)
            return Declined(reason=reason)
        self._clients[route] = _Client(greeting, now)
        self.counts["greeted"] += 1
        return Accepted(instance=self._instance)

    def _declined(self, greeting: Greeting) -> str:
        if greeting.protocol != PROTOCOL:
            return f"version mismatch: the server has {PROTOCOL}, the sender {greeting.protocol}"
        if greeting.engine != self._engine:
            return f"engine {greeting.engine!r}: this is the server of {self._engine!r}"
        if greeting.ranks != self._ranks:
            return f"{greeting.ranks} ranks: must be {self._ranks}"
        if greeting.identity != self._identity:
            return "the engine has another model or configuration"
        if greeting.role not in (SCHEDULER, RANK):
            return f"role {greeting.role!r}: must be {SCHEDULER!r} or {RANK!r}"
        if greeting.role == RANK and not 0 <= greeting.rank < self._ranks:
            return f"rank {greeting.rank}: must be from 0 to {self._ranks - 1}"
        return ""

    def _answer(self, index: CommitIndex, ask: Ask, now: float) -> Answer:
        keys = ask.keys[:MAX_KEYS]
        if any(not 0 < len(key) <= MAX_KEY_BYTES for key in keys):
            self.counts["invalid"] += 1
            return Answer(request=ask.request, stores=())
        # Not ``min``: a number that is none would come through.
        seconds = ask.seconds if 0.0 <= ask.seconds <= MAX_ASK_SECONDS else MAX_ASK_SECONDS
        return Answer(request=ask.request, stores=index.look_up(keys, now + seconds))

    def _take(self, index: CommitIndex, client: _Client, message: Stored | Lost) -> None:
        for key, store in message.items[:MAX_KEYS]:
            if not 0 < len(key) <= MAX_KEY_BYTES or not 0 < store <= MAX_STORE:
                self.counts["invalid"] += 1
            elif isinstance(message, Lost):
                index.lost(key, store)
            elif client.greeting.role == RANK:
                index.stored(client.greeting.rank, key, store)
            else:
                # Only a rank knows what it has stored.
                self.counts["invalid"] += 1

    def _forget_silent(self) -> None:
        before = self._clock() - SILENCE_SECONDS
        for route in [route for route, each in self._clients.items() if each.heard_at < before]:
            del self._clients[route]
