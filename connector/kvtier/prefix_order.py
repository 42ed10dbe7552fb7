"""The order in which chunks are evicted: the end of the least recently used prefix first.

A chunk is of no use without the chunks before it, so none is evicted while a chunk that follows it
is held. The chunks of a tier form a forest: each one knows the chunk before it. Only leaves are
evicted, the least recently used one first. When a leaf goes, the chunk before it is at least as
recently used as the leaf was: a prompt ages as a whole and shrinks from its end.

Nodes are small integers in arrays, 29 bytes each. Every method takes constant time, averaged over
the calls, by two rules:

* The leaves are in a linked list in the order of use. A chunk whose successor is used leaves the
  list, because it will inherit the successor's place.
* What is found at the head of the list and cannot be evicted (it is parked, or is no leaf) is set
  aside. When it can be evicted again it returns to the head, where it is in order except among the
  few others that were set aside.

A node is *absent* before ``enter`` and after ``leave``. Absent nodes stand for chunks that are not
held while a chunk that follows them is: a chunk may arrive before its predecessor. Such an orphan
is of no use, and neither is what follows it. Both are evicted before everything else, until the
predecessor arrives or they are used.

``victim`` resists scans: a part of the room is kept for chunks that were used often, while others
come and go. Otherwise one pass of prompts that are never seen again would empty a tier.

Nothing here is thread-safe. The caller maps its objects to nodes.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

NONE = 0
"""No node. Also the head of the list of nodes that were used once; 1 is that of the other list."""
_PRESENT, _PARKED, _OFTEN, _ORPHAN = 1, 2, 4, 8
KEPT_SHARE = 8
"""``victim`` keeps an eighth of the nodes for those used often. With a larger share, some traces of
conversations have fewer hits than by least recent use alone: what was used often is used no more
one day."""
KEPT_TURNS = 8
"""They are kept until so many uses and entries have followed their last use, in multiples of the
nodes that can be evicted: scans pass them by, and what is no longer used goes."""
_MAX_WALK = 64
"""Places compared when a node returns to the list. Only nodes that were set aside are passed."""
_MAX_DEPTH = 1 << 16
"""Predecessors that are followed to find the first orphan, or to exclude a cycle, which hashes
cannot form but messages can."""


class PrefixOrder:
    """A forest of chunks in the order of eviction. Nodes used ``often`` have a list of their own.

    ``candidates``: for each list, how many nodes are present and not parked. All of them can be
    evicted, one after the other.
    """

    def __init__(self) -> None:
        self.candidates = [0, 0]
        self._parent = array("I", (0, 0))
        self._children = array("I", (0, 0))
        self._parked_children = array("I", (0, 0))
        self._before = array("I", (0, 1))
        self._after = array("I", (0, 1))
        self._used_at = array("Q", (0, 0))
        self._flags = bytearray(2)
        self._unused = NONE
        self._blocked: OrderedDict[int, None] = OrderedDict()
        """Nodes that could be evicted if all that follows them were not parked."""
        self._now = 0

    # Nodes.

    def new(self) -> int:
        """An absent node."""
        node = self._unused
        if node:
            self._unused = self._after[node]
            self._before[node] = self._after[node] = node
            return node
        node = len(self._flags)
        for values in (self._parent, self._children, self._parked_children, self._used_at):
            values.append(0)
        self._before.append(node)
        self._after.append(node)
        self._flags.append(0)
        return node

    def release(self, node: int) -> None:
        """The caller forgets an absent node, which nothing follows."""
        self._after[node], self._unused = self._unused, node

    def is_present(self, node: int) -> bool:
        """Whether the node has entered and not left."""
        return bool(self._flags[node] & _PRESENT)

    def is_parked(self, node: int) -> bool:
        """Whether the node is excluded from eviction."""
        return bool(self._flags[node] & _PARKED)

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

    # Changes.

    def enter(
        self,
        node: int,
        parent: int = NONE,
        *,
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
        self.candidates[often] += 1
        if orphan or oldest:
            self._used_at[node] = 0
            self._insert(node, int(often))
        else:
            self._now += 1
            self._used_at[node] = self._now
            self._insert(node, self._before[int(often)])
        if parent:
            self._attach(node, parent)
        self._note_blocked(node)

    def leave(self, node: int) -> int:
        """The chunk is no longer held. Returns the node before it, if that is absent and has no
        followers left, so that the caller can forget it; else ``NONE``."""
        flags, parent, position = self._flags[node], self._parent[node], NONE
        linked = self._after[node] != node
        if linked:
            position = self._before[node]
            self._remove(node)
        if not flags & _PARKED:
            self.candidates[bool(flags & _OFTEN)] -= 1
        self._blocked.pop(node, None)
        self._flags[node], self._parent[node] = 0, NONE
        if not parent:
            return NONE
        self._children[parent] -= 1
        self._parked_children[parent] -= bool(flags & _PARKED)
        if not self._flags[parent] & _PRESENT:
            return NONE if self._children[parent] else parent
        self._inherit(parent, bool(flags & _OFTEN), self._used_at[node], linked, position)
        self._note_blocked(parent)
        return NONE

    def use(self, node: int, *, often: bool = False) -> None:
        """The chunk was used. With ``often`` it is among those used often from here on."""
        flags = self._flags[node]
        if not flags & _PRESENT:
            return
        if often and not flags & _OFTEN:
            self._make_often(node)
        self._flags[node] &= ~_ORPHAN
        self._now += 1
        self._used_at[node] = self._now
        if self._after[node] != node:
            self._remove(node)
        self._insert(node, self._before[bool(self._flags[node] & _OFTEN)])
        parent = self._parent[node]
        if parent:
            self._give_way(parent, node)

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
        self.candidates[bool(flags & _OFTEN)] -= 1
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
        self.candidates[bool(flags & _OFTEN)] += 1
        if self._after[node] == node and not self._children[node]:
            self._insert_in_order(node)
        self._note_blocked(node)
        parent = self._parent[node]
        if parent:
            self._parked_children[parent] -= 1
            self._blocked.pop(parent, None)

    def orphan(self, node: int) -> None:
        """The chunk before this one is absent, and cannot be had from elsewhere."""
        if self._flags[node] & (_PRESENT | _ORPHAN) != _PRESENT:
            return
        self._flags[node] |= _ORPHAN
        self._used_at[node] = 0
        if self._after[node] != node:
            self._remove(node)
        if not self._children[node]:
            self._insert(node, int(bool(self._flags[node] & _OFTEN)))

    # The next victim.

    def oldest(self, *, often: bool = False) -> int:
        """The least recently used leaf of one list that is not parked, or ``NONE``. It stays."""
        head = int(often)
        while (node := self._after[head]) != head:
            flags = self._flags[node]
            if flags & _PARKED or self._children[node]:
                self._remove(node)
            elif not (flags & _ORPHAN and self._adopt(node)):
                return node
        return NONE

    def victim(self) -> int:
        """The least recently used leaf of both lists that is not parked, or ``NONE``. It stays.

        A leaf of the list of nodes used often is passed over for a later one of the other list
        while its list is no more than a ``KEPT_SHARE``-th of all, and for ``KEPT_TURNS``.
        """
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

    def _inherit(self, node: int, often: bool, used_at: int, linked: bool, position: int) -> None:
        """A follower has left, which was linked behind ``position``: takes its place, if that is
        later than the node's own."""
        own_often = bool(self._flags[node] & _OFTEN)
        if often > own_often or (often == own_often and used_at >= self._used_at[node]):
            if often and not own_often:
                self._make_often(node)
            self._used_at[node] = max(self._used_at[node], used_at)
            if linked and position == node:
                return
            if self._after[node] != node:
                self._remove(node)
            if linked:
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
        same = not (self._flags[node] ^ self._flags[parent]) & _OFTEN
        if same and self._after[parent] != parent:
            self._insert(node, parent)
        else:
            self._insert(node, self._before[bool(self._flags[node] & _OFTEN)])
        return True

    def _make_often(self, node: int) -> None:
        self._flags[node] |= _OFTEN
        if not self._flags[node] & _PARKED:
            self.candidates[0] -= 1
            self.candidates[1] += 1

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

    def _remove(self, node: int) -> None:
        before, after = self._before[node], self._after[node]
        self._after[before], self._before[after] = after, before
        self._before[node] = self._after[node] = node

    def _insert_in_order(self, node: int) -> None:
        head = position = int(bool(self._flags[node] & _OFTEN))
        used_at = self._used_at[node]
        for _ in range(_MAX_WALK):
            after = self._after[position]
            if after == head or self._used_at[after] >= used_at:
                break
            position = after
        self._insert(node, position)
