"""The order in which chunks are evicted: the end of the least recently used prefix first.

A chunk is of no use without the chunks before it, so none is evicted while a chunk that follows it
is held. The chunks of a tier form a forest: each one knows the chunk before it. Only leaves are
evicted, the least recently used one first. When a leaf goes, the chunk before it is at least as
recently used as the leaf was: a prompt ages as a whole and shrinks from its end.

Nodes are small integers in arrays, 33 bytes each. Every method takes constant time, averaged over
the calls and apart from what is awaited (``kvtier.awaited_nodes``), by two rules:

* The leaves are in a linked list in the order of use. A chunk whose successor is used leaves the
  list, because it will inherit the successor's place.
* What is found at the head of the list and cannot be evicted (it is parked or awaited, or is no
  leaf) is set aside. When it can be evicted again it returns to the head, where it is in order
  except among the few others that were set aside.

A node is *absent* before ``enter`` and after ``leave``. Absent nodes stand for chunks that are not
held while a chunk that follows them is: a chunk may arrive before its predecessor. Such an orphan
is of no use, and neither is what follows it. Both are evicted before everything else, until the
predecessor arrives or they are used.

``victim`` resists scans: a part of the room is kept for chunks that were used often, while others
come and go. Otherwise one pass of prompts that are never seen again would empty a tier.

Nodes may be *retained*: they go after all others, while they are not more than half of the nodes.

Nodes may be *awaited*: requests that wait in a queue are going to use them. They go when nothing
else can, the one whose request is the last in the queue first. As only leaves are evicted, the last
chunk of a prefix protects all of it. The chunk before an awaited one that is evicted is not awaited
for that: one request loses its prefix before the next one loses anything.

Nodes belong to *groups*, such as tenants, which have lists of their own: ``oldest_of`` finds the
next victim of one group. Without groups all nodes are in group 0.

Nothing here is thread-safe. The caller maps its objects to nodes.
"""

from __future__ import annotations

import heapq
from array import array
from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

from kvtier.awaited_nodes import AwaitedNodes

NONE = 0
"""No node. Also the head of the list of nodes of group 0 that were used once."""
KINDS = 3
"""Lists of a group: used once, used often, retained. Their heads have numbers in this order."""
_ONCE, _OFTEN_USED, _RETAINED_KIND = range(KINDS)
_PRESENT, _PARKED, _OFTEN, _ORPHAN, _RETAINED, _AWAITED, _USED_ALONE = 1, 2, 4, 8, 16, 32, 64
_KIND_OF = bytes(
    _RETAINED_KIND if flags & _RETAINED else _OFTEN_USED if flags & _OFTEN else _ONCE
    for flags in range(128)
)
RETAINED_SHARE = 2
"""Retained nodes go after all others while they are at most a half of what can be evicted: who asks
for everything to be retained gets the same as all others."""
KEPT_SHARE = 8
"""``victim`` keeps an eighth of the nodes for those used often. With a larger share, some traces of
conversations have fewer hits than by least recent use alone: what was used often is used no more
one day."""
KEPT_TURNS = 8
"""They are kept until so many uses and entries have followed their last use, in multiples of the
nodes that can be evicted: scans pass them by, and what is no longer used goes."""
MAX_OUTDATED = 64
_MAX_WALK = 64
"""Places compared when a node returns to the list. Only nodes that were set aside are passed."""
_MAX_DEPTH = 1 << 16
"""Predecessors that are followed to find the first orphan, or to exclude a cycle, which hashes
cannot form but messages can."""


class PrefixOrder:
    """A forest of chunks in the order of eviction.

    ``candidates``: for each kind of list (used once, used often, retained), how many nodes are
    present and not parked. All of them can be evicted, one after the other.
    """

    def __init__(self) -> None:
        self.candidates = [0] * KINDS
        self._parent = array("I")
        self._children = array("I")
        self._parked_children = array("I")
        self._before = array("I")
        self._after = array("I")
        self._used_at = array("Q")
        self._group = array("I")
        self._flags = bytearray()
        self._unused = NONE
        self._counts: dict[int, list[int]] = {}
        """Of each group but 0: nodes that are present, and those of them that are not parked."""
        self._free_groups: list[int] = []
        self._firsts: list[list[tuple[int, int]]] = [[] for _ in range(KINDS)]
        """With groups: for each kind a heap of lower bounds of the use of each list's first node,
        with the group."""
        self._bounds: list[dict[int, int]] = [{} for _ in range(KINDS)]
        """The bound of each group that counts; others in the heap are outdated."""
        for _ in range(KINDS):
            self._append()
        self._blocked: OrderedDict[int, None] = OrderedDict()
        """Nodes that could be evicted if all that follows them were not parked."""
        self._awaited = AwaitedNodes(self._can_be_evicted, self._group.__getitem__)
        self._now = 0

    # Nodes.

    def new(self) -> int:
        """An absent node."""
        node = self._unused
        if node:
            self._unused = self._after[node]
            self._before[node] = self._after[node] = node
            return node
        return self._append()

    def _append(self) -> int:
        node = len(self._flags)
        for values in (
            self._parent, self._children, self._parked_children, self._used_at, self._group
        ):  # fmt: skip
            values.append(0)
        self._before.append(node)
        self._after.append(node)
        self._flags.append(0)
        return node

    def __len__(self) -> int:
        """Numbers in use or used before: every node is below this."""
        return len(self._flags)

    def release(self, node: int) -> None:
        """The caller forgets an absent node, which nothing follows."""
        self._after[node], self._unused = self._unused, node

    def is_present(self, node: int) -> bool:
        """Whether the node has entered and not left."""
        return bool(self._flags[node] & _PRESENT)

    def is_often(self, node: int) -> bool:
        """Whether the node is in the list of nodes that are used often."""
        return bool(self._flags[node] & _OFTEN)

    def has_followers(self, node: int) -> bool:
        """Whether a node that is present follows this one."""
        return bool(self._children[node])

    def predecessor(self, node: int) -> int:
        """The node that this one follows; ``NONE`` if it is the first or that is not known."""
        return self._parent[node]

    @property
    def now(self) -> int:
        """How many uses and entries there were."""
        return self._now

    def recency(self) -> tuple[NDArray[np.uint64], NDArray[np.uint8]]:
        """Copies, by node: when it was used last, and whether it is present."""
        present = np.frombuffer(self._flags, dtype=np.uint8) & _PRESENT
        return np.array(self._used_at, dtype=np.uint64), present.astype(np.uint8)

    def group_of(self, node: int) -> int:
        """The group of a node that is present."""
        return self._group[node]

    # Groups.

    def new_group(self) -> int:
        """A group without nodes. Its number is below that of no node."""
        if not self._counts:
            for kind, bounds in enumerate(self._bounds):
                bounds[0] = 0
                self._firsts[kind] = [(0, 0)]
        if self._free_groups:
            group = self._free_groups.pop()
        else:
            group = self._append()
            for _ in range(KINDS - 1):
                self._append()
        self._counts[group] = [0, 0]
        return group

    def release_group(self, group: int) -> None:
        """The caller forgets a group, which has no nodes."""
        del self._counts[group]
        for bounds in self._bounds:
            bounds.pop(group, None)
        self._free_groups.append(group)

    def present_of(self, group: int) -> int:
        """How many nodes of a group, but 0, are present."""
        return self._counts[group][0]

    def candidates_of(self, group: int) -> int:
        """How many nodes of a group, but 0, are present and not parked."""
        return self._counts[group][1]

    def move(self, node: int, group: int) -> None:
        """It has become known to which group a present node belongs."""
        before = self._group[node]
        if before == group:
            return
        free = int(not self._flags[node] & _PARKED)
        self._count(before, -1, -free)
        self._group[node] = group
        self._count(group, 1, free)
        if self._after[node] != node:
            self._remove(node)
            self._insert_in_order(node)
        self._awaited.offer(node)

    # Changes.

    def enter(
        self,
        node: int,
        parent: int = NONE,
        *,
        group: int = 0,
        often: bool = False,
        oldest: bool = False,
        elsewhere: bool = False,
    ) -> None:
        """The chunk is held from here on, as the most recently used one, or as the ``oldest``.

        ``parent``: the node of the chunk before it, present or absent. An absent one makes this an
        orphan, unless that chunk can be had from ``elsewhere``.
        """
        parent = NONE if parent and self._leads_to(parent, node) else parent
        orphan = (
            bool(parent)
            and not elsewhere
            and self._flags[parent] & (_PRESENT | _ORPHAN) != _PRESENT
        )
        kind = _OFTEN if often else 0
        self._flags[node] = _PRESENT | kind | (_ORPHAN if orphan else 0)
        self._group[node] = group
        self.candidates[often] += 1
        if group:
            self._count(group, 1, 1)
        if orphan or oldest:
            self._used_at[node] = 0
            self._insert(node, group + often)
        else:
            self._now += 1
            self._used_at[node] = self._now
            self._insert(node, self._before[group + often])
        if parent:
            self._attach(node, parent)
        self._note_blocked(node)

    def leave(self, node: int) -> int:
        """The chunk is no longer held. Returns the node before it, if that is absent and has no
        followers left, so that the caller can forget it; else ``NONE``."""
        flags, parent, position = self._flags[node], self._parent[node], -1
        if self._after[node] != node:
            position = self._before[node]
            self._remove(node)
        if not flags & _PARKED:
            self.candidates[_KIND_OF[flags]] -= 1
        if self._group[node]:
            self._count(self._group[node], -1, -int(not flags & _PARKED))
        self._blocked.pop(node, None)
        if flags & _AWAITED:
            self._awaited.remove(node)
        self._flags[node], self._parent[node] = 0, NONE
        if not parent:
            return NONE
        self._children[parent] -= 1
        self._parked_children[parent] -= bool(flags & _PARKED)
        if not self._flags[parent] & _PRESENT:
            return NONE if self._children[parent] else parent
        head = self._group[node] + _KIND_OF[flags]
        same_list = position >= 0 and head == self._head(parent, flags & _OFTEN)
        self._inherit(
            parent, bool(flags & _OFTEN), self._used_at[node], position if same_list else -1
        )
        self._note_blocked(parent)
        if self._flags[parent] & _AWAITED:
            self._awaited.offer(parent)
        return NONE

    def use(self, node: int, *, often: bool = False, alone: bool = False) -> None:
        """The chunk was used. With ``often`` it is among those used often from here on. ``alone``:
        the chunk before it is absent and cannot be had from elsewhere, so ``orphan`` has no effect
        until the next use."""
        flags = self._flags[node]
        if not flags & _PRESENT:
            return
        if often and not flags & _OFTEN:
            self._make_often(node)
        self._flags[node] &= ~(_ORPHAN | _USED_ALONE)
        if alone:
            self._flags[node] |= _USED_ALONE
        self._now += 1
        self._used_at[node] = self._now
        if self._after[node] != node:
            self._remove(node)
        self._insert(node, self._before[self._head(node)])
        parent = self._parent[node]
        if parent:
            self._give_way(parent, node)

    def retain(self, node: int, retained: bool) -> None:
        """A present node goes after all others from here on, or no longer does."""
        flags = self._flags[node]
        if not flags & _PRESENT or bool(flags & _RETAINED) == retained:
            return
        self._flags[node] ^= _RETAINED
        if not flags & _PARKED:
            self.candidates[_KIND_OF[flags]] -= 1
            self.candidates[_KIND_OF[flags ^ _RETAINED]] += 1
        if self._after[node] != node:
            self._remove(node)
            self._insert_in_order(node)

    def await_node(self, node: int, rank: int) -> None:
        """A request of a queue is going to use a present node, or none is any longer (0). ``rank``:
        the place in the queue of the first request that is."""
        flags = self._flags[node]
        if not flags & _PRESENT:
            return
        if rank:
            self._flags[node] |= _AWAITED
            self._awaited.set_rank(node, rank)
        elif flags & _AWAITED:
            self._flags[node] &= ~_AWAITED
            self._awaited.remove(node)
            if self._after[node] == node and not flags & _PARKED and not self._children[node]:
                self._insert_in_order(node)

    def follow(self, node: int, parent: int) -> bool:
        """It has become known that a present node follows ``parent``. False if it follows a node
        already, or if it would follow itself."""
        if self._parent[node] or self._leads_to(parent, node):
            return False
        self._attach(node, parent)
        return True

    def park(self, node: int) -> None:
        """Excludes the node from eviction."""
        flags = self._flags[node]
        if flags & (_PRESENT | _PARKED) != _PRESENT:
            return
        self._flags[node] |= _PARKED
        self.candidates[_KIND_OF[flags]] -= 1
        if self._group[node]:
            self._count(self._group[node], 0, -1)
        self._blocked.pop(node, None)
        parent = self._parent[node]
        if parent:
            self._parked_children[parent] += 1
            self._note_blocked(parent)

    def offer(self, node: int) -> None:
        """Reverts ``park``. The order of use stays as it is."""
        flags = self._flags[node]
        if not flags & _PARKED:
            return
        self._flags[node] &= ~_PARKED
        self.candidates[_KIND_OF[flags]] += 1
        if self._group[node]:
            self._count(self._group[node], 0, 1)
        if self._after[node] == node and not self._children[node]:
            self._insert_in_order(node)
        if flags & _AWAITED:
            self._awaited.offer(node)
        self._note_blocked(node)
        parent = self._parent[node]
        if parent:
            self._parked_children[parent] -= 1
            self._blocked.pop(parent, None)

    def orphan(self, node: int) -> None:
        """The chunk before this one is absent, and cannot be had from elsewhere. No effect if the
        last use of this one was without it."""
        if self._flags[node] & (_PRESENT | _ORPHAN | _USED_ALONE) != _PRESENT:
            return
        self._flags[node] |= _ORPHAN
        self._used_at[node] = 0
        if self._after[node] != node:
            self._remove(node)
        if not self._children[node]:
            self._insert(node, self._head(node))

    # The next victim.

    def oldest(self, *, often: bool = False) -> int:
        """The least recently used leaf of one list that is neither parked nor awaited, or ``NONE``.
        It stays."""
        return self._oldest(int(often))

    def oldest_of(self, group: int) -> int:
        """The least recently used leaf of one group that is not parked, or ``NONE``. It stays.
        Those that are retained go after the others, and those that are awaited after these."""
        once, often = self._first(group), self._first(group + _OFTEN_USED)
        if once and often:
            return once if self._used_at[once] <= self._used_at[often] else often
        found = once or often or self._first(group + _RETAINED_KIND)
        return found or self._awaited.last(group)

    def awaited_victim(self) -> int:
        """The awaited leaf that is not parked and whose use is the furthest in the future, or
        ``NONE``. It stays. For use when ``victim`` finds none."""
        return self._awaited.last()

    def rank_of(self, node: int) -> int:
        """The rank at which a node is awaited; 0 if it is not."""
        return self._awaited.rank_of(node)

    def _oldest(self, kind: int) -> int:
        """The least recently used leaf of the lists of one kind that is not parked."""
        if not self._counts:
            return self._first(kind)
        heap, bounds = self._firsts[kind], self._bounds[kind]
        while heap:
            bound, group = heap[0]
            if bounds.get(group) != bound:
                heapq.heappop(heap)
                continue
            node = self._first(group + kind)
            if not node:
                heapq.heappop(heap)
                del bounds[group]
                continue
            used_at = self._used_at[node]
            if used_at == bound:
                return node
            if bounds.get(group) == bound:
                heapq.heapreplace(heap, (used_at, group))
                bounds[group] = used_at
        return NONE

    def _first(self, head: int) -> int:
        """The least recently used leaf of one list that is neither parked nor awaited."""
        while (node := self._after[head]) != head:
            flags = self._flags[node]
            if flags & (_PARKED | _AWAITED) or self._children[node]:
                self._remove(node)
            elif not (flags & _ORPHAN and self._adopt(node)):
                return node
        return NONE

    def victim(self) -> int:
        """The least recently used leaf of all lists that is not parked, or ``NONE``. It stays.

        A leaf of the list of nodes used often is passed over for a later one of the other list
        while its list is no more than a ``KEPT_SHARE``-th of all, and for ``KEPT_TURNS``. Retained
        ones are passed over while they are no more than a ``RETAINED_SHARE``-th. Awaited ones are
        none (``awaited_victim``).
        """
        if self.candidates[_RETAINED_KIND]:
            return self.retained_victim(self._victim())
        return self._victim()

    def retained_victim(self, other: int) -> int:
        """What is evicted instead of ``other``, which is not retained or ``NONE``."""
        share = self.candidates[_RETAINED_KIND] * RETAINED_SHARE > sum(self.candidates)
        if other and not share:
            return other
        return self._oldest(_RETAINED_KIND) or other

    def _victim(self) -> int:
        once, often = self.oldest(), self.oldest(often=True)
        if not once or not often:
            return once or often
        used_at, candidates = self._used_at[often], sum(self.candidates)
        if used_at > self._used_at[once]:
            return once
        kept = self.candidates[1] * KEPT_SHARE <= candidates
        return once if kept and self._now - used_at <= KEPT_TURNS * candidates else often

    def blocked(self) -> int:
        """A node that only parked nodes follow, or ``NONE``. For use when there is no leaf."""
        return next(iter(self._blocked), NONE)

    # Helpers.

    def _leads_to(self, node: int, target: int) -> bool:
        """Whether ``target`` is the node or one before it. Only a node that has followers can be
        one."""
        if node == target:
            return True
        if not self._children[target]:
            return False
        for _ in range(_MAX_DEPTH):
            node = self._parent[node]
            if node == target:
                return True
            if not node:
                return False
        return True

    def _can_be_evicted(self, node: int) -> bool:
        return self._flags[node] & (_PRESENT | _PARKED) == _PRESENT and not self._children[node]

    def _attach(self, node: int, parent: int) -> None:
        self._parent[node] = parent
        self._children[parent] += 1
        if self._flags[node] & _PARKED:
            self._parked_children[parent] += 1
        if self._flags[parent] & _PRESENT:
            self._give_way(parent, node)
            self._note_blocked(parent)

    def _give_way(self, parent: int, node: int) -> None:
        """Takes a node out of the list, if the node after it will leave it its place."""
        if (
            self._after[parent] != parent
            and self._used_at[node] >= self._used_at[parent]
            and self._flags[node] & _OFTEN >= self._flags[parent] & _OFTEN
        ):
            self._remove(parent)

    def _inherit(self, node: int, often: bool, used_at: int, position: int) -> None:
        """A follower has left, which was linked behind ``position`` of the list that the node's
        place would be in, or in no such list (-1): takes its place, if that is later than the
        node's own."""
        own_often = bool(self._flags[node] & _OFTEN)
        if often > own_often or (often == own_often and used_at >= self._used_at[node]):
            if often and not own_often:
                self._make_often(node)
            self._used_at[node] = max(self._used_at[node], used_at)
            if position == node:
                return
            if self._after[node] != node:
                self._remove(node)
            if position >= 0:
                self._insert(node, position)
                return
        if self._after[node] == node and not self._children[node]:
            self._insert_in_order(node)

    def _adopt(self, node: int) -> bool:
        """If the predecessor that an orphan lacked has arrived, the orphan is as recently used as
        that. False if it is an orphan still."""
        orphans, parent = [node], self._parent[node]
        while self._flags[parent] & _ORPHAN and len(orphans) < _MAX_DEPTH:
            orphans.append(parent)
            parent = self._parent[parent]
        if self._flags[parent] & (_PRESENT | _ORPHAN) != _PRESENT:
            return False
        for orphan in orphans:
            self._flags[orphan] &= ~_ORPHAN
            self._used_at[orphan] = self._used_at[parent]
        self._remove(node)
        head = self._head(node)
        if head == self._head(parent) and self._after[parent] != parent:
            self._insert(node, parent)
        else:
            self._insert(node, self._before[head])
        return True

    def _make_often(self, node: int) -> None:
        self._flags[node] |= _OFTEN
        if not self._flags[node] & (_PARKED | _RETAINED):
            self.candidates[0] -= 1
            self.candidates[1] += 1

    def _head(self, node: int, more: int = 0) -> int:
        """The head of the list of a node, with ``more`` flags."""
        return self._group[node] + _KIND_OF[self._flags[node] | more]

    def _count(self, group: int, present: int, free: int) -> None:
        if group:
            counts = self._counts[group]
            counts[0] += present
            counts[1] += free

    def _note_blocked(self, node: int) -> None:
        children = self._children[node]
        if (
            children
            and children == self._parked_children[node]
            and self._flags[node] & (_PRESENT | _PARKED) == _PRESENT
        ):
            self._blocked[node] = None
        elif self._blocked:
            self._blocked.pop(node, None)

    def _insert(self, node: int, position: int) -> None:
        after = self._after[position]
        self._before[node], self._after[node] = position, after
        self._after[position] = self._before[after] = node
        if self._counts:
            self._note_first(node, position)

    def _note_first(self, node: int, position: int) -> None:
        """A node was inserted: if it is the first one, its use is a bound of the list's."""
        group = self._group[node]
        kind = position - group
        if 0 <= kind < KINDS and not self._flags[position] and kind == _KIND_OF[self._flags[node]]:
            used_at, bounds = self._used_at[node], self._bounds[kind]
            if used_at < bounds.get(group, used_at + 1):
                bounds[group] = used_at
                heap = self._firsts[kind]
                if len(heap) > MAX_OUTDATED + 2 * len(bounds):
                    heap[:] = sorted((bound, each) for each, bound in bounds.items())
                else:
                    heapq.heappush(heap, (used_at, group))

    def _remove(self, node: int) -> None:
        before, after = self._before[node], self._after[node]
        self._after[before], self._before[after] = after, before
        self._before[node] = self._after[node] = node

    def _insert_in_order(self, node: int) -> None:
        head = position = self._head(node)
        used_at = self._used_at[node]
        for _ in range(_MAX_WALK):
            after = self._after[position]
            if after == head or self._used_at[after] >= used_at:
                break
            position = after
        self._insert(node, position)
