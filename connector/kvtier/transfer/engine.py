"""What every copy engine offers, and the values that go in and out.

A copy engine moves whole blocks between the engine's KV cache (the *device*, even where that is a CPU) and the host
pool. It decides nothing: which slot, which blocks and when to stop are its caller's business.

Threads: one thread, the transfer thread, calls ``submit``, ``done``, ``synchronise``, ``attach`` and ``detach``.
``fence`` is called by the thread that launches the engine's kernels. Nothing here is called by two threads at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from kvtier.errors import KVTierError
from kvtier.transfer.codec import Codec
from kvtier.transfer.host_pool import HostPool

IN_FLIGHT_BYTES = 256 << 20
"""Most that may be submitted and unfinished per direction: what a limit or an abort has to drain (about 5 ms at 50
GB/s).
"""


class CopyError(KVTierError):
    """A copy that was refused (an address outside cache or pool) or that the device failed. What it should have
    written is undefined.
    """


class Direction(Enum):
    """Which way the bytes go."""

    TO_DEVICE = "to_device"
    TO_HOST = "to_host"


@dataclass(frozen=True, slots=True)
class Copy:
    """Blocks ``first .. first + len(blocks)`` of one object's shard, and the device blocks they belong to.

    ``shard``: byte offset of this rank's shard in the pool. ``blocks``: device block ids, in the order of the object.
    """

    group: int
    shard: int
    first: int
    blocks: tuple[int, ...]


@dataclass(slots=True, eq=False)
class CopyHandle:
    """What ``submit`` returned: ask the engine whether it is ``done``. ``state`` belongs to the engine."""

    direction: Direction
    total_bytes: int
    finished: bool = False
    state: object = field(default=None, repr=False)


class CopyEngine(ABC):
    """Base of the copy engines: address checks and in-flight accounting; a backend adds the moving."""

    kind = ""

    def __init__(self, codec: Codec, in_flight_bytes: int = IN_FLIGHT_BYTES) -> None:
        self._codec = codec
        self._limit_bytes = in_flight_bytes
        self._in_flight = dict.fromkeys(Direction, 0)
        self._handles: set[CopyHandle] = set()
        self._pool: HostPool | None = None

    @property
    def codec(self) -> Codec:
        """The byte layout this engine copies by."""
        return self._codec

    @property
    def pool(self) -> HostPool | None:
        """The attached pool, ``None`` when there is none."""
        return self._pool

    def attach(self, pool: HostPool) -> None:
        """Copies go to and from ``pool`` from here on. Nothing may be in flight."""
        self._pool = pool

    def detach(self) -> None:
        """Forgets the pool. Nothing may be in flight."""
        self._pool = None

    def in_flight_bytes(self, direction: Direction) -> int:
        """Bytes submitted and not yet known to be done."""
        return self._in_flight[direction]

    def has_room(self, direction: Direction, nbytes: int, alone: bool = True) -> bool:
        """Whether ``nbytes`` more stay within the bound. ``alone``: they cannot be made less, so with nothing in
        flight they go.
        """
        used = self._in_flight[direction]
        return used + nbytes <= self._limit_bytes or (alone and used == 0)

    def copy_bytes(self, copy: Copy) -> int:
        """Bytes that ``copy`` moves."""
        return self._codec.groups[copy.group].block_bytes * len(copy.blocks)

    def check(self, copy: Copy) -> str:
        """Why ``copy`` would touch memory it must not; empty: it would not.

        Checked on the host because a wrong index on a GPU is not an error of one copy: it ends the whole process's use
        of the device.
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
            return f"blocks {copy.first}+{len(copy.blocks)} are not within a chunk of {group.blocks_per_chunk}"
        if min(copy.blocks) < 1 or max(copy.blocks) >= self._codec.num_blocks:
            return f"a block id is outside 1..{self._codec.num_blocks - 1}"
        if len(set(copy.blocks)) != len(copy.blocks):
            return "a block id occurs twice"
        if copy.shard < 0 or copy.shard + group.shard_bytes > self._pool.nbytes:
            return f"shard at {copy.shard} is not within a pool of {self._pool.nbytes} bytes"
        if copy.shard % self._codec.word_bytes:
            return f"shard at {copy.shard} is not aligned to {self._codec.word_bytes} bytes"
        return ""

    def submit(
        self, copies: Sequence[Copy], direction: Direction, after: object | None = None
    ) -> CopyHandle:
        """Starts ``copies``; returns at once where the backend can. ``after``: a ``fence``; no device memory is read or
        written before it.

        Raises ``CopyError`` before anything was started if an address is wrong, or when the device refuses: then
        ``synchronise`` must come before the memory involved is trusted again.
        """
        for copy in copies:
            problem = self.check(copy)
            if problem:
                raise CopyError(f"copy refused: {problem}")
        handle = CopyHandle(direction, sum(self.copy_bytes(copy) for copy in copies))
        self._in_flight[direction] += handle.total_bytes
        self._handles.add(handle)
        try:
            self._start(handle, copies, after)
        except RuntimeError as error:
            self._finish(handle)
            raise CopyError(f"copy failed: {error}") from error
        return handle

    def done(self, handle: CopyHandle) -> bool:
        """Whether every byte of ``handle`` is where it belongs. Never blocks. Raises ``CopyError`` if the device
        failed.
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
        return ready

    def synchronise(self) -> None:
        """Returns when nothing that was submitted touches device or pool any more. Raises ``CopyError`` if that cannot
        be established.
        """
        try:
            self._drain()
        except RuntimeError as error:
            raise CopyError(f"the device cannot be synchronised: {error}") from error
        for handle in list(self._handles):
            self._finish(handle)

    def fence(self) -> object | None:
        """Marks this point in the engine's stream of kernels; ``None`` where kernels are synchronous."""
        return None

    def enter_thread(self) -> None:
        """Called once by the transfer thread before anything else."""
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

    @abstractmethod
    def _start(self, handle: CopyHandle, copies: Sequence[Copy], after: object | None) -> None:
        """Starts checked copies. Raises ``RuntimeError`` on failure."""

    @abstractmethod
    def _ready(self, handle: CopyHandle) -> bool:
        """Whether the started copies are done. Raises ``RuntimeError`` on failure."""

    @abstractmethod
    def _drain(self) -> None:
        """Blocks until nothing runs. Raises ``RuntimeError`` on failure."""
