"""The interface of copy engines.

A copy engine moves whole blocks between the engine's KV cache (the *device*, even on a CPU) and the
host pool. Its caller decides which slots and blocks, and when to stop.

Threads: the thread that launches the engine's kernels calls ``fence``, ``submit`` and ``done``;
another one calls the same, and ``attach``, ``detach`` and ``synchronize``. The caller's lock keeps
two of these calls apart. ``wait_idle`` is called without it.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from kvtier.errors import KVTierError
from kvtier.transfer.codec import Codec
from kvtier.transfer.host_pool import HostPool

IN_FLIGHT_BYTES = 256 << 20
"""Limit per direction: a timeout or an abort has to drain this much, about 5 ms at 50 GB/s."""


class CopyError(KVTierError):
    """A copy was rejected (an address outside the cache or the pool), or the device failed.

    The content of its target is undefined.
    """


class Direction(Enum):
    """The direction of a copy."""

    TO_DEVICE = "to_device"
    TO_HOST = "to_host"


@dataclass(frozen=True, slots=True)
class Copy:
    """Consecutive blocks of one object's shard, and the device blocks that they belong to.

    ``shard``: byte offset of this rank's shard in the pool. ``first``: number of the first block
    within the object. ``blocks``: device block ids, in the order of the object.
    """

    group: int
    shard: int
    first: int
    blocks: tuple[int, ...]


@dataclass(slots=True, eq=False)
class CopyHandle:
    """A submission, for ``CopyEngine.done``. ``state`` belongs to the engine."""

    direction: Direction
    total_bytes: int
    finished: bool = False
    seconds: float = 0.0
    """Time on the device between the first and the last byte; 0 until it is known."""
    state: object = field(default=None, repr=False)
    failure: str = ""
    """Why a part of it was not submitted. ``done`` raises once the other part has ended."""


class CopyEngine(ABC):
    """Base class: address checks and in-flight accounting. A backend implements the copies."""

    kind = ""
    batch_bytes = 32 << 20
    """How much a caller should submit at once: it checks deadlines between two submissions."""

    def __init__(self, codec: Codec, in_flight_bytes: int = IN_FLIGHT_BYTES) -> None:
        self._codec = codec
        self._limit_bytes = in_flight_bytes
        self._limits = dict.fromkeys(Direction, in_flight_bytes)
        self._in_flight = dict.fromkeys(Direction, 0)
        self._handles: set[CopyHandle] = set()
        self._pool: HostPool | None = None
        self._empty_groups = frozenset(
            index for index, group in enumerate(codec.groups) if not group.layers
        )

    @property
    def codec(self) -> Codec:
        """The byte layout of the copies."""
        return self._codec

    @property
    def pool(self) -> HostPool | None:
        """The attached pool, if any."""
        return self._pool

    def attach(self, pool: HostPool) -> None:
        """Uses ``pool`` for all further copies. Nothing may be in flight."""
        self._pool = pool

    def detach(self) -> None:
        """Detaches the pool. Nothing may be in flight."""
        self._pool = None

    def limit(self, direction: Direction, nbytes: int) -> None:
        """Sets how much may be submitted and unfinished in one direction."""
        self._limits[direction] = nbytes

    def in_flight_bytes(self, direction: Direction) -> int:
        """Returns the bytes that are submitted and not known to be done."""
        return self._in_flight[direction]

    def has_room(self, direction: Direction, nbytes: int, alone: bool = True) -> bool:
        """Returns whether ``nbytes`` more stay within the limit.

        ``alone``: the bytes cannot be split, so they may exceed it if nothing else is in flight.
        """
        used = self._in_flight[direction]
        return used + nbytes <= self._limits[direction] or (alone and used == 0)

    def copy_bytes(self, copy: Copy) -> int:
        """Returns the bytes that ``copy`` moves; 0 for a group that does not exist."""
        groups = self._codec.groups
        known = 0 <= copy.group < len(groups)
        return groups[copy.group].block_bytes * len(copy.blocks) if known else 0

    def check(self, copy: Copy) -> str:
        """Returns why ``copy`` would touch memory that it must not touch; empty if it is valid.

        The check runs on the host, because on a GPU a wrong index does not fail one copy: the
        process cannot use the device afterwards.
        """
        if self._pool is None:
            return "no pool is attached"
        if not 0 <= copy.group < len(self._codec.groups):
            return f"group {copy.group} does not exist"
        group = self._codec.groups[copy.group]
        if (
            not copy.blocks
            or copy.first < 0
            or copy.first + len(copy.blocks) > group.blocks_per_chunk
        ):
            end = copy.first + len(copy.blocks)
            size = group.blocks_per_chunk
            return f"blocks {copy.first} to {end} are not within a chunk of {size} blocks"
        first, count = self._codec.first_block, self._codec.num_blocks
        if min(copy.blocks) < first or max(copy.blocks) >= count:
            return f"a block id is outside {first}..{count - 1}"
        if len(set(copy.blocks)) != len(copy.blocks):
            return "a block id occurs twice"
        if copy.shard < 0 or copy.shard + group.shard_bytes > self._pool.nbytes:
            return f"shard at {copy.shard} is not within a pool of {self._pool.nbytes} bytes"
        if copy.shard % self._codec.word_bytes:
            return f"shard at {copy.shard} is not aligned to {self._codec.word_bytes} bytes"
        return ""

    def first_invalid(self, copies: Sequence[Copy]) -> tuple[int, str] | None:
        """Returns the position of the first copy for which ``check`` finds a problem, with the
        problem; None if all are valid."""
        pool = self._pool
        groups = {copy.group for copy in copies}
        if pool is not None and len(groups) == 1 and 0 <= min(groups) < len(self._codec.groups):
            group = self._codec.groups[copies[0].group]
            shards = [copy.shard for copy in copies]
            blocks = np.fromiter(itertools.chain.from_iterable(c.blocks for c in copies), np.int64)
            if (
                len(blocks)
                and all(c.blocks and c.first >= 0 for c in copies)
                and all(c.first + len(c.blocks) <= group.blocks_per_chunk for c in copies)
                and blocks.min() >= self._codec.first_block
                and blocks.max() < self._codec.num_blocks
                and len(np.unique(blocks)) == len(blocks)
                and min(shards) >= 0
                and max(shards) + group.shard_bytes <= pool.nbytes
                and not any(shard % self._codec.word_bytes for shard in shards)
            ):
                return None
        for position, copy in enumerate(copies):
            problem = self.check(copy)
            if problem:
                return position, problem
        return None

    def submit(
        self,
        copies: Sequence[Copy],
        direction: Direction,
        after: object | None = None,
        checked: bool = False,
    ) -> CopyHandle:
        """Starts ``copies``, and returns without waiting where the backend supports that.

        ``after``: a ``fence``; device memory is neither read nor written before it. ``checked``:
        the caller has called ``check`` for every copy. Raises
        ``CopyError`` for an invalid address, before anything has started, or if the device fails.
        If the device still runs a part of the copies then, the handle is returned all the same, and
        ``done`` raises once that part has ended. Copies of groups that have no layers on this rank
        move nothing.
        """
        invalid = None if checked else self.first_invalid(copies)
        if invalid is not None:
            raise CopyError(f"invalid copy: {invalid[1]}")
        if self._empty_groups:
            copies = [copy for copy in copies if copy.group not in self._empty_groups]
        handle = CopyHandle(direction, sum(self.copy_bytes(copy) for copy in copies))
        if not copies:
            handle.finished = True
            return handle
        self._in_flight[direction] += handle.total_bytes
        self._handles.add(handle)
        try:
            self._start(handle, copies, after)
        except RuntimeError as error:
            if not self._seal(handle):
                self._finish(handle)
                raise CopyError(f"copy failed: {error}") from error
            handle.failure = f"copy failed: {error}"
        return handle

    def done(self, handle: CopyHandle) -> bool:
        """Returns whether all copies of ``handle`` are complete. Never blocks.

        Raises ``CopyError`` if the device failed.
        """
        if handle.finished:
            return True
        try:
            ready = self._ready(handle)
        except RuntimeError as error:
            self._finish(handle)
            raise CopyError(f"copy failed: {error}") from error
        if ready:
            self._finish(handle)
            if handle.failure:
                raise CopyError(handle.failure)
        return ready

    def wait_idle(self) -> None:
        """Waits until the copies that were submitted before have ended. Any thread.

        Raises ``CopyError`` if that cannot be determined.
        """
        try:
            self._drain()
        except RuntimeError as error:
            raise CopyError(f"the device cannot be synchronized: {error}") from error

    def synchronize(self) -> None:
        """Waits until no submitted copy touches the device or the pool.

        Raises ``CopyError`` if that cannot be determined.
        """
        self.wait_idle()
        for handle in list(self._handles):
            self._finish(handle)

    def fence(self) -> object | None:
        """Returns a mark in the stream of the engine's kernels; None if kernels are synchronous."""
        return None

    @property
    def can_order_kernels(self) -> bool:
        """Whether ``order_kernels`` works."""
        return False

    def order_kernels(self, handles: Sequence[CopyHandle]) -> None:
        """Makes the engine's kernels that are launched from now on wait for these submissions, on
        the device. The engine's thread only.

        Raises ``CopyError`` if the device failed.
        """
        raise CopyError("this copy engine has no order with kernels")

    def enter_thread(self) -> None:
        """Prepares the transfer thread, which calls it before anything else."""
        return

    def close(self) -> None:
        """Releases buffers. Nothing may be in flight."""
        self.detach()

    def _finish(self, handle: CopyHandle) -> None:
        if not handle.finished:
            handle.finished = True
            handle.state = None
            self._in_flight[handle.direction] -= handle.total_bytes
            self._handles.discard(handle)

    @property
    def synchronous(self) -> bool:
        """Whether a copy is complete when ``submit`` returns."""
        return False

    @abstractmethod
    def _start(self, handle: CopyHandle, copies: Sequence[Copy], after: object | None) -> None:
        """Starts checked copies. Raises ``RuntimeError`` on failure."""

    def _seal(self, handle: CopyHandle) -> bool:
        """Makes ``_ready`` wait for what ``_start`` submitted before it failed.

        Returns False if nothing runs, or the device is lost.
        """
        return False

    @abstractmethod
    def _ready(self, handle: CopyHandle) -> bool:
        """Returns whether the started copies are complete. Raises ``RuntimeError`` on failure."""

    @abstractmethod
    def _drain(self) -> None:
        """Blocks until no copy runs. Raises ``RuntimeError`` on failure."""
