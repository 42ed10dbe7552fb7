"""A copy engine for CPU whose copies take as long as a test wants, as those of a GPU do.

The plain CPU engine has moved every byte when ``submit`` returns, so it cannot show what happens
when blocks or slots are reused under a running copy. This one can: it moves the bytes later, from
and to whatever the blocks and slots hold then. ``install`` makes the connectors of this process use
it; it is a hook for ``kvtier.harness.engine_driver``. Variables of the process's environment
control it and are read at each use:

* ``KVTIER_TEST_LOAD_SECONDS``, ``KVTIER_TEST_STORE_SECONDS``: how long a copy takes (0), including
  copies that already run;
* ``KVTIER_TEST_UNREFERENCED``: not empty: stores do not reference their source blocks;
* ``KVTIER_TEST_CUT_SLOTS``: only that many slots of a load are named;
* ``KVTIER_TEST_UNDRAINED``: not empty: copies count as complete at once; no caller waits for them.

The last three break rules of docs/datapath.md on purpose, to prove that the tests notice.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvtier.engines.common.jobs import LoadJob
from kvtier.harness.engine_testbed import EngineTestbed
from kvtier.transfer.codec import Codec
from kvtier.transfer.cpu import CpuCopyEngine
from kvtier.transfer.engine import Copy, CopyHandle, Direction

SECONDS = {
    Direction.TO_DEVICE: "KVTIER_TEST_LOAD_SECONDS",
    Direction.TO_HOST: "KVTIER_TEST_STORE_SECONDS",
}
UNREFERENCED = "KVTIER_TEST_UNREFERENCED"
UNDRAINED = "KVTIER_TEST_UNDRAINED"
CUT_SLOTS = "KVTIER_TEST_CUT_SLOTS"
POLL_SECONDS = 0.002
INSTALL = f"{__file__}:install"
"""The hook, by file: a package of another distribution may also be called ``tests``."""
_engines: list[SlowCopyEngine] = []


class SlowCopyEngine(CpuCopyEngine):
    """Copies that take a configured time and run concurrently. ``environment`` is read at each use.

    Unlike in other copy engines, a second thread may call ``move_due``: a device needs no thread.
    """

    kind = "slow-cpu"

    def __init__(
        self,
        kv_caches: Mapping[str, object],
        codec: Codec,
        environment: Mapping[str, str],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(kv_caches, codec)
        self._environment = environment
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._waiting: list[tuple[float, CopyHandle, Sequence[Copy]]] = []
        _engines.append(self)

    @property
    def running(self) -> dict[str, int]:
        """Copies that run, by direction."""
        waiting = [handle.direction for _, handle, _ in self._waiting]
        return {direction.value: waiting.count(direction) for direction in Direction}

    def _start(self, handle: CopyHandle, copies: Sequence[Copy], after: object | None) -> None:
        with self._lock:
            self._waiting.append((self._clock(), handle, tuple(copies)))
        self.move_due()

    def _ready(self, handle: CopyHandle) -> bool:
        self.move_due()
        if self._environment.get(UNDRAINED):
            return True
        return all(waiting is not handle for _, waiting, _ in self._waiting)

    def _drain(self) -> None:
        self.move_due()
        while self._waiting and not self._environment.get(UNDRAINED):
            self._sleep(POLL_SECONDS)
            self.move_due()

    def _due(self, start: float, handle: CopyHandle) -> bool:
        return start + float(self._environment.get(SECONDS[handle.direction]) or 0) <= self._clock()

    def move_due(self) -> None:
        """Moves the bytes of every copy that is due. Any thread."""
        with self._lock:
            for each in [each for each in self._waiting if self._due(each[0], each[1])]:
                for copy in each[2]:
                    self._move(copy, each[1].direction)
                self._waiting.remove(each)


class ForgetfulPool:
    """vLLM's block pool as the scheduler side sees it; does not reference blocks if configured."""

    def __init__(self, pool: Any, environment: Mapping[str, str]) -> None:
        self._pool = pool
        self._environment = environment
        self.blocks = pool.blocks

    def touch(self, blocks: Sequence[Any]) -> None:
        """References the blocks, or not."""
        if not self._environment.get(UNREFERENCED):
            self._pool.touch(blocks)

    def free_blocks(self, ordered_blocks: Iterable[Any]) -> None:
        """Gives the references back, if there are any."""
        if not self._environment.get(UNREFERENCED):
            self._pool.free_blocks(ordered_blocks)


def running() -> dict[str, int]:
    """Copies under way in this process, by direction, after those that are due were made."""
    move_due()
    total = {direction.value: 0 for direction in Direction}
    for engine in _engines:
        for direction, count in engine.running.items():
            total[direction] += count
    return total


def move_due() -> None:
    """Moves what is due in every engine of this process."""
    for engine in _engines:
        engine.move_due()


def set_copy_seconds(testbed: EngineTestbed, seconds: float) -> None:
    """How long copies take from the next one on."""
    testbed.drive("set", variables={variable: str(seconds) for variable in SECONDS.values()})


def running_copies(testbed: EngineTestbed) -> dict[str, int]:
    """Copies under way in the engine's process, by direction."""
    counts: dict[str, int] = testbed.drive("call", function=f"{__file__}:running")
    return counts


def wait_copying(testbed: EngineTestbed, direction: Direction) -> None:
    """Steps the engine until a copy in this direction runs."""

    def copying() -> bool:
        testbed.drive("step")
        return running_copies(testbed)[direction.value] > 0

    testbed.wait_for(copying, "no copy started")


def _cut(job: LoadJob) -> LoadJob:
    """``job``; with fewer slots if configured, as if objects had been evicted."""
    if os.environ.get(CUT_SLOTS):
        return replace(job, slots=job.slots[: int(os.environ[CUT_SLOTS])])
    return job


def install() -> None:
    """Makes the connectors of this process use ``SlowCopyEngine``."""
    from kvtier.engines.common.worker_thread import TransferThread
    from kvtier.engines.vllm.scheduler import KVTierConnectorScheduler
    from kvtier.engines.vllm.worker import KVTierConnectorWorker

    defaults = KVTierConnectorWorker.__init__.__kwdefaults__
    if defaults is None or "copy_engine" not in defaults:
        raise RuntimeError("the worker side takes no copy engine")
    defaults["copy_engine"] = lambda kv_caches, codec: SlowCopyEngine(kv_caches, codec, os.environ)
    submit = TransferThread.submit_loads
    TransferThread.submit_loads = (  # type: ignore[method-assign]
        lambda self, jobs, *others: submit(self, tuple(map(_cut, jobs)), *others)
    )
    bind = KVTierConnectorScheduler.bind_gpu_block_pool
    KVTierConnectorScheduler.bind_gpu_block_pool = (  # type: ignore[method-assign]
        lambda self, pool: bind(self, ForgetfulPool(pool, os.environ))
    )
