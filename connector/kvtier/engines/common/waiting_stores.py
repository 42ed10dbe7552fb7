"""Chunks whose blocks are referenced while they wait for a slot. The scheduler's thread only.

Their number is bounded by the blocks that stores may reference, which can be thousands of chunks,
and a step costs nothing for those that go on waiting.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any, NamedTuple

from kvtier.engines.common.request_state import RequestState

WAITING_STEPS = 2
WAITING_SECONDS = 0.1
"""How long chunks wait for a slot: at least this many steps and this long. Steps of an idle engine
take a tenth of a millisecond, an eviction up to 100 ms."""


class ChunkBlocks(NamedTuple):
    """What one object is copied from. ``previous``: key of the chunk before it if the object is of
    no use without that, else empty."""

    group: int
    key: bytes
    previous: bytes
    state: RequestState
    ids: tuple[int, ...]
    blocks: list[Any]


class _Waiting(NamedTuple):
    """``number``: in the order in which they came. ``until_step``, ``until``: when it is given up,
    the later of both."""

    number: int
    chunk: ChunkBlocks
    until_step: int
    until: float


class WaitingStores:
    """The chunks of one engine that wait, in the order in which they came."""

    def __init__(self, groups: int) -> None:
        self._queues: tuple[deque[_Waiting], ...] = tuple(deque() for _ in range(groups))
        """By group, because a slot is of one group."""
        self._numbers = count()
        self._step = 0

    def __len__(self) -> int:
        return sum(map(len, self._queues))

    def begin_step(self) -> None:
        """The steps that chunks have waited are counted by this."""
        self._step += 1

    def add(self, chunk: ChunkBlocks, now: float) -> None:
        """The chunk waits from now on."""
        until_step = self._step + WAITING_STEPS + 1
        self._queues[chunk.group].append(
            _Waiting(next(self._numbers), chunk, until_step, now + WAITING_SECONDS)
        )

    def with_slots(self, credits: Sequence[Sequence[int]]) -> Iterator[ChunkBlocks]:
        """Yields the chunks for which there is a slot. Each waits no longer once the next one is
        asked for, when it must have taken a slot from ``credits``, the free slots by group.
        """
        while heads := [queue for queue in self._queues if queue and credits[queue[0].chunk.group]]:
            queue = min(heads, key=_first_number)
            yield queue[0].chunk
            queue.popleft()

    def take_given_up(self, now: float) -> Iterator[ChunkBlocks]:
        """Removes and yields the chunks that have waited long enough."""
        while heads := [
            queue
            for queue in self._queues
            if queue and queue[0].until_step <= self._step and queue[0].until <= now
        ]:
            yield min(heads, key=_first_number).popleft().chunk

    def take_all(self) -> Iterator[ChunkBlocks]:
        """Removes and yields every chunk."""
        while heads := [queue for queue in self._queues if queue]:
            yield min(heads, key=_first_number).popleft().chunk


def _first_number(queue: deque[_Waiting]) -> int:
    return queue[0].number
