"""A CUDA device in this process, for the CUDA copy engine: streams, events and memory, no GPU.

Whatever the engine queues runs later, at points that a random generator chooses: each stream keeps
its order, and between streams only events do. What a launch or a transfer reads (tables, buffers,
the pool) is read when it runs, as on a device. So a wait that is missing, or memory that is used
again too early, shows up as wrong bytes.
"""

from __future__ import annotations

import ctypes
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from kvtier.transfer import cuda as engine_module
from kvtier.transfer.copy_ranges import Addresses, BlockRuns
from kvtier.transfer.cuda import CudaCopyEngine


class InvalidAccess(Exception):
    """A kernel or transfer that would touch memory outside cache, buffers and pool."""


@dataclass(slots=True, eq=False)
class _Mark:
    """One record of an event."""

    reached: bool = False


@dataclass(slots=True)
class Event:
    """Has the semantics of CUDA's: waiting means the last record at the time of the call."""

    device: SimulatedDevice
    mark: _Mark = field(default_factory=lambda: _Mark(reached=True))

    def record(self, stream: Stream) -> None:
        """Queues a record."""
        mark = self.mark = _Mark()

        def reach() -> None:
            mark.reached = True

        stream.queue.append(reach)

    def query(self) -> bool:
        """Returns whether the last record was reached; the device goes on meanwhile."""
        self.device.progress()
        return self.mark.reached

    def elapsed_time(self, end: Event) -> float:
        """Returns milliseconds; the simulation has no clock."""
        return 1.0


@dataclass(slots=True, eq=False)
class Stream:
    """``queue`` holds functions to run and marks to wait for."""

    device: SimulatedDevice
    name: str
    cuda_stream: int
    queue: deque[Callable[[], None] | _Mark] = field(default_factory=deque)

    def wait_event(self, event: Event) -> None:
        """Queues a wait, unless the device was told to forget those of this stream."""
        if self.name not in self.device.forgotten_waits:
            self.queue.append(event.mark)

    def synchronize(self) -> None:
        """Runs the device until this stream is empty."""
        while self.queue:
            self.device.step()

    def blocked(self) -> bool:
        """Returns whether the next entry cannot run yet."""
        head = self.queue[0] if self.queue else None
        return head is None or (isinstance(head, _Mark) and not head.reached)


class SimulatedDevice:
    """``forgotten_waits``: names of streams (``kernels``, ``dma``) that wait for no event."""

    def __init__(self, seed: int, forgotten_waits: frozenset[str] = frozenset()) -> None:
        self._random = random.Random(seed)
        self.forgotten_waits = forgotten_waits
        self.streams: list[Stream] = []
        self.compute = self.stream("compute")
        self._current = [self.compute]
        self._memory: list[tuple[int, int]] = []

    def stream(self, name: str) -> Stream:
        """Makes a stream."""
        stream = Stream(self, name, len(self.streams))
        self.streams.append(stream)
        return stream

    @property
    def current(self) -> Stream:
        """The stream of launches."""
        return self._current[-1]

    @contextmanager
    def using(self, stream: Stream) -> Iterator[None]:
        """Makes ``stream`` the current one."""
        self._current.append(stream)
        try:
            yield
        finally:
            self._current.pop()

    def own(self, address: int, nbytes: int) -> None:
        """Declares memory that kernels and transfers may touch."""
        self._memory.append((address, address + nbytes))

    def move(self, target: int, source: int, nbytes: int) -> None:
        """Copies bytes now. Raises ``InvalidAccess``."""
        for address in (target, source):
            if not any(b <= address and address + nbytes <= end for b, end in self._memory):
                raise InvalidAccess(f"{nbytes} bytes at {address:#x}")
        ctypes.memmove(target, source, nbytes)

    def step(self) -> bool:
        """Runs the next entry of one stream; False if there is none that can run."""
        ready = [stream for stream in self.streams if not stream.blocked()]
        if not ready:
            if any(stream.queue for stream in self.streams):
                raise RuntimeError("every stream waits")
            return False
        entry = self._random.choice(ready).queue.popleft()
        if not isinstance(entry, _Mark):
            entry()
        return True

    def progress(self) -> None:
        """Runs none, some, or all that is queued."""
        for _ in range(self._random.choice((0, 0, 1, 3, 10, 1000))):
            if not self.step():
                return

    def finish(self) -> None:
        """Runs everything."""
        while self.step():
            pass


@dataclass(slots=True)
class _DeviceTable:
    """Device memory of an address table: ``[...]`` is a view with ``copy_``."""

    device: SimulatedDevice
    array: Any
    part: Any = None

    def __getitem__(self, part: Any) -> _DeviceTable:
        return _DeviceTable(self.device, self.array, part)

    def copy_(self, source: torch.Tensor, non_blocking: bool) -> None:
        """Queues a transfer from host memory, which is read when it runs."""
        values, array, part = source.numpy(), self.array, self.part

        def run() -> None:
            array[part] = values

        self.device.current.queue.append(run)


@dataclass(slots=True)
class _RowKernel:
    """Does what the Triton kernel does, when its turn comes."""

    device: SimulatedDevice
    runs: BlockRuns

    def launch(
        self, tables: _DeviceTable, first_row: int, rows: int, to_cache: bool, programs: int
    ) -> None:
        """Queues the kernel on the current stream."""

        def run() -> None:
            for row in range(first_row, first_row + rows):
                block, other = (int(number) for number in tables.array[:, row])
                for base, stride, start, words in self.runs.table:
                    cache, nbytes = base + block * stride, words * self.runs.word_bytes
                    if to_cache:
                        self.device.move(cache, other + start, nbytes)
                    else:
                        self.device.move(other + start, cache, nbytes)

        self.device.current.queue.append(run)


@dataclass(slots=True)
class _Batch:
    """Does what ``BatchCopy`` does: takes the arrays now, and copies later."""

    device: SimulatedDevice

    def __call__(
        self, targets: Addresses, sources: Addresses, sizes: Addresses, stream: int
    ) -> None:
        ranges = list(zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True))
        for target, source, size in ranges:
            self.device.streams[stream].queue.append(
                lambda t=target, s=source, n=size: self.device.move(t, s, n)
            )


class SimulatedCudaEngine(CudaCopyEngine):
    """The CUDA copy engine on a simulated device."""

    device: SimulatedDevice
    """Set by ``install``."""

    def _table(self) -> Any:
        host = torch.zeros((2, engine_module.TABLE_ROWS), dtype=torch.int64)
        device = _DeviceTable(self.device, np.full(host.shape, -1, dtype=np.int64))
        return engine_module._Table(host, host.numpy(), device)  # type: ignore[arg-type]

    def _lane(self, priority: int) -> Any:
        lane = super()._lane(priority)
        for buffer in lane.buffers:
            self.device.own(buffer.address, buffer.memory.numel() * self._codec.word_bytes)
        return lane


def install(
    monkeypatch: pytest.MonkeyPatch, device: SimulatedDevice, table_rows: int, tables: int
) -> type[SimulatedCudaEngine]:
    """Replaces torch's CUDA by ``device``, with small tables, and returns the engine's class."""
    names = iter(("kernels", "dma") * 2)

    class _Cuda:
        @staticmethod
        def Event(enable_timing: bool = False) -> Event:
            return Event(device)

        @staticmethod
        def Stream(_: object, priority: int = 0) -> Stream:
            return device.stream(next(names))

    def row_kernels(runs: Sequence[BlockRuns], _: object) -> list[_RowKernel]:
        return [_RowKernel(device, each) for each in runs]

    monkeypatch.setattr(engine_module, "cuda", _Cuda)
    monkeypatch.setattr(engine_module, "TABLE_ROWS", table_rows)
    monkeypatch.setattr(engine_module, "TABLES", tables)
    monkeypatch.setattr(engine_module, "_row_kernels", row_kernels)
    monkeypatch.setattr(engine_module, "_batch_copy", lambda: _Batch(device))
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "stream", device.using)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: device.current)
    SimulatedCudaEngine.device = device
    return SimulatedCudaEngine
