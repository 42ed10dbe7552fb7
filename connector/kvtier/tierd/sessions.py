"""Sessions and the engines they form: a state machine without sockets, for one thread.

One EngineCore and its workers are one *engine*. It opens in the store when all its members are
attached and consistent, and closes as a whole: when a member is lost, the others get ``Bye``,
drain, and attach again.

Every opening has its own epoch, larger than all before. A store that was planned before a loss
therefore names an epoch without workers, even if tierd did not restart; and "drained to epoch N"
refers to the previous opening of this engine.

Proof that a worker no longer touches slots is one of: its ``Bye``; a ``Hello`` of the same process
that has drained the epoch; the end of its process. Without proof its slots stay in quarantine: as
long as an observable process lives (one that is stopped and continues an hour later finishes its
copy then), and for ``UNVERIFIABLE_TIMEOUT_SECONDS`` if the process cannot be observed.

Cases of ``hello``:

1. the version differs or the description is invalid: refused;
2. the member is attached, in the same process: it reattaches, and an open engine closes first;
3. the member is attached in a process that has exited: the loss is handled first, then case 5;
4. the member is attached in another process that lives: refused;
5. the engine is ending, because a member has sent ``Bye``: it closes, and a new one forms;
6. otherwise it joins the forming engine, which opens with its last member.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvtier.errors import KVTierError
from kvtier.processes import Liveness, ProcessIdentity
from kvtier.store.types import EngineInfo, StoreCounters
from kvtier.tierd.fencing import (
    UNVERIFIABLE_TIMEOUT_SECONDS,
    AttachedWorker,
    SessionFiles,
    StartupFence,
)
from kvtier.tierd.shard_layout import ShardRange, part_numbers, slot_layouts
from kvtier.tierd.wire import PROTOCOL, SESSION_TIMEOUT_SECONDS, Bye, Hello, Message, SessionRefused


@dataclass(slots=True, eq=False)
class Session:
    """One attached process. ``route``: its address at the socket. ``last_heard_at``: time of its
    last message."""

    route: bytes
    number: int
    hello: Hello
    worker: AttachedWorker
    last_heard_at: float

    @property
    def is_scheduler(self) -> bool:
        """Whether this is the engine's scheduler side."""
        return self.hello.role == "scheduler"

    @property
    def process(self) -> ProcessIdentity:
        """The process at the other end."""
        return self.worker.process

    @property
    def title(self) -> str:
        """Description for logs."""
        role = "scheduler" if self.is_scheduler else f"rank {self.hello.rank}"
        return f"{self.hello.engine} {role} (process {self.hello.pid})"


@dataclass(slots=True, eq=False)
class EngineSessions:
    """The attached members of an engine. ``name``: its name in the store. ``ending``: a member has
    sent ``Bye``. ``shards[r][g]``: where rank r's shard of group g lies in an object. ``parts[r]``:
    the part of the pool that rank r reads, if the pool has one for each shard; else empty, and
    ``one_range_reason`` says why. ``derive``:
    namespace and canonical text for fingerprints of weights by rank; ``weights``: the current ones.
    """

    engine: str
    epoch: int
    scheduler: Session | None = None
    workers: dict[int, Session] = field(default_factory=dict)
    info: EngineInfo | None = None
    shards: tuple[tuple[ShardRange, ...], ...] = ()
    parts: tuple[int, ...] = ()
    one_range_reason: str = ""
    weights: tuple[str, ...] = ()
    derive: Callable[[tuple[str, ...]], tuple[str, str]] | None = None
    canonical: str = ""
    open: bool = False
    ending: bool = False

    @property
    def name(self) -> str:
        """Unique per opening, so that proof about one opening never counts for another."""
        return f"{self.engine}#{self.epoch}"

    @property
    def ranks(self) -> int:
        """How many workers belong to it; 0 while the scheduler is not attached."""
        return 0 if self.scheduler is None else self.scheduler.hello.ranks

    def members(self) -> list[Session]:
        """All attached members."""
        return ([] if self.scheduler is None else [self.scheduler]) + list(self.workers.values())

    def member(self, hello: Hello) -> Session | None:
        """The attached member with the role and rank of ``hello``."""
        return self.scheduler if hello.role == "scheduler" else self.workers.get(hello.rank)


@dataclass(slots=True, eq=False)
class SessionQuarantine:
    """Workers of a closed engine that may still access its slots."""

    name: str
    waiting: list[Session]
    deadline: float


class SessionListener(Protocol):
    """What the sessions tell their owner."""

    def send(self, route: bytes, message: Message) -> None:
        """Sends without waiting; a session that does not read is reported later through
        ``unreachable``."""
        ...

    def welcome(self, session: Session) -> None:
        """A session was admitted."""
        ...

    def engine_opened(self, engine: EngineSessions) -> None:
        """All members are attached. Raises ``KVTierError`` if the store rejects the engine."""
        ...

    def engine_closed(self, engine: EngineSessions, proven: bool) -> None:
        """The engine closed. ``proven``: none of its workers accesses its slots."""
        ...

    def engine_confirmed_dead(self, name: str) -> None:
        """No worker of this closed engine accesses a slot."""
        ...

    def session_removed(self, session: Session) -> None:
        """The session ended; no message follows."""
        ...


MAX_SESSIONS = 256
"""Processes that share one pool: eight ranks of eight engines, with room."""
MAX_RANKS = 64
ShardOffsets = tuple[tuple[tuple[int, int], ...], ...]
"""(offset in the slot, size) by rank and group."""
Derive = Callable[[str, tuple[str, ...], tuple[str, ...], ShardOffsets], tuple[str, str]]
"""(identity JSON; codec texts, fingerprints of the weights and shards in rank order) -> (namespace
as 32 hex digits, canonical text)."""
_log = logging.getLogger("kvtier.tierd")


@dataclass(frozen=True, slots=True)
class SessionDependencies:
    """What the sessions use.

    ``derive``: namespace of an engine. ``next_epoch`` publishes and returns a larger epoch each
    time, and raises ``OSError``. ``liveness``: what is known about a process.
    """

    files: SessionFiles
    fence: StartupFence
    derive: Derive
    next_epoch: Callable[[], int]
    liveness: Callable[[ProcessIdentity], Liveness]


@dataclass(frozen=True, slots=True)
class SessionTimeouts:
    """``silence_seconds``: a session without a message for this long is lost.
    ``unverifiable_seconds``: quarantine of slots whose process cannot be observed."""

    silence_seconds: float = SESSION_TIMEOUT_SECONDS
    unverifiable_seconds: float = UNVERIFIABLE_TIMEOUT_SECONDS


DEFAULT_TIMEOUTS = SessionTimeouts()


class Sessions:
    """The state machine. For the thread of its owner."""

    def __init__(
        self,
        listener: SessionListener,
        dependencies: SessionDependencies,
        counters: StoreCounters,
        timeouts: SessionTimeouts = DEFAULT_TIMEOUTS,
    ) -> None:
        self._listener = listener
        self._files = dependencies.files
        self._fence = dependencies.fence
        self._derive = dependencies.derive
        self._next_epoch = dependencies.next_epoch
        self._liveness = dependencies.liveness
        self._counters = counters
        self._timeouts = timeouts
        self._last_number = 0
        self._sessions: dict[bytes, Session] = {}
        self._engines: dict[str, EngineSessions] = {}
        self._quarantines: list[SessionQuarantine] = []
        self.had_any = False
        """Whether a session was ever admitted."""
        self.last_left_cleanly = True
        """Whether the session that ended last sent ``Bye``."""

    def __len__(self) -> int:
        return len(self._sessions)

    def get(self, route: bytes) -> Session | None:
        """The session at an address."""
        return self._sessions.get(route)

    def engine_of(self, session: Session) -> EngineSessions | None:
        """The engine a session belongs to."""
        return self._engines.get(session.hello.engine)

    def all(self) -> list[Session]:
        """Every session."""
        return list(self._sessions.values())

    def engines(self) -> Iterator[EngineSessions]:
        """Every engine, open or forming."""
        return iter(list(self._engines.values()))

    def locks(self) -> set[str]:
        """Names of the peer locks of all processes that are attached or quarantined."""
        waiting = [session for quarantine in self._quarantines for session in quarantine.waiting]
        return {session.process.lock for session in (*self._sessions.values(), *waiting)}

    @property
    def quarantined(self) -> int:
        """How many processes are in quarantine."""
        return sum(len(quarantine.waiting) for quarantine in self._quarantines)

    # Attaching.

    def hello(self, route: bytes, hello: Hello, now: float) -> None:
        """Handles the first message of a process."""
        if route in self._sessions:
            self._counters.add("protocol_violations", "", "hello_twice")
            return
        reason = self._rejection_reason(hello)
        if reason:
            self._reject_session(route, hello, reason)
            return
        process = ProcessIdentity(hello.pid, hello.process_start, hello.pid_namespace, hello.lock)
        if hello.role == "worker":
            self._worker_drained(hello, process)
        engine = self._engines.get(hello.engine)
        there = None if engine is None else engine.member(hello)
        if engine is not None and there is not None:
            if there.process == process:
                self._reattach(engine, there, hello, now)
                engine = self._engines.get(hello.engine)
            elif self._liveness(there.process) is Liveness.GONE:
                self._session_lost(there, now, "its process has exited", proven=True)
                engine = None
            else:
                self._reject_session(
                    route, hello, f"{there.title} is already attached: engine ids must be unique"
                )
                return
        if engine is not None and engine.ending:
            self._close_engine(engine, now, "a new session of this engine starts")
            engine = None
        self._join(route, hello, process, engine, now)

    def _rejection_reason(self, hello: Hello) -> str:
        if hello.protocol != PROTOCOL:
            return f"version mismatch: tierd has {PROTOCOL}, the connector {hello.protocol}"
        if hello.role not in ("scheduler", "worker") or not hello.engine:
            return (
                f"role {hello.role!r} of engine {hello.engine!r}: must be 'scheduler' or 'worker' "
                "of a named engine"
            )
        if hello.role == "worker" and not 0 <= hello.rank < MAX_RANKS:
            return f"rank {hello.rank}: must be between 0 and {MAX_RANKS - 1}"
        if hello.role == "scheduler" and not 1 <= hello.ranks <= MAX_RANKS:
            return f"{hello.ranks} ranks: must be between 1 and {MAX_RANKS}"
        if len(self._sessions) >= MAX_SESSIONS:
            return f"{MAX_SESSIONS} sessions are already attached"
        return ""

    def _reject_session(self, route: bytes, hello: Hello, reason: str) -> None:
        _log.warning(
            "refused session of engine %s (process %d): %s", hello.engine, hello.pid, reason
        )
        self._counters.add("sessions_refused")
        self._listener.send(route, SessionRefused(reason=reason))

    def _reattach(self, engine: EngineSessions, there: Session, hello: Hello, now: float) -> None:
        drained = there.is_scheduler or hello.drained_epoch >= there.worker.epoch
        self._counters.add("sessions_replaced", "", "drained" if drained else "not_drained")
        if engine.open or engine.ending:
            self._close_engine(
                engine, now, f"{there.title} reattached", proven=[there] if drained else []
            )
        else:
            self._remove(engine, there)
            self._files.remove(there.worker)

    def _join(
        self,
        route: bytes,
        hello: Hello,
        process: ProcessIdentity,
        engine: EngineSessions | None,
        now: float,
    ) -> None:
        try:
            if engine is None:
                engine = EngineSessions(hello.engine, self._next_epoch())
            worker = AttachedWorker(hello.engine, hello.rank, engine.epoch, process)
            if hello.role == "worker":
                self._files.add(worker)
        except OSError as error:
            # Without this file the next tierd would not wait for the worker.
            self._reject_session(route, hello, f"cannot write to the run directory: {error}")
            return
        self._engines[hello.engine] = engine
        self._last_number += 1
        session = Session(route, self._last_number, hello, worker, now)
        self._sessions[route] = session
        if session.is_scheduler:
            engine.scheduler = session
        else:
            engine.workers[hello.rank] = session
        self.had_any = True
        self._counters.add("sessions_attached", "", hello.role)
        _log.info("attached: %s, epoch %d", session.title, engine.epoch)
        self._listener.welcome(session)
        self._open_if_complete(engine, now)

    def _open_if_complete(self, engine: EngineSessions, now: float) -> None:
        if engine.open or engine.scheduler is None:
            return
        outside = [rank for rank in engine.workers if rank >= engine.ranks]
        if outside:
            self._reject_engine(engine, f"ranks {outside}: must be below {engine.ranks}")
            return
        if len(engine.workers) < engine.ranks:
            return
        try:
            engine.info = self._describe(engine, engine.scheduler.hello)
            self._listener.engine_opened(engine)
        except (KVTierError, ValueError) as error:
            self._reject_engine(engine, str(error))
            return
        engine.open = True
        self._counters.add("engines_opened")

    def _describe(self, engine: EngineSessions, scheduler: Hello) -> EngineInfo:
        hellos = [engine.workers[rank].hello for rank in range(engine.ranks)]
        groups = slot_layouts([hello.shard_bytes for hello in hellos], scheduler.shard_writers)
        _check_shared_shards(hellos, scheduler.shard_writers)
        engine.shards = tuple(zip(*(group.ranges for group in groups), strict=True))
        engine.parts, engine.one_range_reason = part_numbers(groups)
        codecs = tuple(hello.codec for hello in hellos)
        shards = tuple(
            tuple((shard.offset, shard.size_bytes) for shard in of_rank)
            for of_rank in engine.shards
        )
        engine.derive = lambda weights: self._derive(scheduler.identity, codecs, weights, shards)
        engine.weights = tuple(hello.weights for hello in hellos)
        namespace, engine.canonical = engine.derive(engine.weights)
        persistent = not any(hello.ephemeral_reason for hello in (scheduler, *hellos))
        if not persistent:
            # What the identity does not cover can differ at the next start, even with the same
            # text.
            namespace = secrets.token_hex(16)
        return EngineInfo(
            engine=engine.name,
            namespace=namespace,
            slot_bytes=tuple(group.slot_bytes for group in groups),
            shard_bytes=tuple(group.shard_bytes for group in groups),
            writer_ranks=tuple(group.writers for group in groups),
            persistent=persistent,
            parts=len(groups[0].writers) if engine.parts else 1,
        )

    def _reject_engine(self, engine: EngineSessions, reason: str) -> None:
        """Rejects an inconsistent engine. It has no grants, so nothing is quarantined."""
        for session in engine.members():
            self._reject_session(session.route, session.hello, f"engine {engine.engine}: {reason}")
            self._remove(engine, session)
            self._files.remove(session.worker)
        self._engines.pop(engine.engine, None)
        self.last_left_cleanly = False

    # Liveness.

    def touch(self, session: Session, now: float) -> None:
        """Records that the session sent a message."""
        session.last_heard_at = now

    def reset_timeouts(self, now: float) -> None:
        """Restarts every timeout, because this process was suspended."""
        for session in self._sessions.values():
            session.last_heard_at = now

    def check(self, now: float) -> None:
        """Ends sessions that are silent or whose process has exited, and expired quarantines."""
        for session in list(self._sessions.values()):
            if session.route not in self._sessions:
                continue
            if self._liveness(session.process) is Liveness.GONE:
                self._session_lost(session, now, "its process has exited", proven=True)
            elif now - session.last_heard_at > self._timeouts.silence_seconds:
                self._session_lost(
                    session,
                    now,
                    f"no message for {self._timeouts.silence_seconds:g} s",
                    proven=False,
                )
        for quarantine in list(self._quarantines):
            for session in list(quarantine.waiting):
                liveness = self._liveness(session.process)
                if liveness is Liveness.GONE or (
                    liveness is Liveness.UNKNOWN and now >= quarantine.deadline
                ):
                    self._confirm(quarantine, session)

    # Closing.

    def bye(self, route: bytes) -> None:
        """Ends a session whose process has drained its copies."""
        session = self._sessions.get(route)
        if session is None:
            # It crossed with tierd's own ``Bye``; the copies are drained all the same.
            for quarantine in list(self._quarantines):
                for waiting in list(quarantine.waiting):
                    if waiting.route == route:
                        self._confirm(quarantine, waiting)
            return
        engine = self._engines[session.hello.engine]
        self._remove(engine, session)
        self._files.remove(session.worker)
        self.last_left_cleanly = True
        _log.info("detached: %s", session.title)
        if engine.open:
            engine.ending = True
            if not engine.workers:
                # The scheduler copies nothing, so the engine ends with its last worker.
                engine.open = False
                self._listener.engine_closed(engine, True)
        if not engine.members():
            self._engines.pop(engine.engine, None)

    def unreachable(self, session: Session, now: float, reason: str) -> None:
        """Ends a session whose connection is closed, or that does not read."""
        if session.route in self._sessions:
            self._session_lost(
                session, now, reason, proven=self._liveness(session.process) is Liveness.GONE
            )

    def _session_lost(self, session: Session, now: float, reason: str, proven: bool) -> None:
        self._counters.add("sessions_vanished", "", "proven" if proven else "unproven")
        engine = self._engines[session.hello.engine]
        self._close_engine(
            engine, now, f"lost {session.title}: {reason}", proven=[session] if proven else []
        )

    def _close_engine(
        self, engine: EngineSessions, now: float, reason: str, proven: list[Session] | None = None
    ) -> None:
        """Closes an engine and ends its sessions. Members not in ``proven`` get ``Bye`` and may
        still be copying."""
        _log.warning("closed engine %s: %s", engine.engine, reason)
        known = proven or []
        members = engine.members()
        waiting = []
        for session in members:
            self._remove(engine, session)
            if session not in known:
                self._listener.send(session.route, Bye(reason=reason))
            if session.is_scheduler:
                continue
            if (
                session in known
                or not engine.open
                or self._liveness(session.process) is Liveness.GONE
            ):
                self._files.remove(session.worker)
            else:
                waiting.append(session)
        self._engines.pop(engine.engine, None)
        self.last_left_cleanly = False
        if not engine.open:
            return
        engine.open = False
        self._listener.engine_closed(engine, not waiting)
        if waiting:
            self._quarantines.append(
                SessionQuarantine(engine.name, waiting, now + self._timeouts.unverifiable_seconds)
            )

    def _remove(self, engine: EngineSessions, session: Session) -> None:
        self._sessions.pop(session.route, None)
        if session.is_scheduler:
            engine.scheduler = None
        else:
            engine.workers.pop(session.hello.rank, None)
        self._listener.session_removed(session)

    def _worker_drained(self, hello: Hello, process: ProcessIdentity) -> None:
        self._fence.worker_attached(
            AttachedWorker(hello.engine, hello.rank, 0, process), hello.drained_epoch
        )
        for quarantine in list(self._quarantines):
            for session in list(quarantine.waiting):
                worker = session.worker
                if (
                    worker.process == process
                    and worker.engine == hello.engine
                    and worker.rank == hello.rank
                    and hello.drained_epoch >= worker.epoch
                ):
                    self._confirm(quarantine, session)

    def _confirm(self, quarantine: SessionQuarantine, session: Session) -> None:
        quarantine.waiting.remove(session)
        self._files.remove(session.worker)
        if not quarantine.waiting:
            self._quarantines.remove(quarantine)
            self._listener.engine_confirmed_dead(quarantine.name)


def _check_shared_shards(hellos: Sequence[Hello], shard_writers: Sequence[Sequence[int]]) -> None:
    """Raises ``ValueError`` if ranks that share a shard lay it out differently."""
    for group, writer_of in enumerate(shard_writers):
        for rank, writer in enumerate(writer_of):
            if hellos[rank].codec != hellos[writer].codec:
                raise ValueError(
                    f"group {group}: rank {rank} reads what rank {writer} writes: they must have "
                    "the same layout"
                )
