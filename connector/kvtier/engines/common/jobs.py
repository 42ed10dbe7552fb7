"""The jobs that the scheduler side gives to the workers, and the ends of loads.

They know no engine. Each connector carries them in messages of its own.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockRun:
    """Consecutive blocks of one object, and the engine blocks that hold them in GPU memory.

    ``first``: number of the first block within the object; 0 unless a local hit ends inside the
    chunk.
    """

    group: int
    first: int
    blocks: tuple[int, ...]


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
    runs: tuple[BlockRun, ...]
    timeout_seconds: float
    epoch: int = 0
    slots: tuple[int, ...] = ()
    generations: tuple[int, ...] = ()
    arriving: bool = False


@dataclass(frozen=True, slots=True)
class ArrivedKeys:
    """The next keys of a load that is ``arriving``: where they are, as in ``LoadJob``. ``last``: no
    more follow, and what is missing then fails the load from there on."""

    load: int
    slots: tuple[int, ...]
    generations: tuple[int, ...]
    last: bool


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
