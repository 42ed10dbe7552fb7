"""Sessions and the engines they form: what the state machine in sessions.py keeps, and what it needs from outside.

Who is attached: sessions, the engines they form, and what is left of those that went.

A state machine without sockets. One EngineCore and its workers are one *engine*; it opens in the store when all of them are
there and agree, and closes as a whole: when any member is lost, the others are told ``Bye``, drain, and attach again.

Every opening has an epoch of its own, larger than all before it. So a store that was planned before a loss names an epoch that no worker is
attached to any more, even if tierd itself never went away, and a worker's "drained to epoch N" is about this engine's last life.

Proof that a worker touches no slot any more is one of: its ``Bye``, a ``Hello`` of the same process that has drained the epoch, or
that its process is gone. Without proof, slots stay in quarantine: for ``BLIND_SECONDS`` where the process cannot be seen, and for as
long as it lives where it can (one that is stopped and goes on an hour later finishes its copy then).

Cases of ``hello``:

1. another version, or a description that makes no sense: refused;
2. the member is there already, in the same process: it attaches again. An open engine ends first;
3. the member is there already, in a process that is gone: as if that had been noticed before, then 5;
4. the member is there already, in another living process: refused;
5. the engine is ending (a member has said ``Bye``): it ends, and a fresh one forms;
6. otherwise it joins the engine that forms, which opens when it is the last one.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from kvtier.errors import KVTierError
from kvtier.processes import Liveness, ProcessIdentity
from kvtier.store.types import EngineInfo, StoreCounters
from kvtier.tierd.fencing import BLIND_SECONDS, AttachedWorker, SessionFiles, StartupFence
from kvtier.tierd.wire import LOST_SECONDS, PROTOCOL, Bye, Hello, Message, Refused
from kvtier.tiers.base import aligned


@dataclass(slots=True, eq=False)
class Session:
    """One attached process. ``route``: its address at the socket; ``heard``: when it last said something."""

    route: bytes
    number: int
    hello: Hello
    worker: AttachedWorker
    heard: float

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
        """For logs."""
        role = "scheduler" if self.is_scheduler else f"rank {self.hello.rank}"
        return f"{self.hello.engine} {role} (process {self.hello.pid})"


@dataclass(slots=True, eq=False)
class EngineSessions:
    """The members that are there. ``name``: its name in the store; ``ending``: a member has said ``Bye``."""

    engine: str
    epoch: int
    scheduler: Session | None = None
    workers: dict[int, Session] = field(default_factory=dict)
    info: EngineInfo | None = None
    canonical: str = ""
    open: bool = False
    ending: bool = False

    @property
    def name(self) -> str:
        """No two openings have the same one, so that proof about one is never taken for another."""
        return f"{self.engine}#{self.epoch}"

    @property
    def ranks(self) -> int:
        """How many workers belong to it; 0 while the scheduler is not there."""
        if self.scheduler is None:
            return 0
        hello = self.scheduler.hello
        return hello.ranks or max(hello.writer_ranks, default=0) + 1

    def members(self) -> list[Session]:
        """Everybody who is there."""
        return ([] if self.scheduler is None else [self.scheduler]) + list(self.workers.values())

    def member(self, hello: Hello) -> Session | None:
        """Who is there in the part that ``hello`` wants to play."""
        return self.scheduler if hello.role == "scheduler" else self.workers.get(hello.rank)


@dataclass(slots=True, eq=False)
class SessionQuarantine:
    """Workers of an engine that was closed, which have not proven that they touch nothing any more."""

    name: str
    waiting: list[Session]
    deadline: float


class SessionListener(Protocol):
    """What happens to the outside."""

    def send(self, route: bytes, message: Message) -> None:
        """Sends without waiting; a session that does not read is reported later through ``unreachable``."""
        ...

    def welcome(self, session: Session) -> None:
        """The session stands."""
        ...

    def opened(self, engine: EngineSessions) -> None:
        """All members are there. Raises ``KVTierError`` if the store does not take the engine."""
        ...

    def closed(self, engine: EngineSessions, proven: bool) -> None:
        """The engine is not there any more."""
        ...

    def proven_gone(self, name: str) -> None:
        """Nobody of this engine touches a slot any more."""
        ...

    def dropped(self, session: Session) -> None:
        """Nothing is sent to this session any more."""
        ...


MAX_SESSIONS = 256
"""Processes on one machine with one pool: eight ranks of eight engines, with room."""
MAX_RANKS = 64
Derive = Callable[[str, tuple[str, ...]], tuple[str, str]]
"""(identity JSON, codec texts in rank order) -> (namespace as 32 hex digits, canonical text)."""
_log = logging.getLogger("kvtier.tierd")


class Sessions:
    """See the module's text. Owner's thread only. ``next_epoch`` publishes and returns a larger epoch each time (``OSError``)."""

    def __init__(
        self,
        host: SessionListener,
        files: SessionFiles,
        fence: StartupFence,
        derive: Derive,
        next_epoch: Callable[[], int],
        fate: Callable[[ProcessIdentity], Liveness],
        counters: StoreCounters,
        lost_seconds: float = LOST_SECONDS,
        blind_seconds: float = BLIND_SECONDS,
    ) -> None:
        self._host = host
        self._files = files
        self._fence = fence
        self._derive = derive
        self._next_epoch = next_epoch
        self._fate = fate
        self._counters = counters
        self._lost_seconds = lost_seconds
        self._blind_seconds = blind_seconds
        self._numbers = 0
        self._routes: dict[bytes, Session] = {}
        self._engines: dict[str, EngineSessions] = {}
        self._quarantines: list[SessionQuarantine] = []
        self.had_any = False
        """Whether there ever was a session."""
        self.left_in_order = True
        """Whether the session that ended last said ``Bye``."""

    def __len__(self) -> int:
        return len(self._routes)

    def get(self, route: bytes) -> Session | None:
        """The session at an address."""
        return self._routes.get(route)

    def engine_of(self, session: Session) -> EngineSessions | None:
        """The engine a session belongs to."""
        return self._engines.get(session.hello.engine)

    def all(self) -> list[Session]:
        """Every session."""
        return list(self._routes.values())

    def engines(self) -> Iterator[EngineSessions]:
        """Every engine, open or forming."""
        return iter(list(self._engines.values()))

    def locks(self) -> set[str]:
        """Names of the locks of all processes that are attached, or have to be proven gone."""
        waiting = [session for quarantine in self._quarantines for session in quarantine.waiting]
        return {session.process.lock for session in (*self._routes.values(), *waiting)}

    @property
    def quarantined(self) -> int:
        """How many processes have to be proven gone."""
        return sum(len(quarantine.waiting) for quarantine in self._quarantines)

    # Beginning.

    def hello(self, route: bytes, hello: Hello, now: float) -> None:
        """A process wants a session."""
        if route in self._routes:
            self._counters.add("protocol_violations", "", "hello_twice")
            return
        reason = self._reason_to_refuse(hello)
        if reason:
            self._refuse(route, hello, reason)
            return
        process = ProcessIdentity(hello.pid, hello.process_start, hello.pid_namespace, hello.lock)
        if hello.role == "worker":
            self._drained(hello, process)
        engine = self._engines.get(hello.engine)
        there = None if engine is None else engine.member(hello)
        if engine is not None and there is not None:
            if there.process == process:
                self._attach_again(engine, there, hello, now)
                engine = self._engines.get(hello.engine)
            elif self._fate(there.process) is Liveness.GONE:
                self._vanished(there, now, "its process is gone", proven=True)
                engine = None
            else:
                self._refuse(
                    route, hello, f"{there.title} has this part already; engine ids must be unique"
                )
                return
        if engine is not None and engine.ending:
            self._end(engine, now, "another session begins")
            engine = None
        self._join(route, hello, process, engine, now)

    def _reason_to_refuse(self, hello: Hello) -> str:
        if hello.protocol != PROTOCOL:
            return f"tierd is version {PROTOCOL}, the connector is {hello.protocol}; both must be of one version"
        if hello.role not in ("scheduler", "worker") or not hello.engine:
            return f"role {hello.role!r} of engine {hello.engine!r}: 'scheduler' or 'worker' of a named engine attaches"
        if hello.role == "worker" and not 0 <= hello.rank < MAX_RANKS:
            return f"rank {hello.rank}: 0 to {MAX_RANKS - 1} are accepted"
        writers_fit = hello.writer_ranks and all(
            0 <= rank < (hello.ranks or MAX_RANKS) for rank in hello.writer_ranks
        )
        if hello.role == "scheduler" and not (0 <= hello.ranks <= MAX_RANKS and writers_fit):
            return f"writer ranks {list(hello.writer_ranks)} of {hello.ranks} ranks make no sense"
        if len(self._routes) >= MAX_SESSIONS:
            return f"{MAX_SESSIONS} sessions are open, which is the limit"
        return ""

    def _refuse(self, route: bytes, hello: Hello, reason: str) -> None:
        _log.warning("refused: %s, process %d: %s", hello.engine, hello.pid, reason)
        self._counters.add("sessions_refused")
        self._host.send(route, Refused(reason=reason))

    def _attach_again(
        self, engine: EngineSessions, there: Session, hello: Hello, now: float
    ) -> None:
        drained = there.is_scheduler or hello.drained_epoch >= there.worker.epoch
        self._counters.add("sessions_replaced", "", "" if drained else "not_drained")
        if engine.open or engine.ending:
            self._end(
                engine, now, f"{there.title} attached again", proven=[there] if drained else []
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
            # Without these files the next tierd would not know whom to wait for.
            self._refuse(route, hello, f"the run directory cannot be written: {error}")
            return
        self._engines[hello.engine] = engine
        self._numbers += 1
        session = Session(route, self._numbers, hello, worker, now)
        self._routes[route] = session
        if session.is_scheduler:
            engine.scheduler = session
        else:
            engine.workers[hello.rank] = session
        self.had_any = True
        self._counters.add("sessions_attached", "", hello.role)
        _log.info("attached: %s, epoch %d", session.title, engine.epoch)
        self._host.welcome(session)
        self._open_if_complete(engine, now)

    def _open_if_complete(self, engine: EngineSessions, now: float) -> None:
        if engine.open or engine.scheduler is None:
            return
        outside = [rank for rank in engine.workers if rank >= engine.ranks]
        if outside:
            self._reject(engine, f"ranks {outside} of {engine.ranks}")
            return
        if len(engine.workers) < engine.ranks:
            return
        try:
            engine.info = self._describe(engine, engine.scheduler.hello)
            self._host.opened(engine)
        except (KVTierError, ValueError) as error:
            self._reject(engine, str(error))
            return
        engine.open = True
        self._counters.add("engines_opened")

    def _describe(self, engine: EngineSessions, scheduler: Hello) -> EngineInfo:
        hellos = [engine.workers[rank].hello for rank in range(engine.ranks)]
        writers = sorted(set(scheduler.writer_ranks))
        shards = [hellos[rank].shard_bytes for rank in writers]
        if len({len(sizes) for sizes in shards}) != 1 or not shards[0]:
            raise ValueError(
                f"the ranks have {[len(sizes) for sizes in shards]} groups; all must have the same, at least one"
            )
        shard_bytes = tuple(zip(*shards, strict=True))
        namespace, engine.canonical = self._derive(
            scheduler.identity, tuple(hello.codec for hello in hellos)
        )
        persistent = not scheduler.ephemeral_reason
        if not persistent:
            # What the identity does not establish can differ at the next start, even under the same text.
            namespace = secrets.token_hex(16)
        return EngineInfo(
            engine=engine.name,
            namespace=namespace,
            slot_bytes=tuple(sum(map(aligned, sizes)) for sizes in shard_bytes),
            shard_bytes=shard_bytes,
            writer_ranks=tuple(writers),
            persistent=persistent,
        )

    def _reject(self, engine: EngineSessions, reason: str) -> None:
        """The members contradict each other. Nothing was granted, so nothing is quarantined."""
        for session in engine.members():
            self._refuse(session.route, session.hello, f"engine {engine.engine}: {reason}")
            self._remove(engine, session)
            self._files.remove(session.worker)
        self._engines.pop(engine.engine, None)
        self.left_in_order = False

    # Going on.

    def heard(self, session: Session, now: float) -> None:
        """It said something."""
        session.heard = now

    def forgive(self, now: float) -> None:
        """This process was asleep: nobody's silence counts."""
        for session in self._routes.values():
            session.heard = now

    def check(self, now: float) -> None:
        """Finds sessions that are silent or whose process is gone, and processes whose quarantine ends."""
        for session in list(self._routes.values()):
            if session.route not in self._routes:
                continue
            if self._fate(session.process) is Liveness.GONE:
                self._vanished(session, now, "its process is gone", proven=True)
            elif now - session.heard > self._lost_seconds:
                self._vanished(session, now, f"no word for {self._lost_seconds:g} s", proven=False)
        for quarantine in list(self._quarantines):
            for session in list(quarantine.waiting):
                fate = self._fate(session.process)
                if fate is Liveness.GONE or (
                    fate is Liveness.UNKNOWN and now >= quarantine.deadline
                ):
                    self._resolve(quarantine, session)

    # Ending.

    def bye(self, route: bytes) -> None:
        """A process ends its session in order: it has drained its copies."""
        session = self._routes.get(route)
        if session is None:
            # It crossed with tierd's own; what it says about the copies holds all the same.
            for quarantine in list(self._quarantines):
                for waiting in list(quarantine.waiting):
                    if waiting.route == route:
                        self._resolve(quarantine, waiting)
            return
        engine = self._engines[session.hello.engine]
        self._remove(engine, session)
        self._files.remove(session.worker)
        self.left_in_order = True
        _log.info("left: %s", session.title)
        if engine.open:
            engine.ending = True
            if not engine.workers:
                # The scheduler side copies nothing, so this ends it, whether the scheduler is still there or not.
                engine.open = False
                self._host.closed(engine, True)
        if not engine.members():
            self._engines.pop(engine.engine, None)

    def unreachable(self, session: Session, now: float, reason: str) -> None:
        """Its connection is closed, or it does not read what it is sent."""
        if session.route in self._routes:
            self._vanished(
                session, now, reason, proven=self._fate(session.process) is Liveness.GONE
            )

    def _vanished(self, session: Session, now: float, reason: str, proven: bool) -> None:
        self._counters.add("sessions_vanished", "", "proven" if proven else "unproven")
        engine = self._engines[session.hello.engine]
        self._end(
            engine, now, f"{session.title} vanished: {reason}", proven=[session] if proven else []
        )

    def _end(
        self, engine: EngineSessions, now: float, reason: str, proven: list[Session] | None = None
    ) -> None:
        """Closes an engine with all its members; those not in ``proven`` are told, and may still be copying."""
        _log.warning("engine %s ends: %s", engine.engine, reason)
        known = proven or []
        members = engine.members()
        waiting = []
        for session in members:
            self._remove(engine, session)
            if session not in known:
                self._host.send(session.route, Bye(reason=reason))
            if session.is_scheduler:
                continue
            if session in known or not engine.open or self._fate(session.process) is Liveness.GONE:
                self._files.remove(session.worker)
            else:
                waiting.append(session)
        self._engines.pop(engine.engine, None)
        self.left_in_order = False
        if not engine.open:
            return
        engine.open = False
        self._host.closed(engine, not waiting)
        if waiting:
            self._quarantines.append(
                SessionQuarantine(engine.name, waiting, now + self._blind_seconds)
            )

    def _remove(self, engine: EngineSessions, session: Session) -> None:
        self._routes.pop(session.route, None)
        if session.is_scheduler:
            engine.scheduler = None
        else:
            engine.workers.pop(session.hello.rank, None)
        self._host.dropped(session)

    def _drained(self, hello: Hello, process: ProcessIdentity) -> None:
        self._fence.hello(AttachedWorker(hello.engine, hello.rank, 0, process), hello.drained_epoch)
        for quarantine in list(self._quarantines):
            for session in list(quarantine.waiting):
                worker = session.worker
                if (
                    worker.process == process
                    and worker.engine == hello.engine
                    and worker.rank == hello.rank
                    and hello.drained_epoch >= worker.epoch
                ):
                    self._resolve(quarantine, session)

    def _resolve(self, quarantine: SessionQuarantine, session: Session) -> None:
        quarantine.waiting.remove(session)
        self._files.remove(session.worker)
        if not quarantine.waiting:
            self._quarantines.remove(quarantine)
            self._host.proven_gone(quarantine.name)
