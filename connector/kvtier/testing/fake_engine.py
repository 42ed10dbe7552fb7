"""An engine without a model: it talks to tierd exactly as the connector does, and every byte it stores follows from its key.

So each byte that comes back can be checked. For tests and the fault scorecard: many of these fit on a small machine, they can be
killed, stopped and slowed down, and nothing of vLLM is needed. Scheduler side and worker side are two sessions in one process, as in
vLLM with one rank.

As a program (``python -m kvtier.testing.fake_engine --topology DIR``) it stores and loads random keys until it is told to stop,
and says every half second, as one JSON line, what it has seen so far.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import random
import signal
import sys
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from kvtier.testing.fake_worker import (
    GROUP,
    OBJECT_TOKENS,
    STRICT_SECONDS,
    FakeEngineOptions,
    FakeWorker,
    Job,
    Seen,
    block_hash,
)
from kvtier.tierd.client import TierdClient
from kvtier.tierd.peers import own_lock
from kvtier.tierd.process import own_identity
from kvtier.tierd.replica import Replica
from kvtier.tierd.supervisor import Supervisor
from kvtier.tierd.wire import (
    MEMORY_BIT,
    Beat,
    Cancel,
    Credits,
    Delta,
    Hello,
    Leaving,
    Load,
    Message,
    Promote,
    Promoted,
    Ready,
    Reserve,
    Resync,
    Usable,
    Welcome,
)
from kvtier.topology.loading import load as load_topology


class FakeEngine:
    """Scheduler side and worker side. ``store`` and ``load`` are called by one thread and end within their limits."""

    def __init__(self, options: FakeEngineOptions) -> None:
        self.options = options
        self.engine = options.engine or uuid.uuid4().hex
        self.seen = Seen()
        self.worker = FakeWorker(options, self.engine, self.seen)
        self.replica = Replica()
        self.ready: Ready | None = None
        self._inbox: queue.SimpleQueue[Message | str] = queue.SimpleQueue()
        self._credits: list[int] = []
        self._credits_epoch = 0
        self._snapshot = False
        self._promoted: dict[int, Promoted] = {}
        self._numbers = 0
        self.client = TierdClient(options.run_directory, self._hello, self._inbox.put, self._inbox.put)

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
            volatile_reason=self.options.volatile_reason,
            lock=own_lock(Path(self.options.run_directory)),
        )

    def _beat(self) -> Beat:
        """Every object stands for ``OBJECT_TOKENS`` tokens of a prompt."""
        loaded, stored = self.seen.loaded * OBJECT_TOKENS, self.seen.stored * OBJECT_TOKENS
        return Beat(prompt_tokens=loaded + stored, loaded_tokens=(loaded,))

    def start(self) -> None:
        """Attaches in the background."""
        self.client.beat = self._beat
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
        if self.replica.wants_resync():
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
        elif isinstance(item, Delta | Leaving | Usable):
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
        return self.ready is not None and self._snapshot and self.client.epoch == self.worker.epoch != 0

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

    def _load(self, promotion: int, keys: tuple[tuple[int, bytes], ...], epoch: int, end: float) -> int:
        self._numbers += 1
        done = threading.Event()
        job = Job(self._numbers, tuple(GROUP + key for _, key in keys), epoch, -1, done)
        self.worker.put(job)
        self.client.send(Load(load=self._numbers, promotion=promotion, keys=keys))
        copies = self.options.copy_seconds * len(keys)
        limit = max(0.0, end - time.monotonic()) if self.options.strict else self.options.limit_seconds
        if not done.wait(limit + copies):
            done.set()
        self.seen.loaded += job.ended
        if job.ended < len(keys):
            self.seen.load_failed += 1
        return job.ended

    def work(self, keys: int, stop: threading.Event, generator: random.Random, pause_seconds: float = 0.002) -> None:
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
    parser = argparse.ArgumentParser(prog="python -m kvtier.testing.fake_engine")
    parser.add_argument("--topology", type=Path, required=True)
    parser.add_argument("--engine", default="")
    parser.add_argument("--identity", default="fake")
    parser.add_argument("--keys", type=int, default=64)
    parser.add_argument("--object-bytes", type=int, default=64 << 10)
    parser.add_argument("--copy-seconds", type=float, default=0.0)
    parser.add_argument("--never-drain", action="store_true")
    parser.add_argument("--unresponsive-seconds", type=float, default=10.0, help="when to kill a tierd that hangs")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    topology = load_topology(given.topology)
    supervisor = Supervisor(given.topology, topology, unresponsive_seconds=given.unresponsive_seconds)
    supervisor.ensure()
    engine = FakeEngine(
        FakeEngineOptions(
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
        document = asdict(engine.seen) | {"pid": os.getpid(), "usable": engine.usable, "epoch": engine.client.epoch}
        print(json.dumps(document | {"refusal": engine.client.refusal, "tierd": supervisor.child}), flush=True)

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
