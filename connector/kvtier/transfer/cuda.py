"""Copies between GPU memory and the host pool, concurrent with the engine's kernels.

Three ways to move the blocks of a submission, per direction:

* ``staged``: DMA transfers between the slots and a staging buffer on the GPU, and one kernel that
  moves the blocks between the buffer and the KV cache. The kernel takes a few percent of the
  transfer's time, and with two buffers it overlaps with the next transfer.
* ``batch``: one call that lists every contiguous range of the blocks. For layouts whose blocks are
  in one piece, nothing is gained by staging.
* ``direct``: a kernel reads or writes the registered host memory itself.

``kvtier.transfer.calibration`` measures them for the layout at hand and chooses. The number of
launches depends on the bytes of a submission (one round per staging buffer), not on the number of
layers or chunks.

Order with the engine: whatever touches the KV cache waits for the caller's fence. Order between
copies through one buffer: a transfer or kernel that reuses it waits for the event of its last use.
Nothing waits on the host.

What a launch reads (block numbers and addresses) lies in a ring of tables that is allocated at the
start. A table is reused only after the event of the submission that used it was seen: the caching
allocator would hand its memory to the next forward pass while the kernel still reads it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvtier.transfer.codec import Codec
from kvtier.transfer.copy_ranges import (
    CopyRows,
    StagedPiece,
    block_runs,
    rows_of,
    run_ranges,
    split_ranges,
    staged_pieces,
)
from kvtier.transfer.cuda_runtime import BatchCopy, cuda, relax_capture
from kvtier.transfer.engine import Copy, CopyEngine, CopyHandle, Direction
from kvtier.transfer.host_pool import HostPool
from kvtier.transfer.strided_views import gather, scatter, segment_views, word_dtype

logger = logging.getLogger(__name__)
STAGING_BYTES = 128 << 20
"""The last piece of a load is moved by the kernel alone, so pieces are short. Measured for 512 MiB:
52 GB/s with 128 MiB, 48 with 256."""
STAGING_SHARE = 400
"""A staging buffer has at most this fraction of the KV cache: four buffers are 1 % of it."""
MIN_STAGING_BYTES = 16 << 20
STAGING_BUFFERS = 2
"""Per direction: one is filled while the other is drained."""
BATCH_BYTES = 512 << 20
"""10 ms of a link."""
TABLES = 64
TABLE_ROWS = 8192
"""64 tables of 8192 blocks are 8 MiB, on the device and in host memory each."""
TABLES_PER_SUBMISSION = 8
"""A submission of ``batch_bytes`` and one more chunk takes at most three: a part of it fills more
than half of a table."""
STAGING_PROGRAMS = 64
"""Programs of the kernel between cache and staging: about 1 TB/s, with a quarter of an H200's
multiprocessors, for a few percent of the transfer's time."""
DIRECT_PROGRAMS = 16
"""12 to 32 programs saturate the link; more of them slow the engine's kernels down."""
LIMIT_SECONDS = 0.2
"""Limit of what is submitted and unfinished in one direction, at the measured rate."""


@dataclass(slots=True)
class _Buffer:
    memory: torch.Tensor
    address: int
    free: Any
    filled: Any


@dataclass(slots=True)
class _Table:
    """Block numbers and addresses of the other side, in host memory and on the device."""

    host: torch.Tensor
    rows: npt.NDArray[np.int64]
    device: torch.Tensor


@dataclass(slots=True)
class _Lane:
    """One direction. ``kernels`` runs what touches the cache by kernels; ``dma`` the transfers."""

    kernels: Any
    dma: Any
    buffers: list[_Buffer]
    way: str = "staged"
    next_buffer: int = 0


@dataclass(slots=True)
class _Submission:
    start: Any
    end: Any
    started: bool = False
    tables: list[_Table] = field(default_factory=list)


class CudaCopyEngine(CopyEngine):
    """Asynchronous copies for CUDA devices, and for ROCm, whose torch has the same names.

    Construct and calibrate it on the engine's thread, before that captures graphs: it allocates
    ``2 x STAGING_BUFFERS`` buffers and compiles its kernel.
    """

    def __init__(
        self,
        kv_caches: Mapping[str, object],
        codec: Codec,
        in_flight_bytes: int | None = None,
        staging_bytes: int = STAGING_BYTES,
    ) -> None:
        super().__init__(codec, in_flight_bytes or 2 * STAGING_BUFFERS * staging_bytes)
        self._fixed_limit = in_flight_bytes is not None
        self._views = segment_views(kv_caches, codec)
        self._device = next(view.cache.device for group in self._views for view in group)
        self._runs = tuple(
            block_runs(kv_caches, codec, group) for group in range(len(codec.groups))
        )
        largest = max(group.block_bytes for group in codec.groups)
        cache_bytes = codec.num_blocks * sum(group.block_bytes for group in codec.groups)
        share = max(MIN_STAGING_BYTES, cache_bytes // STAGING_SHARE)
        self._staging_bytes = max(largest, min(staging_bytes, share))
        self._batch = _batch_copy()
        self._memory: torch.Tensor | None = None
        self._host_address = 0
        with torch.cuda.device(self._device):
            self._kernels = _row_kernels(self._runs, self._device)
            self._tables = [self._table() for _ in range(TABLES)]
            self._lanes = {
                Direction.TO_DEVICE: self._lane(priority=-1),
                Direction.TO_HOST: self._lane(priority=0),
            }
        smallest = min(group.block_bytes for group in codec.groups if group.layers)
        self.batch_bytes = min(BATCH_BYTES, smallest * TABLE_ROWS)
        self._describe()

    def _describe(self) -> None:
        """Names the ways of both directions, for the log."""
        kernel = "triton" if self._kernels else "torch"
        load, store = (self._lanes[d].way for d in (Direction.TO_DEVICE, Direction.TO_HOST))
        self.kind = f"cuda ({kernel}; load {load}, store {store})"

    def _lane(self, priority: int) -> _Lane:
        ready = cuda.Event()
        ready.record(torch.cuda.current_stream(self._device))
        words = -(-self._staging_bytes // self._codec.word_bytes)
        buffers = []
        for _ in range(STAGING_BUFFERS):
            memory = torch.empty(
                words, dtype=word_dtype(self._codec.word_bytes), device=self._device
            )
            # The allocator may return memory that this thread's stream still uses.
            buffers.append(_Buffer(memory, memory.data_ptr(), ready, cuda.Event()))
        kernels = cuda.Stream(self._device, priority=priority)
        return _Lane(kernels, cuda.Stream(self._device, priority=priority), buffers)

    def _table(self) -> _Table:
        host = torch.zeros((2, TABLE_ROWS), dtype=torch.int64, pin_memory=True)
        device = torch.zeros((2, TABLE_ROWS), dtype=torch.int64, device=self._device)
        return _Table(host, host.numpy(), device)

    # Capacity.

    def has_room(self, direction: Direction, nbytes: int, alone: bool = True) -> bool:
        return len(self._tables) >= TABLES_PER_SUBMISSION and super().has_room(
            direction, nbytes, alone
        )

    def attach(self, pool: HostPool) -> None:
        super().attach(pool)
        self._memory = torch.from_numpy(pool.memory)
        self._host_address = int(pool.memory.ctypes.data)

    def detach(self) -> None:
        super().detach()
        self._memory = None

    def enter_thread(self) -> None:
        torch.cuda.set_device(self._device)
        relax_capture()

    def fence(self) -> object | None:
        event: Any = cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        mark: object = event
        return mark

    @property
    def can_order_kernels(self) -> bool:
        return True

    def order_kernels(self, handles: Sequence[CopyHandle]) -> None:
        stream = torch.cuda.current_stream(self._device)
        try:
            for handle in handles:
                submission = handle.state
                if isinstance(submission, _Submission):
                    stream.wait_event(submission.end)
        except RuntimeError:
            # Without an order on the device, the host waits.
            self.wait_idle()

    def close(self) -> None:
        super().close()
        self._lanes.clear()

    # Submissions.

    def _start(self, handle: CopyHandle, copies: Sequence[Copy], after: object | None) -> None:
        lane = self._lanes[handle.direction]
        submission = _Submission(cuda.Event(enable_timing=True), cuda.Event(enable_timing=True))
        handle.state = submission
        with torch.cuda.device(self._device):
            started = False
            for rows in rows_of(copies, self._codec):
                move = self._move_batch if lane.way == "batch" else self._move_rows
                move(handle.direction, rows, submission, None if started else after)
                started = True

    def _move_batch(
        self, direction: Direction, rows: CopyRows, submission: _Submission, after: object | None
    ) -> None:
        lane, batch = self._lanes[direction], self._batch
        if batch is None:
            raise RuntimeError("the driver has no batched copies")
        if after is not None:
            lane.dma.wait_event(after)
        cache, host, sizes = run_ranges(self._runs[rows.group].table, self._codec, rows)
        host = host + self._host_address
        boundaries = self._pool.boundaries if self._pool is not None else ()
        host, cache, sizes = split_ranges(host, cache, sizes, self._host_address, boundaries)
        self._record_start(submission, lane.dma)
        if direction is Direction.TO_DEVICE:
            batch(cache, host, sizes, lane.dma.cuda_stream)
        else:
            batch(host, cache, sizes, lane.dma.cuda_stream)
        submission.end.record(lane.dma)

    def _move_rows(
        self, direction: Direction, rows: CopyRows, submission: _Submission, after: object | None
    ) -> None:
        lane = self._lanes[direction]
        if after is not None:
            lane.kernels.wait_event(after)
        if direction is Direction.TO_DEVICE:
            # The transfers may run ahead of the fence, and wait for buffers that wait for it.
            self._record_start(submission, lane.kernels)
        block_bytes = self._codec.groups[rows.group].block_bytes
        per_piece = max(1, min(self._staging_bytes // block_bytes, TABLE_ROWS))
        step = TABLE_ROWS // per_piece * per_piece
        # One context for all launches: entering it costs as much as a launch.
        with torch.cuda.stream(lane.kernels):
            for begin in range(0, len(rows.blocks), step):
                part = CopyRows(
                    rows.group,
                    rows.blocks[begin : begin + step],
                    rows.offsets[begin : begin + step],
                )
                if lane.way == "direct":
                    table = self._fill_table(lane, part, per_piece, submission)
                    self._record_start(submission, lane.kernels)
                    self._launch(direction, part, table, (0, len(part.blocks)), DIRECT_PROGRAMS)
                    submission.end.record(lane.kernels)
                else:
                    self._move_staged(direction, part, per_piece, submission)

    def _fill_table(
        self, lane: _Lane, rows: CopyRows, per_piece: int, submission: _Submission
    ) -> _Table:
        """Takes a table from the ring and queues its transfer to the device.

        The current stream is that of the kernels.
        """
        if not self._tables:
            raise RuntimeError("every address table is in use")
        table = self._tables.pop()
        submission.tables.append(table)
        count = len(rows.blocks)
        table.rows[0, :count] = rows.blocks
        if lane.way == "direct":
            table.rows[1, :count] = rows.offsets + self._host_address
        else:
            block_bytes = self._codec.groups[rows.group].block_bytes
            numbers = np.arange(count)
            buffers = np.array([buffer.address for buffer in lane.buffers])
            turns = (lane.next_buffer + numbers // per_piece) % len(buffers)
            table.rows[1, :count] = buffers[turns] + numbers % per_piece * block_bytes
        table.device[:, :count].copy_(table.host[:, :count], non_blocking=True)
        return table

    def _move_staged(
        self, direction: Direction, rows: CopyRows, per_piece: int, submission: _Submission
    ) -> None:
        """Moves blocks through the staging buffers, in pieces of ``per_piece`` blocks."""
        lane = self._lanes[direction]
        block_bytes = self._codec.groups[rows.group].block_bytes
        boundaries = self._pool.boundaries if self._pool is not None else ()
        pieces = staged_pieces(rows, block_bytes, per_piece, self._host_address, boundaries)
        table: _Table | None = None
        if direction is Direction.TO_HOST:
            table = self._fill_table(lane, rows, per_piece, submission)
        first_buffer = lane.next_buffer
        for number, piece in enumerate(pieces):
            turn = (first_buffer + number) % len(lane.buffers)
            buffer = lane.buffers[turn]
            span = (number * per_piece, min((number + 1) * per_piece, len(rows.blocks)))
            if table is not None and direction is Direction.TO_HOST:
                lane.next_buffer = (turn + 1) % len(lane.buffers)
                lane.kernels.wait_event(buffer.free)
                self._record_start(submission, lane.kernels)
                self._launch(direction, rows, table, span, STAGING_PROGRAMS)
                buffer.filled.record(lane.kernels)
                lane.dma.wait_event(buffer.filled)
                self._transfer(direction, buffer, piece, lane)
                buffer.free = submission.end = self._end_event()
                submission.end.record(lane.dma)
                continue
            lane.dma.wait_event(buffer.free)
            self._transfer(direction, buffer, piece, lane)
            buffer.filled.record(lane.dma)
            if table is None:
                # The link is busy from here on; what the kernels need is computed meanwhile.
                table = self._fill_table(lane, rows, per_piece, submission)
            lane.next_buffer = (turn + 1) % len(lane.buffers)
            lane.kernels.wait_event(buffer.filled)
            self._launch(direction, rows, table, span, STAGING_PROGRAMS)
            buffer.free = submission.end = self._end_event()
            submission.end.record(lane.kernels)

    @staticmethod
    def _end_event() -> Any:
        # A buffer's event may be awaited after the submission has ended, so it is not reused.
        return cuda.Event(enable_timing=True)

    @staticmethod
    def _record_start(submission: _Submission, stream: Any) -> None:
        """Marks the start once, behind the engine's kernels that the submission waits for and
        behind earlier submissions: before them it would measure those."""
        if not submission.started:
            submission.started = True
            submission.start.record(stream)

    def _launch(
        self,
        direction: Direction,
        rows: CopyRows,
        table: _Table,
        span: tuple[int, int],
        programs: int,
    ) -> None:
        first, end = span
        to_cache = direction is Direction.TO_DEVICE
        if self._kernels:
            self._kernels[rows.group].launch(table.device, first, end - first, to_cache, programs)
            return
        lane = self._lanes[direction]
        before = (lane.next_buffer - 1) % len(lane.buffers)
        words = self._codec.groups[rows.group].block_bytes // self._codec.word_bytes
        staging = lane.buffers[before].memory[: words * (end - first)]
        move = scatter if to_cache else gather
        move(self._views[rows.group], table.device[0, first:end], staging, words)

    def _transfer(
        self, direction: Direction, buffer: _Buffer, piece: StagedPiece, lane: _Lane
    ) -> None:
        """Queues the transfers between a staging buffer and the pool."""
        memory = self._memory
        if memory is None:
            raise RuntimeError("no pool is attached")
        staging = piece.within + np.uint64(buffer.address)
        if self._batch is not None:
            if direction is Direction.TO_DEVICE:
                self._batch(staging, piece.host, piece.sizes, lane.dma.cuda_stream)
            else:
                self._batch(piece.host, staging, piece.sizes, lane.dma.cuda_stream)
            return
        theirs_all = buffer.memory.view(torch.uint8)
        with torch.cuda.stream(lane.dma):
            for at, to, size in zip(
                piece.host.tolist(), piece.within.tolist(), piece.sizes.tolist(), strict=True
            ):
                ours = memory[at - self._host_address : at - self._host_address + size]
                theirs = theirs_all[to : to + size]
                source, target = (
                    (ours, theirs) if direction is Direction.TO_DEVICE else (theirs, ours)
                )
                target.copy_(source, non_blocking=True)

    def _seal(self, handle: CopyHandle) -> bool:
        submission, lane = handle.state, self._lanes[handle.direction]
        if not isinstance(submission, _Submission):
            return False
        try:
            transfers, end = cuda.Event(), self._end_event()
            transfers.record(lane.dma)
            lane.kernels.wait_event(transfers)
            end.record(lane.kernels)
        except RuntimeError:
            return False
        submission.end, submission.started = end, False
        for buffer in lane.buffers:
            # The failed part may still use it, unrecorded.
            buffer.free = end
        return True

    def _ready(self, handle: CopyHandle) -> bool:
        submission = handle.state
        if not isinstance(submission, _Submission):
            return True
        if not submission.end.query():
            return False
        if submission.started:
            handle.seconds = submission.start.elapsed_time(submission.end) / 1e3
        return True

    def _finish(self, handle: CopyHandle) -> None:
        submission = handle.state
        super()._finish(handle)
        if isinstance(submission, _Submission):
            self._tables += submission.tables
            submission.tables = []

    def _drain(self) -> None:
        for lane in self._lanes.values():
            lane.kernels.synchronize()
            lane.dma.synchronize()

    # The choice of a way.

    def set_rate(self, direction: Direction, bytes_per_second: float) -> None:
        """Takes a measured rate, from which the limit of what may be in flight follows."""
        if not self._fixed_limit:
            limit = int(bytes_per_second * LIMIT_SECONDS)
            self.limit(direction, max(self._limit_bytes, limit))

    def choose(self, direction: Direction, way: str) -> None:
        """Uses ``way``, one of ``ways(direction)``. Nothing may be in flight."""
        self._lanes[direction].way = way
        self._describe()

    def give_up_batches(self) -> None:
        """Does without batched copies: the driver rejected one. Nothing may be in flight."""
        self._batch = None

    def ways(self, direction: Direction) -> list[str]:
        """Returns the ways that this process can use, ``batch`` first."""
        ways = ["staged"] if self._batch is None else ["batch", "staged"]
        if self._kernels and direction is Direction.TO_DEVICE:
            # To the host it costs the engine's kernels 40 % while it runs.
            ways.append("direct")
        return ways


def _batch_copy() -> BatchCopy | None:
    try:
        return BatchCopy()
    except OSError:
        return None


def _row_kernels(runs: Sequence[Any], device: torch.device) -> list[Any]:
    """Returns the kernel of each group; none without Triton."""
    try:
        from kvtier.transfer.cuda_kernels import RowKernel
    except ImportError:
        return []
    try:
        return [RowKernel(each, device) for each in runs]
    except Exception as error:  # noqa: BLE001
        # Compilers fail in many ways (no C compiler, a read-only cache); torch's kernels remain.
        logger.warning("KVTier: copies use torch's kernels, Triton's do not compile: %s", error)
        return []
