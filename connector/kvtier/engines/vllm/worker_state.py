"""What the worker's two threads share: counters, the reports that the engine's next step takes along, and the client's
interface.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from kvtier.engines.vllm.metadata import LoadJob, LoadResult
from kvtier.tierd.wire import Message

Clock = Callable[[], float]
"""Seconds, monotonic."""


class WorkerClient(Protocol):
    """The part of tierd's client that a worker uses (kvtier.tierd.client)."""

    @property
    def attached(self) -> bool: ...

    def start(self) -> None: ...

    def send(self, message: Message) -> bool: ...

    def reattach(self, drained_epoch: int) -> None: ...

    def close(self, timeout_seconds: float) -> None: ...


MAX_UNSENT = 65_536
"""Messages that wait for room in the client's queue; beyond it tierd is as good as lost, and its loss will be
noticed.
"""


class WorkerOutbox:
    """Messages to tierd in order, kept while the client has no room for them, dropped while there is no tierd.
    Transfer thread.
    """

    def __init__(self, client: WorkerClient, counters: Counters) -> None:
        self._client = client
        self._counters = counters
        self._unsent: deque[Message] = deque()

    def __len__(self) -> int:
        return len(self._unsent)

    def send(self, message: Message) -> None:
        """Sends ``message``, or keeps it for ``flush``."""
        if self._unsent or not self._client.send(message):
            self._unsent.append(message)
            self.flush()

    def flush(self) -> None:
        """Sends what is kept, as far as there is room."""
        while self._unsent and self._client.send(self._unsent[0]):
            self._unsent.popleft()
        if self._unsent and (not self._client.attached or len(self._unsent) > MAX_UNSENT):
            self._counters.add("unsent_dropped", len(self._unsent))
            self._unsent.clear()

    def clear(self) -> None:
        """Tierd is gone, and what it should have heard with it."""
        self._unsent.clear()


class Counters:
    """Named counts, added to from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def add(self, name: str, amount: int = 1) -> None:
        """Adds ``amount`` to ``name``."""
        with self._lock:
            self._counts[name] += amount

    def snapshot(self) -> dict[str, int]:
        """All counts since the start."""
        with self._lock:
            return dict(self._counts)


@dataclass(frozen=True, slots=True)
class LoadEnd:
    """The one end of a load. ``owed``: vLLM waits for a report on the request. ``missing``: target blocks without
    their content.
    """

    result: LoadResult
    missing: frozenset[int]
    whole: bool
    owed: bool = True


@dataclass(frozen=True, slots=True)
class WorkerSnapshot:
    """Everything that one engine step reports, taken at once: the same load is in all of these or in none.

    ``recving``: request ids whose load has ended. ``failed``: those of them that must be recomputed from the start
    (models with several groups, where a block id does not name one block). ``invalid_blocks``: blocks that were not
    filled (models with one group).
    """

    loads: list[LoadResult] = field(default_factory=list)
    recving: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    invalid_blocks: set[int] = field(default_factory=set)
    stores_done: dict[int, int] = field(default_factory=dict)


class CompletionQueue:
    """Filled by the transfer thread, emptied by the engine's thread once per step."""

    def __init__(self, single_group: bool) -> None:
        self._single_group = single_group
        self._lock = threading.Lock()
        self._ends: list[LoadEnd] = []
        self._stores: list[int] = []
        self._epoch = 0

    @property
    def epoch(self) -> int:
        """The tierd epoch in which this rank can copy; 0: it cannot."""
        with self._lock:
            return self._epoch

    @epoch.setter
    def epoch(self, value: int) -> None:
        with self._lock:
            self._epoch = value

    def load_ended(self, end: LoadEnd) -> None:
        """No copy of this load runs any more."""
        with self._lock:
            self._ends.append(end)

    def load_refused(self, job: LoadJob, reason: str) -> None:
        """The load was never begun."""
        self.load_ended(refused(job, reason))

    def stores_done(self, reservations: Iterable[int]) -> None:
        """The source blocks of these reservations are not read any more."""
        with self._lock:
            self._stores.extend(reservations)

    def take(self) -> WorkerSnapshot:
        """What ended since the last call."""
        with self._lock:
            ends, self._ends = self._ends, []
            stores, self._stores = self._stores, []
        taken = WorkerSnapshot(stores_done=dict.fromkeys(stores, 1))
        for end in ends:
            taken.loads.append(end.result)
            if end.owed:
                taken.recving.add(end.result.request_id)
            if end.whole:
                continue
            if self._single_group:
                taken.invalid_blocks.update(end.missing)
            elif end.owed:
                taken.failed.add(end.result.request_id)
        return taken


def missing_blocks(job: LoadJob, keys_loaded: int) -> frozenset[int]:
    """Target blocks of the keys after the first ``keys_loaded``."""
    return frozenset(block for run in job.runs[keys_loaded:] for block in run.blocks)


def refused(job: LoadJob, reason: str, owed: bool = True) -> LoadEnd:
    """The end of a load of which nothing was copied."""
    result = LoadResult(job.load, job.request_id, 0, (), reason)
    return LoadEnd(result, missing_blocks(job, 0), whole=not job.runs, owed=owed)
