"""A copy engine for CPU whose copies to the device run when kernels are ordered behind them.

On a GPU, a load is reported while its last copies run, and the next step's kernels wait for them.
Here they run when the step gives that order, so a report without the order gives wrong tokens, and
a load that is not reported before its end takes more steps. ``install`` makes the connectors of
this process, and of those that it forks, use the engine.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from kvtier.transfer.codec import Codec
from kvtier.transfer.cpu import CpuCopyEngine
from kvtier.transfer.engine import Copy, CopyHandle, Direction

GIVEN_UP_SECONDS = 30.0
"""Then a copy runs by itself, so that a load that is not reported early ends."""
STEP_SECONDS = 60.0
"""How long a step may wait for tierd's word: no machine is too slow for one step."""


class DeferredCopyEngine(CpuCopyEngine):
    """Copies to the device wait for ``order_kernels`` once the transfer thread runs."""

    kind = "deferred"

    def __init__(self, kv_caches: Mapping[str, object], codec: Codec) -> None:
        super().__init__(kv_caches, codec)
        self._defers = False
        self._deferred: dict[CopyHandle, tuple[float, tuple[Copy, ...]]] = {}

    @property
    def synchronous(self) -> bool:
        return not self._defers

    @property
    def can_order_kernels(self) -> bool:
        return True

    def enter_thread(self) -> None:
        self._defers = True

    def order_kernels(self, handles: Sequence[CopyHandle]) -> None:
        for handle in handles:
            self._run(handle)

    def _run(self, handle: CopyHandle) -> None:
        _, copies = self._deferred.pop(handle, (0.0, ()))
        for copy in copies:
            self._move(copy, handle.direction)

    def _start(self, handle: CopyHandle, copies: Sequence[Copy], after: object | None) -> None:
        self._deferred[handle] = (time.monotonic(), tuple(copies))
        if not self._defers or handle.direction is Direction.TO_HOST:
            self._run(handle)

    def _ready(self, handle: CopyHandle) -> bool:
        started, _ = self._deferred.get(handle, (0.0, ()))
        if time.monotonic() - started > GIVEN_UP_SECONDS:
            self._run(handle)
        return handle not in self._deferred

    def _drain(self) -> None:
        for handle in list(self._deferred):
            self._run(handle)


def install() -> None:
    """Makes the connectors of this process use ``DeferredCopyEngine``."""
    from kvtier.engines.vllm import worker

    defaults = worker.KVTierConnectorWorker.__init__.__kwdefaults__
    if defaults is None or "copy_engine" not in defaults:
        raise RuntimeError("the worker side takes no copy engine")
    defaults["copy_engine"] = DeferredCopyEngine
    worker.IDLE_WAIT_SECONDS = STEP_SECONDS


def reported_early(_: Any) -> int:
    """In a rank: how many loads it has reported while their copies ran."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    from kvtier.engines.common.worker_state import Counters

    connector: Any = get_kv_transfer_group()
    counters: Counters = connector._worker._counters
    return counters.snapshot().get("loads_reported_early", 0)
