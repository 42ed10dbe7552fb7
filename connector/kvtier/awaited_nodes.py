"""Nodes of a prefix order that requests of a queue wait for, the last one of the queue first.

Every node that is awaited has a *rank*: the place in the queue of the first request that waits for
it. What is awaited is evicted only when nothing else can be, and then the node with the highest
rank goes: its use is the furthest in the future. The time of each method is logarithmic in the
number of awaited nodes, averaged over the calls.

Not thread-safe.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

MAX_OUTDATED = 64
_ALL = -1
"""The heap of all groups."""


class AwaitedNodes:
    """``can_be_evicted(node)``: whether a node is a leaf that is not parked. ``group_of(node)``:
    its group."""

    def __init__(
        self, can_be_evicted: Callable[[int], bool], group_of: Callable[[int], int]
    ) -> None:
        self._can_be_evicted = can_be_evicted
        self._group_of = group_of
        self._ranks: dict[int, int] = {}
        self._heaps: dict[int, list[tuple[int, int]]] = {}
        """By group, and of all groups: (-rank, node) of at least every node that can be evicted.
        What is outdated is dropped when it is found."""

    def __len__(self) -> int:
        return len(self._ranks)

    def rank_of(self, node: int) -> int:
        """The rank of a node; 0 if it is not awaited."""
        return self._ranks.get(node, 0)

    def set_rank(self, node: int, rank: int) -> None:
        """The node is awaited from here on, or at another place of the queue."""
        if self._ranks.get(node) != rank:
            self._ranks[node] = rank
            self.offer(node)

    def remove(self, node: int) -> None:
        """The node is awaited no longer, or has left."""
        self._ranks.pop(node, None)
        if not self._ranks:
            self._heaps.clear()

    def offer(self, node: int) -> None:
        """It may be that an awaited node can be evicted from here on, or that its group is
        another one."""
        rank = self._ranks.get(node)
        if rank is None or not self._can_be_evicted(node):
            return
        for group in (_ALL, self._group_of(node)):
            heap = self._heaps.setdefault(group, [])
            if len(heap) >= MAX_OUTDATED + 2 * len(self._ranks):
                heap[:] = sorted({each for each in heap if self._holds(each, group)})
            heapq.heappush(heap, (-rank, node))

    def last(self, group: int = _ALL) -> int:
        """The node with the highest rank that can be evicted, of one group or of all; 0 if there is
        none. It stays."""
        heap = self._heaps.get(group)
        while heap:
            if self._holds(heap[0], group):
                return heap[0][1]
            heapq.heappop(heap)
        self._heaps.pop(group, None)
        return 0

    def _holds(self, item: tuple[int, int], group: int) -> bool:
        rank, node = item
        return (
            self._ranks.get(node) == -rank
            and self._can_be_evicted(node)
            and group in (_ALL, self._group_of(node))
        )
