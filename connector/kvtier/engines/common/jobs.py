"""The jobs that the scheduler side gives to the workers, and the ends of loads.

They know no engine. Each connector carries them in messages of its own, which the engine pickles
once for each step and unpickles in every rank, between the arrival of a request and the first copy
of its load. So jobs are pickled as a few byte strings: a key takes 8 bytes for its slot and
generation, 4 for each block, and 2 for the shape of its run if there are several. The number of
objects does not grow with the keys. What does not fit (an offset that is no multiple of the page
size, a number beyond its width) is pickled as it is, and the rank rejects it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any, overload

import numpy as np

from kvtier.store.generations import PAGE_SHIFT

_PAGE_MASK = (1 << PAGE_SHIFT) - 1
_MAX_SHAPES = 1 << 16
Packed = tuple[Any, ...]
Reduced = tuple[Callable[..., Any], tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class BlockRun:
    """Consecutive blocks of one object, and the engine blocks that hold them in GPU memory.

    ``first``: number of the first block within the object; 0 unless a local hit ends inside the
    chunk.
    """

    group: int
    first: int
    blocks: tuple[int, ...]


Shape = tuple[int, int, int]
"""Of a run: group, first block, number of blocks."""


class LoadRuns(Sequence[BlockRun]):
    """The runs of a load, each of which is built when it is asked for. Immutable.

    ``shapes[i]``: of the i-th run. ``blocks``: of all runs, one after the other.
    """

    __slots__ = ("_starts", "blocks", "shapes")

    def __init__(self, shapes: Sequence[Shape], blocks: Sequence[int]) -> None:
        self.shapes = shapes
        self.blocks = blocks
        self._starts: list[int] | None = None
        """Of the blocks of each run. Only a rank needs them."""

    @classmethod
    def of(cls, runs: Sequence[BlockRun]) -> LoadRuns:
        """The same runs."""
        if isinstance(runs, LoadRuns):
            return runs
        shapes = [(run.group, run.first, len(run.blocks)) for run in runs]
        return cls(shapes, list(chain.from_iterable(run.blocks for run in runs)))

    def __len__(self) -> int:
        return len(self.shapes)

    @overload
    def __getitem__(self, index: int) -> BlockRun: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[BlockRun, ...]: ...

    def __getitem__(self, index: int | slice) -> BlockRun | tuple[BlockRun, ...]:
        if isinstance(index, slice):
            return tuple(self[each] for each in range(*index.indices(len(self))))
        group, first, count = self.shapes[index]
        if self._starts is None:
            self._starts = [0, *accumulate(shape[2] for shape in self.shapes)]
        start = self._starts[index if index >= 0 else len(self) + index]
        return BlockRun(group, first, tuple(self.blocks[start : start + count]))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return f"LoadRuns({list(self)})"

    def __reduce__(self) -> Reduced:
        return _unpack_runs, _pack_runs(self)


def _pack_runs(runs: Sequence[BlockRun]) -> Packed:
    every = LoadRuns.of(runs)
    blocks, shapes = _array(every.blocks, 1 << 31), tuple(dict.fromkeys(every.shapes))
    if blocks is None or len(shapes) > _MAX_SHAPES:
        return list(every.shapes), list(every.blocks), None
    if len(shapes) <= 1:
        return shapes, blocks.astype(np.int32).tobytes(), len(every)
    numbers = {shape: number for number, shape in enumerate(shapes)}
    which = np.array([numbers[shape] for shape in every.shapes], np.uint16)
    return shapes, blocks.astype(np.int32).tobytes(), which.tobytes()


def _unpack_runs(shapes: Any, blocks: Any, which: Any) -> LoadRuns:
    if which is None:
        return LoadRuns(shapes, blocks)
    if isinstance(which, int):
        of_runs = list(shapes) * which
    else:
        of_runs = [shapes[number] for number in np.frombuffer(which, np.uint16).tolist()]
    return LoadRuns(of_runs, np.frombuffer(blocks, np.int32).tolist())


def _array(numbers: Sequence[int], limit: int) -> Any:
    """The numbers as an array; None if one is negative or at least ``limit``."""
    try:
        array = np.array(numbers, dtype=np.int64)
    except (OverflowError, TypeError, ValueError):
        return None
    return None if len(array) and (array.min() < 0 or array.max() >= limit) else array


def _pack_locations(slots: Sequence[int], generations: Sequence[int]) -> Packed:
    offsets, words = _array(slots, 1 << 32 + PAGE_SHIFT), _array(generations, 1 << 32)
    if offsets is None or words is None or len(offsets) != len(words):
        return tuple(slots), tuple(generations)
    if (offsets & _PAGE_MASK).any():
        return tuple(slots), tuple(generations)
    both = np.array((offsets >> PAGE_SHIFT, words), np.uint32)
    return (both.tobytes(),)


def _unpack_locations(packed: Packed) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if len(packed) != 1:
        slots, generations = packed
        return slots, generations
    pages, words = np.frombuffer(packed[0], np.uint32).reshape(2, -1).astype(np.int64)
    return tuple((pages << PAGE_SHIFT).tolist()), tuple(words.tolist())


@dataclass(frozen=True, slots=True)
class LoadJob:
    """Copies slots of the host pool into GPU blocks.

    ``runs[i]`` belongs to the i-th key of the load, which is at byte offset ``slots[i]``, as long
    as the slot's generation word is ``generations[i]``. Keys beyond the end of ``slots`` are no
    longer in RAM. ``epoch``: the tierd epoch that named the slots; a worker that is attached to
    another one fails the job. ``timeout_seconds``: how long the worker submits copies, from when it
    receives the job. ``arriving``: keys beyond the end of ``slots`` are not in RAM yet; they follow
    in ``ArrivedKeys``, of which one says that it is the last.
    """

    load: int
    request_id: str
    runs: Sequence[BlockRun]
    timeout_seconds: float
    epoch: int = 0
    slots: tuple[int, ...] = ()
    generations: tuple[int, ...] = ()
    arriving: bool = False

    def __reduce__(self) -> Reduced:
        scalars = (self.load, self.request_id, self.timeout_seconds, self.epoch, self.arriving)
        locations = _pack_locations(self.slots, self.generations)
        return _unpack_load, (scalars, _pack_runs(self.runs), locations)


def _unpack_load(scalars: Packed, runs: Packed, locations: Packed) -> LoadJob:
    load, request_id, timeout, epoch, arriving = scalars
    slots, generations = _unpack_locations(locations)
    return LoadJob(
        load, request_id, _unpack_runs(*runs), timeout, epoch, slots, generations, arriving
    )


@dataclass(frozen=True, slots=True)
class ArrivedKeys:
    """The next keys of a load that is ``arriving``: where they are, as in ``LoadJob``. ``last``: no
    more follow, and what is missing then fails the load from there on."""

    load: int
    slots: tuple[int, ...]
    generations: tuple[int, ...]
    last: bool

    def __reduce__(self) -> Reduced:
        locations = _pack_locations(self.slots, self.generations)
        return _unpack_arrived, (self.load, self.last, locations)


def _unpack_arrived(load: int, last: bool, locations: Packed) -> ArrivedKeys:
    slots, generations = _unpack_locations(locations)
    return ArrivedKeys(load, slots, generations, last)


@dataclass(frozen=True, slots=True)
class StoreJob:
    """Copies a whole chunk from GPU blocks into ``slot``, then delivers ``reservation`` to tierd.

    ``slot``: byte offset in the host pool. ``epoch``: the tierd epoch that granted the slot; a
    worker that is attached to another one drops the job.
    """

    reservation: int
    slot: int
    epoch: int
    run: BlockRun


def pack_stores(jobs: Sequence[StoreJob]) -> Packed:
    """Returns the stores of a step as ``unpack_stores`` takes them."""
    runs = _pack_runs([job.run for job in jobs])
    rows = [(job.reservation, job.slot, job.epoch) for job in jobs]
    try:
        return runs, np.array(rows, np.int64).tobytes()
    except (OverflowError, TypeError, ValueError):
        return runs, rows


def unpack_stores(packed: Packed) -> list[StoreJob]:
    """The jobs of ``pack_stores``."""
    runs, rows = packed
    if isinstance(rows, bytes):
        rows = np.frombuffer(rows, np.int64).reshape(-1, 3).tolist()
    return [
        StoreJob(reservation, slot, epoch, run)
        for (reservation, slot, epoch), run in zip(rows, _unpack_runs(*runs), strict=True)
    ]


@dataclass(frozen=True, slots=True)
class LoadResult:
    """The end of one load on one rank.

    The first ``keys_loaded`` keys are in GPU memory. ``seconds``: since the worker got the job.
    ``copy_seconds``: of these, copying on the device; 0 if that is not known.

    A load whose last copies still run may be reported before (``copying``): kernels that are
    launched afterwards wait for them on the device. A second result follows when they have ended
    (``follows``).
    """

    load: int
    request_id: str
    keys_loaded: int
    reason: str = ""
    seconds: float = 0.0
    copy_seconds: float = 0.0
    copied_bytes: int = 0
    copying: bool = False
    follows: bool = False
