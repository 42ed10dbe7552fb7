"""What the engine's thread and the transfer thread of a rank share: completions and counters.

Also the context that loads and stores work in, the client of tierd, and the outbox to it.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from kvtier.engines.common.jobs import BlockRun, LoadJob, LoadResult
from kvtier.store.generations import PAGE_SHIFT
from kvtier.tierd.client import ClientOptions, TierdClient
from kvtier.tierd.wire import WHOLE_POOL, Hello, Message, Ready
from kvtier.tiers.base import ALIGNMENT_BYTES
from kvtier.transfer.engine import Copy, CopyEngine

SUBMIT_SECONDS = 0.001
"""How long one call may submit copies of one direction: the engine's thread makes the call. In this
time it submits at least what the link moves in 10 ms, after which the call is repeated."""
MAX_UNSENT = 65_536
"""Messages that wait for room in the client's queue. A tierd that is so far behind is lost, and its
loss will be noticed."""


class WorkerClient(Protocol):
    """The part of ``TierdClient`` that a worker uses."""

    @property
    def attached(self) -> bool: ...

    def start(self) -> None: ...

    def send(self, message: Message) -> bool: ...

    def reattach(self, drained_epoch: int) -> None: ...

    def drop(self, reason: str) -> None: ...

    def close(self, timeout_seconds: float) -> None: ...


WorkerClientFactory = Callable[
    [Path, Callable[[], Hello], Callable[[Message], None], Callable[[str], None]], WorkerClient
]
"""(run directory, hello, sink, on_lost) -> client."""


def connect_worker(
    run_directory: Path,
    hello: Callable[[], Hello],
    sink: Callable[[Message], None],
    on_lost: Callable[[str], None],
    *,
    private: bool = False,
) -> WorkerClient:
    """Returns the real client."""
    options = ClientOptions(require_private=private)
    return TierdClient(run_directory, hello, sink, on_lost, options=options)


class Counters:
    """Named counters. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def add(self, name: str, amount: int = 1) -> None:
        """Adds ``amount`` to ``name``."""
        with self._lock:
            self._counts[name] += amount

    def snapshot(self) -> dict[str, int]:
        """Returns all counts since the start."""
        with self._lock:
            return dict(self._counts)


@dataclass(frozen=True, slots=True)
class LoadEnd:
    """The end of a load.

    ``missing_blocks``: target blocks without their content. ``report_expected``: vLLM waits for a
    report of the request.
    """

    result: LoadResult
    missing_blocks: frozenset[int]
    complete: bool
    report_expected: bool = True

    @classmethod
    def of(cls, job: LoadJob, result: LoadResult, report_expected: bool = True) -> LoadEnd:
        """Returns the end of a load of which ``result`` says how many keys were copied."""
        missing = (block for run in job.runs[result.keys_loaded :] for block in run.blocks)
        report_expected = report_expected and not result.follows
        complete = result.keys_loaded == len(job.runs)
        return cls(result, frozenset(missing), complete, report_expected)

    @classmethod
    def rejected(cls, job: LoadJob, reason: str, report_expected: bool = True) -> LoadEnd:
        """Returns the end of a load that was never started."""
        result = LoadResult(job.load, job.request_id, 0, reason)
        return cls.of(job, result, report_expected)


@dataclass(frozen=True, slots=True)
class Completions:
    """Everything that one engine step reports. A load is in all of these fields or in none.

    ``recving``: ids of requests whose load has ended. ``failed``: those that vLLM must recompute
    from the start (models with several groups, where a block id does not identify a block).
    ``invalid_blocks``: blocks that were not filled (models with one group).
    """

    loads: list[LoadResult] = field(default_factory=list)
    recving: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    invalid_blocks: set[int] = field(default_factory=set)
    stores_done: dict[int, int] = field(default_factory=dict)

    def merged(self, later: Completions) -> Completions:
        """Returns the completions of both."""
        return Completions(
            self.loads + later.loads,
            self.recving | later.recving,
            self.failed | later.failed,
            self.invalid_blocks | later.invalid_blocks,
            {**self.stores_done, **later.stores_done},
        )


class SlotGenerations:
    """The generation words of the attached pool (kvtier/store/generations.py).

    ``words``: one 32-bit word per page, which tierd changes; None while no pool is attached.
    """

    def __init__(self, words: memoryview | None = None) -> None:
        self.words = words

    def unchanged(self, slots: Sequence[int], generations: Sequence[int]) -> int:
        """How many slots, from the first, still hold the object that they were named for."""
        words = self.words
        if words is None:
            return 0
        for index, (slot, generation) in enumerate(zip(slots, generations, strict=False)):
            page = slot >> PAGE_SHIFT
            # An odd word means that the slot may be written, even if the job names that word.
            if not 0 <= page < len(words) or words[page] != generation or generation & 1:
                return index
        return min(len(slots), len(generations))


class CompletionQueue:
    """Filled by whichever thread sees the end of a copy, and emptied by the engine's thread once
    per step."""

    def __init__(self, single_group: bool) -> None:
        self._single_group = single_group
        self._lock = threading.Lock()
        self._load_ends: list[LoadEnd] = []
        self._stores: list[int] = []
        self._epoch = 0

    @property
    def epoch(self) -> int:
        """The tierd epoch in which this rank can copy; 0 if it cannot."""
        with self._lock:
            return self._epoch

    @epoch.setter
    def epoch(self, value: int) -> None:
        with self._lock:
            self._epoch = value

    def add_load(self, end: LoadEnd) -> None:
        """Adds a load of which no copy runs."""
        with self._lock:
            self._load_ends.append(end)

    def reject_loads(self, jobs: Iterable[LoadJob], reason: str) -> None:
        """Adds loads that were never started."""
        for job in jobs:
            self.add_load(LoadEnd.rejected(job, reason))

    def add_stores(self, reservations: Iterable[int]) -> None:
        """Adds stores of which no copy reads the source blocks."""
        with self._lock:
            self._stores.extend(reservations)

    def queued(self) -> tuple[set[int], set[int]]:
        """Returns the loads and the stores that the next ``take`` returns."""
        with self._lock:
            return {end.result.load for end in self._load_ends}, set(self._stores)

    def take(self, is_expected: Callable[[LoadEnd], bool] = lambda end: True) -> Completions:
        """Returns what ended since the last call, without loads that are not expected."""
        with self._lock:
            ends, stores = list(self._load_ends), list(self._stores)
        taken = Completions(stores_done=dict.fromkeys(stores, 1))
        for end in ends:
            if not is_expected(end):
                continue
            taken.loads.append(end.result)
            if end.report_expected:
                taken.recving.add(end.result.request_id)
            if end.complete:
                continue
            if self._single_group:
                taken.invalid_blocks.update(end.missing_blocks)
            elif end.report_expected:
                taken.failed.add(end.result.request_id)
        with self._lock:
            # Last: after an error the next call returns the same.
            del self._load_ends[: len(ends)]
            del self._stores[: len(stores)]
        return taken


class RankShards:
    """Where this rank's shards lie in a slot, as tierd said. Callers hold the lock of the copies.

    tierd alone computes the layout of a slot. The rank checks that its range can hold its shard.
    """

    def __init__(self, shard_bytes: Sequence[int]) -> None:
        self._shard_bytes = tuple(shard_bytes)
        self._offsets: tuple[int, ...] = ()
        self._writes: tuple[bool, ...] = ()
        self._span = WHOLE_POOL

    def span(self, pool_bytes: int) -> tuple[int, int]:
        """Begin and end of the bytes of the pool that hold this rank's shards of all slots, if the
        ranges are known."""
        return (0, pool_bytes) if self._span == WHOLE_POOL else self._span

    @property
    def known(self) -> bool:
        """Whether tierd has named valid ranges in this session."""
        return bool(self._offsets)

    def set(self, ready: Ready) -> str:
        """Takes the ranges of an opened namespace; returns why they are not valid, if so."""
        self.clear()
        sizes = self._shard_bytes
        if not len(ready.shards) == len(ready.slot_bytes) == len(sizes):
            return (
                f"{len(ready.shards)} shards in slots of {list(ready.slot_bytes)} bytes: must be "
                f"one of each for {len(sizes)} groups"
            )
        begin, end = ready.span
        if begin < 0 or end < begin or begin % ALIGNMENT_BYTES or end % ALIGNMENT_BYTES:
            return f"bytes {begin} to {end} of the pool: must be a range of whole pages"
        for group, (start, size, _) in enumerate(ready.shards):
            slot_bytes, offset = ready.slot_bytes[group], start - begin
            if size != sizes[group] or offset % ALIGNMENT_BYTES:
                return (
                    f"group {group}: {size} bytes at offset {offset} of a slot: must be "
                    f"{sizes[group]} bytes at a multiple of {ALIGNMENT_BYTES}"
                )
            if not 0 <= offset <= slot_bytes - size:
                return (
                    f"group {group}: {size} bytes at offset {offset}: must be within a slot of "
                    f"{slot_bytes} bytes"
                )
        self._span = ready.span
        self._offsets = tuple(offset - begin for offset, _, _ in ready.shards)
        self._writes = tuple(writes for _, _, writes in ready.shards)
        return ""

    def clear(self) -> None:
        """Forgets the ranges: they belong to one session."""
        self._offsets = self._writes = ()
        self._span = WHOLE_POOL

    def offset(self, group: int) -> int:
        """Returns where the shard of ``group`` starts, from the offset of a slot, in the mapping of
        ``span``; -1 if that is not known."""
        return self._offsets[group] if 0 <= group < len(self._offsets) else -1

    def writes(self, group: int) -> bool:
        """Returns whether this rank stores its shard of ``group``."""
        return 0 <= group < len(self._writes) and self._writes[group]


@dataclass(frozen=True, slots=True)
class RankContext:
    """What loads and stores of one rank work with.

    ``generations``: of the pool that the copy engine is attached to. ``counted_group``: the group
    whose objects are counted as chunks.
    """

    engine: CopyEngine
    shards: RankShards
    completions: CompletionQueue
    counters: Counters
    clock: Callable[[], float]
    generations: SlotGenerations
    counted_group: int = 0

    def copy(self, run: BlockRun, slot: int) -> Copy:
        """Returns the copy of ``run`` to or from ``slot``. The copy engine checks the addresses."""
        offset = self.shards.offset(run.group)
        known = slot >= 0 and offset >= 0
        return Copy(run.group, slot + offset if known else -1, run.first, run.blocks)


class WorkerOutbox:
    """Messages to tierd, in order. For callers that hold the lock of the copies.

    They wait while the client has no room for them, and are dropped while there is no tierd.
    """

    def __init__(self, client: WorkerClient, counters: Counters) -> None:
        self._client = client
        self._counters = counters
        self._unsent: deque[Message] = deque()

    def __len__(self) -> int:
        return len(self._unsent)

    def send(self, message: Message) -> None:
        """Sends ``message``, or queues it for ``flush``."""
        if self._unsent or not self._client.send(message):
            self._unsent.append(message)
            self.flush()

    def flush(self) -> None:
        """Sends queued messages while the client has room."""
        while self._unsent and self._client.send(self._unsent[0]):
            self._unsent.popleft()
        if self._unsent and (not self._client.attached or len(self._unsent) > MAX_UNSENT):
            self._counters.add("unsent_dropped", len(self._unsent))
            self._unsent.clear()

    def clear(self) -> None:
        """Drops queued messages after the loss of tierd."""
        self._unsent.clear()
