"""A copy engine for CPU that is as late as a GPU's can be: bytes move a while after ``submit``, from and to wherever the
blocks and slots are then.

The plain CPU engine has moved everything when ``submit`` returns, so it cannot show what happens when blocks or slots are given to
someone else under a running copy. This one does. ``install`` makes the workers of this process use it; it is meant for
``engine_driver``'s hooks.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvtier.transfer.base import Copy, CopyHandle, Direction
from kvtier.transfer.codec import Codec
from kvtier.transfer.copy_cpu import CpuCopyEngine

DELAYS = {Direction.TO_DEVICE: "KVTIER_TEST_LOAD_COPY_SECONDS", Direction.TO_HOST: "KVTIER_TEST_STORE_COPY_SECONDS"}
"""Variables that say how long a copy takes; 0 where unset."""


class SlowCopyEngine(CpuCopyEngine):
    """Copies that take ``seconds[direction]`` each and run side by side."""

    kind = "slow-cpu"

    def __init__(
        self,
        kv_caches: Mapping[str, object],
        codec: Codec,
        seconds: Mapping[Direction, float],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(kv_caches, codec)
        self._seconds = seconds
        self._clock = clock
        self._sleep = sleep
        self._waiting: list[tuple[float, CopyHandle, Sequence[Copy]]] = []

    def _start(self, handle: CopyHandle, copies: Sequence[Copy], after: object | None) -> None:
        self._waiting.append((self._clock() + self._seconds[handle.direction], handle, tuple(copies)))
        self._move_due()

    def _ready(self, handle: CopyHandle) -> bool:
        self._move_due()
        return all(waiting is not handle for _, waiting, _ in self._waiting)

    def _drain(self) -> None:
        while self._waiting:
            self._sleep(max(0.0, min(due for due, _, _ in self._waiting) - self._clock()))
            self._move_due()

    def _move_due(self) -> None:
        now = self._clock()
        due = [each for each in self._waiting if each[0] <= now]
        self._waiting = [each for each in self._waiting if each[0] > now]
        for _, handle, copies in due:
            for copy in copies:
                self._move(copy, handle.direction)


def make_slow_engine(kv_caches: Mapping[str, Any], codec: Codec) -> SlowCopyEngine:
    """A slow engine with the delays of the environment; none during the proof at start, which needs no lateness."""
    seconds = {direction: float(os.environ.get(variable, "0")) for direction, variable in DELAYS.items()}
    return SlowCopyEngine(kv_caches, codec, seconds)


def install() -> None:
    """Workers made in this process from here on copy slowly."""
    from kvtier.engines.vllm.worker import WorkerSide

    defaults = WorkerSide.__init__.__kwdefaults__
    if defaults is None or "copy_engine" not in defaults:
        raise RuntimeError("the worker side takes no copy engine")
    defaults["copy_engine"] = make_slow_engine
