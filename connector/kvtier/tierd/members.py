"""Sessions and the engines they form: what the state machine in sessions.py keeps, and what it needs from outside."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from kvtier.store.contract import EngineInfo
from kvtier.tierd.fence import AttachedWorker
from kvtier.tierd.process import ProcessIdentity
from kvtier.tierd.wire import Hello, Message


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
class Engine:
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
class Quarantine:
    """Workers of an engine that was closed, which have not proven that they touch nothing any more."""

    name: str
    waiting: list[Session]
    deadline: float


class Host(Protocol):
    """What happens to the outside."""

    def send(self, route: bytes, message: Message) -> None:
        """Sends without waiting; a session that does not read is reported later through ``unreachable``."""
        ...

    def welcome(self, session: Session) -> None:
        """The session stands."""
        ...

    def opened(self, engine: Engine) -> None:
        """All members are there. Raises ``KVTierError`` if the store does not take the engine."""
        ...

    def closed(self, engine: Engine, proven: bool) -> None:
        """The engine is not there any more."""
        ...

    def proven_gone(self, name: str) -> None:
        """Nobody of this engine touches a slot any more."""
        ...

    def dropped(self, session: Session) -> None:
        """Nothing is sent to this session any more."""
        ...
