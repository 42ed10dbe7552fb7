"""The worker side of the engine without a model (see ``fake_engine``): it copies between the host pool and bytes that follow from keys.

An engine without a model: it talks to tierd exactly as the connector does, and every byte it stores follows from its key.

So each byte that comes back can be checked. For tests and the fault scorecard: many of these fit on a small machine, they can be
killed, stopped and slowed down, and nothing of vLLM is needed. Scheduler side and worker side are two sessions in one process, as in
vLLM with one rank.

As a program (``python -m kvtier.harness.stub_engine --topology DIR``) it stores and loads random keys until it is told to stop,
and says every half second, as one JSON line, what it has seen so far.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import mmap
import os
import queue
import random
import signal
import sys
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvtier.config.loader import load as load_topology
from kvtier.processes import own_identity
from kvtier.store.types import MEMORY_BIT
from kvtier.tierd.client import TierdClient
from kvtier.tierd.liveness import hold_peer_lock
from kvtier.tierd.replication import Replica
from kvtier.tierd.supervisor import Supervisor
from kvtier.tierd.watchdog import WatchdogTiming
from kvtier.tierd.wire import (
    PROTOCOL,
    Abort,
    Cancel,
    Credits,
    Deliver,
    Delta,
    EvictionNotice,
    Heartbeat,
    Hello,
    Load,
    LoadReady,
    LoadReleased,
    Message,
    Promote,
    Promoted,
    Ready,
    Reserve,
    Resync,
    Usable,
    Welcome,
)

Bytes = npt.NDArray[np.uint8]
GROUP = b"\0"
_TICK_SECONDS = 0.05
STRICT_SECONDS = 0.05
"""DATAPATH 5: what a worker allows beyond the request's clock."""


def block_hash(number: int, salt: str = "") -> bytes:
    """32 bytes that stand for vLLM's block hash of chunk ``number``."""
    return hashlib.sha256(f"{salt}/{number}".encode()).digest()


def content(key: bytes, size_bytes: int) -> Bytes:
    """The bytes of an object: no two keys, and no two places of one object, have the same eight."""
    seed = int.from_bytes(key[-8:], "little")
    words = np.arange(-(-size_bytes // 8), dtype=np.uint64) * np.uint64(
        0x9E3779B97F4A7C15
    ) + np.uint64(seed)
    return words.view(np.uint8)[:size_bytes]


@dataclass(frozen=True, slots=True)
class StubEngineOptions:
    """``copy_seconds``: how long one copy takes, in ``copy_pieces`` pieces. ``drains``: whether the worker ever says that it has
    drained. ``limit_seconds``: how long a load waits for its slots.
    ``strict``: a load ends with its clock, as a scheduler's does, whatever tierd says or does not say. ``protocol``: what it says its version is."""

    run_directory: Path
    engine: str = ""
    identity: str = "fake"
    ephemeral_reason: str = ""
    object_bytes: int = 64 << 10
    copy_seconds: float = 0.0
    copy_pieces: int = 16
    drains: bool = True
    limit_seconds: float = 2.0
    strict: bool = False
    protocol: str = PROTOCOL


OBJECT_TOKENS = 256


@dataclass(slots=True)
class Seen:
    """What happened. ``wrong``: objects whose bytes were not those of their key."""

    stored: int = 0
    store_dropped: int = 0
    loaded: int = 0
    promoted: int = 0
    load_failed: int = 0
    misses: int = 0
    wrong: int = 0
    lost: int = 0
    attached: int = 0


@dataclass(slots=True, eq=False)
class Job:
    """A load (``slot`` < 0: announced by tierd under ``number``) or a store into ``slot``."""

    number: int
    keys: tuple[bytes, ...]
    epoch: int
    slot: int = -1
    done: threading.Event | None = None
    ended: int = 0
    """Keys that are through and right."""


class StubWorker:
    """The worker side: one thread copies between the pool and nowhere, in the order of its jobs."""

    def __init__(self, options: StubEngineOptions, engine: str, seen: Seen) -> None:
        self._options = options
        self._engine = engine
        self._seen = seen
        self._inbox: queue.SimpleQueue[Message | Job | str | None] = queue.SimpleQueue()
        self._pool: Bytes | None = None
        self._slots: dict[int, tuple[int, ...]] = {}
        self._waiting: list[Job] = []
        self.epoch = 0
        self.drained_epoch = 0
        self.copying = threading.Event()
        """Set while a copy runs."""
        self.client = TierdClient(
            options.run_directory, self._hello, self._inbox.put, self._inbox.put
        )
        self._thread = threading.Thread(target=self._run, name="fake-worker", daemon=True)

    def _hello(self) -> Hello:
        me = own_identity()
        return Hello(
            protocol=self._options.protocol,
            role="worker",
            engine=self._engine,
            pid=me.pid,
            pid_namespace=me.pid_namespace,
            process_start=me.start,
            drained_epoch=self.drained_epoch,
            codec="fake",
            shard_bytes=(self._options.object_bytes,),
            lock=hold_peer_lock(Path(self._options.run_directory)),
        )

    def start(self) -> None:
        """Attaches in the background."""
        self._thread.start()
        self.client.start()

    def put(self, job: Job) -> None:
        """Any thread."""
        self._inbox.put(job)

    def close(self, timeout_seconds: float) -> None:
        """Drains and says ``Bye``."""
        self._inbox.put(None)
        self._thread.join(timeout_seconds)
        if not self._thread.is_alive():
            self.client.close(timeout_seconds)

    def _run(self) -> None:
        while True:
            try:
                item = self._inbox.get(timeout=_TICK_SECONDS)
            except queue.Empty:
                self._expire()
                continue
            if item is None:
                self._end_all()
                return
            if isinstance(item, str):
                self._lost()
            elif isinstance(item, Job):
                self._begin(item)
            elif isinstance(item, Welcome):
                self._map(item)
            elif isinstance(item, LoadReady):
                self._slots[item.load] = item.slots
                self._try_loads()

    def _map(self, welcome: Welcome) -> None:
        with open(welcome.pool_path, "r+b") as file:
            self._pool = np.frombuffer(mmap.mmap(file.fileno(), welcome.pool_bytes), dtype=np.uint8)
        self.epoch = welcome.epoch

    def _lost(self) -> None:
        # Copies are made on this thread, so by now the one that ran at the loss has ended: this is the drained state.
        self._end_all()
        self.drained_epoch = max(self.drained_epoch, self.epoch)
        self.epoch = 0
        if self._options.drains:
            self.client.reattach(self.drained_epoch)

    def _end_all(self) -> None:
        for job in self._waiting:
            self._finish(job)
        self._waiting.clear()
        self._slots.clear()

    def _begin(self, job: Job) -> None:
        if not self.epoch or job.epoch != self.epoch or self._pool is None:
            self._finish(job)
        elif job.slot >= 0:
            self._store(job, self._pool)
        else:
            self._waiting.append(job)
            self._try_loads()

    def _store(self, job: Job, pool: Bytes) -> None:
        key = job.keys[0]
        self._copy(
            pool[job.slot : job.slot + self._options.object_bytes],
            content(key, self._options.object_bytes),
        )
        if self.client.epoch == job.epoch:
            self.client.send(Deliver(reservations=(job.number,)))
        else:
            self.client.send(Abort(reservations=(job.number,)))
        job.ended = 1
        self._finish(job)

    def _try_loads(self) -> None:
        for job in list(self._waiting):
            slots = self._slots.pop(job.number, None)
            pool = self._pool
            if slots is None or pool is None:
                continue
            self._waiting.remove(job)
            size = self._options.object_bytes
            target = np.empty(size, dtype=np.uint8)
            for key, slot in zip(job.keys, slots, strict=False):
                self._copy(target, pool[slot : slot + size])
                if self.client.epoch != job.epoch:
                    # tierd was lost under the copy: what arrived counts as nothing.
                    break
                if np.array_equal(target, content(key, size)):
                    job.ended += 1
                else:
                    self._seen.wrong += 1
            self.client.send(LoadReleased(load=job.number))
            self._finish(job)

    def _expire(self) -> None:
        for job in [job for job in self._waiting if job.done is not None and job.done.is_set()]:
            self._waiting.remove(job)
            self.client.send(LoadReleased(load=job.number))

    def _finish(self, job: Job) -> None:
        if job.done is not None:
            job.done.set()

    def _copy(self, target: Bytes, source: Bytes) -> None:
        if not self._options.copy_seconds:
            target[:] = source
            return
        self.copying.set()
        pieces = self._options.copy_pieces
        size = -(-len(target) // pieces)
        for start in range(0, len(target), size):
            time.sleep(self._options.copy_seconds / pieces)
            target[start : start + size] = source[start : start + size]
        self.copying.clear()


class StubEngine:
    """Scheduler side and worker side. ``store`` and ``load`` are called by one thread and end within their limits."""

    def __init__(self, options: StubEngineOptions) -> None:
        self.options = options
        self.engine = options.engine or uuid.uuid4().hex
        self.seen = Seen()
        self.worker = StubWorker(options, self.engine, self.seen)
        self.replica = Replica()
        self.ready: Ready | None = None
        self._inbox: queue.SimpleQueue[Message | str] = queue.SimpleQueue()
        self._credits: list[int] = []
        self._credits_epoch = 0
        self._snapshot = False
        self._promoted: dict[int, Promoted] = {}
        self._numbers = 0
        self.client = TierdClient(
            options.run_directory, self._hello, self._inbox.put, self._inbox.put, self._heartbeat
        )

    def _hello(self) -> Hello:
        me = own_identity()
        return Hello(
            protocol=self.options.protocol,
            role="scheduler",
            engine=self.engine,
            pid=me.pid,
            pid_namespace=me.pid_namespace,
            process_start=me.start,
            identity=json.dumps({"name": self.options.identity}),
            ephemeral_reason=self.options.ephemeral_reason,
            lock=hold_peer_lock(Path(self.options.run_directory)),
        )

    def _heartbeat(self) -> Heartbeat:
        """Every object stands for ``OBJECT_TOKENS`` tokens of a prompt."""
        loaded, stored = self.seen.loaded * OBJECT_TOKENS, self.seen.stored * OBJECT_TOKENS
        return Heartbeat(prompt_tokens=loaded + stored, loaded_tokens=(loaded,))

    def start(self) -> None:
        """Attaches in the background."""
        self.client.start()
        self.worker.start()

    def close(self, timeout_seconds: float = 5.0) -> None:
        """Ends both sessions in order."""
        self.worker.close(timeout_seconds)
        self.client.close(timeout_seconds)

    def step(self) -> None:
        """Takes in what tierd said."""
        while True:
            try:
                item = self._inbox.get_nowait()
            except queue.Empty:
                break
            self._take(item)
        if self.replica.needs_resync():
            self.client.send(Resync())

    def _take(self, item: Message | str) -> None:
        if isinstance(item, str):
            self.seen.lost += 1
            self.ready, self._snapshot = None, False
            self.replica.clear()
            self._credits.clear()
            self._promoted.clear()
            self.client.reattach(0)
        elif isinstance(item, Welcome):
            self.seen.attached += 1
            self._credits.clear()
            self._credits_epoch = item.epoch
        elif isinstance(item, Ready):
            self.ready, self._snapshot = item, False
        elif isinstance(item, Credits):
            self._credits.extend(item.slots)
        elif isinstance(item, Delta | EvictionNotice | Usable):
            answer = self.replica.apply(item)
            self._snapshot = self._snapshot or (isinstance(item, Delta) and item.snapshot)
            if answer is not None:
                self.client.send(answer)
        elif isinstance(item, Promoted):
            self._promoted[item.promotion] = item

    @property
    def credits(self) -> int:
        """Free slots that this engine was granted."""
        return len(self._credits)

    @property
    def usable(self) -> bool:
        """Whether both sides are attached to one epoch, the engine is open, and it is known what tierd holds: a connector stores nothing before."""
        return (
            self.ready is not None
            and self._snapshot
            and self.client.epoch == self.worker.epoch != 0
        )

    @property
    def can_store(self) -> bool:
        """Whether a store begun at this moment is not dropped: the worker is attached too, and there is a free slot."""
        return self.usable and bool(self._credits)

    def wait(self, condition: str, timeout_seconds: float) -> bool:
        """Steps until the attribute ``condition`` is true."""
        return self.wait_for(lambda: bool(getattr(self, condition)), timeout_seconds)

    def wait_for(self, condition: object, timeout_seconds: float) -> bool:
        """Steps until ``condition()`` is true."""
        deadline = time.monotonic() + timeout_seconds
        while time.monotonic() < deadline:
            self.step()
            if condition():  # type: ignore[operator]
                return True
            time.sleep(0.005)
        return False

    def holds(self, number: int) -> int:
        """Bits of the tiers that hold chunk ``number``, as far as is known."""
        return self.replica.get(GROUP + block_hash(number))

    def begin_store(self, number: int) -> threading.Event | None:
        """Reserves a slot and hands the copy to the worker; None: no credit, or not attached."""
        self.step()
        epoch = self._credits_epoch
        if not self.usable or not self._credits:
            self.seen.store_dropped += 1
            return None
        slot = self._credits.pop(0)
        self._numbers += 1
        done = threading.Event()
        key = block_hash(number)
        if not self.client.send(Reserve(items=((self._numbers, 0, key, slot),))):
            self.seen.store_dropped += 1
            return None
        self.worker.put(Job(self._numbers, (GROUP + key,), epoch, slot, done))
        return done

    def store(self, number: int, timeout_seconds: float = 5.0) -> bool:
        """Stores one chunk; True: it was copied and delivered."""
        done = self.begin_store(number)
        if done is None or not done.wait(timeout_seconds):
            return False
        self.seen.stored += 1
        return True

    def load(self, numbers: Sequence[int], budget_seconds: float = 2.0) -> int:
        """Loads the prefix of ``numbers`` that is there; how many were loaded and right."""
        end = time.monotonic() + budget_seconds + STRICT_SECONDS
        self.step()
        hashes = [block_hash(number) for number in numbers]
        bits = [self.replica.get(GROUP + key) for key in hashes]
        there = next((i for i, held in enumerate(bits) if not held), len(bits))
        epoch = self._credits_epoch
        if not there or not self.usable:
            self.seen.misses += 1
            return 0
        keys = tuple((0, key) for key in hashes[:there])
        self._numbers += 1
        promotion = 0
        if any(not held & MEMORY_BIT for held in bits[:there]):
            promotion = self._numbers
            self.client.send(Promote(promotion=promotion, keys=keys, budget_seconds=budget_seconds))
            answered = self.wait_for(
                lambda: promotion in self._promoted or not self.client.attached,
                budget_seconds + (STRICT_SECONDS if self.options.strict else 2),
            )
            result = self._promoted.pop(promotion, None)
            if result is None and self.options.strict:
                self.client.send(Cancel(promotion=promotion))
            if not answered or result is None or not result.usable:
                self.seen.load_failed += 1
                return 0
            keys = keys[: result.usable]
            self.seen.promoted += result.usable
        return self._load(promotion, keys, epoch, end)

    def _load(
        self, promotion: int, keys: tuple[tuple[int, bytes], ...], epoch: int, end: float
    ) -> int:
        self._numbers += 1
        done = threading.Event()
        job = Job(self._numbers, tuple(GROUP + key for _, key in keys), epoch, -1, done)
        self.worker.put(job)
        self.client.send(Load(load=self._numbers, promotion=promotion, keys=keys))
        copies = self.options.copy_seconds * len(keys)
        limit = (
            max(0.0, end - time.monotonic()) if self.options.strict else self.options.limit_seconds
        )
        if not done.wait(limit + copies):
            done.set()
        self.seen.loaded += job.ended
        if job.ended < len(keys):
            self.seen.load_failed += 1
        return job.ended

    def work(
        self,
        keys: int,
        stop: threading.Event,
        generator: random.Random,
        pause_seconds: float = 0.002,
    ) -> None:
        """Stores and loads random chunks of ``keys`` different ones until ``stop``."""
        while not stop.is_set():
            number = generator.randrange(keys)
            self.step()
            if self.holds(number):
                self.load([number])
            else:
                self.store(number)
            stop.wait(pause_seconds)


def main(arguments: Sequence[str] | None = None) -> int:
    """The program."""
    parser = argparse.ArgumentParser(prog="python -m kvtier.harness.stub_engine")
    parser.add_argument("--topology", type=Path, required=True)
    parser.add_argument("--engine", default="")
    parser.add_argument("--identity", default="fake")
    parser.add_argument("--keys", type=int, default=64)
    parser.add_argument("--object-bytes", type=int, default=64 << 10)
    parser.add_argument("--copy-seconds", type=float, default=0.0)
    parser.add_argument("--never-drain", action="store_true")
    parser.add_argument(
        "--unresponsive-seconds", type=float, default=10.0, help="when to kill a tierd that hangs"
    )
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    topology = load_topology(given.topology)
    supervisor = Supervisor(
        given.topology, topology, timing=WatchdogTiming(unresponsive=given.unresponsive_seconds)
    )
    supervisor.ensure()
    engine = StubEngine(
        StubEngineOptions(
            run_directory=Path(topology.structural.run_directory),
            engine=given.engine,
            identity=given.identity,
            object_bytes=given.object_bytes,
            copy_seconds=given.copy_seconds,
            drains=not given.never_drain,
        )
    )
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    engine.start()

    def say() -> None:
        document = asdict(engine.seen) | {
            "pid": os.getpid(),
            "usable": engine.usable,
            "epoch": engine.client.epoch,
        }
        print(
            json.dumps(document | {"refusal": engine.client.refusal, "tierd": supervisor.child}),
            flush=True,
        )

    def report() -> None:
        while not stop.wait(0.5):
            say()

    threading.Thread(target=report, name="fake-report", daemon=True).start()
    engine.work(given.keys, stop, random.Random(given.seed))
    engine.close()
    supervisor.stop(10.0)
    say()
    return 0


if __name__ == "__main__":
    sys.exit(main())
